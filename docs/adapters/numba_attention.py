# NUMBA_ENABLE_CUDASIM=1 flashproof verify numba_attention.py:attention --claims dtypes=float16,float32 --claims layouts=contiguous --claims head_dims=16 --claims max_seqlen_q=16 --claims empty_batch=false --claims min_seqlen=1
from math import exp, inf, log

import torch
from numba import cuda, float32


@cuda.jit
def forward(q, k, v, out, lse, causal, sm_scale):  # a thread for each query
    i, h, b = cuda.grid(3)
    kv, keys = h // (q.shape[1] // k.shape[1]), k.shape[2]
    keys = min(keys, i + 1 + keys - q.shape[2]) if causal else keys
    top, total, acc = float32(-inf), float32(0), cuda.local.array(128, float32)
    for j in range(keys):
        score = float32(0)
        for d in range(q.shape[3]):
            score += float32(q[b, h, i, d]) * float32(k[b, kv, j, d]) * sm_scale
        shrink, weight, top = exp(top - max(top, score)), exp(score - max(top, score)), max(top, score)
        total = total * shrink + weight
        for d in range(q.shape[3]):
            acc[d] = (acc[d] * shrink if j else float32(0)) + weight * float32(v[b, kv, j, d])
    for d in range(q.shape[3]):
        out[b, h, i, d] = acc[d] / total if keys > 0 else float32(0)
    lse[b, h, i] = top + log(total) if keys > 0 else -inf


def attention(q, k, v, *, causal, sm_scale):
    if not q.is_cuda and q.numel() * k.shape[2] > 2**19:
        raise NotImplementedError("would take the simulator seconds")
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
    arrays = (
        cuda.as_cuda_array(x.detach()) if q.is_cuda else x.detach().numpy() for x in (q, k, v, out, lse)
    )
    stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream) if q.is_cuda else 0
    forward[q.shape[2::-1], 1, stream](*arrays, causal, float32(sm_scale))
    return out, lse
