"""Functions as strangers bring them, none of which fits the contract: loaded by path, in a child process."""

import torch
import triton

from tests.unit.toys import sound


def other_names(q, k, v, scale: float = 1.0, is_causal: bool = False):
    """PyTorch's names."""
    return sound(q, k, v, causal=is_causal, sm_scale=scale)


def positional(q, k, v, causal, sm_scale, /):
    """Takes nothing by keyword."""
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def without_scale(q, k, v, *, causal):
    """Has a scale of its own."""
    return sound(q, k, v, causal=causal, sm_scale=1.0)


def with_bias(q, k, v, bias, *, causal, sm_scale):
    """Needs one more."""
    return sound(q, k, v + bias, causal=causal, sm_scale=sm_scale)


def any_keywords(*tensors, **options):
    """Passes everything on."""
    return sound(*tensors, **options)


def passing_on(*tensors, **options):
    """Passes everything on, to a function that does not take it."""
    return without_scale(*tensors, **options)


class Attention(torch.nn.Module):
    """A module, whose instances are called."""

    def forward(self, q, k, v):
        """The contract, with keywords left out."""
        return sound(q, k, v, causal=False, sm_scale=1.0)


module = Attention()
written_in_c = torch.nn.functional.scaled_dot_product_attention


class Fused(torch.autograd.Function):
    """As Triton's tutorial has it."""


@triton.jit
def device_code(q, k, v, causal, sm_scale):
    """Runs on a device."""


def three_results(q, k, v, *, causal, sm_scale):
    """With what dropout would have drawn."""
    return *sound(q, k, v, causal=causal, sm_scale=sm_scale), None


def a_list(q, k, v, *, causal, sm_scale):
    """Both, in a list."""
    return list(sound(q, k, v, causal=causal, sm_scale=sm_scale))


def an_array(q, k, v, *, causal, sm_scale):
    """NumPy's."""
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)[0].numpy()


def an_array_beside(q, k, v, *, causal, sm_scale):
    """Only lse is NumPy's."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return out, lse.numpy()


def nothing(q, k, v, *, causal, sm_scale):
    """The return is forgotten."""
    sound(q, k, v, causal=causal, sm_scale=sm_scale)


def rows_first(q, k, v, *, causal, sm_scale):
    """Returns (batch, seqlen, heads, head_dim)."""
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)[0].transpose(1, 2)


def rows_first_throughout(q, k, v, *, causal, sm_scale):
    """Takes and returns (batch, seqlen, heads, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)[0].transpose(1, 2)


def rows_first_with_lse(q, k, v, *, causal, sm_scale):
    """Takes and returns (batch, seqlen, heads, head_dim); lse is (batch, heads, seqlen)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return out.transpose(1, 2), lse


def flat(q, k, v, *, causal, sm_scale):
    """Returns (batch, seqlen, heads * head_dim), as a projection takes it."""
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)[0].transpose(1, 2).flatten(2)


def always_float32(q, k, v, *, causal, sm_scale):
    """The dtype of the accumulator."""
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)[0].float()


def three_if_causal(q, k, v, *, causal, sm_scale):
    """Fits at first."""
    results = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return (*results, None) if causal else results


def half_a_type_error(q, k, v, *, causal, sm_scale):
    """A bug that has nothing to do with how it is called."""
    return q + len(causal)


def without_bfloat16(q, k, v, *, causal, sm_scale):
    """Of three dtypes answers two."""
    if q.dtype == torch.bfloat16:
        raise NotImplementedError("no bfloat16")
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def without_memory(q, k, v, *, causal, sm_scale):
    """Finds none, whatever the size."""
    raise MemoryError("no room for a workspace")


def without_gradients(q, k, v, *, causal, sm_scale):
    """For inference."""
    if q.requires_grad:
        raise NotImplementedError("inference only")
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)
