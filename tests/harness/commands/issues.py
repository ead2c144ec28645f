"""``flashproof issues``: opens, updates and closes GitHub issues for the bugs that a run has found."""

import json
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.commands.arguments import OneLine
from tests.harness.files import SUMMARY, write_whole
from tests.harness.report.changes import GONE

LABEL = "flashproof"
"""The label of our issues. Others are left alone."""
MARK = "<!-- flashproof: {} -->"
"""The last line of an issue's text, with the key of its bug."""
BODY = "issue.md"
"""The file with the text of a bug's issue, in the folder of its report."""


@dataclass(frozen=True)
class Issue:
    """An issue of the repository: its number, whether it is open, and the key of its bug."""

    number: int
    is_open: bool
    key: str


def main(arguments: Sequence[str]) -> int:
    """Print the commands that bring the issues up to date with a run, or run them. Raises ValueError, in one line."""
    parser = OneLine(
        "flashproof issues", description="Bring GitHub issues up to date with a run, by the command gh."
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the report directory of a run, or of merged runs"
    )
    parser.add_argument(
        "--write", action="store_true", help="run the commands, which otherwise are only printed"
    )
    given = parser.parse_args(arguments)
    summary = read_summary(given.folder)
    listed = gh(
        "issue", "list", "--label", LABEL, "--state", "all", "--limit", "1000", "--json", "number,state,body"
    )
    bugs = keyed(summary["bugs"])
    for key, bug in bugs.items():
        write_body(given.folder / bug["folder"], key)
    issues = issues_in(listed)
    unseen = {
        issue: reason_to_stay(issue, summary)
        for key, issue in issues.items()
        if key not in bugs and issue.is_open
    }
    for command in commands(
        bugs, issues, given.folder, [issue for issue, reason in unseen.items() if not reason]
    ):
        print(shlex.join(("gh", *command)))
        if given.write:
            gh(*command)
    for issue, reason in unseen.items():
        if reason:
            print(f"# {issue.number} stays open although its bug was not seen: {reason}")
    return 0


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a run. Raises ValueError, in one line, if there is none."""
    try:
        summary: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
        if summary["flashproof"] != 1:
            raise ValueError(f"got format {summary['flashproof']!r:.80}, expected 1")
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise ValueError(f"{folder / SUMMARY}: can't be read ({type(e).__name__}: {e})") from e
    return summary


def gh(*arguments: str) -> str:
    """Run GitHub's command gh, and return what it prints. Raises ValueError, in one line, if it fails."""
    try:
        return subprocess.run(("gh", *arguments), capture_output=True, text=True, check=True).stdout
    except OSError as e:
        raise ValueError(f"gh: can't be run ({e.strerror}), expected GitHub's command line") from e
    except subprocess.CalledProcessError as e:
        raise ValueError(f"gh {' '.join(arguments[:2])}: {' '.join(e.stderr.split())}") from e


def keyed(bugs: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the bugs of a summary by keys that stay the same from night to night.

    A key has the kernel, what the bug points to and what it needs, because the law, the dtype and so the folder of the
    report may be others each night. Bugs of which neither is known are told apart by their tensor and rank.
    """
    seen: Counter[str] = Counter()
    found = {}
    for bug in bugs:
        cause = [*bug["causes"], *bug["matters"]] or [bug["tensor"], bug["rank"]]
        key = f"{bug['kernel']}: {', '.join(cause)}"
        seen[key] += 1
        found[f"{key} ({seen[key]})" if seen[key] > 1 else key] = bug
    return found


def issues_in(listed: str) -> dict[str, Issue]:
    """Return our issues by the keys of their bugs, from what gh lists; of several for one bug, the last open one."""
    before, after = MARK.split("{}")
    found = {}
    for issue in sorted(json.loads(listed), key=lambda x: (x["state"] == "OPEN", x["number"])):
        last = (issue["body"].split() and issue["body"].strip().splitlines()[-1]) or ""
        if last.startswith(before) and last.endswith(after):
            key = last.removeprefix(before).removesuffix(after)
            found[key] = Issue(issue["number"], issue["state"] == "OPEN", key)
    return found


def write_body(folder: Path, key: str) -> None:
    """Write the text of a bug's issue: its report, and the key. Raises ValueError, in one line, if that fails."""
    try:
        text = (folder / "report.md").read_text()
        write_whole(folder / BODY, f"{text}\n{MARK.format(key)}\n")
    except OSError as e:
        raise ValueError(f"{folder}: got no report, expected report.md ({e.strerror})") from e


def commands(
    bugs: Mapping[str, Mapping[str, Any]], issues: Mapping[str, Issue], folder: Path, gone: Sequence[Issue]
) -> Iterator[tuple[str, ...]]:
    """Yield the arguments of each call of gh, for bugs and issues by key, and for the issues of bugs that are gone."""
    if bugs:
        yield "label", "create", LABEL, "--force", "--description", "Found by flashproof"
    for key, bug in bugs.items():
        text = ("--title", bug["headline"], "--body-file", str(folder / bug["folder"] / BODY))
        if key not in issues:
            yield "issue", "create", "--label", LABEL, *text
            continue
        number = str(issues[key].number)
        if not issues[key].is_open:
            yield "issue", "reopen", number, "--comment", "It shows again."
        yield "issue", "edit", number, *text
    for issue in gone:
        yield "issue", "close", str(issue.number), "--comment", "No case of the last run shows it."


def reason_to_stay(issue: Issue, summary: Mapping[str, Any]) -> str:
    """Say why a bug that the run has not seen may be there all the same; "" if there is no reason."""
    shards = summary.get("shards", {})
    if absent := [*shards.get("cut short", ()), *shards.get("missing", ())]:
        return f"{', '.join(absent)} did not come to an end"
    tried = {row["kernel"] for row in summary["results"] if row["examples"]}
    kernel = issue.key.partition(": ")[0]
    if kernel not in tried:
        return f"{kernel} was not tried"
    return next((str(line) for line in summary["notices"] if not line.startswith(GONE)), "")
