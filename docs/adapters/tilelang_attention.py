# flashproof verify tilelang_attention.py:attention --claims dtypes=float16,float32 --claims layouts=contiguous --claims empty_batch=false --claims min_seqlen=1
import tilelang
import tilelang.language as T
import torch


@tilelang.jit(target="cuda" if torch.cuda.is_available() else "c")
def forward(q, k, v, causal: T.bool, sm_scale: T.float32, dtype: str):
    batch, heads, rows, heads_kv, keys = T.dynamic("batch, heads, rows, heads_kv, keys")
    head_dim = T.const("head_dim")
    q: T.Tensor((batch, heads, rows, head_dim), dtype)
    k: T.Tensor((batch, heads_kv, keys, head_dim), dtype)
    v: T.Tensor((batch, heads_kv, keys, head_dim), dtype)
    out, lse = T.empty((batch, heads, rows, head_dim), dtype), T.empty((batch, heads, rows), "float32")
    with T.Kernel(rows, heads, batch, threads=1) as (i, h, b):  # a block for each query
        kv, acc = h // (heads // heads_kv), T.alloc_local((head_dim,), "float32")
        score, shrink, top, total = (T.alloc_var("float32", x) for x in (0, 0, -1e30, 0))
        T.clear(acc)
        for j in T.serial(T.if_then_else(causal, T.min(keys, i + 1 + keys - rows), keys)):
            score = 0
            for d in T.serial(head_dim):
                score += T.float32(q[b, h, i, d]) * T.float32(k[b, kv, j, d]) * sm_scale
            shrink = T.exp(top - T.max(top, score))
            top = T.max(top, score)
            total = total * shrink + T.exp(score - top)
            for d in T.serial(head_dim):
                acc[d] = acc[d] * shrink + T.exp(score - top) * T.float32(v[b, kv, j, d])
        for d in T.serial(head_dim):
            out[b, h, i, d] = acc[d] / T.if_then_else(total == 0, 1, total)
        lse[b, h, i] = top + T.log(total)
    return out, lse


def attention(q, k, v, *, causal, sm_scale):
    return tuple(forward(q, k, v, causal, sm_scale, str(q.dtype).removeprefix("torch.")))
