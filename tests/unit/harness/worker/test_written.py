"""What a kernel writes over an input is told from several calls, and a sound kernel writes over none."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from kernels.contract import AttentionKernel
from kernels.contract.parsing import PLAIN_FUNCTION
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.trial.trial import Trial
from tests.harness.worker.written import written
from tests.panel.eager import float32

CASES = [
    Case(batch=2, heads_kv=2, seqlen_q=5, seqlen_k=7, head_dim=16, dtype="float32"),
    Case(heads_kv=2, seqlen_q=9, seqlen_k=3, head_dim=16, dtype="float32", sm_scale=0.3),
    Case(heads_kv=2, seqlen_q=9, seqlen_k=3, head_dim=16, dtype="float32", sm_scale=-0.125),
]


def told(write: Callable[[Tensor, float], Any], cases: list[Case]) -> list[str]:
    def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Any:
        result = float32(q, k, v, causal=causal, sm_scale=sm_scale)
        write(q.detach(), sm_scale)
        return result

    kernel = AttentionKernel(
        name="plain", forward=forward, capabilities=replace(PLAIN_FUNCTION, backward=False)
    )
    return written(cases, lambda case: Trial(kernel, case, "cpu", SAFETY), "q")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda q, scale: None, []),
        (lambda q, scale: q.mul_(scale), ["q is multiplied by sm_scale in place"]),
        (
            lambda q, scale: q.mul_(scale * math.log2(math.e)),
            ["q is multiplied by sm_scale * log2(e) in place"],
        ),
        (lambda q, scale: q.div_(math.sqrt(16)), ["q is multiplied by 1 / sqrt(head_dim) in place"]),
        (lambda q, scale: q[:, :, 3:].zero_(), ["some of q is set to 0 in place"]),
        (lambda q, scale: q.add_(1.0), []),
    ],
    ids=["nothing", "scaled", "in base 2", "by the default", "cleared", "something else"],
)
def test_what_all_calls_show_is_told(write: Callable[[Tensor, float], Any], words: list[str]) -> None:
    assert told(write, CASES) == words


def test_the_smallest_numbers_are_rounded_coarsely() -> None:
    small = [replace(case, dtype="float16", seqlen_q=300, q_values="tiny_logits") for case in CASES]
    assert told(lambda q, scale: q.mul_(scale), small) == ["q is multiplied by sm_scale in place"]


def test_one_call_alone_tells_nothing() -> None:
    assert told(lambda q, scale: q.mul_(scale), CASES[:1]) == []
