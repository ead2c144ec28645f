"""``flashproof merge``: several runs become one result, each distinct bug once, and what is missing is told."""

import json
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest._io import TerminalWriter

from tests.harness.bugs.bug import Bug
from tests.harness.commands.arguments import OneLine
from tests.harness.commands.union import Find, check_alike, merged_runs
from tests.harness.files import SUMMARY, VERDICT, write_whole
from tests.harness.programs.github import annotations
from tests.harness.programs.verdict import read_verdict, text_of, verdict_of
from tests.harness.report.changes import read_night
from tests.harness.report.conclusion import replaced
from tests.harness.report.folder import add_to_report, report_folder, write
from tests.harness.report.page import PAGE, write_page
from tests.harness.report.record import Recorded, read_run
from tests.harness.report.results import Results
from tests.harness.report.screen import print_ending, repeats


def main(arguments: Sequence[str]) -> int:
    """Merge runs as the command line says, and return the exit status: 1 if any law was broken, else as of a run.

    Raises ValueError, in one line, for what can't be merged.
    """
    given = parse(arguments)
    found = {folder: read_run(folder) for folder in given.folders}
    runs = [run for run in found.values() if run is not None]
    silent = [folder for folder, run in found.items() if run is None]
    check_alike(runs)
    results, finds = merged_runs(runs)
    has_failed = any(run.failed or run.status == pytest.ExitCode.TESTS_FAILED for run in runs)
    status = 1 if has_failed or results.concluded else int(results.exit_status)
    written = write_result(given.report_dir, runs, silent, results, finds, status)
    more = [*untold(runs), *completeness(runs, silent)]
    writer = TerminalWriter(sys.stdout)
    writer.sep("=", "flashproof")
    print_ending(
        writer,
        results,
        given.report_dir,
        verbose=given.verbose,
        written=written,
        page=str(given.report_dir / PAGE),
        more=more,
        annotations=annotations(read_verdict(given.report_dir / VERDICT)),
    )
    return status


def parse(arguments: Sequence[str]) -> Namespace:
    """Return what the command line says. Raises ValueError, in one line, for what it can't say."""
    what = "Make one result of several runs, such as the shards of a night."
    parser = OneLine("flashproof merge", description=what)
    add, default = parser.add_argument, Path("reports")
    add("folders", nargs="+", type=Path, metavar="DIR", help="the report directory of a run")
    add(
        "--report-dir",
        type=Path,
        default=default,
        metavar="DIR",
        help="where the result goes (default: reports)",
    )
    add("-v", "--verbose", action="store_true", help="print every count")
    given = parser.parse_args(arguments)
    resolved = [folder.resolve() for folder in given.folders]
    if given.report_dir.resolve() in resolved:
        raise ValueError(f"--report-dir: got {str(given.report_dir)!r}, expected a folder that is not merged")
    if twice := next((x for x in given.folders if resolved.count(x.resolve()) > 1), None):
        raise ValueError(f"got {twice} twice, expected each run once")
    return given


def write_result(
    into: Path,
    runs: Sequence[Recorded],
    silent: Sequence[Path],
    results: Results,
    finds: Sequence[Sequence[Find]],
    status: int,
) -> str:
    """Write the reports, the summary and the page, and return the path of the summary. ``status`` is that of all runs.

    Raises ValueError, in one line, if that is not possible.
    """
    try:
        with report_folder(into):
            for one, (first, *_) in zip(results.concluded, finds, strict=True):
                copy_report(first, one.bug, into)
                add_to_report(into / one.bug.key, one.lines())
            not_run = dict.fromkeys(x for run in runs for x in run.about["not_run"])
            content = results.to_dict(environment(runs), list(not_run))
            content |= {"run": told_of_run(runs, status), "shards": shards(runs, silent)}
            before = read_night(into / SUMMARY)
            write_whole(into / SUMMARY, json.dumps(content, indent=1) + "\n")
            write_whole(into / VERDICT, text_of(verdict_of(content, into)))
            write_page(into, content, before)
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


def told_of_run(runs: Sequence[Recorded], status: int) -> dict[str, Any]:
    """Return what summary.json tells of the runs as if they were one: it begins with the first of them."""
    first = min((run.about["run"] for run in runs), key=lambda run: str(run["started"]))
    return {**first, "seconds": max(run.seconds for run in runs), "exit": status}


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
