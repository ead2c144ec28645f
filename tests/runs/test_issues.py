"""A run's bugs become issues: one for each cause, updated while it is there, and closed when it is gone."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands.issues import LABEL, MARK, main
from tests.harness.report.changes import told_gone
from tests.harness.report.folder import write
from tests.harness.report.results import Results
from tests.unit.support.bugs import CASE, CAUSAL, GROUP, bug
from tests.unit.support.reports import found, info

IN_CAUSAL = bug(CASE, ("out",), CAUSAL)
IN_GROUPS = bug(CASE, ("lse",), GROUP, law="exact")
KEY = "k: causal"
GH = """#!/usr/bin/env python3
import json, pathlib, sys
home = pathlib.Path(__file__).parent
if sys.argv[1:3] == ["issue", "list"]:
    print((home / "issues.json").read_text())
else:
    with (home / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + chr(10))
"""


@pytest.fixture
def github(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a command gh before all others that answers with a file of issues, and notes how else it is called."""
    home = tmp_path / "bin"
    home.mkdir()
    (home / "gh").write_text(GH)
    (home / "gh").chmod(0o755)
    (home / "issues.json").write_text("[]")
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    return home


def run(tmp_path: Path, *bugs: Any, **more: Any) -> str:
    """Write the report directory of a run that has found these bugs, and return its path."""
    results, folder = Results([info("k")]), tmp_path / "reports"
    results.add(found(*bugs))
    for one in bugs:
        write(one.failure, folder)
    folder.mkdir(exist_ok=True)
    summary = results.to_dict({"device": "cpu"}, []) | more
    (folder / "summary.json").write_text(json.dumps(summary))
    return str(folder)


def have(github: Path, **issues: str) -> None:
    """Let there be issues, each with a number and the key of its bug, open unless the number is marked as closed."""
    listed = [
        {"number": int(name.strip("_closed")), "state": "CLOSED" if "closed" in name else "OPEN", "body": f"x\n{key}"}
        for name, key in issues.items()
    ]  # fmt: skip
    (github / "issues.json").write_text(json.dumps(listed))


def calls(github: Path) -> list[list[str]]:
    path = github / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def of_issues(github: Path) -> list[list[str]]:
    """Return what was done with which issue."""
    return [call[1:3] for call in calls(github) if call[0] == "issue"]


class TestCommands:
    def test_a_new_bug_is_an_issue_with_its_report_and_key(self, github: Path, tmp_path: Path) -> None:
        assert main([run(tmp_path, IN_CAUSAL, IN_GROUPS), "--write"]) == 0
        label, *created = calls(github)
        assert label[:3] == ["label", "create", LABEL]
        assert [call[:4] for call in created] == [["issue", "create", "--label", LABEL]] * 2
        (text,) = (Path(call[-1]).read_text() for call in created if IN_CAUSAL.key in call[-1])
        assert text.startswith("### k: law `forward` is broken, out is wrong (float32)\n")
        assert text.endswith(f"\n{MARK.format(KEY)}\n")

    def test_a_bug_that_is_still_there_updates_its_issue(self, github: Path, tmp_path: Path) -> None:
        have(github, _7=MARK.format(KEY), _8="somebody wrote this")
        main([run(tmp_path, IN_CAUSAL), "--write"])
        assert of_issues(github) == [["edit", "7"]]

    def test_a_bug_that_came_back_reopens_its_issue(self, github: Path, tmp_path: Path) -> None:
        have(github, _7_closed=MARK.format(KEY))
        main([run(tmp_path, IN_CAUSAL), "--write"])
        assert of_issues(github) == [["reopen", "7"], ["edit", "7"]]

    def test_an_open_issue_is_preferred_to_a_closed_one(self, github: Path, tmp_path: Path) -> None:
        have(github, _7=MARK.format(KEY), _9_closed=MARK.format(KEY))
        main([run(tmp_path, IN_CAUSAL), "--write"])
        assert of_issues(github) == [["edit", "7"]]

    def test_a_bug_that_is_gone_closes_its_issue(self, github: Path, tmp_path: Path) -> None:
        have(github, _7=MARK.format(KEY), _8_closed=MARK.format("k: group"))
        main([run(tmp_path, notices=list(told_gone([IN_CAUSAL], []))), "--write"])
        assert of_issues(github) == [["close", "7"]]

    @pytest.mark.parametrize(
        ("more", "reason"),
        [
            ({"shards": {"cut short": ["2/3"], "missing": ["3/3"]}}, "2/3, 3/3 did not come to an end"),
            ({"results": []}, "k was not tried"),
            ({"notices": ["gone: another bug", "the database was lost"]}, "the database was lost"),
        ],
    )
    def test_a_bug_that_may_be_there_keeps_its_issue(
        self, github: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: Any, reason: str
    ) -> None:
        have(github, _7=MARK.format(KEY))
        main([run(tmp_path, **more), "--write"])
        assert not calls(github)
        assert capsys.readouterr().out == f"# 7 stays open although its bug was not seen: {reason}\n"

    def test_by_default_the_commands_are_only_printed(
        self, github: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main([run(tmp_path, IN_CAUSAL)])
        assert not calls(github)
        label, create = map(shlex.split, capsys.readouterr().out.splitlines())
        assert label[:3] == ["gh", "label", "create"]
        assert create[:3] == ["gh", "issue", "create"]

    def test_another_law_that_shows_a_bug_first_does_not_make_it_another(
        self, github: Path, tmp_path: Path
    ) -> None:
        have(github, _7=MARK.format(KEY))
        main([run(tmp_path, bug(CASE, ("lse",), CAUSAL, law="exact")), "--write"])
        assert of_issues(github) == [["edit", "7"]]

    def test_two_bugs_of_one_cause_have_an_issue_each(self, github: Path, tmp_path: Path) -> None:
        have(github, _7=MARK.format(KEY))
        folder = run(tmp_path, IN_CAUSAL)
        summary = json.loads(Path(folder, "summary.json").read_text())
        summary["bugs"] *= 2
        Path(folder, "summary.json").write_text(json.dumps(summary))
        main([folder, "--write"])
        assert of_issues(github) == [["edit", "7"], ["create", "--label"]]


class TestBadInput:
    def test_without_gh_it_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ValueError, match=r"^gh: can't be run \(.*\), expected GitHub's command line$"):
            main([run(tmp_path, IN_CAUSAL)])

    def test_what_gh_says_is_passed_on_in_one_line(self, github: Path, tmp_path: Path) -> None:
        (github / "gh").write_text("#!/bin/sh\necho 'not logged\nin' >&2\nexit 4\n")
        with pytest.raises(ValueError, match=r"^gh issue list: not logged in$"):
            main([run(tmp_path, IN_CAUSAL)])
