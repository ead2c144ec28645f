"""Drawn cases are steered away from known bugs, and at times not, to see whether a bug is still there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.contract import KnownFailure
from strategies.case import Spike
from strategies.features import SCORES
from tests.harness.bugs.avoidance import Avoided, steer_away
from tests.harness.bugs.bug import Condition, Severity
from tests.harness.diagnosis.known_bugs import MOST_BLAMED, MOST_BLAMED_IN_DOUBT, KnownBugs
from tests.unit.support.bugs import CASE, CAUSAL, CLAIMS, GROUP, all_laid_out, bug


class TestElsewhere:
    def known(self, **where: tuple[Any, ...]) -> KnownFailure:
        return KnownFailure(what="", laws=("forward",), case=None, where=where, device="cpu", torch=("",))

    def test_a_case_of_a_known_failure_is_run_with_a_field_that_holds(self) -> None:
        closed = Avoided(
            (self.known(k_layout=("gap", "offset")), self.known(causal=(True,), sm_scale=(0.0,)))
        )
        case = replace(CASE, k_layout="gap", q_layout="gap", sm_scale=0.0)
        assert steer_away(case, closed, CLAIMS) == replace(case, k_layout="contiguous", sm_scale=None)

    def test_a_case_that_meets_nothing_stays(self) -> None:
        assert steer_away(CASE, Avoided((self.known(group=(3,)),)), CLAIMS) == CASE

    @pytest.mark.parametrize("where", [{}, {"dtype": ("float32",)}])
    def test_a_case_that_cannot_be_told_apart_is_left_out(self, where: Any) -> None:
        assert steer_away(CASE, Avoided((self.known(**where),)), CLAIMS) is None

    def test_what_is_run_instead_is_claimed(self) -> None:
        claims = replace(CLAIMS, layouts=("bnhd", "gap"), causal=(True,))
        closed = Avoided((self.known(causal=(True,), q_layout=("gap",)),))
        case = all_laid_out(CASE, "gap")
        moved = steer_away(case, closed, claims)
        assert moved == replace(case, q_layout="bnhd")
        assert moved is not None
        assert claims.admits(moved)

    def test_a_size_moves_to_the_nearest(self) -> None:
        closed = Avoided((self.known(seqlen_k=tuple(range(80, 100))),))
        moved = steer_away(CASE, closed, CLAIMS)
        assert moved is not None
        assert moved.seqlen_k in (79, 100)

    def test_a_bug_is_left_by_one_of_what_it_needs(self) -> None:
        closed = Avoided((), (bug(CASE, (), CAUSAL, GROUP),))
        moved = steer_away(CASE, closed, CLAIMS)
        assert moved == replace(CASE, causal=False)

    @pytest.mark.parametrize(("missed", "most"), [(0, MOST_BLAMED), (1, MOST_BLAMED_IN_DOUBT)])
    def test_cases_are_run_elsewhere_later_if_the_bug_needs_more_than_is_known(
        self, tmp_path: Path, missed: int, most: int
    ) -> None:
        known = KnownBugs("k", "float32", tmp_path, verbose=False)
        found = replace(bug(CASE, ("out",), CAUSAL), severity=Severity(8, 20, missed))
        known.add(found)
        assert most > 1
        for blamed in range(most):
            assert not known.closed("forward"), blamed
            known.count(found, "forward", CASE, "out")
        assert known.closed("forward") == (found,)

    def test_failing_examples_of_other_processes_count_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        known, other, of_float16 = (
            KnownBugs("k", dtype, tmp_path, verbose=False) for dtype in ("float32", "float32", "float16")
        )
        found = bug(CASE, ("out",), CAUSAL)
        known.add(found)
        monkeypatch.setattr("tests.harness.report.ledger.os.getpid", lambda: 1)
        for _ in range(MOST_BLAMED):
            other.count(found, "forward", CASE, "out")
        monkeypatch.undo()
        for one in (known, of_float16):
            one.learn()
        assert known.closed("forward") == (found,)
        assert of_float16.closed("forward") == ()

    @pytest.mark.parametrize(
        ("fields", "stays"),
        [
            ({"sm_scale": 0.0}, True),
            ({"sm_scale": -0.01}, True),
            ({"sm_scale": 30.0}, False),
            ({"sm_scale": 0.01, "q_values": "outliers"}, False),
        ],
    )
    def test_a_bug_of_large_scores_leaves_small_ones_to_be_tried(self, fields: Any, stays: bool) -> None:
        large = replace(CASE, sm_scale=30.0)
        case = replace(CASE, **fields)
        for need in (
            Condition(SCORES, ("other",), ("ordinary",)),
            Condition("sm_scale", (30.0,), (None, 1.0)),
        ):
            moved = steer_away(case, Avoided((), (bug(large, ("out",), need),)), CLAIMS)
            assert (moved == case) == (stays if need.name == SCORES else case.sm_scale == 0)

    def test_a_bug_of_finite_large_scores_leaves_nan_to_be_tried(self) -> None:
        large, nan = (Spike("q", (0, 0, 0, 0), x) for x in (30.0, "nan"))
        found = bug(replace(CASE, spikes=(large,)), ("out",), Condition(SCORES, ("other",), ("ordinary",)))
        for spike, stays in ((large, False), (nan, True)):
            case = replace(CASE, spikes=(spike,))
            assert (steer_away(case, Avoided((), (found,)), CLAIMS) == case) == stays


def test_a_report_is_written_again_with_a_certificate_and_keeps_its_script(tmp_path: Path) -> None:
    known, plain = KnownBugs("k", "float32", tmp_path, verbose=False), bug(CASE, ("out",))
    f = plain.failure
    known.write(f, "print()\n")
    known.add(plain)
    told = replace(f, finding=replace(f.finding, certificate="the causal mask is left out"))
    known.add(replace(plain, failure=told))
    assert "the causal mask is left out" in (tmp_path / f.folder / "report.md").read_text()
    assert (tmp_path / f.folder / "repro.py").read_text() == "print()\n"
