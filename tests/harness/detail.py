"""The tables that ``pytest -v`` adds at the end of a run: counts and verdicts, errors over bounds, and times."""

from collections.abc import Iterator

import pytest

from tests.harness.results import Results
from tests.harness.table import print_table
from tests.harness.tally import Tally


def print_detail(reporter: pytest.TerminalReporter, results: Results) -> None:
    """Print each table that has at least one row."""
    tables = {
        ("kernel", "property", "dtype", "examples", "refused", "worst err/bound", "verdict"): verdicts(
            results
        ),
        (
            "kernel",
            "dtype",
            "tensor",
            "examples",
            "median err/bound",
            "99.9 %",
            "maximum",
            "tests nothing",
        ): distribution(results),
        (
            "kernel",
            "launches",
            "references",
            "tensors",
            "total",
            "harness over launches + references",
        ): times(results),
    }
    for columns, rows in tables.items():
        if found := list(rows):
            print_table(reporter, columns, found)


def verdicts(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a row for each kernel, law and dtype: its examples, its largest error over bound, and its verdict."""
    for key in sorted(results.tallies):
        tally = results.tallies[key]
        worst = f"{tally.worst:.3f} {tally.worst_tensor}" if tally.worst_tensor else "-"
        yield (*key, str(tally.examples), _refused(tally), worst, results.verdict(key))


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


def distribution(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a row for each kernel, dtype and tensor: how the largest error over bound is distributed over examples."""
    for row in results.distribution():
        yield (
            *(str(row[name]) for name in ("kernel", "dtype", "tensor", "examples")),
            f"{row['median']:.3f}",
            f"{row['p99.9']:.3f}",
            f"{row['maximum']:.4f}",
            f"{100 * row['tests_nothing']:.0f} %",
        )


def times(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield a row for each kernel: the seconds spent on launches, on judging them, on tensors, and in all.

    The last column is the time that the harness adds, as a share of launches and judging.
    """
    for kernel in results.kernels:
        total = Tally()
        for key, tally in results.tallies.items():
            if key[0] == kernel:
                total.add_seconds(tally.seconds)
        s = total.seconds
        work = s.get("kernel", 0.0) + s.get("check", 0.0)
        share = f"{100 * (s['total'] - work) / work:.0f} %" if work else "-"
        yield (kernel, *(f"{s.get(x, 0.0):.1f} s" for x in ("kernel", "check", "tensors", "total")), share)
