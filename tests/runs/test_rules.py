"""The rules of other suites: sound kernels pass, gross bugs fail, and bugs that a rule cannot see pass."""

from pathlib import Path

import pytest

from tests.mutation import compare
from tests.mutation.rules import RULES


def test_a_crash_fails_the_case_and_the_next_rule_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = tmp_path / "mine.py"
    kernel.write_text("import os\n\ndef f(q, k, v, *, causal, sm_scale):\n    os.kill(os.getpid(), 9)\n")
    monkeypatch.setattr(compare, "RULES", RULES[:2])
    found = compare.outcomes(f"{kernel}:f", "cpu", without={RULES[0].name: (0, 1)})
    assert [(outcome.failed, outcome.tried) for outcome in found] == [((2,), 1), ((0,), 1)]
