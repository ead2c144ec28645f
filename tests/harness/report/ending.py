"""The end of a run on the screen: the matrix, notes, each bug, and where everything is written."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from _pytest._io import TerminalWriter

from tests.harness.report.detail import print_detail
from tests.harness.report.folder import replay_line
from tests.harness.report.matrix import Paint, matrix
from tests.harness.report.results import Results
from tests.harness.report.screen import MOST_LINES, bug_lines, notes, wrapped
from tests.harness.report.wording import annotation


def print_ending(
    writer: TerminalWriter,
    results: Results,
    report_dir: Path,
    *,
    verbose: bool,
    written: str,
    page: str = "",
    more: Sequence[str] = (),
) -> None:
    """Print each section, an empty line between any two; with ``verbose``, first the tables of all counts.

    Args:
        writer: what prints.
        results: what was counted and found; its bugs must be concluded.
        report_dir: the folder of the reports, as a user may name it.
        verbose: whether to tell everything.
        written: the path of the summary, and why it is not written if that is so.
        page: the same of the page; "" if there is none.
        more: lines that come after the notes.
    """
    if verbose:
        print_detail(writer.line, results)
    is_below = verbose
    for markup, (first, *rest) in _sections(writer, results, report_dir, verbose, more, page, written):
        writer.line("\n" * is_below + first, **markup)
        for line in rest:
            writer.line(line)
        is_below = True


def _sections(
    writer: TerminalWriter,
    results: Results,
    report_dir: Path,
    verbose: bool,
    more: Sequence[str],
    page: str,
    written: str,
) -> Iterator[tuple[dict[str, bool], list[str]]]:
    """Yield the matrix, notes, bugs, and the paths of what is written: lines, and how the first one is marked."""
    concluded = results.concluded
    yield {}, verdicts(results, writer.markup)
    if found := [*notes(results, writer.fullwidth), *more]:
        yield {}, found
    for line in results.complaints():
        yield {"red": True}, [line]
    if concluded and os.environ.get("GITHUB_ACTIONS") == "true":
        yield {}, [annotation(one.bug, one.seen) for one in concluded]
    if concluded:
        yield {"bold": True}, [f"bugs, the worst first: {len(concluded)}"]
    most = None if verbose else MOST_LINES
    for number, one in enumerate(concluded, 1):
        yield {"red": True}, bug_lines(number, one, report_dir, writer.fullwidth, most)
    for kernel, told in results.less_precise_told().items():
        yield {}, [f"{kernel}: {told}"]
    for kernel, laws in results.untried().items():
        yield {"yellow": True}, wrapped(f"{kernel}: not tried: {laws}", writer.fullwidth)
    replay = [f"replay: {replay_line(one.bug.failure, report_dir)}" for one in concluded[:1]]
    pages = [f"page: {page}"] if page else []
    yield {}, [*replay, *pages, f"summary: {written}{'' if verbose else ' (every count: -v)'}"]


def verdicts(results: Results, paint: Paint) -> list[str]:
    """Return the lines of the matrix of what is known so far; ``paint`` colours a mark."""
    return matrix(results.kernels, results.laws, results.dtypes, results.mark, paint)
