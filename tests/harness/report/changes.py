"""Two runs compared by their summaries: which bugs are new, which are still there, and which were not found again."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.harness.bugs.bug import Bug
from tests.harness.bugs.failure import Failure, symptom
from tests.harness.report.conclusion import merged

Summary = Mapping[str, Any]
"""The content of a summary.json."""
Row = Mapping[str, Any]
"""An entry of a bug, or of a law at a dtype of a kernel, in a summary."""
GONE = "gone: "
"""How a notice begins that a bug of an earlier run is gone."""


def read_night(path: Path) -> Summary | None:
    """Return the content of a summary.json of this version; None for any other file, and for the replay of one case."""
    try:
        summary: Summary = json.loads(path.read_text())
        bugs_of(summary)
        return None if summary["run"]["replay"] else summary
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def changes(now: Summary, before: Summary) -> dict[str, list[Row]]:
    """Compare a run with an earlier one, and return the bugs of both by what has become of them.

    They are "new", "still there", "gone" or "not tried again". An earlier bug that was not found again is gone
    if this run had at least one example of its kernel, a law that it broke, and a dtype in which it showed. The number
    of these examples is in its row, as "tried".
    """
    found, known = bugs_of(now), bugs_of(before)
    new = [row for row, bug in found if not any(are_one(bug, other) for _, other in known)]
    lost = [
        {**row, "tried": examples(now, row)}
        for row, bug in known
        if not any(are_one(bug, other) for _, other in found)
    ]
    return {
        "new": new,
        "still there": [row for row, _ in found if row not in new],
        "gone": [row for row in lost if row["tried"]],
        "not tried again": [row for row in lost if not row["tried"]],
    }


def told_gone(held: Iterable[Bug], found: Iterable[Bug]) -> Iterator[str]:
    """Yield a line for each bug of earlier runs whose cases pass, unless this run has found it in another case.

    Args:
        held: a bug for each case that passes in this run; some may be duplicates.
        found: the bugs that this run has found.
    """
    cases = {f"{bug.failure.kernel} {bug.failure.law} {bug.failure.case}": bug for bug in held}
    known = list(found)
    for one in merged(cases, {}):
        if not any(are_one(one.bug, bug) for bug in known):
            yield f"{GONE}{_mended(one.bug.failure, 1 + len(one.twins))}"


def _mended(f: Failure, cases: int) -> str:
    showed = "the case that showed it holds now:"
    if cases > 1:
        showed = f"the {cases} cases that showed it hold now, such as"
    was = symptom(f).replace(" is ", " was ")
    return f"law `{f.law}` of {f.kernel}, {was} ({f.case.dtype}): {showed} {f.case!r}"


def bugs_of(summary: Summary) -> list[tuple[Row, Bug]]:
    """Return the entry of each bug with the bug. Raises ValueError, LookupError or TypeError for other content."""
    return [(row, Bug.from_dict(row["record"])) for row in summary["bugs"]]


def are_one(one: Bug, other: Bug) -> bool:
    """Whether bugs of two runs are the same: their records are alike, or each explains the other's smallest case."""
    if one.failure.kernel != other.failure.kernel:
        return False
    return one.is_like(other) or (explains(one, other) and explains(other, one))


def explains(known: Bug, bug: Bug) -> bool:
    """Whether a known bug can be blamed for the smallest case of another: same symptom, and all conditions are met."""
    return known.could_break(bug.failure.finding) and known.is_met(bug.failure.case)


def examples(summary: Summary, bug: Row) -> int:
    """Return how many examples of a run might have shown a bug: those of its kernel, laws and dtypes."""
    return sum(
        row["examples"]
        for row in summary["results"]
        if row["kernel"] == bug["kernel"] and row["property"] in bug["laws"] and row["dtype"] in bug["dtypes"]
    )
