"""The tensors of what a case does to its scores: slopes of ALiBi and logits of sinks, drawn from the seed."""

import random

import torch
from torch import Tensor

from reference.score_rule import ScoreRule
from strategies.case import Case

LARGEST_SINK = 40.0
"""Sinks of this size, of either sign, decide their rows, or have no part in them."""


def score_rule(case: Case, device: torch.device | str) -> ScoreRule:
    """Return what the case does to its scores, with tensors (heads_q,) in float32 on this device."""
    slopes = _slopes(case).to(device) if case.alibi_slopes else None
    sinks = _sinks(case).to(device) if case.sinks else None
    return ScoreRule(softcap=case.softcap, alibi_slopes=slopes, sinks=sinks)


def _slopes(case: Case) -> Tensor:
    """Draw the geometric sequence of the paper from 2^(-8 / heads_q) on, or any powers of two from 1 to 2^-8."""
    chance = random.Random(f"alibi_slopes {case.seed}")
    heads = range(1, case.heads_q + 1)
    if chance.random() < 0.5:
        return torch.tensor([2.0 ** (-8 * head / case.heads_q) for head in heads], dtype=torch.float32)
    return torch.tensor([2.0 ** -chance.uniform(0, 8) for _ in heads], dtype=torch.float32)


def _sinks(case: Case) -> Tensor:
    """Draw logits like those of usual keys; one in eight is far larger or smaller."""
    chance = random.Random(f"sinks {case.seed}")
    sizes = [LARGEST_SINK if chance.random() < 1 / 8 else 2.0 for _ in range(case.heads_q)]
    return torch.tensor([chance.gauss(1.0, size) for size in sizes], dtype=torch.float32)
