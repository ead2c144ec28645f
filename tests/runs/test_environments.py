"""Kernels that can't be run here are told in one line before any case is drawn, and bugs of kernels are not told so."""

import re
from pathlib import Path

import pytest
import torch

from tests.unit.support.running import pytest_run
from tests.unit.support.unrunnable_kernels import CANNOT_RUN, written

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs kernels in this process, interpreted")


@pytest.mark.parametrize("name", ["only in the backward", "package"])
def test_the_run_ends_with_status_4_and_this_line_alone(tmp_path: Path, name: str) -> None:
    source, expected = CANNOT_RUN[name]
    spec = written(tmp_path, source)
    options = ("--kernel", "flash_v2", "--kernel", spec, "-p", "no:cacheprovider")
    run = pytest_run(tmp_path, *options, status=pytest.ExitCode.USAGE_ERROR)
    printed = (run.stdout + run.stderr).strip()
    assert re.fullmatch(rf"ERROR: kernel '{spec}': .*{expected}", printed), printed
    assert not (tmp_path / "reports").exists()
