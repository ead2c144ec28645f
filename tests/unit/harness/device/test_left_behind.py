"""What calls leave behind is told by its name, and nothing of calls that only look like it."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.device import left_behind
from tests.harness.device.left_behind import Storages, overlap
from tests.harness.law import law_named
from tests.harness.trial.trial import LawBroken, Trial
from tests.harness.verdict import LEAVES, STATE
from tests.unit.support import leaving

Attention = Callable[..., Tensor]
CASES = (
    Case(batch=2, heads_kv=2, seqlen_q=5, seqlen_k=9, head_dim=16, dtype="float16"),
    Case(seqlen_q=3, seqlen_k=1, head_dim=8, dtype="float32"),
    Case(heads_kv=2, group=2, seqlen_q=7, seqlen_k=7, head_dim=16, causal=True, dtype="bfloat16"),
)


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Empty what functions keep, so that one does not take the memory of others."""
    yield
    for kept in (leaving._HISTORY, leaving._FILES, leaving._MASKS, leaving._LAST, leaving._RECENT):
        kept.clear()


def told(function: Attention) -> list[str]:
    """Return what the law ``process`` says of each of the cases that break it."""
    kernel, found = load(f"{leaving.__name__}:{function.__name__}"), []
    for case in CASES:
        try:
            law_named("process")(Trial(kernel, case, "cpu", SAFETY))
        except LawBroken as broken:
            found.append(broken.finding)
    assert {finding.kind for finding in found} <= {STATE}
    return [finding.claim.removeprefix(LEAVES) for finding in found]


@pytest.mark.parametrize("function", leaving.LEFT, ids=lambda x: x.__name__)
def test_what_is_left_behind_is_told_by_its_name(
    function: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left_behind, "CALLS", 8)
    assert {*told(function)} == {leaving.LEFT[function]}


@pytest.mark.parametrize("function", leaving.SOUND, ids=lambda x: x.__name__)
def test_nothing_is_told_of_sound_functions(function: Attention) -> None:
    assert told(function) == []


def test_what_each_call_warns_of_is_a_note() -> None:
    kernel = load(f"{leaving.__name__}:warning")
    trial = Trial(kernel, CASES[0], "cpu", SAFETY)
    law_named("process")(trial)
    assert trial.notes["calls warn in {}: UserWarning: 0 keys are few (slow)"]


def test_a_cache_of_bounded_size_is_no_leak_and_one_without_bound_is() -> None:
    kept: list[Tensor] = []

    def call(storages: Storages, most: float) -> dict[str, Tensor]:
        with storages:
            kept.append(torch.ones(3))
        while len(kept) > most:
            kept.pop(0)
        return {}

    for most, expected in ((256, []), (float("inf"), ["a tensor in memory each time"])):
        kept.clear()
        assert left_behind.left_behind(partial(call, most=most), may_draw=False) == expected


def test_what_is_known_to_grow_is_told_after_few_calls() -> None:
    kept: list[Tensor] = []

    def call(storages: Storages) -> dict[str, Tensor]:
        with storages:
            kept.append(torch.ones(3))
        return {}

    known = set[str]()
    for calls in (left_behind.CALLS * left_behind.SERIES, left_behind.CALLS_AGAIN):
        kept.clear()
        assert left_behind.left_behind(call, may_draw=False, known=known) == ["a tensor in memory each time"]
        assert len(kept) == 2 + left_behind.FEW + calls


def test_a_seed_may_be_drawn_where_there_is_dropout() -> None:
    def call(storages: Storages) -> dict[str, Tensor]:
        torch.rand(1)
        return {}

    assert left_behind.left_behind(call, may_draw=True) == []
    assert left_behind.left_behind(call, may_draw=False) == ["PyTorch's random generator changed"]


BUFFER = torch.zeros(64)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (BUFFER[:4], BUFFER[3:8], True),
        (BUFFER[:4], BUFFER[4:8], False),
        (BUFFER[0:8:2], BUFFER[1:8:2], False),
        (BUFFER[:1].expand(5, 3), BUFFER[:8], True),
        (BUFFER[2:4].view(torch.float16), BUFFER[3:5], True),
        (BUFFER[2:3].view(torch.float16), BUFFER[3:5], False),
        (BUFFER[:0], BUFFER, False),
        (BUFFER.view(8, 8)[:, :4], BUFFER.view(8, 8)[:, 4:], False),
        (BUFFER.clone(), BUFFER, False),
    ],
)
def test_tensors_overlap_if_a_byte_is_of_both(x: Tensor, y: Tensor, expected: bool) -> None:
    assert overlap(x, y) == overlap(y, x) == expected
