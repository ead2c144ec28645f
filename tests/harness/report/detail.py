"""The tables that ``pytest -v`` adds at the end of a run: counts and verdicts, errors over bounds, and times."""

from tests.harness.report.results import Results
from tests.harness.report.table import Table, WriteLine, print_table
from tests.harness.running.refusals import merged
from tests.harness.running.tally import Tally


def print_detail(write: WriteLine, results: Results) -> None:
    """Print each table that has at least one row."""
    for columns, rows in (verdicts(results), distribution(results), times(results)):
        if rows:
            print_table(write, columns, rows)


def verdicts(results: Results) -> Table:
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
