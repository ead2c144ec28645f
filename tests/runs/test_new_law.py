"""A law is one file: put beside the others, it is found, tried, shrunk, reported and replayed, and no list names it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.files import ROOT

LAW = '''"""Negation: out of -v is -out. Catches arithmetic that does not treat both signs alike."""

from dataclasses import replace

import torch

from tests.harness.law import law
from tests.harness.trial.relate import Derived, agree, asked


@law(takes_gradients=False, compares=("calls",))
def negation(trial):
    """Compare a call with one whose v has the other sign; no rounding differs."""
    given = asked(trial, replace(trial.problem, v=-trial.problem.v))
    if given is not None:
        out, negated = trial.forward(), trial.forward(given)
        expected = Derived(out.call, {"out": -out.out}, {"out": "-out"})
        agree(trial, "{} of -v is -out", negated, expected, lambda: {"out": torch.zeros_like(out.out).double()})
'''

KERNEL = '''import torch

from tests.unit.support.toys import sound


def biased(q, k, v, *, causal, sm_scale):
    """Rounds positive numbers up, from three rows on: by less than the bound of any rounding."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return torch.where((out > 0) & (q.shape[2] > 2), out * (1 + 2**-23), out), lse
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with one more file: that of the law."""
    shared = ("conftest.py", "pyproject.toml", "kernels", "reference", "strategies")
    for name in (*shared, "tests/__init__.py", "tests/harness", "tests/unit", "tests/runs"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    properties = tmp_path / "tests/properties"
    properties.mkdir()
    for path in (ROOT / "tests/properties").glob("*.py"):
        (properties / path.name).symlink_to(path)
    (properties / "test_negation.py").write_text(LAW)
    (tmp_path / "kernel.py").write_text(KERNEL)
    return tmp_path


def run(checkout: Path, *options: str) -> str:
    """Run pytest in a checkout until it finds a bug, and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/properties", "--device", "cpu", *options],
        cwd=checkout,
        env={k: v for k, v in os.environ.items() if k != "PYTEST_ADDOPTS"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    return done.stdout


def test_a_law_of_one_file_is_found_tried_shrunk_reported_and_replayed(checkout: Path) -> None:
    laws = "(test_forward or test_negation) and float32"
    told = run(checkout, "--kernel=kernel.py:biased", "-k", laws, "--examples=10", "--hypothesis-seed=1")
    summary = json.loads((checkout / "reports/summary.json").read_text())
    verdicts = {row["property"]: row["verdict"] for row in summary["results"]}
    assert verdicts == {"forward": "held", "negation": "broken"}
    (bug,) = summary["bugs"]
    assert bug["law"] == "negation"
    (folder,) = (checkout / "reports").glob("kernel.biased/negation-*")
    assert {"case.json", "report.md", "repro.py"} <= {path.name for path in folder.iterdir()}
    assert "seqlen_q: fails with 3" in (folder / "report.md").read_text()
    (replay,) = re.findall("^replay: python -m pytest tests/properties (.*)", told, re.MULTILINE)
    assert "out of -v is -out" in run(checkout, *replay.split())
