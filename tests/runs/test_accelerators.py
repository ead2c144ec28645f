"""Whole runs on an accelerator of which PyTorch knows nothing but what ``torch.accelerator`` asks of a backend."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.harness.files import ROOT
from tests.unit.support import on_any_device
from tests.unit.support.private_backend import NAME, build

COMPILER = shutil.which("c++")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a torch with CUDA takes that by default"),
    pytest.mark.skipif(COMPILER is None, reason="a private backend of PyTorch is built by a C++ compiler"),
]
Verify = Callable[..., "subprocess.CompletedProcess[str]"]
SHORT = ("--examples", "5", "--hypothesis-seed", "1", "--shrink-seconds", "2", "--time-limit", "1", "-k")
LAWS = "forward or backward or memory or process or calls or streams"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment of processes whose torch has the private backend."""
    site = tmp_path_factory.mktemp("site")
    assert COMPILER is not None
    build(site, COMPILER)
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}


@pytest.fixture
def verify(environment: dict[str, str], tmp_path: Path) -> Verify:
    """Return a function that verifies one of the functions of ``on_any_device`` in a process of its own."""

    def run(function: str, *options: str) -> "subprocess.CompletedProcess[str]":
        words = ["--kernel", f"{on_any_device.__name__}:{function}", "--report-dir", str(tmp_path), *options]
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                str(ROOT / "tests/properties"),
                "-p",
                "no:cacheprovider",
                *words,
            ],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_laws_hold_on_it_and_what_it_lacks_is_told(verify: Verify, tmp_path: Path) -> None:
    run = verify("sound", *SHORT, f"float16 and not bfloat16 and ({LAWS})")
    assert run.returncode == 0, run.stdout
    printed = " ".join(run.stdout.split())
    lacks = (
        "calls in a graph, whether the memory of the device is full, what calls do to its random generator"
    )
    assert f"not run on {NAME}, where PyTorch lacks what they need: {lacks} " in printed
    assert "law `unbiased`, which is tried on cpu alone" in printed
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["environment"]["device"] == f"{NAME}:0"
    assert re.search(r"streams +\+", run.stdout)
    assert re.search(r"memory +\+", run.stdout)


@pytest.mark.parametrize(
    ("function", "laws", "told"),
    [
        ("last_key_lost", "forward", "the last key is dropped"),
        ("stream_left", "process", "a call leaves the current stream changed"),
        ("device_left", "process", "a call leaves the current GPU changed"),
        ("numbers_of_the_usual_stream", "streams", "on a side stream, out is that of a plain call"),
    ],
)
def test_a_bug_is_told_with_a_script_that_shows_it(
    verify: Verify, environment: dict[str, str], tmp_path: Path, function: str, laws: str, told: str
) -> None:
    run = verify(function, *SHORT, f"{laws} and float32", "--device", NAME)
    assert run.returncode == 1, run.stdout
    assert told in " ".join(run.stdout.split())
    (script,) = tmp_path.rglob("repro.py")
    assert f"--device {NAME} --replay" in script.with_name("report.md").read_text()
    shown = subprocess.run([sys.executable, str(script)], env=environment, check=False)
    assert shown.returncode == 1


@pytest.mark.parametrize("device", ["cuda", "xpu", f"{NAME}:5"])
def test_a_device_that_this_torch_lacks_is_one_line(verify: Verify, device: str) -> None:
    run = verify("sound", "--device", device)
    assert run.returncode == 4
    expected = f"--device: got {device}, expected cpu, {NAME} or auto: torch finds no other device here"
    assert [line for line in run.stderr.splitlines() if line] == [f"ERROR: {expected}"]
