"""Which weights dropout keeps: Philox 4x32-10 on the weight's place, in plain PyTorch.

John K. Salmon, Mark A. Moraes, Ron O. Dror and David E. Shaw, *Parallel Random Numbers: As Easy as 1, 2, 3*
(2011), section 3. The counter is (key, row, batch * heads_q + head, 0) and the Philox key is the 64-bit seed, so
whether a weight is kept follows from its place alone: neither tiles nor earlier draws matter. A weight is kept if
the first of the four 32-bit words is at least ``round(dropout_p * 2**32)``, and then multiplied by
1 / (1 - dropout_p).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from reference.heads import fold

KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
ROUNDS = 10
WORD = 0xFFFFFFFF


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four 32-bit words of Philox for four counter words: int64 tensors, broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & WORD, seed >> 32 & WORD
    for _ in range(ROUNDS):
        # A product of int64 that wraps around still has the right 64 bits.
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (product1 >> 32 & WORD) ^ c1 ^ k0, product1 & WORD
        c2, c3 = (product0 >> 32 & WORD) ^ c3 ^ k1, product0 & WORD
        k0, k1 = k0 + KEY_STEPS[0] & WORD, k1 + KEY_STEPS[1] & WORD
    return c0, c1, c2, c3


def keep_mask(
    shape: Sequence[int],
    *,
    dropout_p: float,
    seed: int,
    device: torch.device | str = "cpu",
    rows: slice = slice(None),
    first_head: int = 0,
) -> Tensor:
    """Return which weights are kept: bool, (batch, heads_q, the selected query ``rows``, seqlen_k).

    ``shape`` is (batch, heads_q, seqlen_q, seqlen_k). Where these heads are part of a larger problem, ``first_head`` is
    the first one's number there, batch * heads_q + head.
    """
    batch, heads_q, seqlen_q, seqlen_k = shape

    def index(start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=device)

    head = index(first_head, first_head + batch * heads_q).view(batch, heads_q, 1, 1)
    row = index(*rows.indices(seqlen_q)[:2])[:, None]
    word, *_ = philox((index(0, seqlen_k), row, head, torch.zeros_like(head)), seed)
    return word >= round(dropout_p * 2**32)


def factors(
    q: Tensor, k: Tensor, *, dropout_p: float, seed: int, rows: slice = slice(None), first_head: int = 0
) -> Tensor:
    """Return the float64 factors 0 or 1 / (1 - dropout_p) that dropout multiplies the weights of q and k with.

    Query heads are folded into rows (``reference.heads``). ``rows`` and ``first_head`` are those of ``keep_mask``.
    """
    shape = (*q.shape[:3], k.shape[2])
    keep = keep_mask(shape, dropout_p=dropout_p, seed=seed, device=q.device, rows=rows, first_head=first_head)
    return fold(keep.double() / (1.0 - dropout_p), k.shape[1])
