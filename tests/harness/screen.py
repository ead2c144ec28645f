"""What a person reads at the end of a run, as lines of text: the bugs, and what else has to be known of the run."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

from tests.harness.bugs import told
from tests.harness.conclude import Concluded
from tests.harness.report import Failure, headline
from tests.harness.results import Results

MOST_LINES = 12
"""Lines of one bug. Where it would have more, its longest facts are cut short: the report has them whole."""
MOST_DESIGN_LINES = 2
"""Lines of the designs that a kernel is consistent with; summary.json has all of them."""
LABEL = 10
"""Columns of the labels of a bug's facts."""
INDENT = "   "
CUT = " ..."
CASE = "smallest"
"""The label of the smallest case."""


def wrapped(
    text: str, width: int, first: str = "", indent: str = "    ", most: int | None = None
) -> list[str]:
    """A text as lines of at most ``width`` columns, but where a word is longer; of at most so many lines."""
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
    """A bug: its headline, and below it the facts that a maintainer asks for, each with its label.

    Args:
        number: its place among all bugs, the worst being 1.
        one: the bug as the whole run knows it.
        report_dir: the folder of all reports.
        width: columns of the terminal.
        most: lines that it may have, None for any number.
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
    """What is known of a bug, by label, but for its report."""
    failure = one.bug.failure
    yield "claim", " ".join(failure.finding.claim.split())
    yield from _numbers(failure)
    yield from told(one.bug, one.seen)
    if failure.explanation.causes:
        yield "points to", failure.explanation.points_to
    yield CASE, repr(failure.case)
    if one.offers:
        yield "or claim", "; ".join(one.offers)


def _numbers(failure: Failure) -> Iterator[tuple[str, str]]:
    """The worst element; where no number is wrong, the last frame of a traceback or line of a dead process."""
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


def notes(results: Results, width: int) -> Iterator[str]:
    """What the matrix does not show: cases that were left out, known failures, and designs of plain functions."""
    what = {
        "refused": "refusals",
        "not run here": "skipped",
        "not drawn, the time was up": "undrawn",
    }
    for label, name in what.items():
        if counts := results.counts(name):
            each = ", ".join(f"{kernel} {count}" for kernel, count in counts.items())
            yield from wrapped(f"{label}: {sum(counts.values())} cases ({each})", width)
    for name, info in results.infos.items():
        for known in info.known_failures:
            yield from wrapped(f"known failure of {name}: {known}", width)
    for kernel, designs in results.designs().items():
        yield from wrapped(f"{kernel} is consistent with: {designs}", width, most=MOST_DESIGN_LINES)
