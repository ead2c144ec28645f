"""Functions that run in processes of their own, which are killed when the time is up, whatever they are doing."""

import math
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import TypeVar

Made = TypeVar("Made")

CONTEXT = get_context("forkserver")
"""Processes are copies of one that has imported what all of them need, and has not touched the GPU."""
CONTEXT.set_forkserver_preload(["torch", "triton"])


def gather(parts: Sequence[Callable[[], Iterable[Made]]], left: Callable[[], float]) -> Iterator[Made]:
    """Run each part in a process and yield what they make as it comes, until all have ended or no time is left.

    Parts and what they make can be pickled. A part that raises or crashes makes nothing more; the others go on.

    Args:
        parts: functions without arguments.
        left: returns the seconds that are left, infinite if there is no limit.
    """
    processes, pipes = [], []
    try:
        for part in parts:
            ours, theirs = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=_send, args=(part, theirs))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        while pipes and (seconds := left()) > 0:
            ready = wait(pipes, None if math.isinf(seconds) else seconds)
            for pipe in [each for each in pipes if each in ready]:
                try:
                    yield pipe.recv()
                except (EOFError, OSError):  # the end, or the process was killed as it sent something
                    pipes.remove(pipe)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _send(part: Callable[[], Iterable[Made]], theirs: "Connection[Made, None]") -> None:
    # Ctrl-C goes to all processes; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for made in part():
        theirs.send(made)
    theirs.close()  # what torch does at the end of a process takes a while, and nobody waits for it
