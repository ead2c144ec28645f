"""SGLang's ``context_attention_fwd``, in Triton, for prefills. It has run on a GPU, without its package."""

from sglang.kernels.ops.attention.prefill_attention import context_attention_fwd

from kernels.adapters.bridge import only_on_cuda, prefill

KERNEL = prefill("sglang", context_attention_fwd, scale="sm_scale")

UNAVAILABLE = only_on_cuda(KERNEL.name)
