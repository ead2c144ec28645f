"""Eight_bits: 8-bit q, k and v are answered as the numbers that they stand for, each with the scale of its own head.

The case's q and k, and v too if the case says so, are rounded to ``float8_e4m3fn`` with a scale for each batch element
and key head. What the 8-bit numbers stand for is exact in bfloat16, and is the problem that out and lse are
judged by. Scales are powers of two that differ between heads and tensors even if the numbers there are of like size.
Catches scales that are left out, taken twice, or of another tensor, head or batch element, a lse or a soft-cap of
scores without their scales, and more roundings to 8 bits than are claimed.

The law is about bfloat16, the dtype of out. There are no 8-bit numbers of tensors that may overflow.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strategies.case import TENSORS
from strategies.eight_bits import EightBits
from tests.harness.law import law
from tests.harness.trial.judge import judge, judge_plain_call
from tests.harness.trial.problem import Problem
from tests.harness.trial.trial import Trial


@law(
    needs="fp8_inputs",
    dtypes=("bfloat16",),
    on_device=True,
    adds_arguments=True,
    key_padding=True,
    dropout=True,
    variants=True,
    calls=("fp8_inputs",),
    place=9,
)
def eight_bits(trial: Trial) -> None:
    """Judge a call in which the tensors that the case names are 8-bit numbers; its seed decides their scales.

    A case that names none, or has tensors that may overflow, has the call that the basic laws make, which tells whether
    a failure is a matter of these numbers. So has one in which v is to be a part of k, but k alone of 8 bits.
    """
    tensors, p = trial.case.fp8_inputs, trial.problem
    overflows = trial.case.may_overflow or ("v" in tensors and trial.case.v_values == "huge")
    if tensors == "none" or overflows or (p.v_in_k and "v" not in tensors):
        judge_plain_call(trial, p)
    else:
        with_8_bits(trial, p, tensors)


def with_8_bits(trial: Trial, p: Problem, tensors: str) -> None:
    """Give the kernel these tensors as 8-bit numbers, and judge what it returns by what they stand for."""
    layouts = dict(zip(TENSORS, trial.case.layouts, strict=True))
    # A v that is the first columns of k has the numbers and the scales of k.
    own = [name for name in tensors if name != "v" or not p.v_in_k]
    eight = {
        name: EightBits.of(getattr(p, name), p.heads_kv, layouts[name], trial.chance(f"scales of {name}"))
        for name in own
    }
    given, meant = (
        replaced(p, eight, lambda x: x.window.tensor),
        replaced(p, eight, lambda x: x.meant(p.q.dtype)),
    )
    scales = {f"{name}_scale": eight[name if name in own else "k"].scale for name in tensors}
    before = {name: x.window.bits() for name, x in eight.items()}
    trial = trial.with_launch({**trial.launch, **scales})
    outputs = trial.forward(given)
    for name, was in before.items():
        if not torch.equal(was, eight[name].window.bits()):
            trial.fail(f"{name} is never written, but it changed", kind="contract", call=outputs.call)
    judge(trial, replace(meant, units=torch.stack((scales["q_scale"], scales["k_scale"]))), outputs)


def replaced(p: Problem, eight: Mapping[str, EightBits], part: Callable[[EightBits], Tensor]) -> Problem:
    """Return a problem with a part of 8-bit numbers for each tensor that has them; v stays in k if it is there."""
    tensors: dict[str, Any] = {name: part(x) for name, x in eight.items()}
    if p.v_in_k:
        tensors["v"] = tensors["k"][..., : p.v.shape[3]]
    return replace(p, **tensors)
