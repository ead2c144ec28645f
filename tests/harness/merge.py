"""``flashproof merge``: several runs become one result, each distinct bug once, and what is missing is told."""

import json
import shlex
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count
from pathlib import Path
from typing import NoReturn

import pytest
from _pytest._io import TerminalWriter

from tests.harness.bugs import Bug, with_tensors
from tests.harness.conclude import Concluded, replaced
from tests.harness.ending import print_ending
from tests.harness.plan import SUMMARY, report_folder
from tests.harness.recorded import Recorded, read_run
from tests.harness.report import add_to_report, write, write_whole
from tests.harness.results import Results
from tests.harness.screen import repeats
from tests.harness.sightings import Sightings
from tests.harness.telling import severity


class OneLine(ArgumentParser):
    """A parser of arguments whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError."""
        raise ValueError(message)


@dataclass(frozen=True)
class Find:
    """A bug as one run has found it."""

    run: Recorded
    one: Concluded


def main(arguments: Sequence[str]) -> int:
    """Merge runs as the command line says, and return the exit status: 1 if any law was broken, else 0.

    Raises ValueError, in one line, for what can't be merged.
    """
    parser = OneLine(
        "flashproof merge", description="Make one result of several runs, such as the shards of a night."
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="the report directory of a run")
    parser.add_argument(
        "--report-dir",
        type=Path,
        default="reports",
        metavar="DIR",
        help="where the result goes (default: reports)",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print every count")
    given = parser.parse_args(arguments)
    into = given.report_dir
    if same := next((x for x in given.folders if x.resolve() == into.resolve()), None):
        raise ValueError(f"--report-dir: got {str(same)!r}, expected a folder that is not merged")
    found = [read_run(folder) for folder in given.folders]
    runs = [run for run in found if run is not None]
    silent = [folder for folder, run in zip(given.folders, found, strict=True) if run is None]
    check_alike(runs)
    results, finds = united(runs)
    written = write_result(into, runs, silent, results, finds)
    more = [*untold(runs), *completeness(runs, silent)]
    writer = TerminalWriter(sys.stdout)
    writer.sep("=", "flashproof")
    print_ending(writer, results, into, verbose=given.verbose, written=written, more=more)
    is_broken = any(run.failed or run.status == pytest.ExitCode.TESTS_FAILED for run in runs)
    return (
        pytest.ExitCode.TESTS_FAILED
        if is_broken or results.concluded or results.complaints()
        else pytest.ExitCode.OK
    )


def check_alike(runs: Sequence[Recorded]) -> None:
    """Raise ValueError, in one line, if runs are not parts of one: by their versions, shards or kernels."""
    if not any(run.results.keys for run in runs):
        raise ValueError("got no run with a result, expected at least one")
    for one, other in combinations(runs, 2):
        where = f"in {one.folder} and {{}} in {other.folder}"
        if one.about["version"] != other.about["version"]:
            versions = f"got Flashproof {one.about['version']} {where.format(other.about['version'])}"
            raise ValueError(f"{versions}, expected one version")
        if one.folder.resolve() == other.folder.resolve():
            raise ValueError(f"got {one.folder} twice, expected each run once")
        if one.shard and other.shard and (one.shard == other.shard or one.shard.count != other.shard.count):
            told = f"got shard {one.shard} {where.format(other.shard)}"
            raise ValueError(f"{told}, expected different shards of one number")
        for name in one.results.infos.keys() & other.results.infos.keys():
            mine, theirs = (run.results.infos[name].printed for run in (one, other))
            for key in sorted(mine.keys() | theirs.keys()):
                if mine.get(key) != theirs.get(key):
                    told = f"got the claim {key}={mine.get(key)} of {name} {where.format(theirs.get(key))}"
                    raise ValueError(f"{told}, expected one claim")


def united(runs: Sequence[Recorded]) -> tuple[Results, list[list[Find]]]:
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


def as_one(finds: Sequence[Find]) -> Concluded:
    """Return a bug as all runs have seen it. A claim is offered if each run that found the bug offers it."""
    first, *rest = (find.one for find in finds)
    seen = Sightings()
    for find in finds:
        seen.merge(find.one.seen)
    bug = with_tensors(first.bug, (tensor for find in finds for tensor in find.one.bug.tensors))
    if not rest:
        return Concluded(bug, seen, first.offers)
    claims = ({line.partition(": ")[0]: None for line in find.one.offers} for find in finds)
    mine, *others = claims
    offers = (
        f"{claim}: offered by all {len(finds)} runs that found it"
        for claim in mine
        if all(claim in x for x in others)
    )
    return Concluded(bug, seen, tuple(offers))


def named(concluded: Iterable[Concluded]) -> Iterator[Concluded]:
    """Yield each bug with a report folder of its own, since two runs may have used one name for two bugs."""
    taken: set[str] = set()
    for one in concluded:
        f = one.bug.failure
        bugs = (replace(one.bug, failure=replace(f, number=n)) for n in count(f.number))
        bug = next(bug for bug in bugs if bug.key not in taken)
        taken.add(bug.key)
        yield replace(one, bug=bug)


def write_result(
    into: Path,
    runs: Sequence[Recorded],
    silent: Sequence[Path],
    results: Results,
    finds: Sequence[Sequence[Find]],
) -> str:
    """Write the reports and the summary, and return the path of the latter.

    Raises ValueError, in one line, if that is not possible.
    """
    try:
        with report_folder(into):
            for one, (first, *_) in zip(results.concluded, finds, strict=True):
                copy_report(first, one.bug, into)
                add_to_report(into / one.bug.key, one.lines())
            not_run = dict.fromkeys(x for run in runs for x in run.about["not_run"])
            content = results.to_dict(environment(runs), list(not_run)) | {"shards": shards(runs, silent)}
            # A page of the whole night is written here, from ``content`` and the reports below ``into``.
            write_whole(into / SUMMARY, json.dumps(content, indent=1) + "\n")
    except pytest.UsageError as e:
        raise ValueError(str(e)) from None
    return str(into / SUMMARY)


def copy_report(find: Find, bug: Bug, into: Path) -> None:
    """Copy the report of a find, with the paths in it changed; if it is not there, write what is known of the bug."""
    source, target = find.run.folder / find.one.bug.key, into / bug.key
    shutil.rmtree(target, ignore_errors=True)
    if not (source / "report.md").exists():
        write(bug.failure, into)
        return
    shutil.copytree(source, target)
    before = Path(find.run.about["report_dir"]) / find.one.bug.key
    text = (target / "report.md").read_text()
    for name in ("case.json", "repro.py"):
        text = text.replace(shlex.quote(str(before / name)), shlex.quote(str(target / name)))
    write_whole(target / "report.md", text)


def environment(runs: Sequence[Recorded]) -> dict[str, str]:
    """Return the environment of all runs, each value with those that differ from it in other runs."""
    found = [run.about["environment"] for run in runs]
    return {key: ", ".join(dict.fromkeys(each[key] for each in found)) for key in found[0]}


def shards(runs: Sequence[Recorded], silent: Sequence[Path]) -> dict[str, list[str]]:
    """Return the names of the runs that came to their end, of those that were cut short, and of those that are missing.

    Of a run that wrote nothing, the shard is not known: it is one of those that are missing. If there are no shards,
    such a run has the name of its folder.
    """
    numbered = [run.shard for run in runs if run.shard]
    there = {shard.index for shard in numbered}
    expected = numbered[0].count if numbered else 0
    absent = [f"{i}/{expected}" for i in range(1, expected + 1) if i not in there]
    return {
        "ended": [run.name for run in runs if run.is_whole],
        "cut short": [run.name for run in runs if not run.is_whole],
        "missing": absent or list(map(str, silent)),
    }


def completeness(runs: Sequence[Recorded], silent: Sequence[Path]) -> list[str]:
    """Return lines that say which runs are counted, as a whole or in part, and which are missing."""
    of = shards(runs, silent)
    lines = [f"runs that came to their end: {len(of['ended'])} of {sum(map(len, of.values()))}"]
    if of["cut short"]:
        lines.append(f"cut short, counted as far as they came: {', '.join(of['cut short'])}")
    if of["missing"]:
        lines.append(f"missing, nothing of them is counted: {', '.join(of['missing'])}")
    return lines


def untold(runs: Sequence[Recorded]) -> Iterator[str]:
    """Yield the texts of failed items that are of no bug and of no less precise call."""
    for run in runs:
        for item, text in run.failed.items():
            if not repeats(run.bugs, replaced(text, run.bugs)):
                yield f"{run.name}: FAILED {item}"
                yield from text.splitlines()
