"""What would tell one bug twice is told once, and two bugs that look alike stay two."""

from dataclasses import replace
from typing import Any

from strategies.case import Case
from tests.harness.apart import Try
from tests.harness.attribute import Broken, Outcome, attribute
from tests.harness.bugs import Bug, Need
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
