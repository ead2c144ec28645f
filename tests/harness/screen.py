"""The text at the end of a run: the lines of each bug, and notes on what the matrix does not show."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.harness.conclude import Concluded
from tests.harness.report import Failure, headline, shown_in
from tests.harness.results import Results
from tests.harness.tally import SLOW_SECONDS, Tally
from tests.harness.telling import told

MOST_LINES = 12
"""The most lines of one bug. If it has more, its longest facts are cut short; the report has them whole."""
MOST_DESIGN_LINES = 2
"""The most lines that tell which designs explain a kernel; summary.json names all of them."""
LABEL = 10
"""The width of the labels of a bug's facts, in columns."""
INDENT = "   "
CUT = " ..."
CASE = "smallest"
"""The label of the smallest case."""
LESS_PRECISE = "; the summary tells of all calls"
"""The end of the line that a failing item has for calls that are less precise than claimed."""


def wrapped(
    text: str, width: int, first: str = "", indent: str = "    ", most: int | None = None
) -> list[str]:
    """Return a text as lines of at most ``width`` columns; only a word that is longer makes a longer line.

    The first line begins with ``first``, each other one with ``indent``. With more than ``most`` lines, the text is cut
    and ends with ``CUT``.
    """
    return textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=most,
        placeholder=CUT,
    )


def bug_lines(
    number: int, one: Concluded, report_dir: Path, width: int, most: int | None = MOST_LINES
) -> list[str]:
    """Return the lines of a bug: its headline, and below it what a maintainer asks for, each fact with its label.

    Args:
        number: its place among all bugs, the worst being 1.
        one: the bug as the whole run knows it.
        report_dir: the folder of all reports.
        width: the width of the terminal, in columns.
        most: the most lines that the bug may have, or None for any number.
    """
    facts = {**dict(_facts(one)), "report": str(report_dir / one.bug.key)}
    blocks = {label: _fact(label, text, width) for label, text in facts.items()}
    # The case pastes back as Python only where it is whole, so it is shortened last.
    for label in sorted(facts, key=lambda label: (label == CASE, -len(blocks[label]))):
        while most is not None and 1 + sum(map(len, blocks.values())) > most and len(blocks[label]) > 1:
            blocks[label] = _fact(label, facts[label], width, len(blocks[label]) - 1)
    first = wrapped(headline(one.bug.failure), width, f"{number}. ", INDENT, most and 1)
    return [*first, *(line for block in blocks.values() for line in block)]


def _fact(label: str, text: str, width: int, most: int | None = None) -> list[str]:
    return wrapped(text, width, INDENT + label.ljust(LABEL), INDENT + " " * LABEL, most)


def _facts(one: Concluded) -> Iterator[tuple[str, str]]:
    """Yield a label and a text for each fact that is known of a bug, apart from the path of its report."""
    failure = one.bug.failure
    yield "claim", " ".join(failure.finding.claim.split())
    if failure.finding.rate:
        yield "rate", shown_in(failure.finding)
    yield from _numbers(failure)
    yield from told(one.bug, one.seen)
    if failure.explanation.causes:
        yield "points to", failure.explanation.points_to
    yield CASE, repr(failure.case)
    if one.offers:
        yield "or claim", "; ".join(one.offers)


def _numbers(failure: Failure) -> Iterator[tuple[str, str]]:
    """Yield facts of the worst element or, if no number is wrong, the last frame or line of the failure's detail."""
    f = failure.finding
    if f.actual is not None:
        place = f"{f.expression or f.tensor}[{', '.join(map(str, f.index))}]"
        yield "where", f"{place}: expected {f.expected}, actual {f.actual}"
        counts = {"NaN": f.nan, "+inf": f.posinf, "-inf": f.neginf}
        special = [f"{count} {what}" for what, count in counts.items() if count]
        wrong = f"{f.wrong} of {f.total} elements are wrong"
        yield "error", "; ".join([f"{_rounded(f.ratio)} times the bound", wrong, *special])
    elif lines := f.detail.strip().splitlines():
        yield "where", ([line for line in lines if line.strip().startswith("File ")] or lines)[-1].strip()


def _rounded(ratio: float | str | None) -> str:
    return f"{ratio:.4g}" if isinstance(ratio, float) else str(ratio)


def repeats(concluded: Sequence[Concluded], text: str) -> bool:
    """Whether the screen says all that the text of a failing item says.

    Each line of it must name the report of a bug, or a call that is less precise than claimed.
    """
    shown = (LESS_PRECISE, *(one.bug.key for one in concluded))
    return all(any(name in line for name in shown) for line in text.splitlines())


def _slow(tally: Tally) -> str:
    """Say how long cases took that compile, or may hang."""
    cut = f"; {tally.cut_off} cut off, which a longer run may finish" if tally.cut_off else ""
    most = f"{tally.slowest:.0f} s for {tally.slowest_case}"
    return f"over {SLOW_SECONDS:.0f} s for {tally.slow} cases, {tally.slow_seconds:.0f} s in all, {most}{cut}"


def notes(results: Results, width: int) -> Iterator[str]:
    """Yield lines on what the matrix does not show: cases left out, known failures, and designs of plain functions."""
    what = {"refused": "refusals", "not run here": "skipped", "not drawn, the time was up": "undrawn"}
    for label, name in what.items():
        if counts := results.counts(name):
            each = ", ".join(f"{kernel} {count}" for kernel, count in counts.items())
            yield from wrapped(f"{label}: {sum(counts.values())} cases ({each})", width)
    for name, slow in results.slow().items():
        yield from wrapped(f"slow: {name} took {_slow(slow)}", width)
    for line in results.notices:
        yield from wrapped(line, width)
    for name, info in results.infos.items():
        for known in info.known_failures:
            yield from wrapped(f"known failure of {name}: {known}", width)
    for kernel, designs in results.designs().items():
        yield from wrapped(f"{kernel} is consistent with: {designs}", width, most=MOST_DESIGN_LINES)
