"""Checks of the arguments of an attention call, made before anything is launched.

Arguments that make no sense raise TypeError or ValueError; those that make sense but aren't supported raise
NotImplementedError, the contract's refusal. Every message names the argument, its value and what was expected.
"""

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from kernels.common.launching import is_aligned
from kernels.contract import DTYPES

MAX_HEAD_DIM = 256
COPYABLE = ("contiguous", "bnhd", "packed", "expanded", "expanded_rows", "huge")
"""Layouts whose rows all start at multiples of 16 bytes."""
_DTYPES = tuple(getattr(torch, name) for name in DTYPES)


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    sm_scale: float,
    *,
    paged: bool = False,
    stored: torch.dtype | None = None,
) -> None:
    """Check q (batch, heads_q, seqlen_q, head_dim), k and v (batch, heads_kv, seqlen_k, head_dim).

    If they are ``paged``, k and v are (pages, heads_kv, page_size, head_dim). They have the dtype of q unless another
    one is given in which they are ``stored``.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
        if tensor.ndim != 4:
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, expected (batch, heads, seqlen, head_dim)"
            )
    if q.dtype not in _DTYPES:
        raise NotImplementedError(f"q: got dtype {q.dtype}, expected one of {DTYPES}")
    if not 1 <= q.shape[3] <= MAX_HEAD_DIM:
        raise NotImplementedError(f"q: got head_dim {q.shape[3]}, expected 1 to {MAX_HEAD_DIM}")
    check_like("q", q, "q", q, q.shape, q.dtype)
    check_like("k", k, "q", q, ((k if paged else q).shape[0], *k.shape[1:3], q.shape[3]), stored or q.dtype)
    check_like("v", v, "k", k, k.shape, stored or q.dtype)
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if heads_q != 0 and (heads_kv == 0 or heads_q % heads_kv):
        raise ValueError(f"q: got {heads_q} heads, expected a multiple of k's {heads_kv}")
    if not isinstance(causal, bool):
        raise TypeError(f"causal: got {causal!r}, expected True or False")
    if not isinstance(sm_scale, float | int):
        raise TypeError(f"sm_scale: got {sm_scale!r}, expected a float or an int")
    if not abs(sm_scale) <= torch.finfo(torch.float32).max * math.log(2):
        raise ValueError(
            f"sm_scale: got {sm_scale!r}, expected a number that is finite in float32, times log2 e"
        )


def default_scale(q: Tensor) -> float:
    """Return 1 / sqrt(head_dim), or 1 for a q that has no head_dim and is refused by ``check_inputs`` later."""
    head_dim = q.shape[3] if isinstance(q, Tensor) and q.ndim == 4 else 1
    return 1.0 / math.sqrt(max(head_dim, 1))


def check_stored_dtype(name: str, dtype: torch.dtype | None) -> None:
    """Check the dtype that results are stored in, if one is given: it must be one of those of the inputs."""
    if dtype is not None and dtype not in _DTYPES:
        raise NotImplementedError(f"{name}: got {dtype!r}, expected one of {DTYPES}")


def check_gradient_inputs(dout: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
    """Check what a backward takes besides q, k and v: dout and out like q, lse (batch, heads_q, seqlen_q)."""
    check_like("dout", dout, "q", q, q.shape, q.dtype)
    check_like("out", out, "q", q, q.shape, q.dtype)
    check_like("lse", lse, "q", q, q.shape[:3], torch.float32)


def check_key_padding_mask(mask: Tensor | None, k: Tensor) -> None:
    """Check a mask that is bool, (batch, seqlen_k), contiguous and on k's device, if there is one."""
    if mask is None:
        return
    batch, _, seqlen_k, _ = k.shape
    check_like("key_padding_mask", mask, "k", k, (batch, seqlen_k), torch.bool)
    if not mask.is_contiguous():
        raise ValueError(f"key_padding_mask: got strides {mask.stride()}, expected it to be contiguous")


def check_dropout(dropout_p: float, dropout_seed: int) -> None:
    """Check that dropout_p is from 0 to 1 - 2^-32, and that dropout_seed fits into 63 bits."""
    if not isinstance(dropout_p, float | int):
        raise TypeError(f"dropout_p: got {dropout_p!r}, expected a float or an int")
    if not 0.0 <= dropout_p <= 1.0 - 2.0**-32:
        raise ValueError(f"dropout_p: got {dropout_p!r}, expected a probability from 0 up to 1 - 2^-32")
    if not isinstance(dropout_seed, int):
        raise TypeError(f"dropout_seed: got {dropout_seed!r}, expected an integer")
    if not 0 <= dropout_seed < 2**63:
        raise ValueError(f"dropout_seed: got {dropout_seed!r}, expected an integer from 0 to 2^63 - 1")


def check_sizes(**sizes: int) -> None:
    """Check that the parts of a mask's pattern, such as ``window``, are integers of at least 0."""
    for name, size in sizes.items():
        if not isinstance(size, int):
            raise TypeError(f"{name}: got {size!r}, expected an integer")
        if size < 0:
            raise ValueError(f"{name}: got {size!r}, expected an integer of at least 0")


def check_softcap(softcap: float) -> None:
    """Check that ``softcap`` is a finite number of at least 0, which stands for none."""
    if not isinstance(softcap, float | int):
        raise TypeError(f"softcap: got {softcap!r}, expected a float or an int")
    if not 0.0 <= softcap < math.inf:
        raise ValueError(
            f"softcap: got {softcap!r}, expected a finite number of at least 0, which stands for none"
        )


def check_of_heads(q: Tensor, **tensors: Tensor | None) -> None:
    """Check tensors that have one float32 number for each head of q (batch, heads_q, seqlen_q, head_dim)."""
    for name, x in tensors.items():
        if x is None:
            continue
        check_like(name, x, "q", q, (q.shape[1],), torch.float32)
        if not x.is_contiguous():
            raise ValueError(f"{name}: got strides {x.stride()}, expected it to be contiguous")


def check_bias(bias: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Check a contiguous bias like q in dtype, (batch, heads_q, seqlen_q, seqlen_k) but for 1 in place of the first."""
    if bias is None:
        return
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias: got {type(bias).__name__}, expected a torch.Tensor")
    full = (*q.shape[:3], k.shape[2])
    fits = bias.ndim == 4 and all(n in (1, size) for n, size in zip(bias.shape[:3], full, strict=False))
    if not fits or bias.shape[3] != full[3]:
        expected = f"{full}, of which each but the last may be 1"
        raise ValueError(f"bias: got shape {tuple(bias.shape)}, expected {expected}")
    check_like("bias", bias, "q", q, tuple(bias.shape), q.dtype)
    if not bias.is_contiguous():
        raise ValueError(f"bias: got strides {bias.stride()}, expected it to be contiguous")


def check_like(
    name: str, tensor: Tensor, model_name: str, model: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Check that ``tensor`` has this shape and dtype, the model's device, and a unit last stride."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {type(tensor).__name__}, expected a torch.Tensor")
    if tuple(tensor.shape) != tuple(shape):
        expected = f"{tuple(shape)}, as {model_name} is {tuple(model.shape)}"
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected {expected}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name}: got dtype {tensor.dtype}, expected {dtype}")
    if tensor.device != model.device:
        raise ValueError(f"{name}: got device {tensor.device}, expected {model.device} as {model_name}")
    if tensor.ndim == 4 and tensor.shape[3] > 1 and tensor.stride(3) != 1:
        raise ValueError(f"{name}: got strides {tensor.stride()}, expected the last, of head_dim, to be 1")


def check_lengths(name: str, lengths: Tensor, count: int, q: Tensor) -> None:
    """Check that ``lengths`` is (count,) int32 on the device of q. The numbers in it are not checked."""
    check_like(name, lengths, "q", q, (count,), torch.int32)


def check_document_ids(document_ids: Tensor, q: Tensor, k: Tensor) -> None:
    """Check numbers (batch, seqlen) int32 on the device of q of the documents that its rows, and as many keys, are in.

    On the CPU it is checked too that the rows of a batch element that have one number are adjacent.
    """
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"k: got seqlen {k.shape[2]} beside document_ids, expected {q.shape[2]} as q")
    check_like("document_ids", document_ids, "q", q, (q.shape[0], q.shape[2]), torch.int32)
    if not document_ids.is_cpu:
        return
    for numbers in document_ids.tolist():
        firsts = [number for number, _ in groupby(numbers)]
        if len(firsts) > len({*firsts}):
            raise ValueError(f"document_ids: got {firsts} one after another, expected each number once")


def check_scales(k_scale: Tensor | None, v_scale: Tensor | None, k: Tensor, *, paged: bool) -> str:
    """Check the scales of 8-bit keys and values, and return whether there is one for each "head" or "page".

    They are float32, contiguous and on the device of k: (heads_kv,) or, if k is ``paged``, also (pages, heads_kv).
    """
    of_pages = paged and isinstance(k_scale, Tensor) and k_scale.ndim == 2
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not isinstance(scale, Tensor):
            raise TypeError(
                f"{name}: got {type(scale).__name__}, expected a torch.Tensor: k_scale and v_scale go together"
            )
        check_like(name, scale, "k", k, k.shape[:2] if of_pages else k.shape[1:2], torch.float32)
        if not scale.is_contiguous():
            raise ValueError(f"{name}: got strides {scale.stride()}, expected it to be contiguous")
    return "page" if of_pages else "head"


def check_new(k_new: Tensor | None, v_new: Tensor | None, k: Tensor, batch: int, *, has_lengths: bool) -> int:
    """Check keys and values (batch, heads_kv, new, head_dim) like k that a call appends, and return how many.

    They are given together, and only beside lengths of the cache.
    """
    if k_new is None and v_new is None:
        return 0
    if not has_lengths:
        raise ValueError("cache_seqlens: got None beside new keys, expected a torch.Tensor")
    count = k_new.shape[2] if isinstance(k_new, Tensor) and k_new.ndim == 4 else 1
    for name, tensor in (("k_new", k_new), ("v_new", v_new)):
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{name}: got {type(tensor).__name__}, expected a torch.Tensor: k_new and v_new go together"
            )
        check_like(name, tensor, "k", k, (batch, k.shape[1], count, k.shape[3]), k.dtype)
    return count


def check_cache_seqlens(cache_seqlens: Tensor, q: Tensor, most: int) -> None:
    """Check lengths (batch,) int32 on the device of q and, if that is the CPU, that they are 0 to ``most``."""
    check_lengths("cache_seqlens", cache_seqlens, q.shape[0], q)
    if cache_seqlens.is_cpu and not all(0 <= n <= most for n in cache_seqlens.tolist()):
        raise ValueError(f"cache_seqlens: got {cache_seqlens.tolist()}, expected 0 to {most}")


def check_block_table(
    block_table: Tensor,
    q: Tensor,
    k: Tensor,
    cache_seqlens: Tensor | None,
    page_sizes: tuple[int, ...],
    new: int = 0,
) -> None:
    """Check a table (batch, pages of a sequence) int32 on the device of q, and the pages (pages, _, page_size, _) of k.

    The lengths are checked too: there must be some. On the CPU, the entries in use have to be pages of k, also those
    that ``new`` keys behind each length need.
    """
    if not isinstance(block_table, Tensor):
        raise TypeError(f"block_table: got {type(block_table).__name__}, expected a torch.Tensor")
    if block_table.ndim != 2:
        raise ValueError(
            f"block_table: got shape {tuple(block_table.shape)}, expected (batch, pages of a sequence)"
        )
    check_like("block_table", block_table, "q", q, (q.shape[0], block_table.shape[1]), torch.int32)
    if block_table.shape[1] > 1 and block_table.stride(1) != 1:
        raise ValueError(f"block_table: got strides {block_table.stride()}, expected the last to be 1")
    pages, _, page_size, _ = k.shape
    if page_size not in page_sizes:
        raise NotImplementedError(f"k: got pages of {page_size} keys, expected one of {page_sizes}")
    if cache_seqlens is None:
        raise ValueError("cache_seqlens: got None beside a block_table, expected a torch.Tensor")
    check_cache_seqlens(cache_seqlens, q, block_table.shape[1] * page_size - new)
    if block_table.is_cpu:
        for row, length in zip(block_table.tolist(), cache_seqlens.tolist(), strict=True):
            used = row[: -(-(length + new) // page_size)]
            if not all(0 <= page < pages for page in used):
                raise ValueError(f"block_table: got {used} for a sequence, expected pages 0 to {pages - 1}")


def check_copyable(head_dims: Sequence[int], **tensors: Tensor) -> None:
    """Raise NotImplementedError for a tensor that the TMA cannot copy in tiles, or with which it is not tested.

    ``head_dims`` are multiples of 8, and those with which the kernel is tested.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float16, torch.bfloat16):
            raise NotImplementedError(f"{name}: got dtype {tensor.dtype}, expected float16 or bfloat16")
        if tensor.shape[3] not in head_dims:
            raise NotImplementedError(
                f"{name}: got head_dim {tensor.shape[3]}, expected a multiple of 8 up to {head_dims[-1]}"
            )
        if not is_aligned(tensor):
            raise NotImplementedError(
                f"{name}: got strides {tensor.stride()} and a start at byte {tensor.data_ptr()}, "
                "expected multiples of 16 bytes"
            )
