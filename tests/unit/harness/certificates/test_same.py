"""Two bugs are two if a certificate of one leaves the other wrong, whatever else they have in common."""

import json
from dataclasses import replace

import pytest

from kernels.contract import Capabilities
from strategies.case import Case
from tests.harness.bugs.bug import Bug
from tests.harness.bugs.failure import Failure
from tests.harness.certificates.same import why_duplicates
from tests.harness.verdict import Finding
from tests.unit.support.stubs import runs_of

FINDING = Finding(claim="dk is right", kind="error", tensor="dk", tensors=("dk",), wrong=2, total=4)
OTHER = "backward", Case(seqlen_q=3, causal=True)
"""The law and the smallest case of the other bug, which has no certificate."""


def bug(law: str, case: Case, finding: Finding) -> Bug:
    return Bug(
        Failure("mine:attention", (), law, case, kernel="attention", finding=finding, environment={}),
        finding.tensors,
    )


@pytest.mark.parametrize(
    ("about", "left", "are_one"),
    [
        (("dk",), ("dk",), False),
        (("dk",), (), True),
        (("dk",), ("dq",), True),
        (("dk",), ("dk", "lse"), False),
        (("dk",), ("lse",), False),
        (("lse",), ("out",), True),
    ],
    ids=["left", "explained", "another gradient", "more", "no gradient changes lse", "beside in the forward"],
)
def test_a_certificate_tells_two_bugs_apart_that_are_fixed_by_the_same(
    about: tuple[str, ...], left: tuple[str, ...], are_one: bool
) -> None:
    record = json.dumps(("scale_is_default", about, {}))
    known = bug("backward", Case(sm_scale=1.0), replace(FINDING, certificate="x", alternatives=(record,)))
    other = bug(*OTHER, replace(FINDING, tensors=("dk", *left)))
    rest = replace(FINDING, tensor=left[0], tensors=left) if left else None
    runs = runs_of(Capabilities(), judged=lambda law, case, *_, **__: rest if (law, case) == OTHER else None)
    assert bool(why_duplicates(known, other, lambda *_: None, runs)) is are_one
    assert bool(why_duplicates(other, known, lambda *_: None, runs)) is are_one
