"""The counts of a run: those of several processes are merged, and quantiles are read from them."""

import json

import pytest

from strategies.case import Case
from tests.harness.running.tally import SLOW_SECONDS, Tally
from tests.harness.verdict import Finding, Verdict
from tests.unit.support.running import CASE, SMALL


class TestTally:
    def test_counts_merge_over_processes(self) -> None:
        one, two, both = Tally(), Tally(), Tally()
        verdicts = [
            Verdict(status="held", worst={"out": 0.25, "lse": 0.125}, seconds={"kernel": 1.0}),
            Verdict(
                status="held",
                worst={"out": 0.5},
                seconds={"kernel": 2.0},
                notes={"so": True},
            ),
            Verdict(
                status="broken",
                finding=Finding(claim="so", kind="error", tensor="out"),
                notes={"so": False},
            ),
            Verdict(status="refused", reason="no"),
            Verdict(status="skipped", reason="no memory"),
        ]
        for number, verdict in enumerate(verdicts):
            both.add(verdict, Case(seed=number))
            (one, two)[number % 2].add(verdict, Case(seed=number))
        one.merge(Tally.from_dict(json.loads(json.dumps(two.to_dict()))))
        assert one == both
        assert (one.examples, one.broken, one.refusals, one.skipped) == (3, 1, 1, 1)
        assert (one.worst, one.worst_tensor, one.worst_case) == (0.5, "out", repr(Case(seed=1)))
        assert one.seconds == {"kernel": 3.0}
        assert (one.noted, one.shown) == ({"so": 2}, {"so": 1})

    def test_quantiles_are_upper_edges_of_bins(self) -> None:
        tally = Tally()
        for ratio in (0.1, 0.2, 0.3, 0.9):
            tally.add(Verdict(status="held", worst={"out": ratio}), CASE)
        assert tally.quantile("out", 0.5) == pytest.approx(0.201)  # bins are 0.001 wide
        assert tally.quantile("out", 1.0) == pytest.approx(0.901)

    def test_a_case_that_takes_long_is_counted_and_told(self) -> None:
        one, two = Tally(), Tally()
        one.add(Verdict(status="held", seconds={"kernel": SLOW_SECONDS - 1.0}), CASE)
        assert one.slow == 0
        one.add(Verdict(status="held", seconds={"kernel": SLOW_SECONDS + 10.0}), CASE)
        two.note_slow(SLOW_SECONDS + 20.0, SMALL, cut_off=True)
        one.merge(Tally.from_dict(json.loads(json.dumps(two.to_dict()))))
        assert (one.slow, one.cut_off, one.slow_seconds) == (2, 1, 2 * SLOW_SECONDS + 30.0)
        assert (one.slowest, one.slowest_case) == (SLOW_SECONDS + 20.0, repr(SMALL))
