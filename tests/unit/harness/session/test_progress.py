"""The live line of a run, and the lines above it for what is found."""

import math
from pathlib import Path
from typing import Any

import pytest

from strategies.case import Case
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.bugs.failure import Failure
from tests.harness.report.ledger import BEGUN, Ledger
from tests.harness.session.progress import Found, progress
from tests.harness.verdict import Finding


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 1.0, 200, math.inf), "0 of 200 examples"),
        ((50, 10.0, 200, math.inf), "50 of 200 examples, 5.0 examples/s, 0:30 left"),
        ((50, 10.0, 200, 20.0), "50 of 200 examples, 5.0 examples/s, 0:20 left"),
        ((300, 10.0, 200, math.inf), "300 of 200 examples, 30.0 examples/s, 0:00 left"),
        ((50, 10.0, None, 590.0), "50 examples, 5.0 examples/s, 9:50 left"),
        ((50, 10.0, None, 590.0, 1), "50 examples, 5.0 examples/s, 9:50 left, 1 bug"),
        ((0, 1.0, 200, math.inf, 2), "0 of 200 examples, 2 bugs"),
    ],
)
def test_the_live_line(arguments: tuple[Any, ...], text: str) -> None:
    assert progress(*arguments) == text


def test_what_is_found_is_told_once_and_in_one_line(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "bugs.jsonl")
    wrong = Finding(claim="so", kind="error", tensor="out")
    failure = Failure(
        "toys.py:f", (), "forward", Case(seqlen_k=3), kernel="toys.f", finding=wrong, environment={}
    )
    bug = Bug(failure, tensors=("out",), needs=(Condition("causal", (True,), (False,)),))
    for record in (
        {BEGUN: Bug(failure).to_dict()},
        {BEGUN: Bug(failure).to_dict()},
        bug.to_dict(),
        {"begins": "toys.f", "part": "forward", "time": 0.0},
        bug.to_dict(),
        {"imprecise": "toys.g"},
    ):
        ledger.append(record)
    found = Found(Ledger(tmp_path / "bugs.jsonl"))
    assert list(found.news()) == [
        "failing: toys.f: out is wrong (forward, float32), which is looked into",
        "found: toys.f: out is wrong (forward, float32), only with causal True",
        "found: toys.g: less precise than FlashAttention-2",
    ]
    ledger.append(bug.to_dict())
    assert list(found.news()) == []
