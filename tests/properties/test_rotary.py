"""Rotary: q and k that the kernel rotates by their positions are answered as if they were passed rotated.

The tables have random quarter turns for each position and pair of columns, by which rotating is exact. So the case's q
and k are taken for the rotated ones, the kernel is given what becomes them, and every bound holds as it is: out, lse
and dv are those of the case, and dq and dk are rotated back. A v that is the first columns of k is so before k is
rotated. Columns are paired in each way that is claimed, and all of
them or about half are rotated. Catches one way to pair for the other, a wrong sign, positions that are off or that
leave out how much longer the keys are, rows that are not rotated or twice, gradients that are not rotated back, and an
input that is rotated in place.

Where causal masks are aligned bottom-right, a case has no more queries than keys, so that no position is negative.
"""

import math
import random
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from strategies.layouts import changed_together
from strategies.rotary import Rotation, drawn, rows_from
from tests.harness.judge import judge
from tests.harness.law import law
from tests.harness.trial import Problem, Trial


@law(needs="rotary", on_device=True, key_padding=True, dropout=True, variants=True)
def rotary(trial: Trial) -> None:
    """Judge a call with each way to pair columns whose q and k, once rotated, are those of the case.

    The seed of the case decides by which angles they are rotated.
    """
    p = trial.problem
    if p.q.shape[3] < 2:
        return  # there is no pair of columns
    if trial.alignment == "bottom_right":
        p = p.with_rows(slice(p.k.shape[2]))
    chance = random.Random(trial.case.seed)
    for pairing in trial.kernel.capabilities.rotary:
        rotation = drawn(p.q, max(p.q.shape[2], p.k.shape[2]), pairing, chance)
        rotated_by(trial.with_launch({**trial.launch, **rotation.options}), p, rotation)


def rotated_by(trial: Trial, p: Problem, rotation: Rotation) -> None:
    """Give the kernel what becomes the q and k of a problem, and judge all that it returns by that problem."""
    seqlen_q, seqlen_k = p.q.shape[2], p.k.shape[2]
    of_q = rows_from([0 if trial.alignment == "top_left" else seqlen_k - seqlen_q], seqlen_q, p.q.device)
    of_k = rows_from([0], seqlen_k, p.q.device)
    k, v = changed_together(p.k, p.v, partial(rotation.back, positions=of_k), lambda v: v)
    given = replace(p, q=rotation.back(p.q, of_q), k=k, v=v)
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
