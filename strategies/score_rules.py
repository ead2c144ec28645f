"""The tensors of what a case does to its scores, drawn from its seed: slopes of ALiBi, biases and logits of sinks."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from reference.score_rule import ScoreRule
from strategies.case import Case

SHAPES = {
    "full": (True, True, True, True),
    "of_heads": (False, True, True, True),
    "of_batch": (True, False, True, True),
    "shared": (False, False, True, True),
    "of_keys": (True, False, False, True),
}
"""Which dimensions of (batch, heads_q, seqlen_q, seqlen_k) a bias has; the others are 1."""

HIDDEN = -10000.0
"""What models in float16 add to the scores of keys that are not to be seen."""

LARGEST_SINK = 40.0
"""Sinks of this size, of either sign, decide their rows, or have no part in them."""


def score_rule(case: Case, device: torch.device | str) -> ScoreRule:
    """Return what the case does to its scores, with tensors (heads_q,) in float32 on this device."""
    slopes = _slopes(case).to(device) if case.alibi_slopes else None
    sinks = _sinks(case).to(device) if case.sinks else None
    bias = None if case.bias == "none" else _bias(case).to(device)
    return ScoreRule(softcap=case.softcap, alibi_slopes=slopes, bias=bias, sinks=sinks)


def _slopes(case: Case) -> Tensor:
    """Draw the geometric sequence of the paper from 2^(-8 / heads_q) on, or any powers of two from 1 to 2^-8."""
    chance = random.Random(f"alibi_slopes {case.seed}")
    heads = range(1, case.heads_q + 1)
    if chance.random() < 0.5:
        return torch.tensor(
            [2.0 ** (-8 * head / case.heads_q) for head in heads], dtype=torch.float32, device="cpu"
        )
    return torch.tensor([2.0 ** -chance.uniform(0, 8) for _ in heads], dtype=torch.float32, device="cpu")


def _bias(case: Case) -> Tensor:
    """Draw normal numbers or, for one seed in four, a mask of 0 and a number whose exponential is 0."""
    shape = bias_shape(case.bias, (case.batch, case.heads_q, case.seqlen_q, case.seqlen_k))
    generator = torch.Generator().manual_seed(case.seed)
    normal = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    values = torch.where(normal > 1.0, HIDDEN, torch.zeros_like(normal)) if case.seed % 4 == 0 else normal
    return values.to(getattr(torch, case.dtype))


def bias_shape(name: str, full: Sequence[int]) -> list[int]:
    """Return the shape of the bias that has this name in ``SHAPES``, for scores of the shape ``full``.

    Raises ValueError for an unknown name.
    """
    if name not in SHAPES:
        raise ValueError(f"bias: got {name!r}, expected none or one of {(*SHAPES,)}")
    return [size if kept else 1 for size, kept in zip(full, SHAPES[name], strict=True)]


def _sinks(case: Case) -> Tensor:
    """Draw logits like those of usual keys; one in eight is far larger or smaller."""
    chance = random.Random(f"sinks {case.seed}")
    sizes = [LARGEST_SINK if chance.random() < 1 / 8 else 2.0 for _ in range(case.heads_q)]
    return torch.tensor([chance.gauss(1.0, size) for size in sizes], dtype=torch.float32, device="cpu")
