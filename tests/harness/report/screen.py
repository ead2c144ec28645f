"""The end of a run on the screen: the matrix of verdicts, each bug, notes, and the tables of `pytest -v`."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _pytest._io import TerminalWriter

from strategies.coverage import told as told_tried
from tests.harness.bugs.failure import headline
from tests.harness.report.conclusion import CASE, OFFER, DistinctBug
from tests.harness.report.folder import replay_line
from tests.harness.report.results import Results
from tests.harness.running.refusals import merged
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

Row = Sequence[str]
WriteLine = Callable[..., object]
"""A function that writes a line, such as ``TerminalWriter.line``: ``write("text", bold=True)``."""
Table = tuple[Row, Sequence[Row]]
"""The names of the columns, and the rows."""

Paint = Callable[..., str]
"""A function that colours a text, such as ``TerminalWriter.markup``: ``paint("X", red=True)``."""

FEW = 3
"""Up to this many kernels are columns, and the laws are rows; more of them are rows, if all laws fit a line."""
SCREEN = 80
"""The characters of a line."""
LONGEST_NAME = 20
"""The most characters of a name at the left of the matrix; a longer name loses its middle."""


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
    number: int, one: DistinctBug, report_dir: Path, width: int, most: int | None = MOST_LINES
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


def repeats(concluded: Sequence[DistinctBug], text: str) -> bool:
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


def print_ending(
    writer: TerminalWriter,
    results: Results,
    report_dir: Path,
    *,
    verbose: bool,
    written: str,
    page: str = "",
    more: Sequence[str] = (),
    annotations: Sequence[str] = (),
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
        annotations: workflow commands of GitHub Actions, which come before the bugs.
    """
    if verbose:
        print_detail(writer.line, results)
    is_below = verbose
    for markup, (first, *rest) in _sections(
        writer, results, report_dir, verbose, more, annotations, page, written
    ):
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
    annotations: Sequence[str],
    page: str,
    written: str,
) -> Iterator[tuple[dict[str, bool], list[str]]]:
    """Yield the matrix, notes, bugs, and the paths of what is written: lines, and how the first one is marked."""
    concluded = results.concluded
    yield {}, verdicts(results, writer.markup)
    if found := [*notes(results, writer.fullwidth), *more]:
        yield {}, found
    for line in (*results.complaints(), *results.unjudged()):
        yield {"red": True}, [line]
    if annotations:
        yield {}, list(annotations)
    if concluded:
        yield {"bold": True}, [f"bugs, the worst first: {len(concluded)}"]
    most = None if verbose else MOST_LINES
    for number, one in enumerate(concluded, 1):
        yield {"red": True}, bug_lines(number, one, report_dir, writer.fullwidth, most)
    for kernel, told in results.less_precise_told().items():
        yield {}, [f"{kernel}: {told}"]
    for kernel, tried in results.tried().items():
        yield {}, wrapped(f"{kernel}: tried {told_tried(tried)}", writer.fullwidth)
    for kernel, laws in results.untried().items():
        yield {"yellow": True}, wrapped(f"{kernel}: not tried: {laws}", writer.fullwidth)
    replay = [f"replay: {replay_line(one.bug.failure, report_dir)}" for one in concluded[:1]]
    pages = [f"page: {page}"] if page else []
    yield {}, [*replay, *pages, f"summary: {written}{'' if verbose else ' (every count: -v)'}"]


def verdicts(results: Results, paint: Paint) -> list[str]:
    """Return the lines of the matrix of what is known so far; ``paint`` colours a mark."""
    return matrix(results.kernels, results.laws, results.dtypes, results.mark, paint)


def table(columns: Row, rows: Iterable[Row]) -> list[str]:
    """Return the names of the columns as a line and then each row as a line, with the columns aligned to the left."""
    lines = [columns, *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return [
        " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def print_table(write: WriteLine, columns: Row, rows: Iterable[Row]) -> None:
    """Write an empty line and a table."""
    head, *body = table(columns, rows)
    write("")
    write(head, bold=True)
    for line in body:
        write(line)


def print_detail(write: WriteLine, results: Results) -> None:
    """Print each table that has at least one row."""
    for columns, rows in (verdict_rows(results), distribution(results), times(results)):
        if rows:
            print_table(write, columns, rows)


def verdict_rows(results: Results) -> Table:
    """Return a table with a row for each kernel, law and dtype: its examples, its largest error, and its verdict."""
    rows = []
    for key in sorted(results.tallies):
        tally = results.tallies[key]
        worst = f"{tally.worst:.3f} {tally.worst_tensor}" if tally.worst_tensor else "-"
        rows.append((*key, str(tally.examples), _refused(tally), worst, results.verdict(key)))
    return ("kernel", "property", "dtype", "examples", "refused", "worst err/bound", "verdict"), rows


def _refused(tally: Tally) -> str:
    """Return how many cases were refused and, in brackets, how many were left out for each other reason."""
    left_out = {
        "not run": tally.skipped,
        "known": tally.known,
        "set aside": tally.set_aside,
        "of these run elsewhere": tally.moved,
        "time up": tally.undrawn,
    }
    return " ".join(
        [str(tally.refusals), *(f"(+{count} {what})" for what, count in left_out.items() if count)]
    )


def distribution(results: Results) -> Table:
    """Return a table with a row for each kernel, dtype and tensor: how the largest error over bound is distributed."""
    names = ("kernel", "dtype", "tensor", "examples")
    rows = [
        (
            *(str(row[name]) for name in names),
            *(f"{row['median']:.3f}", f"{row['p99.9']:.3f}", f"{row['maximum']:.4f}"),
            f"{100 * row['tests_nothing']:.0f} %",
        )
        for row in results.distribution()
    ]
    return (*names, "median err/bound", "99.9 %", "maximum", "tests nothing"), rows


def times(results: Results) -> Table:
    """Return a table with a row for each kernel: the seconds for launches, for judging them, for tensors, and in all.

    The last column is the time that the harness adds, as a share of launches and judging.
    """
    rows = []
    for kernel in results.kernels:
        seconds = merged(tally for key, tally in results.tallies.items() if key[0] == kernel).seconds
        spent = [seconds.get(x, 0.0) for x in ("kernel", "check", "tensors", "total")]
        work = spent[0] + spent[1]
        share = f"{100 * (spent[3] - work) / work:.0f} %" if work else "-"
        rows.append((kernel, *(f"{x:.1f} s" for x in spent), share))
    measured = ("launches", "references", "tensors", "total", "harness over launches + references")
    return ("kernel", *measured), rows


@dataclass(frozen=True)
class Mark:
    """How the matrix shows a verdict: as one character, with a meaning for the legend, and in a colour."""

    character: str
    meaning: str
    colour: dict[str, Any]


MARKS = {
    "broken": Mark("X", "broken", {"red": True, "bold": True}),
    "less precise": Mark("~", "less precise than claimed", {"red": True}),
    "refused": Mark("r", "refused nearly all", {"red": True}),
    "known": Mark("k", "known failure", {"yellow": True}),
    "held": Mark("+", "held", {"green": True}),
    "not tried": Mark("?", "not tried", {"yellow": True}),
    "not claimed": Mark(".", "not claimed", {}),
}
"""The mark of each verdict, the worst first, which is the order of the legend."""


def matrix(
    kernels: Sequence[str],
    laws: Sequence[str],
    dtypes: Sequence[str],
    verdict: Callable[[str, str, str], str],
    paint: Paint,
) -> list[str]:
    """Return the lines of the matrix, its legend included.

    Each column's name stands on a line of its own above the rows, so the names form a staircase.

    Args:
        kernels: names of kernels, in the order in which they are shown.
        laws: names of laws, likewise.
        dtypes: names of dtypes, one for each mark of a cell.
        verdict: a function from the names of a kernel, a law and a dtype to a key of ``MARKS``.
        paint: a function that colours a mark.
    """
    shown = {verdict(kernel, law, dtype) for kernel in kernels for law in laws for dtype in dtypes}

    def cell(kernel: str, law: str) -> str:
        marks = [MARKS[verdict(kernel, law, dtype)] for dtype in dtypes]
        return "".join(paint(mark.character, **mark.colour) for mark in marks)

    width = len(dtypes)
    of_laws, of_kernels = _most(kernels, width), _most(laws, width)
    if len(kernels) <= FEW or (len(laws) > of_laws and len(kernels) <= of_kernels):
        rows = {law: [cell(name, law) for name in kernels] for law in laws}
        lines = _below_stairs(kernels, rows, width)
    else:
        blocks = _blocks(laws, of_laws)
        parts = [{name: [cell(name, law) for law in block] for name in kernels} for block in blocks]
        tables = [_below_stairs(block, rows, width) for block, rows in zip(blocks, parts, strict=True)]
        lines = [line for at, table in enumerate(tables) for line in (*([""] if at else []), *table)]
    return [*lines, "", f"in each cell: {', '.join(dtypes)}", _legend(shown, paint)]


def _margin(names: Iterable[str]) -> int:
    """Return the width of the names of rows, with a space behind."""
    return min(max(map(len, names), default=0), LONGEST_NAME) + 1


def _most(names: Iterable[str], width: int) -> int:
    """Return how many columns fit a line whose rows have these names."""
    return (SCREEN + 1 - _margin(names)) // (width + 1)


def _blocks(laws: Sequence[str], most: int) -> list[Sequence[str]]:
    """Return the laws in as few parts as have at most so many each, and are about as long as each other."""
    size = -(-len(laws) // -(-len(laws) // most)) if laws else 1
    return [laws[start : start + size] for start in range(0, len(laws), size)]


def _below_stairs(columns: Sequence[str], rows: dict[str, list[str]], width: int) -> list[str]:
    """Return the rows below the names of the columns, each on a line of its own, so that no name has to be cut."""
    margin = _margin(rows)
    step = "|".ljust(width + 1)
    stairs = [_stair(" " * margin + step * place, name) for place, name in enumerate(columns)]
    return [*stairs, *(_fitted(name).ljust(margin) + " ".join(cells) for name, cells in rows.items())]


def _stair(before: str, name: str) -> str:
    """Return the line of a column's name: right of its place or, where the screen is too narrow, left of its bar."""
    if len(before) + len(name) <= SCREEN:
        return before + name
    return f"{before[: -len(name) - 2]} {name} |"


def _fitted(name: str) -> str:
    """Return a name, without its middle if it is too long: the names of one module's kernels differ at their ends."""
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME // 2 - 2]}..{name[-LONGEST_NAME // 2 :]}"


def _legend(shown: set[str], paint: Paint) -> str:
    """Return the meanings of the marks that the matrix has."""
    marks = [mark for verdict, mark in MARKS.items() if verdict in shown]
    return "   ".join(f"{paint(mark.character, **mark.colour)} {mark.meaning}" for mark in marks)
