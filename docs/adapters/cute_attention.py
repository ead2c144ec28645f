# flashproof verify cute_attention.py:attention --claims empty_batch=false --claims min_seqlen=1
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, cute
from cutlass.cute.runtime import from_dlpack


@cute.kernel
def kernel(q, k, v, out, lse, causal: Int32, sm_scale: Float32):  # a thread for each number of out
    (i, h, b), (column, _, _) = cute.arch.block_idx(), cute.arch.thread_idx()
    keys = cute.min(k.shape[2], i + 1 + k.shape[2] - q.shape[2]) if causal != 0 else k.shape[2]
    kv, top, total, acc = h // (q.shape[1] // k.shape[1]), Float32(-1e30), Float32(0), Float32(0)
    for j in range(keys):
        score = Float32(0)
        for d in range(q.shape[3]):
            score += Float32(q[b, h, i, d]) * Float32(k[b, kv, j, d]) * sm_scale
        new = cute.arch.fmax(top, score)
        weight, shrink, top = cute.math.exp(score - new), cute.math.exp(top - new), new
        total, acc = total * shrink + weight, acc * shrink + weight * Float32(v[b, kv, j, column])
    lse[b, h, i] = top + cute.math.log(total)
    out[b, h, i, column] = out.element_type(acc / total if total != 0 else Float32(0))


@cute.jit
def forward(q, k, v, out, lse, causal: Int32, sm_scale: Float32, stream: CUstream):
    grid, block = lse.shape[::-1], [q.shape[3], 1, 1]
    kernel(q, k, v, out, lse, causal, sm_scale).launch(grid=grid, block=block, stream=stream)


compiled = {}  # for each dtype: sizes and strides are arguments


def attention(q, k, v, *, causal, sm_scale):
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
    arrays = (from_dlpack(x.detach()).mark_layout_dynamic(x.ndim - 1) for x in (q, k, v, out, lse))
    arguments = *arrays, int(causal), sm_scale, CUstream(torch.cuda.current_stream().cuda_stream)
    compiled[q.dtype] = compiled.get(q.dtype) or cute.compile(forward, *arguments)
    compiled[q.dtype](*arguments)
    return out, lse
