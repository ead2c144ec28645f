"""How large a drawn case may be, and what is cut from a larger one: whole tiles of rows or keys, or heads."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from kernels.contract import Capabilities
from strategies.by_device import ByDevice
from strategies.case import DEFAULT_BLOCK, Case, changed
from strategies.lengths import shortest_lengths

MOST_SCORES = ByDevice(cpu=2**19, accelerator=2**22)
"""The most scores of a case by device type: a core of the CPU has no time for more."""
WORK_SHARES = ByDevice(cpu=(1, *(4,) * 2, *(16,) * 13), accelerator=(1, *(16,) * 2, *(128,) * 13))
"""Most cases keep to a fraction of the most products, because judging a case takes longer than running it.

That leaves most of them 2^22 products (``Case.products``), which a core of the CPU judges.
"""
USUAL_HEAD_DIM = 128
"""The most products of a case are those of the most scores at this head_dim."""
CUT = ("seqlen_q", "seqlen_k", "heads")
"""What is cut from a case that is too large, in this order."""
KEPT = ("heads", "seqlen_q", "seqlen_k", "seqlen_k")
"""What is cut last instead: one of these is drawn for each case."""
COUNTS = ("batch", "heads_kv", "group")
"""The fields of a case that say how many heads it has in all."""
SHORTEST_TWICE = 2
"""A case may be so many times as large as the smallest that is claimed, whatever the limits are."""
Heads = tuple[int, int, int]
"""(batch, heads_kv, group) of a case."""


def cut_down(
    capabilities: Capabilities,
    many: tuple[Heads, ...],
    most: Mapping[str, Any],
    limits: Mapping[str, Any],
    kept: str,
    case: Case,
) -> Case:
    """Cut a case down to the limits, by whole tiles or by heads; what is ``kept`` is cut last.

    A case of ``many`` heads keeps them before anything else, and has as much as ``most`` allows.
    """
    last = [kept]
    if (case.batch, case.heads_kv, case.group) in many:
        limits, last = most, list(dict.fromkeys((kept, "heads")))
    for name in (*(name for name in CUT if name not in last), *last):
        fewer = with_fewer_heads if name == "heads" else partial(_shorter, capabilities, name)
        case = fewer(case, **limits)
    return case


def _shorter(capabilities: Capabilities, name: str, case: Case, **limits: Any) -> Case:
    """Cut as many whole tiles of queries or keys as needed, so that the length's distance to a tile's end stays.

    Two rows are left at least, because with a single key all weights are 1 and gradients of the scores are 0.
    """
    step = math.lcm(blocks(case)[name == "seqlen_k"], capabilities.seqlen_multiple)
    shortest = max(2, shortest_lengths(capabilities)[name == "seqlen_k"])
    while not is_affordable(case, **limits) and getattr(case, name) - step >= shortest:
        shorter: dict[str, Any] = {name: getattr(case, name) - step}
        case = changed(case, **shorter)
    return case


def with_fewer_heads(case: Case, **limits: Any) -> Case:
    """Drop batch and heads from an expensive case, which would else be rejected, so that long sequences are drawn."""
    for place in range(len(COUNTS)):  # The seed decides which is dropped first.
        if not is_affordable(case, **limits):
            one: dict[str, Any] = {COUNTS[(place + case.seed) % len(COUNTS)]: 1}
            case = changed(case, **one)
    return case


def with_heads_at_most(most: int, case: Case) -> Case:
    """Drop the batch, the key heads or the groups of a case until it has so many heads in all; the seed says which."""
    for place in range(len(COUNTS)):
        if case.batch * case.heads_q > most:
            case = changed(case, **{COUNTS[(place + case.seed) % len(COUNTS)]: 1})
    return case


def blocks(case: Case) -> tuple[int, int]:
    """Return how many rows and how many keys a tile has."""
    launch = dict(case.launch)
    return launch.get("block_m", DEFAULT_BLOCK), launch.get("block_n", DEFAULT_BLOCK)


def is_affordable(
    case: Case,
    *,
    shortest: tuple[int, int],
    max_scores: int,
    max_products: float = math.inf,
) -> bool:
    """Whether a case, with all its heads, has at most so many scores, and products of q and k.

    A head with the ``shortest`` lengths that are claimed is always affordable, and twice as much.
    """
    least = SHORTEST_TWICE * math.prod(shortest)
    fits = case.scores <= max(max_scores, least)
    return fits and case.products <= max(max_products, least * case.head_dim)
