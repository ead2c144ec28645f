"""Rotary: q and k that the kernel rotates by their positions are answered as if they were passed rotated.

The tables have random quarter turns for each position and pair of columns, by which rotating is exact. So the case's q
and k are taken for the rotated ones, the kernel is given what becomes them, and every bound holds as it is: out, lse
and dv are those of the case, and dq and dk are rotated back. A v that is the first columns of k is so before k is
rotated. The case says in which way columns are paired, and all of them or about half are rotated. Catches one way to
pair for the other, a wrong sign, positions that are off or that leave out how much longer the keys are, rows that are
not rotated or twice, gradients that are not rotated back, and an input that is rotated in place.

Where causal masks are aligned bottom-right, a case has no more queries than keys, so that no position is negative.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from strategies.layouts import changed_together
from strategies.rotary import Rotation, drawn, rows_from
from tests.harness.law import law
from tests.harness.trial.judge import judge, judge_plain_call
from tests.harness.trial.problem import Problem
from tests.harness.trial.relate import asked
from tests.harness.trial.trial import Trial


@law(
    needs="rotary",
    on_device=True,
    adds_arguments=True,
    key_padding=True,
    dropout=True,
    variants=True,
    calls=("rotary",),
    place=8,
)
def rotary(trial: Trial) -> None:
    """Judge a call whose q and k, once columns are paired in the way of the case and rotated, are those of the case.

    The seed of the case decides by which angles they are rotated. A case of no way, or with a head_dim of 1, has the
    call that the basic laws make, which tells whether a failure is a matter of the rotation.
    """
    p = trial.problem
    if trial.case.rotary == "none" or p.q.shape[3] < 2:
        judge_plain_call(trial, p)
        return
    if trial.alignment == "bottom_right":
        p = p.with_rows(slice(p.k.shape[2]))
    rotation = drawn(p.q, max(p.q.shape[2], p.k.shape[2]), trial.case.rotary, trial.chance("angles"))
    rotated_by(trial.with_launch({**trial.launch, **rotation.options}), p, rotation)


def rotated_by(trial: Trial, p: Problem, rotation: Rotation) -> None:
    """Give the kernel what becomes the q and k of a problem, and judge all that it returns by that problem."""
    seqlen_q, seqlen_k = p.q.shape[2], p.k.shape[2]
    of_q = rows_from([0 if trial.alignment == "top_left" else seqlen_k - seqlen_q], seqlen_q, p.q.device)
    of_k = rows_from([0], seqlen_k, p.q.device)
    k, v = changed_together(p.k, p.v, partial(rotation.back, positions=of_k), lambda v: v)
    given = asked(trial, replace(p, q=rotation.back(p.q, of_q), k=k, v=v))
    if given is None:
        return
    if p.v_in_k:
        p = replace(p, v=v.clone())
    before = given.q.clone(), given.k.clone()
    outputs = trial.gradients(given)
    for name, was, now in zip("qk", before, (given.q, given.k), strict=True):
        # Padded keys may hold NaN, which equals no number.
        if not torch.allclose(was, now, rtol=0.0, atol=0.0, equal_nan=True):
            trial.fail(f"{name} is never written, but it changed", kind="contract", call=outputs.call)
    moved = {"dq": partial(rotated_back, rotation, of_q), "dk": partial(rotated_back, rotation, of_k)}
    judge(trial, p, outputs, moved=moved)


def rotated_back(
    rotation: Rotation, positions: Tensor, expected: Tensor, bound: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradient of rows before their rotation, and its bound, from those of the rotated rows.

    Where a gradient overflows before it is rotated back, inf * 0 makes NaN of the other column of its pair.
    """
    overflows = ~(expected.abs() + bound < torch.finfo(rotation.cos.dtype).max)
    one_quarter = Rotation(
        torch.zeros_like(rotation.cos), torch.ones_like(rotation.sin), rotation.interleaved
    )
    beside = one_quarter.forth(overflows.double(), positions) != 0
    bound = torch.where(beside, math.inf, bound)
    return rotation.back(expected, positions), rotation.back(bound, positions).abs()
