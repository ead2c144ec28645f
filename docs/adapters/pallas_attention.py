# flashproof verify pallas_attention.py:attention --claims empty_batch=false
import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def kernel(call, q, k, v, out):  # 16 queries, and all keys of their head
    causal, sm_scale, offset, keys = (call[n] for n in range(4))
    i, j = pl.program_id(1) * 16 + jnp.arange(16)[:, None], jnp.arange(k.shape[0])[None, :]
    q, k, v = (x[...].astype(jnp.float32) for x in (q, k, v))
    scores = jnp.dot(q, k.T, precision="highest") * sm_scale
    scores = jnp.where((j < keys) & ((causal == 0) | (j <= i + offset)), scores, -jnp.inf)
    weights = jnp.exp(scores - jnp.maximum(scores.max(1, keepdims=True), -1e30))
    total = weights.sum(1, keepdims=True)
    out[...] = (jnp.dot(weights, v, precision="highest") / jnp.where(total == 0, 1, total)).astype(out.dtype)


@jax.jit
def forward(call, q, k, v):
    (heads, rows, head_dim), group = q.shape, len(q) // len(k)
    queries = pl.BlockSpec((None, 16, head_dim), lambda h, i: (h, i, 0))
    keys = pl.BlockSpec((None, *k.shape[1:]), lambda h, i: (h // group, 0, 0))
    specs = {"grid": (heads, rows // 16), "in_specs": [pl.BlockSpec(), queries, keys, keys], "out_specs": queries}
    how = heads * rows > 1024 or pltpu.InterpretParams(detect_races=True)  # memory that nobody has written is NaN
    return pl.pallas_call(kernel, q, interpret=jax.default_backend() == "cpu" and how, **specs)(call, q, k, v)


def attention(q, k, v, *, causal, sm_scale):
    call = jnp.array([causal, sm_scale, k.shape[2] - q.shape[2], k.shape[2]], jnp.float32)
    more = [max(16, 1 << (x.shape[2] - 1).bit_length()) - x.shape[2] for x in (q, k, v)]  # to a power of 2
    heads = [torch.nn.functional.pad(x.detach(), (0, 0, 0, n)).flatten(0, 1) for x, n in zip((q, k, v), more)]
    if q.is_cuda and heads[1][0].numel() > 16384:
        raise NotImplementedError("the keys of a head have to fit into shared memory")
    out = torch.from_dlpack(forward(call, *map(jax.dlpack.from_dlpack, heads)))
    return out.unflatten(0, q.shape[:2])[:, :, : q.shape[2]]
