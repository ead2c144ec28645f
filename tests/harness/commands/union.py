"""Several runs as one: their counts are added, and each bug is there once, whichever of them have found it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count
from pathlib import Path

from tests.harness.bugs.bug import Bug, Occurrences, with_tensors
from tests.harness.report.conclusion import DistinctBug
from tests.harness.report.record import Recorded
from tests.harness.report.results import Results
from tests.harness.report.wording import severity


@dataclass(frozen=True)
class Find:
    """A bug as one run has found it."""

    run: Recorded
    one: DistinctBug


def check_alike(runs: Sequence[Recorded]) -> None:
    """Raise ValueError, in one line, if runs are not parts of one: by their versions, shards or kernels."""
    if not any(run.results.keys for run in runs):
        raise ValueError("got no run with a result, expected at least one")
    for one, other in combinations(runs, 2):
        for what, mine, theirs, expected in unlike(one, other):
            places = f"{mine} in {one.folder} and {theirs} in {other.folder}"
            raise ValueError(f"got {what}{places}, expected {expected}")


def unlike(one: Recorded, other: Recorded) -> Iterator[tuple[str, object, object, str]]:
    """Yield why two runs are not parts of one: what is unlike, its value in each, and what is expected."""
    versions = [run.about["version"] for run in (one, other)]
    if versions[0] != versions[1]:
        yield "Flashproof ", *versions, "one version"
    if one.shard and other.shard and (one.shard == other.shard or one.shard.count != other.shard.count):
        yield "shard ", one.shard, other.shard, "different shards of one number"
    for name in one.results.infos.keys() & other.results.infos.keys():
        mine, theirs = (run.results.infos[name].printed for run in (one, other))
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                yield f"the claim {key} of {name} as ", mine.get(key), theirs.get(key), "one claim"


def merged_runs(runs: Sequence[Recorded]) -> tuple[Results, list[list[Find]]]:
    """Return the results of all runs as one, and the finds of each of its bugs, of which the first is the worst."""
    finds = grouped(Find(run, one) for run in runs for one in run.bugs)
    concluded = list(named(map(as_one, finds)))
    names: dict[Path, dict[str, str]] = {run.folder: {} for run in runs}
    for group, one in zip(finds, concluded, strict=True):
        for find in group:
            names[find.run.folder].update(dict.fromkeys((find.one.bug.key, *find.one.twins), one.bug.key))
    infos = {name: info for run in runs for name, info in run.results.infos.items()}
    results = Results(list(infos.values()))
    for run in runs:
        results.absorb(run.results, names[run.folder])
    results.conclude(concluded)
    return results, finds


def grouped(finds: Iterable[Find]) -> list[list[Find]]:
    """Return the finds of each bug, the worst bug and the worst find first.

    A run has told its own bugs apart by running the kernel, so that two finds of one run are two bugs.
    """
    groups: list[list[Find]] = []
    for find in sorted(finds, key=lambda find: severity(find.one.bug)):
        others = (x for x in groups if all(y.run is not find.run for y in x))
        group = next((x for x in others if is_found_again(x[0].one.bug, find.one.bug)), None)
        if group is None:
            groups.append([find])
        else:
            group.append(find)
    return groups


def is_found_again(one: Bug, other: Bug) -> bool:
    """Whether bugs of two runs are one, to judge by their records.

    Within a run two bugs may break the same law in the same way and need the same lengths or numbers. Of two runs such
    bugs count as one, if each one's smallest case has what the other one needs.
    """
    f, g = one.failure, other.failure
    if f.kernel != g.kernel:
        return False
    broken = [(x.law, x.case.dtype, x.finding.tensor, x.finding.signature) for x in (f, g)]
    needs = [{need.name for need in bug.needs} for bug in (one, other)]
    is_met = one.is_met(g.case) and other.is_met(f.case)
    return one.is_like(other) or (broken[0] == broken[1] and needs[0] == needs[1] and is_met)


def as_one(finds: Sequence[Find]) -> DistinctBug:
    """Return a bug as all runs have seen it. A claim is offered if each run that found the bug offers it."""
    first, *rest = (find.one for find in finds)
    seen = Occurrences()
    for find in finds:
        seen.merge(find.one.seen)
    bug = with_tensors(first.bug, (tensor for find in finds for tensor in find.one.bug.tensors))
    if not rest:
        return DistinctBug(bug, seen, first.offers)
    claims = ({line.partition(": ")[0]: None for line in find.one.offers} for find in finds)
    mine, *others = claims
    offers = (
        f"{claim}: offered by all {len(finds)} runs that found it"
        for claim in mine
        if all(claim in x for x in others)
    )
    return DistinctBug(bug, seen, tuple(offers))


def named(concluded: Iterable[DistinctBug]) -> Iterator[DistinctBug]:
    """Yield each bug with a report folder of its own, since two runs may have used one name for two bugs."""
    taken: set[str] = set()
    for one in concluded:
        f = one.bug.failure
        bugs = (replace(one.bug, failure=replace(f, number=n)) for n in count(f.number))
        bug = next(bug for bug in bugs if bug.key not in taken)
        taken.add(bug.key)
        yield replace(one, bug=bug)
