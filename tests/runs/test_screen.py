"""The text at the end of a run: what it says of each bug and of cases that were left out."""

import re
from pathlib import Path

import pytest

from tests.unit.support.running import TOYS, pytest_run


@pytest.mark.parametrize("verbose", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_pytest_shows_the_failures_that_the_screen_does_not_repeat(tmp_path: Path, verbose: bool) -> None:
    own = tmp_path / "test_own.py"
    own.write_text("def test_own():\n    assert 1 == 2\n")
    selected = ["-k", "(test_forward and float32) or test_own", "--examples=4", "--hypothesis-seed=1"]
    selected += ["--shrink-seconds=1"]
    run = pytest_run(tmp_path, str(own), "--kernel", f"{TOYS}:wrong", *selected, *["-v"] * verbose, status=1)
    assert "\n1. toys.wrong: law `forward` is broken, out is wrong (float32)\n" in run.stdout
    headings = re.findall("^_{3,} (.*) _{3,}$", run.stdout, re.MULTILINE)
    assert [heading for heading in headings if "test_forward" not in heading] == ["test_own"]
    assert (len(headings) > 1) == verbose
    failed = re.findall(r"^FAILED \S*::(test_\w+)", run.stdout, re.MULTILINE)
    assert {*failed} == {"test_forward", "test_own"}
    assert f"{len(failed)} failed" in run.stdout.splitlines()[-1]
