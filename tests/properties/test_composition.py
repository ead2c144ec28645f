"""Composition: attention over parts, put together, is attention over the whole.

Keys may be split anywhere, and the answers to both parts merged through lse, as split-KV, cascade and ring attention
do. Queries may be split anywhere. Catches an lse that does not belong to its out, lengths that only work as multiples
of a tile, offsets of a causal mask when seqlen_q != seqlen_k, and long sequences treated unlike short ones, which no
other law on ``out`` draws.
"""

from dataclasses import replace

import torch
from torch import Tensor

from reference.bounds.forward import ForwardBounds
from reference.bounds.relations import merged_bounds
from tests.harness.law import law
from tests.harness.trial.problem import Outputs
from tests.harness.trial.relate import (
    Allowed,
    Derived,
    agree,
    allowances,
    asked,
    claimed_length,
    settled,
    twice,
)
from tests.harness.trial.trial import Trial

LONGEST = 2048
"""The largest length that this law draws. It needs no reference, so it can afford more than other laws on out."""


@law(max_seqlen=LONGEST, place=7, takes_gradients=False, compares=("calls",))
def composition(trial: Trial) -> None:
    """Split the queries, then the keys, each at a place that the seed of the case decides."""
    if trial.arithmetic.rotates:
        return  # each part is quantised on its own, and no rotated entry is certain to pass that unchanged
    trial = settled(trial)
    p = trial.problem
    if 0 in p.q.shape or 0 in p.k.shape:
        return  # there is nothing to split
    whole, allowed = trial.forward(), allowances(trial, p, gradients=False)
    split_queries(trial, whole, allowed)
    if whole.lse is not None:
        split_keys(trial, whole, whole.lse, allowed)


def split_queries(trial: Trial, whole: Outputs, allowed: Allowed) -> None:
    """Compare some rows of the whole with a call for these rows alone.

    Under a causal mask the first rows keep their answer if the keys are left out that only later rows see.
    """
    p = trial.problem
    seqlen_q, seqlen_k = p.q.shape[2], p.k.shape[2]
    at = claimed_length(trial, trial.case.seed % seqlen_q)
    if p.causal and trial.alignment == "top_left":
        rows, part = slice(0, at), p.with_rows(slice(0, at))
    elif p.causal and trial.case.seed % 2 and at + seqlen_k - seqlen_q > 0:
        rows = slice(0, at)
        keys = slice(0, at + seqlen_k - seqlen_q)
        part = p.with_rows(rows).with_both(lambda x: x[:, :, keys])
    else:
        rows, part = slice(at, None), p.with_rows(slice(at, None))
    if 0 in part.q.shape or (given := asked(trial, part)) is None:
        return
    got = trial.forward(given)
    outputs = whole.named()
    expected = Derived(
        whole.call,
        {name: x[:, :, rows] for name, x in outputs.items()},
        {name: f"{name}[:, :, {rows.start}:]" for name in outputs},
    )
    bound = twice(lambda: {name: x[:, :, rows] for name, x in allowed().items()})
    agree(trial, "{} of some queries is that of all, at those rows", got, expected, bound)


def split_keys(trial: Trial, whole: Outputs, lse: Tensor, allowed: Allowed) -> None:
    """Compare the whole with two parts of the keys, merged: out = sum_s w_s out_s with w_s = exp(lse_s - lse)."""
    p = trial.problem
    at = claimed_length(trial, trial.case.seed // 7 % p.k.shape[2])
    if p.causal:
        if trial.alignment == "top_left":
            return  # the second part would need a mask that no kernel claims
        # The cut is at a place where every row sees all keys of the first part.
        at = claimed_length(trial, min(at, p.k.shape[2] - p.q.shape[2] + 1))
    if not 0 < at < p.k.shape[2]:
        return
    first = asked(trial, replace(p.with_both(lambda x: x[:, :, :at]), causal=False))
    second = asked(trial, p.with_both(lambda x: x[:, :, at:]))
    if first is None or second is None:
        return
    halves = [trial.forward(half) for half in (first, second)]
    of_halves = [allowances(trial, half, gradients=False) for half in (first, second)]
    lses = torch.stack([half.lse.double() for half in halves if half.lse is not None])
    largest = trial.arithmetic.output.maximum
    outs = torch.stack([half.out.double().clamp(-largest, largest) for half in halves])
    together = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - together.masked_fill(together == -torch.inf, 0.0)).nan_to_num(nan=torch.inf)
    merged = (weights[..., None] * outs).sum(0)

    def bound() -> dict[str, Tensor]:
        of_whole, *of_parts = (ForwardBounds(**of_call()) for of_call in (allowed, *of_halves))
        return vars(merged_bounds(of_whole, of_parts, outs, weights))

    expected = Derived(halves[1].call, {"out": merged, "lse": together}, _merging(halves))
    agree(trial, "{} is merged from two halves of the keys", whole, expected, bound)


def _merging(halves: list[Outputs]) -> dict[str, str]:
    """Return the formulas for merged out and lse as Python text, in the names of a stand-alone script."""
    calls = [half.call for half in halves]
    lse, out = (f"torch.stack([results[i][{x!r}].double() for i in {calls}])" for x in ("lse", "out"))
    return {"out": f"({lse}.softmax(0)[..., None] * {out}).sum(0)", "lse": f"{lse}.logsumexp(0)"}
