# flashproof verify cuda_attention.py:attention --claims empty_batch=false --claims min_seqlen=1
from torch.utils.cpp_extension import load_inline

SOURCE = """
#include <c10/cuda/CUDAStream.h>
template <typename T> using View = at::PackedTensorAccessor64<T, 4>;

template <typename T> __global__ void kernel(View<T> q, View<T> k, View<T> v, View<T> out, bool causal, float sm_scale) {
  int i = blockIdx.x, h = blockIdx.y, b = blockIdx.z, kv = h / (q.size(1) / k.size(1)), keys = k.size(2);
  float top = -1e30, total = 0, acc = 0;  // of one number of out
  for (int j = 0; j < keys && (!causal || j <= i + keys - q.size(2)); j++) {
    float score = 0, before = top;
    for (int d = 0; d < q.size(3); d++) score += float(q[b][h][i][d]) * float(k[b][kv][j][d]) * sm_scale;
    top = fmaxf(top, score);
    total = total * expf(before - top) + expf(score - top);
    acc = acc * expf(before - top) + expf(score - top) * float(v[b][kv][j][threadIdx.x]);
  }
  out[b][h][i][threadIdx.x] = total == 0 ? 0 : acc / total;
}

void forward(at::Tensor q, at::Tensor k, at::Tensor v, at::Tensor out, bool causal, double sm_scale) {
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, q.scalar_type(), "attention", [&] {
    auto view = [](at::Tensor x) { return x.packed_accessor64<scalar_t, 4>(); };
    kernel<<<dim3(q.size(2), q.size(1), q.size(0)), q.size(3), 0, c10::cuda::getCurrentCUDAStream()>>>(
        view(q), view(k), view(v), view(out), causal, sm_scale);
  });
}
"""
DECLARATION = "void forward(at::Tensor, at::Tensor, at::Tensor, at::Tensor, bool, double);"
MODULE = load_inline("attention", DECLARATION, SOURCE, functions=["forward"])


def attention(q, k, v, *, causal, sm_scale):
    out = q.new_empty(q.shape)
    MODULE.forward(q, k, v, out, causal, sm_scale)
    return out
