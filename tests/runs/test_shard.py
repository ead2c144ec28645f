"""Machines that share a night draw different cases, and the same seed and shard draw the same."""

import json
import os
import subprocess
import sys

from tests.harness.files import ROOT
from tests.unit.support.shards import common

TWO_NIGHTS = "import conftest, json; from tests.unit.support.shards import drawn; print(json.dumps([drawn(), drawn()]))"


def test_two_nights_under_ci_draw_different_cases() -> None:
    """Hypothesis has settings of its own for CI, under which every run would draw the same."""
    environment = os.environ | {"CI": "1", "PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        [sys.executable, "-c", TWO_NIGHTS], env=environment, capture_output=True, text=True, check=True
    )
    first, second = json.loads(told.stdout)
    assert common(first, second) < 0.2
