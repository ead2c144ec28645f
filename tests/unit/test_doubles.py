"""What would tell one bug twice is told once, and two bugs that look alike stay two."""

from dataclasses import replace
from typing import Any

import pytest

from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case, Spike
from tests.harness.apart import Try
from tests.harness.attribute import Broken, Outcome, attribute
from tests.harness.bugs import Bug, Need
from tests.harness.law import law_named
from tests.harness.plainly import plainly
from tests.harness.trial import LawBroken, Trial
from tests.harness.vary import BLIND, HIDDEN, SEEN
from tests.harness.verdict import Finding
from tests.unit.bugs import CLAIMS, bug


def wrong(*tensors: str, **fields: Any) -> Finding | None:
    """Return the finding that these tensors are wrong; None if there are none."""
    if not tensors:
        return None
    return Finding(**{"claim": "so", "kind": "error", "tensor": tensors[0], "tensors": tensors, **fields})


class TestTheCaseThatIsLeft:
    """Rows that see no key are NaN. To cure them the lengths change, and then another bug shows."""

    OF_MASK = bug(Case(seqlen_q=9, seqlen_k=8, causal=True), ("out",), Need(BLIND, (HIDDEN,), (SEEN,)))
    MADE_NAN = replace(OF_MASK.failure.finding, kind="nonfinite")
    BLIND_ROWS = replace(OF_MASK, failure=replace(OF_MASK.failure, finding=MADE_NAN))
    REMAINDER = bug(Case(seqlen_k=5), ("out",), Need("seqlen_k", (5,), (0, 4, 32, 64)))
    DRAWN = Case(seqlen_q=129, seqlen_k=32, causal=True)

    @staticmethod
    def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        if case.causal and case.seqlen_q > case.seqlen_k:
            return wrong("out", kind="nonfinite")
        return wrong("out") if case.seqlen_k % 4 else None

    def outcome(self, run: Try, *known: Bug) -> Outcome:
        found = run("forward", self.DRAWN, frozenset())
        assert found is not None
        return attribute(Broken("forward", self.DRAWN, found), known, run, CLAIMS)

    def test_a_bug_that_a_cure_brings_in_explains_what_is_left(self) -> None:
        outcome = self.outcome(self.run, self.REMAINDER, self.BLIND_ROWS)
        assert outcome.rest is None
        assert outcome.blamed == [self.BLIND_ROWS, self.REMAINDER]

    def test_what_no_known_bug_explains_is_left(self) -> None:
        outcome = self.outcome(self.run, self.BLIND_ROWS)
        assert outcome.blamed == [self.BLIND_ROWS]
        assert outcome.rest is not None
        assert outcome.rest.finding.kind == "error"

    def test_nan_that_stays_is_another_bug(self) -> None:
        outcome = self.outcome(lambda *_: wrong("out", kind="nonfinite"), self.BLIND_ROWS)
        assert not outcome.blamed
        assert outcome.rest is not None


class TestCallsInOtherLayouts:
    """A law that makes a v of its own calls the kernel with k and v in two layouts, whatever those of the case are."""

    CASE = Case(
        heads_kv=2,
        seqlen_k=2,
        k_layout="gap",
        v_layout="gap",
        spikes=(Spike("k", (0, 0, 0, 0), "-inf"), Spike("q", (0, 0, 0, 0), 1.0)),
    )

    def test_a_law_tells_the_layouts_of_its_calls(self) -> None:
        trial = Trial(load("tests.several:corners__only__k_by_strides_of_v"), self.CASE, "cpu", SAFETY)
        with pytest.raises(LawBroken):
            law_named("special")(trial)
        told = {(size["k_layout"], size["v_layout"]) for size in trial.sizes}
        assert ("gap", "contiguous") in told
        assert ("gap", "gap") not in told

    def test_a_plain_law_tells_the_failure_in_the_layouts_of_a_call(self) -> None:
        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            return wrong("out") if case.k_layout != case.v_layout else None

        failed = wrong("out")
        assert failed is not None
        for v_layout, law in (("contiguous", "forward"), ("gap", "special")):
            broken = Broken("special", self.CASE, failed, sizes=({"v_layout": v_layout},))
            assert plainly(broken, run, CLAIMS).law == law
