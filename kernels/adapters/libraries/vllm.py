"""vLLM's ``context_attention_fwd``, in Triton, for prefills. It has run on a GPU, without its package."""

from vllm.v1.attention.ops.triton_prefill_attention import context_attention_fwd

from kernels.adapters.bridge import only_on_cuda, prefill

KERNEL = prefill("vllm", context_attention_fwd, scale="softmax_scale")

UNAVAILABLE = only_on_cuda(KERNEL.name)
