"""The page of a run: what it shows, that it is whole in itself, and how it compares two nights."""

import json
from pathlib import Path

import pytest

from tests.harness.report.page import PAGE
from tests.harness.run import Run
from tests.unit.support.reports import Page, bug, summary
from tests.unit.support.running import CASE, TOYS, pytest_run


def test_a_run_compares_itself_with_the_one_before_and_goes_on_without_its_page(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    (reports / "summary.json").write_text(json.dumps(summary(bug(kernel="toys.sound"), exit=1)))
    run = (
        "--kernel",
        f"{TOYS}:sound",
        "--examples",
        "1",
        "-k",
        "forward and float32",
        "-p",
        "no:cacheprovider",
    )
    assert f"page: reports/{PAGE}\n" in pytest_run(tmp_path, *run).stdout
    found = Page((reports / PAGE).read_text()).text
    assert found.startswith("Every law held")
    assert "gone toys.sound: law `forward` is broken" in found
    (reports / PAGE).unlink()
    (reports / PAGE).mkdir()  # not even root can replace a folder by a file
    assert f"page: reports/{PAGE}, not written: Is a directory\n" in pytest_run(tmp_path, *run).stdout


@pytest.mark.nightly
def test_a_replay_leaves_the_page_of_the_night(tmp_path: Path) -> None:
    (tmp_path / "case.json").write_text(json.dumps(Run(f"{TOYS}:sound", (), "forward", CASE).to_dict()))
    assert "page:" not in pytest_run(tmp_path, "--replay", "case.json").stdout
    assert not (tmp_path / "reports" / PAGE).exists()
