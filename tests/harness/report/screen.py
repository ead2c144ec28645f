"""The text at the end of a run: the lines of each bug, and notes on what the matrix does not show."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.harness.bugs.failure import headline
from tests.harness.report.conclusion import CASE, OFFER, Concluded
from tests.harness.report.results import Results
from tests.harness.running.tally import SLOW_SECONDS, Tally

MOST_LINES = 12
"""The most lines of one bug. If it has more, its longest facts are cut short; the report has them whole."""
MOST_DESIGN_LINES = 2
"""The most lines that tell which designs explain a kernel; summary.json names all of them."""
LABEL = 10
"""The width of the labels of a bug's facts, in columns."""
LEFT_OUT = {
    "refused": "refusals",
    "not run here": "skipped",
    "not drawn, the time was up": "undrawn",
    "failed, but not told apart for lack of time": "unsorted",
}
"""The counts of cases without an answer, each with the words for it."""
INDENT = "   "
CUT = " ..."
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
    facts = {**dict(one.facts()), "report": str(report_dir / one.bug.key)}
    blocks = {label: _fact(label, text, width) for label, text in facts.items()}
    # The case pastes back as Python only where it is whole, so it is shortened last.
    for label in sorted(facts, key=lambda label: (label == CASE, -len(blocks[label]))):
        over = 0 if most is None else 1 + sum(map(len, blocks.values())) - most
        if over > 0 and len(blocks[label]) > 1:
            blocks[label] = _fact(label, facts[label], width, max(1, len(blocks[label]) - over))
            # A claim is pasted, so it is whole, in a line of any width.
            if label == OFFER and (claim := facts[label].partition(": ")[0]) not in blocks[label][0]:
                blocks[label] = [INDENT + label.ljust(LABEL) + claim]
    first = wrapped(headline(one.bug.failure), width, f"{number}. ", INDENT, most and 1)
    return [*first, *(line for block in blocks.values() for line in block)]


def _fact(label: str, text: str, width: int, most: int | None = None) -> list[str]:
    return wrapped(text, width, INDENT + label.ljust(LABEL), INDENT + " " * LABEL, most)


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
    for label, name in LEFT_OUT.items():
        if counts := results.counts(name):
            each = ", ".join(f"{kernel} {count}" for kernel, count in counts.items())
            yield from wrapped(f"{label}: {sum(counts.values())} cases ({each})", width)
    for name, reason in results.not_run().items():
        yield from wrapped(f"not run here of {name}: {reason}", width)
    for name, slow in results.slow().items():
        yield from wrapped(f"slow: {name} took {_slow(slow)}", width)
    for name, watched in results.counters("watched").items():
        each = ", ".join(f"{sanitizer} {count}" for sanitizer, count in watched.items())
        yield from wrapped(f"cases of {name} under sanitizers: {each}", width)
    for line in results.told:
        yield from wrapped(line, width)
    for name, info in results.infos.items():
        for known in info.known_failures:
            yield from wrapped(f"known failure of {name}: {known}", width)
    for kernel, designs in results.designs().items():
        yield from wrapped(f"{kernel} is consistent with: {designs}", width, most=MOST_DESIGN_LINES)
