"""A run's bugs become issues: one for each cause, updated while it is there, and closed when it is gone."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.harness.commands.issues import main
from tests.harness.report.folder import write
from tests.harness.report.results import Results
from tests.unit.support.reports import found, info

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


def calls(github: Path) -> list[list[str]]:
    path = github / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class TestBadInput:
    @pytest.mark.parametrize(
        ("text", "told"),
        [
            (None, r"\S+summary.json: can't be read \(FileNotFoundError: .*\)"),
            ("{", r"\S+summary.json: can't be read \(JSONDecodeError: .*\)"),
            ('{"flashproof": 2}', r"\S+summary.json: can't be read \(ValueError: got format 2, expected 1\)"),
        ],
    )
    def test_what_is_no_summary_is_refused(
        self, github: Path, tmp_path: Path, text: str | None, told: str
    ) -> None:
        if text is not None:
            (tmp_path / "summary.json").write_text(text)
        with pytest.raises(ValueError, match=f"^{told}$"):
            main([str(tmp_path)])
