"""New Python processes that are copies of one: it has imported torch, say, and has called no kernel.

That import takes more than a second, and processes are replaced often: after each crash, and wherever earlier calls may
be to blame for a failure. A copy takes milliseconds, and no copy knows anything of another one.

``python PATH FD MODULE``, with the path of this file, is the program of the process that is copied. It imports MODULE;
FD is its end of a pair of sockets. It reads what a copy is to run as a line of JSON, with the files of the new process,
and answers with that one's id; or it reads an id, and answers with the exit status of that process when it has ended.
It ends when the other socket is closed. It imports none of our packages by itself, as a copy may run a script of users
that has packages of the same names.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

MOST_BYTES = 2**15
"""No message is longer than this."""
LOST = -signal.SIGKILL
"""The exit status of a copy that others have killed, which is also what it dies of when its origin does."""
OF_PYTEST = ("PYTEST_CURRENT_TEST", "PYTEST_VERSION")
"""Variables that pytest sets: a copy does not have them, since what it runs would run without pytest elsewhere.

Some kernels look at them. Example: those of Triton's tutorial 06 have fewer configurations under pytest.
"""


class Origin:
    """A process that has imported a module, and is copied.

    It ends with this process, or when neither it nor one of its copies is used here.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), module],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        weakref.finalize(self, _end, self.socket, process)

    def copy(self, arguments: Sequence[str], folder: str | Path, seconds: float, *, silent: bool) -> "Copy":
        """Return a new process, as ``new_copy`` does. Raises OSError if there is none within so many seconds."""
        ours, theirs = ((), _nowhere()) if silent else _pipes()
        wanted = json.dumps([str(folder), *arguments])
        try:
            pid = self.ask(wanted.encode(), theirs, seconds)
        except BaseException:
            for file in ours:
                os.close(file)
            raise
        finally:
            for file in theirs:
                os.close(file)
        return Copy(self, pid, ours)

    def ask(self, message: bytes, files: tuple[int, ...] = (), seconds: float | None = None) -> int:
        """Send a message, and return the number that answers it. Raises OSError if there is no answer."""
        try:
            self.socket.settimeout(seconds)
            socket.send_fds(self.socket, [message], files)
            answer = self.socket.recv(MOST_BYTES)
        except BaseException:
            self.socket.close()  # an answer that comes late must not be taken for that to a later message
            raise
        if not answer:
            raise ConnectionResetError
        return int(answer)


class Copy:
    """A copy, with as much of the interface of ``subprocess.Popen`` as its user needs."""

    def __init__(self, origin: Origin, pid: int, files: tuple[int, ...]) -> None:
        self.origin, self.pid = origin, pid
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        if files:
            self.stdin, self.stdout, self.stderr = map(os.fdopen, files, ("wb", "rb", "rb"))
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless its end is known: then its id may be that of another one."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return its exit status: negative if it was ended by a signal.

        Raises subprocess.TimeoutExpired after ``timeout`` seconds, and ends the process then.
        """
        if self.returncode is None:
            try:
                self.returncode = self.origin.ask(str(self.pid).encode(), seconds=timeout)
            except TimeoutError:
                self.kill()
                self.returncode = LOST
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
            except OSError:
                self.returncode = LOST
        return self.returncode


_latest: dict[str, Origin] = {}


def origin_of(module: str, environment: Mapping[str, str]) -> Origin:
    """Return a process with an environment that has imported a module, or is about to: the latest one, or a new one."""
    told = {name: value for name, value in environment.items() if name not in OF_PYTEST}
    latest = _latest.get(module)
    if latest is None or latest.environment != told:
        latest = _latest[module] = Origin(module, told)
    return latest


def new_copy(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: str | Path,
    seconds: float,
    *,
    silent: bool = False,
) -> Copy:
    """Return a new process that has imported a module, and does as ``python -P`` with these arguments does.

    These are ``-m`` and the name of a module, or the path of a script, and its own arguments. The process works in
    ``folder``; if ``silent``, nobody reads what it prints. Raises OSError if there is none within so many seconds.
    """
    try:
        return origin_of(module, environment).copy(arguments, folder, seconds, silent=silent)
    except TimeoutError:
        raise  # it is still importing: another one would take longer
    except OSError:
        _latest.pop(module, None)  # it has been killed, or was late before: then there is another one
    return origin_of(module, environment).copy(arguments, folder, seconds, silent=silent)


def _pipes() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return our ends of the pipes to stdin, from stdout and from stderr of a process, and its own ends."""
    (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
    return (to_stdin, from_stdout, from_stderr), (stdin, stdout, stderr)


def _nowhere() -> tuple[int, ...]:
    """Return files for stdin, stdout and stderr of a process of which nothing is read."""
    return tuple(os.open(os.devnull, os.O_RDWR) for _ in range(3))


def _end(ours: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    ours.close()
    process.kill()  # it may still be importing, for seconds
    process.wait()


def serve(ours: socket.socket) -> list[str]:
    """Make copies of this process. Returns nothing in the end, and in each copy the arguments that it has."""
    while True:
        message, files, _, _ = socket.recv_fds(ours, MOST_BYTES, 3)
        if not message:
            return []
        asked = json.loads(message)
        if isinstance(asked, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1])
        elif not (answer := os.fork()):
            folder, *arguments = asked
            become(files, folder)
            return arguments
        for file in files:
            os.close(file)
        ours.send(str(answer).encode())


def become(files: Sequence[int], folder: str) -> None:
    """Give this process, a new copy, its files and its folder."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)


def run(arguments: list[str]) -> None:
    """Do as ``python -P`` with these arguments does."""
    importlib.invalidate_caches()  # files may have been written since this process began
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.modules.pop(arguments[1], None)  # runpy warns of a module that has been imported before
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def main(number: int, module: str) -> None:
    """Import a module, make the copies of this process that are asked for, and do in each what it is to run."""
    importlib.import_module(module)
    gc.freeze()  # copies share the memory of what is there by now only as long as no collection looks through it
    with socket.socket(fileno=number) as ours:
        arguments = serve(ours)
    if not arguments:
        os._exit(0)  # what torch does at the end of a process takes a while, and nobody waits for it
    run(arguments)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
