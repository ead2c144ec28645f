"""What is known of a call, and of what an alternative says nothing of it."""

from dataclasses import replace

import torch
from torch import Tensor

from kernels.registry import load
from reference.alternatives import Alternative
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.fitting.known import Known, candidates_of, known_call
from tests.harness.trial.trial import Trial
from tests.unit.support import instead

CASE = Case(
    batch=2, heads_kv=2, group=2, seqlen_q=20, seqlen_k=400, head_dim=16, causal=True, v_layout="bnhd"
)
BY_Q = Alternative("by_strides_of", ("out", "lse"), (("tensor", "k"), ("other", "q")))
BY_K = Alternative("by_strides_of", ("out", "lse"), (("tensor", "q"), ("other", "k")))


def known(name: str, case: Case = CASE) -> Known:
    found = known_call(Trial(load(f"{instead.__name__}:{name}"), case, "cpu", SAFETY))
    assert found is not None
    return found


def test_wrong_tensors_are_known() -> None:
    assert known("top_left").wrong == {"out", "lse", "dq", "dk", "dv"}
    assert known("sound").wrong == frozenset()


def test_nothing_is_known_of_memory_behind_a_tensor_but_that_a_right_call_does_not_read_it() -> None:
    wrong, right = known("top_left"), known("sound")
    assert wrong.is_told_by((BY_Q,), "out")
    assert not wrong.is_told_by((BY_K,), "out")
    assert wrong.unexplained((BY_K,), ("out", "lse")) == wrong.missed((BY_K,), ("out", "lse")) == set()
    assert (
        right.unexplained((BY_K,), ("out", "lse")) == right.missed((BY_K,), ("out", "lse")) == {"out", "lse"}
    )


def test_nothing_is_known_of_gradients_that_follow_from_nan() -> None:
    call = known("no_mask")
    told = (Alternative("no_mask", ("dk", "dv")),)
    assert call.is_told_by(told, "dk")
    lse = torch.full_like(call.outputs.named()["lse"], torch.nan)
    spoiled = replace(call, outputs=replace(call.outputs, lse=lse))
    assert not spoiled.is_told_by(told, "dk")
    assert spoiled.is_told_by((Alternative("empty_gradients", ("dk", "dv")),), "dk")


BUFFERS: dict[torch.Size, Tensor] = {}


def in_one_buffer(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Returns lse in the memory that the call before returned, if it fits."""
    out, lse = instead.kernel()(q, k, v, causal=causal, sm_scale=sm_scale)
    return out, BUFFERS.setdefault(lse.shape, torch.empty_like(lse)).copy_(lse.detach())


def test_what_a_call_returned_stays_though_later_calls_write_over_it() -> None:
    kernel = load(f"{__file__}:in_one_buffer")
    first = known_call(Trial(kernel, CASE, "cpu", SAFETY))
    assert first is not None
    before = first.outputs.named()["lse"].clone()
    known_call(Trial(kernel, replace(CASE, seed=1), "cpu", SAFETY))
    assert torch.equal(first.outputs.named()["lse"], before)


def test_what_does_not_concern_a_call_is_not_judged_again() -> None:
    call = known("top_left")
    told = (Alternative("no_mask", ("out", "lse")),)
    assert call.unexplained(told, ("out", "lse")) == {"out", "lse"}
    only = Alternative("shifted_mask", ("out",), (("by", 1), ("only", "without a causal mask")))
    assert call.unexplained((*told, only), ("out", "lse")) == {"out", "lse"}
    assert len(call.refuted) == 1


def test_weights_that_are_cut_are_no_smaller_out() -> None:
    call = known("cut", replace(CASE, dtype="float16", causal=False, seqlen_k=200))
    assert not any(x.name == "out_times" for x in candidates_of(call, (), "out"))
