"""The verdict reaches a file or stdout, and a reader that has gone away costs one line."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.harness.programs.delivery import Delivery
from tests.unit.support.reports import summary


def delivery(tmp_path: Path, place: str) -> Delivery:
    one = Delivery(place, tmp_path / "reports", None)
    one.content = summary
    return one


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    delivery(tmp_path, str(tmp_path / "found.json")).deliver()
    assert json.loads((tmp_path / "found.json").read_text())["status"] == "held"
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.parametrize("place", ["absent/found.json", ".", ""])
def test_a_place_that_is_no_file_is_a_usage_error(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pytest.UsageError, match=rf"\A--json: got '{place}', expected - or a file .*\Z"):
        Delivery(place, tmp_path, None)


@pytest.fixture
def pipe(tmp_path: Path) -> Any:
    """Return the ends of a pipe, and a delivery whose stdout is the second end."""
    reader, writer = os.pipe()
    one = delivery(tmp_path, str(tmp_path / "unused"))
    one.place, one.stdout = "-", writer
    return reader, one


def test_stdout_has_the_verdict_and_is_closed(pipe: Any) -> None:
    reader, one = pipe
    one.content = None
    one.error = "--budget: got 0"
    one.deliver()
    with os.fdopen(reader) as file:
        assert json.loads(file.read())["error"] == "--budget: got 0"


def test_a_reader_that_has_gone_away_is_told_in_one_line(
    pipe: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, one = pipe
    os.close(reader)
    one.deliver()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ERROR: --json: got '-', expected a reader that stays (Broken pipe); ")
    assert line.endswith("verdict.json has the verdict")


@pytest.mark.parametrize("place", ["-", "absent/found.sarif"])
def test_another_form_goes_into_a_file_alone(tmp_path: Path, place: str) -> None:
    expected = rf"\A--sarif: got '{place}', expected a file that can be written\Z"
    with pytest.raises(pytest.UsageError, match=expected):
        Delivery(place, tmp_path, None, "--sarif", str)
    one = Delivery(str(tmp_path / "found"), tmp_path, None, "--sarif", lambda verdict: verdict["status"])
    one.content = summary
    one.deliver()
    assert (tmp_path / "found").read_text() == "held"
