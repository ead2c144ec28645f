"""Timings as text: a line for each row when it is measured, and tables at the end."""

from collections.abc import Iterable, Iterator, Sequence

from tests.bench.providers import OTHERS
from tests.bench.roofline import Ceiling
from tests.bench.shapes import DIRECTIONS, Shape
from tests.bench.timings import FEWEST_CALLS, LARGE_SPREAD, NOT_REACHED, Row, Timing, best_of_others
from tests.harness.report.screen import table

UNCERTAIN = "~"
"""The mark of a time that is uncertain."""
LEGEND = (
    f"{UNCERTAIN}: the middle half of the times spreads by more than ±{LARGE_SPREAD:.0%} around the median, or "
    f"there were fewer than {FEWEST_CALLS} calls; the last digit of the ratio means nothing"
)
ROOFLINE = "roofline"


def heading(shape: Shape, ceiling: Ceiling) -> str:
    """Return the line above the rows of a shape."""
    attainable = ", ".join(f"{digits(ceiling.attainable(shape, d))} {d}" for d in DIRECTIONS)
    return f"{shape.series}, {shape.lengths}: {shape.sizes}; in TFLOPS (ratio), {ROOFLINE} {attainable}"


def row_line(row: Row, at_shape: Sequence[Timing], seconds_left: float) -> str:
    """Return the line of one provider at one shape.

    Args:
        row: its timings.
        at_shape: the timings of all providers that were timed at the shape so far, with which it is compared.
        seconds_left: how long the measurements are still going to take, as far as is known.
    """
    cells = (
        f"{t.direction} {_cell(t, at_shape)}{f' ±{t.times.spread:.1%}' if t.times else ''}".ljust(30)
        for t in row
    )
    lowest = min((t.clocks.sm_mhz for t in row if t.clocks), default=None)
    minutes, seconds = divmod(int(seconds_left), 60)
    clock = f"{lowest} MHz" if lowest else ""
    return f"  {row[0].provider:22}{''.join(cells)}{clock:10}about {minutes}:{seconds:02d} left"


def digits(tflops: float) -> str:
    """Return a number with three digits."""
    return f"{tflops:.{0 if tflops >= 100 else 2 if tflops < 10 else 1}f}"


def _cell(timing: Timing, at_shape: Iterable[Timing]) -> str:
    if not timing.times:
        return timing.refusal if timing.refusal in NOT_REACHED else "-"
    best = best_of_others(t for t in at_shape if t.direction == timing.direction)
    ratio = f" ({timing.tflops / best:.2f})" if best and timing.provider not in OTHERS else ""
    return f"{digits(timing.tflops)}{UNCERTAIN * timing.times.is_uncertain}{ratio}"


def tables(timings: Sequence[Timing], providers: Sequence[str], ceiling: Ceiling | None) -> list[list[str]]:
    """Make a table, as lines, for each series and direction: TFLOPS, and for ours the ratio to the best other.

    There is a timing of each provider at each shape. Shapes at which none was timed are left out.
    """
    made = []
    for series, direction in dict.fromkeys((t.shape.series, t.direction) for t in timings):
        columns: dict[Shape, dict[str, Timing]] = {}
        for t in timings:
            if (t.shape.series, t.direction) == (series, direction):
                columns.setdefault(t.shape, {})[t.provider] = t
        columns = {
            shape: column for shape, column in columns.items() if any(t.times for t in column.values())
        }
        if columns:
            rows = [
                (name, *(_cell(column[name], column.values()) for column in columns.values()))
                for name in providers
            ]
            rows = [row for row in rows if {*row[1:]} != {"-"}]
            if ceiling:
                rows.append((ROOFLINE, *(digits(ceiling.attainable(shape, direction)) for shape in columns)))
            title = f"{direction}: {next(iter(columns)).sizes}"
            made.append([title, *table(("TFLOPS (ratio)", *(shape.lengths for shape in columns)), rows)])
    return made


def legend(timings: Sequence[Timing]) -> Iterator[str]:
    """Yield what the mark means, if a cell of the tables has it."""
    if any(t.times and t.times.is_uncertain for t in timings):
        yield LEGEND


def left_out(timings: Sequence[Timing], providers: Sequence[str]) -> Iterator[str]:
    """Yield lines that name the shapes and providers which the run ended too early to measure, with the reason."""
    missing: dict[Shape, dict[str, str]] = {}
    for t in timings:
        if t.refusal in NOT_REACHED:
            missing.setdefault(t.shape, {})[t.provider] = t.refusal
    where: dict[tuple[str, str, str], list[str]] = {}
    for shape, why in missing.items():
        names = "all" if len(why) == len(providers) else ", ".join(why)
        where.setdefault((next(iter(why.values())), shape.series, names), []).append(shape.lengths)
    for (reason, series, names), lengths in where.items():
        yield f"not measured, {reason}: {series}, {', '.join(lengths)}: {names}"


def refusals(timings: Sequence[Timing]) -> Iterator[str]:
    """Yield a line for each reason for which a direction of a provider was not timed somewhere."""
    told = dict.fromkeys(
        (t.provider, t.direction, t.refusal.partition("\n")[0])
        for t in timings
        if t.refusal and t.refusal not in NOT_REACHED
    )
    for provider, direction, reason in told:
        yield f"{provider} {direction}: not everywhere, {reason}"
