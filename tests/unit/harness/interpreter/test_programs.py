"""Programs of one launch that write the same place: races show without a GPU, and what is sound is not accused."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernels.contract import AttentionKernel
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.interpreter import repaired as interpreter
from tests.harness.interpreter.programs import BACKWARD, FORWARD, QUICKEST, in_order
from tests.harness.interpreter.ttir.launch import interpreted
from tests.harness.law import law_named
from tests.harness.trial.trial import LawBroken, Trial
from tests.properties.test_determinism import MOST_IN_TURN
from tests.unit.support import races
from tests.unit.support.sound import Sound

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs kernels in this process, without a GPU"
)

CASE = Case(heads_kv=2, seqlen_q=40, seqlen_k=41, head_dim=16, dtype="float32", seed=1)
CAUSAL = replace(CASE, batch=2, group=2, seqlen_q=17, seqlen_k=20, causal=True)
SHORT = replace(CASE, heads_kv=1, seqlen_q=33, seqlen_k=9)
"""Three tiles of rows: the sum of two parts is the same in both orders."""
SHOWN_BY_ORDER = ("OTHERS_ROWS", "LAST_SPLIT", "FIRST_SPLIT", "LOST_SUMS", "CLAIMED_ATOMIC")
SOUND = ("SAME_VALUES", "TICKETS", "COUNTED", "ATOMIC", "LOCKED", "IN_TURN")
LAWS = ("forward", "backward", "determinism")
ENGINES = {"executed": nullcontext, "interpreted": interpreted}
Engine = Callable[[], AbstractContextManager[None]]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget which kernels have waited, as each test has other constants for them."""
    interpreter.waiting.clear()
    yield
    interpreter.waiting.clear()


def told(law: str, name: str, case: Case = CASE) -> tuple[str, str]:
    """Return the claim that a kernel breaks, and the tensor, or two empty words if the law holds."""
    kernel: AttentionKernel = getattr(races, name)
    try:
        law_named(law)(Trial(kernel, case, "cpu", SAFETY))
    except LawBroken as broken:
        return broken.finding.claim, broken.finding.tensor
    return "", ""


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("name", SHOWN_BY_ORDER)
def test_a_race_shows_in_another_order(name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine():
        claim, tensor = told("determinism", name, SHORT if engine is interpreted else CASE)
        assert claim == f"the same call gives the same {tensor} if the last program of each launch runs first"
        assert tensor in (("dk", "dv") if name in ("LOST_SUMS", "CLAIMED_ATOMIC") else ("out", "lse"))
        monkeypatch.setattr(races, "MENDED", True)
        assert told("determinism", name, SHORT) == ("", "")


@pytest.mark.parametrize("name", ["OTHERS_ROWS", "LAST_SPLIT", "FIRST_SPLIT"])
def test_these_races_show_in_no_other_way(name: str) -> None:
    assert told("forward", name) == told("backward", name) == ("", "")


@pytest.mark.parametrize(("name", "law"), [("LOST_SUMS", "backward"), ("UNPROTECTED_COUNTER", "forward")])
def test_what_is_lost_between_a_load_and_a_store_is_lost_at_once(
    name: str, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(law, name) != ("", "")
    with interpreted():  # which runs one program after the other
        assert told(law, name) == ("", "")
    monkeypatch.setattr(races, "MENDED", True)
    assert told(law, name) == ("", "")


@pytest.mark.parametrize("case", [CASE, CAUSAL], ids=["plain", "causal"])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_kernel_is_not_accused(name: str, law: str, case: Case) -> None:
    assert told(law, name, case) == ("", "")


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_kernel_is_not_accused_where_it_is_interpreted(name: str) -> None:
    with interpreted():
        assert told("determinism", name, SHORT) == ("", "")


@triton.jit
def _visit(count, seen, turn, WAITS: tl.constexpr):
    """Enter the number of each program behind those that have come before it, and for which it may wait."""
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    number = (x * tl.num_programs(1) + y) * tl.num_programs(2) + z
    if WAITS == "by atomics":
        while tl.atomic_add(turn, 0) != number:
            pass
    if WAITS == "by loads":
        now = tl.load(turn, volatile=True)
        while now != number:
            now = tl.load(turn, volatile=True)
    tl.store(seen + tl.atomic_add(count, 1), number)
    if WAITS != "never":
        tl.atomic_xchg(turn, number + 1)


def visited(order: str, waits: str) -> tuple[list[int], int]:
    """Return the numbers of the programs as they came, and how many may come in another order."""
    count, turn = torch.zeros(2, dtype=torch.int32).split(1)
    seen = torch.full((12,), -1, dtype=torch.int32)
    with in_order(order) as programs:
        _visit[(2, 3, 2)](count, seen, turn, WAITS=waits)
    return seen.tolist(), programs.most


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_programs_come_in_the_order_that_is_asked_for(engine: Engine) -> None:
    numbers = list(range(12))
    with engine():
        for order, expected in ((QUICKEST, numbers), (FORWARD, numbers), (BACKWARD, numbers[::-1])):
            assert visited(order, "never") == (expected, 12)
        assert visited(QUICKEST, "never") == (numbers, 12)


@pytest.mark.parametrize("waits", ["by atomics", "by loads"])
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_programs_that_wait_for_each_other_come_by_their_numbers(engine: Engine, waits: str) -> None:
    numbers = list(range(12))
    with engine():
        visited(QUICKEST, waits)
        for order in (QUICKEST, FORWARD, BACKWARD):
            assert visited(order, waits) == (numbers, 0)


def test_a_function_without_programs_is_not_called_again() -> None:
    trial = Trial(Sound().kernel(), CASE, "cpu", SAFETY)
    law_named("determinism")(trial)
    assert {call.order for call in trial.calls} == {QUICKEST}


@pytest.mark.parametrize(("batch", "calls"), [(1, 1), (6, 0)])
def test_a_kernel_is_called_in_two_orders_if_it_has_few_programs(batch: int, calls: int) -> None:
    trial = Trial(races.COUNTED, replace(CASE, batch=batch), "cpu", SAFETY)
    law_named("determinism")(trial)
    assert [call.order for call in trial.calls].count(BACKWARD) == calls
    assert (trial.given[0].programs > MOST_IN_TURN) == (calls == 0)


def test_a_replay_takes_the_answer_of_a_call_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(races.LAST_SPLIT, CASE, "cpu", SAFETY)
    with pytest.raises(LawBroken) as first:
        law_named("determinism")(trial)

    def unexpected(*_: Any, **__: Any) -> None:
        raise AssertionError("the kernel is called once more")

    again = trial.replayed(trial.family)
    monkeypatch.setattr("tests.harness.trial.trial.run_kernel", unexpected)
    with pytest.raises(LawBroken) as second:
        law_named("determinism")(again)
    assert first.value.finding == second.value.finding
