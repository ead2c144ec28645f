"""Sanitizers: tools that watch a kernel as it runs on a GPU, how each is started, and what it prints of an error.

Three are tools of NVIDIA's compute-sanitizer, whose log has a block of lines for each error. Two are checks that Triton
compiles into a kernel, which print an assertion and end the CUDA context.
"""

import linecache
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from tests.harness.accelerators.lookup import accelerator_of
from tests.harness.run import COMPUTE, SANITIZERS, TRITON
from tests.harness.verdict import SANITIZER, Finding

PROGRAM = "compute-sanitizer"
OWN_ALLOCATIONS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
"""Have torch ask the driver for the memory of each tensor, as these tools know only what the driver allocates."""
ALL = "all"

LIBRARIES = (
    *("at::", "cub::", "thrust::", "cublas", "cudnn", "cutlass", "pytorch_flash::"),
    *("ampere_", "gemm", "gemv", "nvjet", "sm80_", "sm90_", "sm100_"),
)
"""How names of kernels in torch and its libraries begin. Races and reads of unwritten memory that are reported there
are how these libraries work, and do not count; accesses outside of any allocation do.
"""

OF_TRITON = ("def ", "gl.warp_specialize(", "ttgl.warp_specialize(")
"""How source lines begin at which code runs that Triton's compiler adds. It passes work to other warps through shared
memory and named barriers, which racecheck takes for a race.
"""

PREFIX = re.compile(r"^=+ ?")
HEADLINE = re.compile(
    r"(?:Error: )?(Invalid __\w+__ .*|Uninitialized __\w+__ memory read .*|Race reported between .*)",
    re.IGNORECASE,
)
BODY = re.compile(r"\s*(at |by |and |Address |Access to )")
SUMMARY = " SUMMARY: "
"""The last line of a log contains this, unless the tool itself failed."""
PLACE = re.compile(
    r"0x[0-9a-f]+ in (?:(?P<old_file>\S+:\d+):)?(?P<old_name>.+)"
    r"|(?P<name>.+?)(?:[+:]0x[0-9a-f]+)?(?: in (?P<file>\S+:\d+))?"
)
"""Where an instruction is, as older and newer releases of compute-sanitizer print it."""
ACCESS = re.compile(r"(?:between|and) (Read|Write) access at (.*?)(?: \[\d+ hazards?\])?$", re.IGNORECASE)
ASSERTION = re.compile(r"(\S+:\d+): (.+?): block: .*? thread: .*? Assertion `(.*)` failed")
UNKNOWN = "unknown"
"""The name that Triton gives for the function of an assertion if it does not know it."""


@dataclass(frozen=True)
class Place:
    """Where in a kernel something happens: the function without its types, and file and line, "" if not known."""

    function: str
    file: str = ""

    def __str__(self) -> str:
        """Return the place as a user reads it, without the folder of the file."""
        line = PurePath(self.file).name
        return f"{self.function} ({line})" if self.function and line else self.function or line

    @property
    def source(self) -> str:
        """Return the line of the source, "" if it can't be read."""
        path, _, line = self.file.rpartition(":")
        return linecache.getline(path, int(line)).strip() if path else ""


@dataclass(frozen=True)
class Report:
    """An error that a sanitizer reports.

    Attributes:
        what: the error in words, with the kernel function and the source line but without addresses and sizes, so that
            it is the same whenever the same instruction is wrong.
        places: the places in kernels that it names.
        lines: what the tool prints of it.
    """

    what: str
    places: tuple[Place, ...]
    lines: tuple[str, ...]


def sanitizers(text: str) -> tuple[str, ...]:
    """Return the sanitizers of an option: names with commas between them, or "all". Raises ValueError, in one line."""
    names = SANITIZERS if text == ALL else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in SANITIZERS:
            raise ValueError(f"got {name!r}, expected some of {','.join(SANITIZERS)}, or {ALL}")
    return names


def why_not(sanitizer: str, device: str) -> str | None:
    """Return why a sanitizer can't be used here; None if nothing is known that would prevent it."""
    if not accelerator_of(device).has_sanitizers:
        return f"sanitizer {sanitizer}: needs a GPU with CUDA"
    if sanitizer in COMPUTE and shutil.which(PROGRAM) is None:
        return f"sanitizer {sanitizer}: there is no {PROGRAM} on PATH"
    return None


def command(sanitizer: str, log: Path) -> list[str]:
    """Return the beginning of the command that runs a program under a sanitizer."""
    if sanitizer in TRITON:
        return []
    options = [
        "--tool",
        sanitizer,
        "--log-file",
        str(log),
        "--show-backtrace",
        "no",
        "--strip-paths",
        "no",
        *COMPUTE[sanitizer],
    ]
    return [PROGRAM, "--target-processes", "application-only", *options]


def environment(sanitizer: str) -> Mapping[str, str]:
    """Return the environment variables that a program needs to run under this sanitizer."""
    return TRITON.get(sanitizer, OWN_ALLOCATIONS)


def reports(sanitizer: str, log: str, printed: str) -> list[Report]:
    """Return the errors that a sanitizer reports of a kernel, read from its log or from what its process printed."""
    if sanitizer in TRITON:
        return [*_assertions(printed)]
    return [report for report in map(_report, _blocks(log)) if _counts(sanitizer, report)]


def failure(sanitizer: str, log: str) -> str | None:
    """Return why a tool did not do its work, according to its log; None if it did."""
    if SUMMARY in log or (sanitizer in TRITON and not log):
        return None
    lines = [PREFIX.sub("", line).strip() for line in log.splitlines()]
    last = next((line for line in reversed(lines) if line), "its log is empty")
    return f"sanitizer {sanitizer} did not come to its end: {last}"


def finding(sanitizer: str, report: Report) -> Finding:
    """Return the finding of a report."""
    claim = f"{sanitizer} finds nothing wrong in a claimed case, but it reports: {report.what}"
    return Finding(claim=claim, kind=SANITIZER, detail="\n".join(report.lines))


def _blocks(log: str) -> Iterator[list[str]]:
    """Yield the lines of each error in a log of compute-sanitizer, its headline first."""
    block: list[str] = []
    for line in log.splitlines():
        text = PREFIX.sub("", line)
        if headline := HEADLINE.fullmatch(text.strip()):
            yield from filter(None, [block])
            block = [headline[1]]
        elif block and BODY.match(text):
            block.append(text.strip())
        else:
            yield from filter(None, [block])
            block = []
    yield from filter(None, [block])


def _report(block: list[str]) -> Report:
    accesses = [access for line in block if (access := ACCESS.search(line))]
    if accesses:
        places = [_place(access[2]) for access in accesses]
        told = [f"{access[1].lower()} in {place}" for access, place in zip(accesses, places, strict=True)]
        what = "race between " + " and ".join(dict.fromkeys(told))
    else:
        places = [_place(line.removeprefix("at ")) for line in block if line.startswith("at ")][:1]
        what = " in ".join([re.sub(r" of size [\d,]+( bytes)?", "", block[0]), *map(str, places)])
    return Report(what, tuple(places), tuple(block))


def _place(text: str) -> Place:
    found = PLACE.fullmatch(text)
    assert found is not None  # the last alternative takes any text
    name, file = found["old_name"] or found["name"], found["old_file"] or found["file"]
    return Place(re.split(r"[<(]", name.removeprefix("void "))[0], file or "")


def _counts(sanitizer: str, report: Report) -> bool:
    """Whether a report is about the kernel, and not about how a library or Triton's compiler works.

    Threads that write the same place at one instruction are no race: Triton stores what all threads of a warp have
    reduced from each of them.
    """
    if sanitizer == "memcheck":
        return True
    if any(x.function.startswith(LIBRARIES) or x.source.startswith(OF_TRITON) for x in report.places):
        return False
    accesses = {access.groups() for line in report.lines if (access := ACCESS.search(line))}
    return len(accesses) != 1


def _assertions(printed: str) -> Iterator[Report]:
    for line in printed.splitlines():
        if found := ASSERTION.search(line):
            file, function, what = found.groups()
            place = Place("" if function == UNKNOWN else re.split(r"[<(]", function)[0], file)
            yield Report(f"{what} in {place}", (place,), (line.strip(),))
