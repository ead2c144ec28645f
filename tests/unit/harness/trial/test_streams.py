"""Calls in other places than on the default stream: what is wrong there is told by what it is."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.contract import AttentionKernel
from kernels.contract.parsing import PLAIN_FUNCTION
from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.accelerators import lookup
from tests.harness.accelerators.interface import NoAccelerator
from tests.harness.law import law_named
from tests.harness.trial.streams import BESIDE, GRAPH, SIDE, once, other_numbers, placed, places, write
from tests.harness.trial.trial import CannotRun, LawBroken, Trial
from tests.panel import PANEL
from tests.properties.test_streams import CLAIMS
from tests.unit.support import elsewhere
from tests.unit.support.stand_in import StandIn

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Attention = Callable[..., Tensor]
CASES = (
    Case(batch=2, heads_kv=2, seqlen_q=40, seqlen_k=70, head_dim=64, dtype="float16"),
    Case(heads_kv=2, group=2, seqlen_q=33, seqlen_k=33, head_dim=32, causal=True, dtype="bfloat16"),
    Case(seqlen_q=1, seqlen_k=200, head_dim=16, dtype="float32"),
)


def kernel_of(function: Attention) -> AttentionKernel:
    return load(f"{elsewhere.__name__}:{function.__name__}")


def told(kernel: AttentionKernel, case: Case) -> tuple[str, dict[str, bool]]:
    """Return the claim of the law ``streams`` that a kernel breaks on a case, or "", and the law's notes."""
    trial = Trial(kernel, case, "cuda", SAFETY)
    try:
        law_named("streams")(trial)
    except LawBroken as broken:
        return broken.finding.claim, trial.notes
    return "", trial.notes


def refusals(notes: dict[str, bool]) -> list[str]:
    return [text for text in notes if "can't be captured" in text]


def test_a_call_without_a_place_is_made_as_it_is() -> None:
    out = torch.ones(3)
    assert placed("", lambda: {"out": out}, [])["out"] is out


def test_other_numbers_are_of_the_same_kind_and_not_the_same() -> None:
    numbers, lengths = torch.tensor([[1.0, -2.0, 3.0]]), torch.tensor([0, 1, 7], dtype=torch.int32)
    assert other_numbers(numbers).tolist() == [[1.125, -0.75, 0.375]]
    assert other_numbers(lengths).tolist() == [0, 1, 1]
    assert other_numbers(numbers.to(torch.float8_e4m3fn)).dtype == torch.float8_e4m3fn


def test_an_expanded_tensor_is_written_once() -> None:
    x = torch.zeros(2, 1, 3)
    expanded = x.expand(2, 4, 3)
    write([once(expanded)], [torch.ones(2, 1, 3)])
    assert expanded.sum() == 24


@needs_gpu
@pytest.mark.parametrize("function", elsewhere.SIDE_WRONG, ids=lambda x: x.__name__)
def test_a_launch_on_another_stream_is_told(function: Attention) -> None:
    """What is late may be in time by chance in one case, as where a library is loaded meanwhile."""
    claims = [told(kernel_of(function), case)[0] for case in CASES]
    assert sum(claim.startswith(CLAIMS[SIDE].partition(",")[0]) for claim in claims) >= len(CASES) - 1, claims


@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda x: x.dtype)
@pytest.mark.parametrize("function", elsewhere.GRAPH_WRONG, ids=lambda x: x.__name__)
def test_numbers_of_the_capture_are_told(function: Attention, case: Case) -> None:
    kernel = kernel_of(function)
    if function is not elsewhere.largest_of_the_last_call:  # what keeps answers is asked for out alone
        kernel = load(f"{elsewhere.__name__}:{function.__name__}", ("backward=false",))
    claim, notes = told(kernel, case)
    assert claim.startswith(CLAIMS[GRAPH].partition(",")[0]), notes


@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda x: x.dtype)
@pytest.mark.parametrize("function", elsewhere.NOT_CAPTURED, ids=lambda x: x.__name__)
def test_a_kernel_that_can_not_be_captured_is_no_bug_and_leaves_the_device_as_it_was(
    function: Attention, case: Case
) -> None:
    for _ in range(2):
        claim, notes = told(kernel_of(function), case)
        assert claim == ""
        assert len(refusals(notes)) == 1
    torch.rand(2, device="cuda")  # a generator that still captures would raise
    claim, notes = told(kernel_of(elsewhere.eager), case)
    assert (claim, refusals(notes)) == ("", [])


@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda x: x.dtype)
@pytest.mark.parametrize("function", elsewhere.SOUND, ids=lambda x: x.__name__)
def test_sound_functions_hold_and_can_be_captured(function: Attention, case: Case) -> None:
    claim, notes = told(kernel_of(function), case)
    assert (claim, refusals(notes)) == ("", [])


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="without a device guard, they fail on two GPUs")
@pytest.mark.parametrize("member", [x for x in PANEL if x.is_triton], ids=lambda x: x.name)
def test_kernels_in_triton_hold(member: object) -> None:
    for case in CASES:
        claim, _ = told(load(member.spec, member.claims), case)  # type: ignore[attr-defined]
        assert claim == ""


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_missing_device_guard_is_told_and_one_that_is_there_holds() -> None:
    unguarded, guarded = (kernel_of(x) for x in (elsewhere.unguarded, elsewhere.guarded))
    for case in CASES:
        assert told(unguarded, case)[0]
        assert told(guarded, case)[0] == ""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Yield a stand-in that is taken for the accelerator of tensors on the CPU."""
    found = StandIn()
    monkeypatch.setitem(lookup.OWN_INTERFACES, "cpu", found)
    lookup._of_type.cache_clear()
    yield found
    lookup._of_type.cache_clear()


def broken_by(function: Callable[..., Any]) -> str:
    """Return the claim of the law ``streams`` that a function breaks on the CPU, or ""."""
    kernel = AttentionKernel(name="f", forward=function, capabilities=PLAIN_FUNCTION)
    try:
        law_named("streams").check(Trial(kernel, CASES[2], "cpu", SAFETY))
    except LawBroken as broken:
        return broken.finding.claim
    return ""


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, None]:
    return elsewhere.eager(q, k, v, causal=causal, sm_scale=sm_scale), None


def test_all_places_of_an_accelerator_are_asked_for_by_its_interface(stand_in: StandIn) -> None:
    assert places(stand_in) == (SIDE, BESIDE, GRAPH)
    assert broken_by(attention) == ""
    on_side = ["synchronize", "keep_busy 0", "side_stream", "keep_busy 1", "synchronize"]
    in_graph = [
        "side_stream",
        "wait_stream 0",
        "synchronize",
        "captured",
        "replay",
        "synchronize",
        "synchronize",
    ]
    assert [x for x in stand_in.called if x != "beside"] == [*on_side * 2, *in_graph * 2]
    assert stand_in.called.count("beside") == 2


@pytest.mark.parametrize(
    ("is_wrong", "place"),
    [
        (lambda x: x.stream.number == 1 and "captured" not in x.called, SIDE),
        (lambda x: x.device == 1, BESIDE),
        (lambda x: x.is_replayed, GRAPH),
    ],
)
def test_what_is_wrong_in_one_place_of_any_accelerator_is_told(
    stand_in: StandIn, is_wrong: Callable[[StandIn], bool], place: str
) -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, None]:
        out, _ = attention(q, k, v, causal=causal, sm_scale=sm_scale)
        return (out + 1.0 if is_wrong(stand_in) else out), None

    assert place in broken_by(wrong)


def test_an_accelerator_without_other_places_is_not_judged(stand_in: StandIn) -> None:
    assert places(NoAccelerator()) == ()
    stand_in.__class__ = type(
        "Bare", (StandIn,), {"has_streams": False, "has_graphs": False, "device_count": int}
    )
    with pytest.raises(CannotRun, match="no other stream, device or graph"):
        broken_by(attention)
