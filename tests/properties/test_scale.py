"""Scale: sizes that models have are answered as small ones are, which no reference could compute as a whole.

Up to 2^20 keys, 2^16 rows, 2^16 heads and, on a GPU, 2^31 elements. Some rows are judged in float64: the first, the
last, those next to powers of two and to multiples of 128. Some of these have half of their weight on one key, some all
of it, some the same on every key; that key is chosen in the same way. dout is 0 in all other rows, so that dk and dv
are known. In all rows, v = 1 gives out = 1. Catches positions and offsets in too few bits, rows, keys and heads behind
the end of a grid, of a table or of a last whole part, and other kernels that are taken for long rows.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from strategies.landmarks import MOST_LANDMARKS, landmarks
from tests.harness.law import law
from tests.harness.trial.judge import judge_rows, judged_rows
from tests.harness.trial.problem import Problem
from tests.harness.trial.relate import asked
from tests.harness.trial.trial import Trial
from tests.properties.test_identities import ones, sizes_of

LARGEST_FACTOR = 64.0
"""No query is more than so many times as long as a key."""
MOST_WHOLE = 2**27
"""The most elements of a tensor for which all rows are compared with 1: that takes up to 20 times its memory."""


@law(large=True, place=20, on_device=True, sets=("numbers",), costs=8)
def scale(trial: Trial) -> None:
    """Judge some rows of one call with gradients, and all rows of one where v = 1."""
    p = trial.problem
    if 0 in p.q.shape or 0 in p.k.shape:  # there is no row or no key to judge
        trial.gradients()
        return
    rows = landmarks(p.q.shape[2], judged_rows(p), trial.chance("landmarks"))
    if (given := asked(trial, with_aims(trial, p, rows))) is None:
        return
    judge_rows(trial, given, trial.gradients(given), rows)
    if max(p.q.numel(), p.k.numel()) <= MOST_WHOLE:
        s = sizes_of(trial, p)
        trial.hold(ones(trial, p, s) if s.safe else [])


def with_aims(trial: Trial, p: Problem, rows: list[int]) -> Problem:
    """Return a problem some of whose ``rows`` look at few keys, and whose dout is 0 in all others."""
    chance = trial.chance("aims")
    q, dout = p.q.clone(), torch.zeros_like(p.dout)
    dout[:, :, rows] = p.dout[:, :, rows]
    first = p.k.shape[2] - p.q.shape[2] if trial.alignment == "bottom_right" else 0
    for row in rows:
        last = min(row + first, p.k.shape[2] - 1) if p.causal else p.k.shape[2] - 1
        weight = chance.choice((None, 0.0, 1.0, 4.0))
        if last >= 0 and weight is not None:
            key = chance.choice(landmarks(last + 1, MOST_LANDMARKS, chance))
            q[:, :, row] = weight * aimed(p, key, math.log(last + 2))
    return replace(p, q=q, dout=dout)


def aimed(p: Problem, key: int, score: float) -> Tensor:
    """Return a query (batch, heads_q, head_dim) for each head, by which a key has that score, as far as it may."""
    towards = p.k[:, :, key].double()
    wanted = score / (p.sm_scale * towards.square().sum(-1, keepdim=True))
    factor = wanted.nan_to_num(1.0).clamp(-LARGEST_FACTOR, LARGEST_FACTOR)
    return (factor * towards).repeat_interleave(p.heads_q // p.heads_kv, 1).to(p.q)
