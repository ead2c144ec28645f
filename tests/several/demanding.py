"""A sound function that refuses what many published kernels refuse: odd lengths, strided rows, blind rows."""

from functools import partial

from torch import Tensor

from tests.panel.flash import online_softmax, recomputed
from tests.panel.heads import attend


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention-2 that takes only lengths in multiples of 8, and rows whose entries lie side by side in memory.

    Under a causal mask there must be as many keys as queries, so that each row sees one. Raises NotImplementedError for
    all else.
    """
    lengths = q.shape[2], k.shape[2]
    if 0 in lengths or any(length % 8 for length in lengths):
        raise NotImplementedError(f"expected lengths that are multiples of 8, got {lengths}")
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise NotImplementedError("expected tensors whose last stride is 1")
    if causal and lengths[0] > lengths[1]:
        raise NotImplementedError(
            f"expected at least as many keys as queries under a causal mask, got {lengths}"
        )
    forward = partial(online_softmax, block=64)
    return attend(q, k, v, causal=causal, sm_scale=sm_scale, forward=forward, backward=recomputed)
