"""What is told of a process that has ended: how it ended, and where the kernel was then."""

import signal

from tests.harness.verdict import BEFORE_THE_BEGINNING, PAST_THE_END, Finding

STACK = " (most recent call first):"
"""The end of the line above the frames that faulthandler prints."""
OURS = ("/harness/trial.py", "/kernels/registry.py")
"""The ends of the paths of files of ours that call a kernel: frames from there on are not the kernel's."""
AT_FENCE = " in run_fenced"
"""The end of the frame in which memory ends where a tensor ends."""


def how_it_ended(code: int) -> str:
    """Return words for the exit status of a process; negative ones are signals."""
    if code >= 0:
        return f"the process ended with status {code}"
    return f"the process ended with signal {-code} ({signal.strsignal(-code)})"


def finding(what: str, kind: str, printed: str) -> Finding:
    """Return the finding that a case has ended its process.

    Args:
        what: how it ended, in words.
        kind: "died" or "hung".
        printed: the end of what the process printed to stderr.
    """
    claim = f"a claimed case runs to its end, but {what}"
    if AT_FENCE in printed:
        claim = f"{PAST_THE_END}, but there {what}"
    return Finding(claim=claim, kind=kind, detail=place(printed))


def is_outside(found: Finding) -> bool:
    """Whether memory outside of a tensor is touched: a process has ended there, or the access is told."""
    return found.claim.startswith((PAST_THE_END, BEFORE_THE_BEGINNING))


def place(printed: str) -> str:
    """Return what a process printed, with the frames of the kernel alone, the last one being where it was."""
    before, stack, after = printed.rpartition(STACK)
    if not stack:
        return printed
    told = before.splitlines()[:-1]  # without the name of the thread
    frames = [line for line in after.splitlines() if line.strip().startswith("File ")]
    ends = (at for at, frame in enumerate(frames) if any(f'{ours}"' in frame for ours in OURS))
    return "\n".join([*filter(None, told), *reversed(frames[: next(ends, len(frames))])])
