"""Ragged: if sequences of different lengths are in one call, each is answered as if it were alone.

The kernel takes a cache of which each sequence fills a part, or sequences packed end to end. In both cases out, lse
and the gradients of each sequence are within the bound of float64. Lengths are 0, 1, close to whole tiles, random, or
the full length. Catches lengths or offsets of another sequence, rows and keys of the neighbour, a
causal corner that is that of the longest, empty sequences, and what lies in a cache behind its last key.
"""

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from strategies.case import DEFAULT_BLOCK
from tests.harness.judge import judge
from tests.harness.law import law
from tests.harness.trial import Trial

MOST_SEQUENCES = 4
"""The most sequences that the rows of a packed case are cut into."""


@law(needs="ragged", on_device=True)
def ragged(trial: Trial) -> None:
    """Judge each sequence of one call; the seed of the case decides their lengths."""
    claimed = trial.kernel.capabilities.ragged
    chance = random.Random(trial.case.seed)
    if claimed == "cache":
        filled_in_part(trial, chance)
    elif claimed == "packed":
        end_to_end(trial, chance)


def filled_in_part(trial: Trial, chance: random.Random) -> None:
    """Give each sequence of the batch a random number of keys, in half of the cases with NaN behind the last one."""
    p = trial.problem
    lengths = [length(trial, "block_n", p.k.shape[2], chance) for _ in range(len(p.k))]
    if chance.random() < 0.5:
        p = replace(p, k=p.k.clone(), v=p.v.clone())
        for b, n in enumerate(lengths):
            p.k[b, :, n:] = p.v[b, :, n:] = math.nan
    trial = trial.with_launch({**trial.launch, "cache_seqlens": int32(lengths, p.q.device)})
    outputs = trial.forward(p)
    for b, n in enumerate(lengths):
        here = slice(b, b + 1)
        alone = replace(p, q=p.q[here], k=p.k[here, :, :n], v=p.v[here, :, :n], dout=p.dout[here])
        expressions = {name: f"{name}[{b}:{b + 1}]" for name in outputs.named()}
        of_this: dict[str, Any] = {name: x[here] for name, x in outputs.named().items()}
        judge(trial, alone, replace(outputs, **of_this), expressions)


def end_to_end(trial: Trial, chance: random.Random) -> None:
    """Cut the rows of the first batch element into sequences, and its keys into as many, at other places."""
    p = trial.problem
    p = replace(p, q=p.q[:1], k=p.k[:1], v=p.v[:1], dout=p.dout[:1])
    sequences = chance.randint(1, MOST_SEQUENCES)
    cuts_q = cuts(trial, "block_m", p.q.shape[2], sequences, chance)
    cuts_k = cuts(trial, "block_n", p.k.shape[2], sequences, chance)
    lengths = {
        "cu_seqlens_q": int32(cuts_q, p.q.device),
        "cu_seqlens_k": int32(cuts_k, p.q.device),
        "max_seqlen_q": max(end - start for start, end in pairwise(cuts_q)),
        "max_seqlen_k": max(end - start for start, end in pairwise(cuts_k)),
    }
    trial = trial.with_launch({**trial.launch, **lengths})
    outputs = trial.gradients(p)
    for of_q, of_k in zip(pairwise(cuts_q), pairwise(cuts_k), strict=True):
        rows, keys = slice(*of_q), slice(*of_k)
        alone = replace(p, q=p.q[:, :, rows], dout=p.dout[:, :, rows], k=p.k[:, :, keys], v=p.v[:, :, keys])
        at = {name: keys if name in ("dk", "dv") else rows for name in outputs.named()}
        expressions = {name: f"{name}[:, :, {x.start}:{x.stop}]" for name, x in at.items()}
        of_this: dict[str, Any] = {name: x[:, :, at[name]] for name, x in outputs.named().items()}
        part = replace(outputs, **of_this)
        judge(trial, alone, part, expressions)


def cuts(trial: Trial, block: str, total: int, sequences: int, chance: random.Random) -> list[int]:
    """Return the places where the sequences begin, and the end of the last one."""
    places = [length(trial, block, total, chance) for _ in range(sequences - 1)]
    return [0, *sorted(places), total]


def length(trial: Trial, block: str, most: int, chance: random.Random) -> int:
    """Return a random length: 0, 1, one close to whole tiles of the setting ``block``, any length, or ``most``."""
    tile = trial.launch.get(block, DEFAULT_BLOCK)
    near_tile = chance.randint(1, max(1, most // tile)) * tile + chance.randint(-1, 1)
    return min(most, chance.choice((0, 1, near_tile, near_tile, chance.randint(0, most), most)))


def int32(numbers: list[int], device: torch.device) -> Tensor:
    """Return lengths in the form in which kernels take them: int32, on the device."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)
