"""New processes that run kernels on the CPU: copies of one process that has imported torch and has called no kernel.

That import takes more than a second, and processes are replaced often: after each crash, and wherever earlier calls may
be to blame for a failure. A copy takes milliseconds, and no copy knows anything of another one.

``python -m tests.harness.origin FD`` is the program of the process that is copied, where FD is its end of a pair of
sockets. It reads ``COPY`` with the files of a new process, and answers with that one's id; or it reads an id, and
answers with the exit status of that process when it has ended. It ends when the other socket is closed.
"""

import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress

WORKER = "tests.harness.worker"
"""The program of a copy."""
COPY = b"copy"
MOST_BYTES = 64
"""No message is longer than this."""
LOST = -signal.SIGKILL
"""The exit status of a copy that others have killed, which is also what it dies of when its origin does."""
NAMES_A_TEST = "PYTEST_CURRENT_TEST"
"""A variable of pytest in which two environments may differ, since no kernel depends on it."""


class Origin:
    """A process that is copied. It ends with this process, or when neither it nor one of its copies is used here."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        weakref.finalize(self, _end, self.socket, process)

    def copy(self, seconds: float) -> "Copy":
        """Return a new process. Raises OSError if there is none within so many seconds."""
        (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
        ours, theirs = (to_stdin, from_stdout, from_stderr), (stdin, stdout, stderr)
        try:
            pid = self.ask(COPY, theirs, seconds)
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

    def __init__(self, origin: Origin, pid: int, files: tuple[int, int, int]) -> None:
        self.origin, self.pid = origin, pid
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

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit status: negative if it was ended by a signal."""
        if self.returncode is None:
            try:
                self.returncode = self.origin.ask(str(self.pid).encode())
            except OSError:
                self.returncode = LOST
        return self.returncode


_latest: Origin | None = None


def new_copy(environment: Mapping[str, str], seconds: float) -> Copy:
    """Return a new process with an environment, in the current folder. Raises OSError if there is none in time.

    The folder is a part of PYTHONPATH, which ``environment`` has.
    """
    global _latest
    told = {name: value for name, value in environment.items() if name != NAMES_A_TEST}
    if _latest is not None and _latest.environment == told:
        with suppress(OSError):  # it may have been killed: then there is another one
            return _latest.copy(seconds)
    _latest = Origin(told)
    return _latest.copy(seconds)


def _end(ours: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    ours.close()
    process.wait()


def serve(ours: socket.socket) -> bool:
    """Make copies of this process. Returns False in the end, and True in each copy."""
    while True:
        message, files, _, _ = socket.recv_fds(ours, MOST_BYTES, 3)
        if not message:
            return False
        if message == COPY:
            answer = os.fork()
            if not answer:
                for number, file in enumerate(files):
                    os.dup2(file, number)
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(int(message), 0)[1])
        for file in files:
            os.close(file)
        if message == COPY and not answer:
            return True
        ours.send(str(answer).encode())


def main(number: int) -> None:
    """Import what runs kernels, and make copies of this process, in each of which that is run."""
    worker = importlib.import_module(WORKER)
    worker.end_with_parent()
    gc.freeze()  # copies share the memory of what is there by now only as long as no collection looks through it
    with socket.socket(fileno=number) as ours:
        is_copy = serve(ours)
    if not is_copy:
        os._exit(0)  # what torch does at the end of a process takes a while, and nobody waits for it
    importlib.invalidate_caches()  # files may have been written since
    sys.argv = [str(worker.__file__), "cpu"]
    worker.main("cpu")


if __name__ == "__main__":
    main(int(sys.argv[1]))
