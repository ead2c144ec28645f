"""Grouped heads: the query heads that read one key head are folded into its rows.

Score matrices are then (batch, heads_kv, group * seqlen_q, seqlen_k), k and v are never repeated, and sums over
a group come for free.
"""

from torch import Tensor


def group_size(q: Tensor, k: Tensor) -> int:
    """How many query heads read each key head, for q (batch, heads_q, ...) and k (batch, heads_kv, ...).

    Raises ValueError where heads_q is not a multiple of heads_kv.
    """
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if heads_kv == 0 or heads_q % heads_kv:
        raise ValueError(f"q: got {heads_q} heads, expected a multiple of k's {heads_kv}")
    return heads_q // heads_kv


def fold(x: Tensor, heads_kv: int) -> Tensor:
    """Return (batch, heads_q, seqlen, ...) as (batch, heads_kv, group * seqlen, ...): all rows that read a key head."""
    batch, heads_q, seqlen, *rest = x.shape
    return x.reshape(batch, heads_kv, heads_q // heads_kv * seqlen, *rest)


def unfold(x: Tensor, heads_q: int) -> Tensor:
    """Undo ``fold``: (batch, heads_kv, rows, ...) -> (batch, heads_q, seqlen_q, ...)."""
    batch, heads_kv, rows, *rest = x.shape
    return x.reshape(batch, heads_q, rows * heads_kv // heads_q, *rest)
