"""Laws take turns, a run ends in time, and the cases of a turn share compiled variants of a kernel."""

import math
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.cases import Space, cases, without_huge_strides
from strategies.design import Design, variants_of
from tests.harness.clock import (
    GRACE_SECONDS,
    LEAST_CALLS,
    LEAST_SECONDS,
    BudgetSpent,
    Clock,
    ShrinkBudget,
    meter,
)
from tests.harness.files import JOURNALS, append_line
from tests.harness.session.item import AN_EXAMPLE, ORDER, share_of
from tests.harness.session.turns import (
    LAST_ROUND,
    OVERRUN_SECONDS,
    TURN_SECONDS,
    TURNS,
    TURNS_OF_SERIES,
    VARIANTS,
    Shares,
    Turn,
    fair_seconds,
    seconds_for,
    turns_of_examples,
    turns_of_seconds,
)
from tests.unit.support.drawing import sample

CLAIMS = Capabilities(launch={"block_m": (64, 128), "block_n": (32, 64), "num_stages": (1, 2)})


class TestTurns:
    @pytest.mark.parametrize("examples", [1, 7, 10, 200])
    def test_a_law_of_some_cost_has_that_much_fewer_examples_and_one_at_least(self, examples: int) -> None:
        turns = [turn.of_cost(8) for turn in turns_of_examples(examples)]
        assert sum(turn.examples or 0 for turn in turns) == math.ceil(examples / 8)
        assert [turn.before for turn in turns] == [
            sum(x.examples or 0 for x in turns[:i]) for i in range(len(turns))
        ]

    @pytest.mark.parametrize("examples", [1, 2, 5, 10, 20, 100, 2000])
    def test_turns_grow_and_have_all_examples_together(self, examples: int) -> None:
        sizes = [turn.examples or 0 for turn in turns_of_examples(examples)]
        assert sum(sizes) == examples
        assert sizes[:-1] == sorted(sizes[:-1])
        assert min(sizes) > 0

    def test_the_first_turn_has_a_few_examples_and_the_last_alone_huge_strides(self) -> None:
        turns = turns_of_examples(100)
        assert 3 <= (turns[0].examples or 0) <= 5
        assert turns[-1].examples == 20
        for turn in turns:
            assert ("huge" in turn.claims(CLAIMS).layouts) is turn.last

    def test_every_worker_has_its_own_turn_of_a_round_by_the_clock(self) -> None:
        turns = turns_of_seconds(600.0, workers=16, items=5)
        assert len({turn.number for turn in turns}) == len(turns)
        assert [turn.round for turn in turns].count(0) == 16
        total = sum(turn.weight for turn in turns)
        first = sum(turn.weight for turn in turns if turn.round == 0) / total * 600
        assert 30 <= first <= 60
        assert sum(turn.weight for turn in turns if turn.last) / total == pytest.approx(LAST_ROUND)

    @pytest.mark.parametrize(
        ("seconds", "workers", "items"), [(120.0, 16, 33), (240.0, 16, 36), (600.0, 64, 360)]
    )
    def test_turns_by_the_clock_are_no_shorter_than_compiling_pays(
        self, seconds: float, workers: int, items: int
    ) -> None:
        turns = turns_of_seconds(seconds, workers, items)
        assert len({turn.number for turn in turns}) == len(turns)
        assert sum(turn.weight for turn in turns) == pytest.approx(1.0)
        for turn in turns:
            alone = [other.round for other in turns].count(turn.round) == 1
            assert alone or turn.weight * seconds * workers / items >= TURN_SECONDS

    def test_a_short_run_is_one_round_of_everything(self) -> None:
        (turn,) = turns_of_seconds(5.0, workers=1, items=30)
        assert turn.last
        assert "huge" not in turn.claims(CLAIMS).layouts
        assert turns_of_examples(1)[0].claims(CLAIMS) == CLAIMS


class TestTime:
    def test_the_time_is_shared_by_weight_and_what_is_saved_goes_to_the_others(self) -> None:
        weights = [1.0, 1.0, 2.0]
        assert seconds_for(0, weights, 40.0, workers=1) == 10.0
        assert seconds_for(1, weights, 36.0, workers=1) == 12.0
        assert seconds_for(2, weights, 36.0, workers=1) == 36.0
        assert seconds_for(0, weights, 40.0, workers=2) == 20.0

    def test_no_turn_passes_the_end(self) -> None:
        assert seconds_for(0, [1.0, 1.0], 10.0, workers=4, patience=5.0) == 10.0

    def test_a_clock_without_an_end_cuts_nothing(self) -> None:
        assert Clock().left == math.inf
        assert Clock().cut(50.0) == 50.0
        assert ShrinkBudget(50.0).within(Clock()).seconds == 50.0

    def test_a_failure_takes_its_share_of_what_is_left(self) -> None:
        budget = ShrinkBudget(50.0, calls=7).within(Clock(seconds=80.0))
        assert budget.seconds == pytest.approx(10.0, abs=0.5)
        assert budget.calls == 7

    def test_the_time_begins_with_the_first_example(self) -> None:
        clock = Clock(seconds=60.0)
        assert clock.left == 60.0
        clock.start()
        until = clock.until
        clock.start()
        assert clock.until == until
        assert clock.left < 60.0

    def test_after_the_end_little_is_left_and_then_nothing(self) -> None:
        late = Clock(seconds=60.0, until=time.perf_counter())
        assert late.left == 0.0
        assert ShrinkBudget(50.0).within(late).seconds == LEAST_SECONDS
        over = Clock(seconds=60.0, until=time.perf_counter() - 1.0 - GRACE_SECONDS)
        assert ShrinkBudget(50.0).within(over).seconds == 0.0

    def test_a_report_takes_less_in_a_run_with_less_time_for_it(self) -> None:
        late, hurried = (Clock(60.0, time.perf_counter(), grace) for grace in (GRACE_SECONDS, 0.3))
        assert (late.least, hurried.least) == (LEAST_SECONDS, 0.3)
        assert hurried.most_of_it(60.0) == pytest.approx(0.18, abs=0.05)
        assert hurried.most_of_it(0.01) == 0.01
        assert Clock().most_of_it(60.0) == 60.0

    def test_a_meter_that_is_up_ends_what_it_measures(self) -> None:
        spend = meter(seconds=0.0)
        with pytest.raises(BudgetSpent):
            spend()
        spend = meter(seconds=60.0, calls=1)
        spend()
        with pytest.raises(BudgetSpent):
            spend()

    def test_on_a_busy_machine_a_few_calls_may_take_longer(self) -> None:
        spend = meter(seconds=0.0, most=60.0)
        for _ in range(LEAST_CALLS):
            spend()
        with pytest.raises(BudgetSpent):
            spend()


class TestVariants:
    def test_turns_of_one_series_share_variants_and_no_others_do(self) -> None:
        turns = turns_of_seconds(600.0, workers=8, items=6)
        of_series: dict[tuple[int, int], set[range]] = {}
        for turn in turns:
            of_series.setdefault((turn.round, turn.series), set()).add(turn.variants("cuda"))
        assert all(len(found) == 1 for found in of_series.values())
        numbers = [number for (found,) in of_series.values() for number in found]
        assert numbers == [*range(len(numbers))]
        assert max(Counter((turn.round, turn.series) for turn in turns).values()) == TURNS_OF_SERIES

    @pytest.mark.parametrize("device_type", ["cpu", "cuda"])
    def test_each_round_of_a_run_by_examples_has_twice_as_many_variants(self, device_type: str) -> None:
        found = [turn.variants(device_type) for turn in turns_of_examples(100)]
        assert [len(x) for x in found] == [VARIANTS[device_type] * 2**i for i in range(len(found))]
        assert [number for x in found for number in x] == [*range(found[-1].stop)]

    def test_the_first_variants_have_all_that_is_compiled_in(self) -> None:
        variants = variants_of(CLAIMS, "cuda", 0)
        most = max(len(axis.levels) for axis in variants.axes) * len(CLAIMS.dtypes)
        rows = [variants.row(number) for number in range(2 * most)]
        missing = {
            (axis.name, level)
            for axis in variants.axes
            for level in axis.levels
            if not any(row.get(axis.name) == level for row in rows)
        }
        assert not missing
        assert {"head_dim", "causal", *CLAIMS.launch} <= {axis.name for axis in variants.axes}

    @pytest.mark.parametrize("number", range(6))
    def test_each_case_has_the_levels_of_a_variant_and_some_of_each_all_others(self, number: int) -> None:
        claims = replace(CLAIMS, window=(0, 7), sinks=True)
        dtype = claims.dtypes[number % len(claims.dtypes)]
        row = variants_of(claims, "cuda", number).row(number)
        space = Space(capabilities=claims, dtype=dtype, device_type="cuda", variants=True)
        design = Design([space], variants=[row])
        cases = [design.steered(i, case) for i, case in enumerate(sample(space.strategy(), 60))]
        known = {axis.name: axis for axis in design.axes}
        for name, level in row.items():
            shares = [known[name].level(case) == level for case in cases if name in known]
            assert sum(shares) >= 0.9 * len(shares)
        assert len({case.batch for case in cases}) > 2
        assert len({case.seqlen_q for case in cases}) > 10

    def test_the_first_round_compiles_few_variants(self) -> None:
        claims = replace(CLAIMS, window=(0, 7), sinks=True)
        rows = variants_of(claims, "cuda", 0)
        space = Space(capabilities=claims, dtype=claims.dtypes[0], device_type="cuda", variants=True)
        design = Design([space], variants=[rows.row(0), rows.row(len(claims.dtypes))])
        drawn = sample(space.strategy(), 100)
        steered = [design.steered(i, case) for i, case in enumerate(drawn)]
        assert len(set(map(constants, steered))) * 5 < len(set(map(constants, drawn)))

    def test_huge_strides_are_drawn_in_the_last_turn_or_where_nothing_else_is_claimed(self) -> None:
        for turn in turns_of_seconds(600.0, workers=8, items=6):
            assert turn.claims(CLAIMS) == (CLAIMS if turn.last else without_huge_strides(CLAIMS))
        assert without_huge_strides(Capabilities(layouts=("huge",))).layouts == ("huge",)


def constants(case: Case) -> object:
    """Return what a kernel in Triton is compiled for."""
    return case.head_dim, case.causal, case.launch, bool(case.window), case.sinks


def test_layouts_are_one_for_all_or_one_that_differs() -> None:
    found = sample(cases(without_huge_strides(CLAIMS), dtype="float16"), 400)
    different = [len(set(case.layouts)) for case in found]
    one, two = different.count(1), different.count(2)
    assert 0.5 <= one / 400 <= 0.75
    assert 0.2 <= two / 400 <= 0.4
    assert 0.05 <= (400 - one - two) / 400 <= 0.2


class TestShares:
    LAWS = dict.fromkeys(("sound", "busy", "hanging"), 10.0)

    def seconds(self, had: dict[str, float], left: float = 60.0) -> dict[str, float]:
        """Return what all turns to come may take together, by kernel."""
        return {name: fair_seconds(name, 1.0, self.LAWS, had, left) for name in self.LAWS}

    def test_those_that_have_had_less_get_more(self) -> None:
        assert self.seconds(dict.fromkeys(self.LAWS, 5.0)) == dict.fromkeys(self.LAWS, 20.0)
        assert self.seconds({"sound": 0.0, "busy": 10.0, "hanging": 20.0}) == {
            "sound": 30.0,
            "busy": 20.0,
            "hanging": 10.0,
        }

    def test_one_that_has_had_more_than_its_share_gets_none_and_the_others_share_the_rest(self) -> None:
        had = {"sound": 0.0, "busy": 10.0, "hanging": 120.0}
        assert self.seconds(had) == {"sound": 35.0, "busy": 25.0, "hanging": 0.0}
        assert self.seconds(had, left=5.0) == {"sound": 5.0, "busy": 0.0, "hanging": 0.0}

    def test_shares_are_by_the_weight_of_turns(self) -> None:
        had = {"sound": 2.0, "busy": 4.0}
        found = [fair_seconds(name, 0.5, {"sound": 1.0, "busy": 2.0}, had, 30.0) for name in had]
        assert found == [5.0, 10.0]

    def test_every_process_knows_what_each_kernel_has_had(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 1000.0
        monkeypatch.setattr("tests.harness.session.turns.time.time", lambda: now)
        one, other = Shares(tmp_path / TURNS), Shares(tmp_path / TURNS)
        with one.turn("early", 3.0):
            now += 1.0
        with one.turn("late", 3.0):
            now += 3.0 + OVERRUN_SECONDS
            assert other.had() == {"early": 3.0, "late": 3.0 + OVERRUN_SECONDS}
            assert other.held_up() == set()
            now += 1.0
            assert other.held_up() == {"late"}
        now += 100.0
        assert other.had() == one.had() == {"early": 3.0, "late": 4.0 + OVERRUN_SECONDS}
        assert other.held_up() == set()

    def test_a_process_that_was_killed_holds_up_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shares = Shares(tmp_path / TURNS)
        append_line(tmp_path / TURNS, {"process": 7, "turn": "k", "given": 3.0, "time": 0.0})
        monkeypatch.setattr("tests.harness.session.turns.is_alive", lambda process: False)
        assert (shares.had(), shares.held_up()) == ({"k": 3.0}, set())

    def test_a_kernel_that_has_had_its_share_has_one_example_of_each_law_and_none_while_it_holds_up_another(
        self, tmp_path: Path
    ) -> None:
        plan = SimpleNamespace(report_dir=tmp_path, workers=2, clock=Clock(60.0))
        config = SimpleNamespace(stash=pytest.Stash())
        turns = (Turn(0, 0, weight=1.0, last=False), Turn(1, 1, weight=1.0, last=True))
        items: Any = [
            SimpleNamespace(config=config, plan=plan, info=SimpleNamespace(name=name), turn=turn)
            for turn in turns
            for name in ("busy", "sound")
        ]
        config.stash[ORDER] = items
        file = tmp_path / JOURNALS / TURNS
        assert [share_of(item) for item in items] == [30.0, 30.0, 60.0, 60.0]
        begun = {"process": os.getpid(), "turn": "busy", "given": 1.0, "time": time.time() - 200.0}
        append_line(file, begun)
        assert [share_of(item) for item in items] == [0.0, 60.0, 0.0, 60.0]
        append_line(file, {"process": os.getpid(), "time": time.time()})
        assert [share_of(item) for item in items] == [AN_EXAMPLE, 60.0, 0.0, 60.0]
