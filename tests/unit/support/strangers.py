"""Functions as users may bring them, none of which fits the contract. Tests load them by path in a child process."""

import torch
import triton

from tests.unit.support.toys import sound


def other_names(q, k, v, scale: float = 1.0, is_causal: bool = False):
    """Names its arguments as PyTorch does."""
    return sound(q, k, v, causal=is_causal, sm_scale=scale)


def positional(q, k, v, causal, sm_scale, /):
    """Takes no argument by keyword."""
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def without_scale(q, k, v, *, causal):
    """Takes no scale, as if it had its own."""
    return sound(q, k, v, causal=causal, sm_scale=1.0)


def with_bias(q, k, v, bias, *, causal, sm_scale):
    """Needs one more argument."""
    return sound(q, k, v + bias, causal=causal, sm_scale=sm_scale)


def any_keywords(*tensors, **options):
    """Takes any tensors and keywords, and passes them on to a function that fits."""
    return sound(*tensors, **options)


def passing_on(*tensors, **options):
    """Passes any keywords on to a function that does not take them."""
    return without_scale(*tensors, **options)


class Attention(torch.nn.Module):
    """A module of torch.nn, which is a kernel only once an instance is made."""

    def forward(self, q, k, v):
        """Takes q, k and v alone."""
        return sound(q, k, v, causal=False, sm_scale=1.0)


module = Attention()
written_in_c = torch.nn.functional.scaled_dot_product_attention


class Fused(torch.autograd.Function):
    """An autograd function, as in Triton's tutorial, without its ``apply``."""


@triton.jit
def device_code(q, k, v, causal, sm_scale):
    """A jitted function, which runs on a device and is no launcher."""


def three_results(q, k, v, *, causal, sm_scale):
    """Returns a third result, such as the state of dropout."""
    return *sound(q, k, v, causal=causal, sm_scale=sm_scale), None


def a_list(q, k, v, *, causal, sm_scale):
    """Returns out and lse in a list."""
    return list(sound(q, k, v, causal=causal, sm_scale=sm_scale))


def an_array(q, k, v, *, causal, sm_scale):
    """Returns an array of NumPy."""
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)[0].numpy()


def an_array_beside(q, k, v, *, causal, sm_scale):
    """Returns out as a tensor, but lse as an array of NumPy."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return out, lse.numpy()


def nothing(q, k, v, *, causal, sm_scale):
    """Returns None, because the return statement was forgotten."""
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
    """Returns float32, the dtype of the accumulator, for inputs of any dtype."""
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)[0].float()


def three_if_causal(q, k, v, *, causal, sm_scale):
    """Returns a third result only under a causal mask, so that a first call may show nothing."""
    results = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return (*results, None) if causal else results


def half_a_type_error(q, k, v, *, causal, sm_scale):
    """Raises a TypeError that has nothing to do with how it is called."""
    return q + len(causal)


def without_bfloat16(q, k, v, *, causal, sm_scale):
    """Refuses bfloat16, and answers the other two dtypes."""
    if q.dtype == torch.bfloat16:
        raise NotImplementedError("no bfloat16")
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def without_memory(q, k, v, *, causal, sm_scale):
    """Raises an out-of-memory error for every size."""
    raise MemoryError("no room for a workspace")


def without_gradients(q, k, v, *, causal, sm_scale):
    """Refuses to compute gradients."""
    if q.requires_grad:
        raise NotImplementedError("inference only")
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def contiguous_alone(q, k, v, *, causal, sm_scale):
    """Takes contiguous tensors only, and says so."""
    if not all(x.is_contiguous() for x in (q, k, v)):
        raise NotImplementedError("contiguous tensors only")
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def one_query(q, k, v, *, causal, sm_scale):
    """Takes one query of each sequence alone, as decode kernels do."""
    if q.shape[2] != 1:
        raise NotImplementedError("seqlen_q must be 1")
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def whole_blocks_of_keys(q, k, v, *, causal, sm_scale):
    """Takes keys in whole blocks and any number of queries, which no claim can say."""
    if k.shape[2] % 128:
        raise NotImplementedError("keys come in blocks of 128")
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)
