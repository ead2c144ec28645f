"""Stands for a kernel of another language that takes arrays, as Numba's, CuPy's and JAX's do. It has no gradients."""

import numpy as np
from numpy.typing import NDArray


def attention(
    q: NDArray[np.floating], k: NDArray[np.floating], v: NDArray[np.floating], causal: bool, scale: float
) -> tuple[NDArray[np.floating], NDArray[np.float32]]:
    """Return out, like q (batch, heads, seqlen, head_dim), and the natural lse (batch, heads, seqlen) float32."""
    dtype, group = q.dtype, q.shape[1] // k.shape[1]
    q, k, v = (x.astype(np.float32) for x in (q, *(np.repeat(x, group, 1) for x in (k, v))))
    rows, keys = q.shape[2], k.shape[2]
    seen = np.tri(rows, keys, keys - rows, dtype=bool) if causal else np.ones((rows, keys), dtype=bool)
    with np.errstate(all="ignore"):
        scores = np.where(seen, q @ k.swapaxes(2, 3) * np.float32(scale), -np.inf)
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        p = np.exp(scores - np.where(np.isneginf(top), 0, top))
        total = p.sum(-1, keepdims=True)
        out = (p @ v / np.where(total == 0, 1, total)).astype(dtype)
        return out, (top + np.log(total))[..., 0].astype(np.float32)
