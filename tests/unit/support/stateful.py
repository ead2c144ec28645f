"""Plain functions that keep something from call to call: planted bugs after real ones, and sound ones that look alike.

Each bug is right in the first call of a process. What it keeps is a module's global, as in the kernels that it follows;
``forget`` empties all of it.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.contract import AttentionKernel
from kernels.registry import load
from tests.unit.support.large import expanded, scores_of, sound, weights_of

MODULE = __name__
KEPT: dict[Any, Any] = {}
"""What the functions keep."""
ENTRIES = 64
"""Entries of a cache, or buffers of a ring."""
CHUNK = 32
"""Keys of a part of a sequence."""


def forget() -> None:
    """Empty all that is kept, as in a new process."""
    KEPT.clear()


class _WithSums(torch.autograd.Function):
    """Attention whose dk and dv are sums in a workspace that is kept by shape."""

    @staticmethod
    def forward(ctx, q, k, v, causal, sm_scale, clears):
        p = weights_of(scores_of(q, k, causal, sm_scale))
        ctx.save_for_backward(q, k, v, p)
        ctx.options = sm_scale, clears
        return (p @ expanded(v, q)).to(q.dtype)

    @staticmethod
    def backward(ctx, dout):
        (q, k, v, p), (sm_scale, clears) = ctx.saved_tensors, ctx.options
        dout = dout.float()
        products = p * (dout @ expanded(v, q).mT)
        ds = products - p * products.sum(-1, keepdim=True)
        found = []
        for name, x in (("dk", ds.mT @ q.float() * sm_scale), ("dv", p.mT @ dout)):
            of_groups = x.unflatten(1, (k.shape[1], -1)).sum(2)
            workspace = KEPT.setdefault((name, of_groups.shape), torch.zeros_like(of_groups))
            if clears:
                workspace.zero_()
            found.append(workspace.add_(of_groups).clone())
        dq = ds @ expanded(k, q) * sm_scale
        return dq.to(q.dtype), found[0].to(k.dtype), found[1].to(v.dtype), None, None, None


def workspace_by_shape(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Dk and dv are added to a workspace that is 0 only when it is new (cudnn-frontend, pull request 333)."""
    return _WithSums.apply(q, k, v, causal, sm_scale, False)


def tail_of_workspace(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Keys are padded to whole tiles in a workspace kept by head_dim; those behind the last are not masked anew."""
    rows = -(-max(1, k.shape[2]) // CHUNK) * CHUNK
    name = ("padded", k.shape[:2], k.shape[3], rows)
    workspace = KEPT.setdefault(name, k.new_zeros(*k.shape[:2], rows, k.shape[3]).float())
    has_more = bool(workspace[:, :, k.shape[2] :].count_nonzero())
    workspace[:, :, : k.shape[2]] = k.detach()
    if not has_more:
        return sound(q, k, v, causal=causal, sm_scale=sm_scale)
    stale = workspace[:, :, k.shape[2] : k.shape[2] + 1].to(k.dtype)
    keys, values = torch.cat([stale, k], 2), torch.cat([torch.zeros_like(v[:, :, :1]), v], 2)
    return sound(q, keys, values, causal=causal, sm_scale=sm_scale)


def first_scale(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """The scale times log2 e is computed in the first call, as a constant that a compiler has folded, and kept."""
    return sound(q, k, v, causal=causal, sm_scale=KEPT.setdefault("scale", sm_scale))


def mask_by_shape(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """The mask is kept by the lengths alone, without whether it is causal."""
    return sound(q, k, v, causal=KEPT.setdefault((q.shape[2], k.shape[2]), causal), sm_scale=sm_scale)


def shared_lse(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Lse is written to a buffer that calls of one shape share, so that an earlier result changes."""
    lse = torch.logsumexp(scores_of(q, k, causal, sm_scale).detach(), -1)
    buffer = KEPT.setdefault(("lse", lse.shape), torch.empty_like(lse))
    return sound(q, k, v, causal=causal, sm_scale=sm_scale), buffer.copy_(lse)


def flag_after_exception(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """A flag that says that a call is running is put back at its end alone, and a nested call skips the mask."""
    is_nested, KEPT["running"] = KEPT.get("running", False), True
    out = sound(q, k, v, causal=causal, sm_scale=sm_scale * (0.5 if is_nested else 1.0))
    KEPT["running"] = False
    return out


def ring_of_buffers(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Counters of a ring of buffers are zeroed once: from the 65th call on, a part of the work counts as done."""
    KEPT["calls"] = KEPT.get("calls", 0) + 1
    out = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return out if KEPT["calls"] <= ENTRIES else out * 0.5


def full_cache(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Plans are kept by lengths in a table of 64 entries; the plan of a call that finds it full is that of another."""
    plans, lengths = KEPT.setdefault("plans", {}), (q.shape, k.shape)
    if len(plans) < ENTRIES:
        plans.setdefault(lengths, k.shape[2])
    keys = plans.get(lengths, k.shape[2] // 2)
    return sound(
        q, k[:, :, k.shape[2] - keys :], v[:, :, k.shape[2] - keys :], causal=causal, sm_scale=sm_scale
    )


def plan_by_batch(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """The number of parts of the keys is kept by batch and heads, as that of a captured graph (transformers 45323)."""
    chunks = KEPT.setdefault(("chunks", q.shape[:2]), -(-k.shape[2] // CHUNK))
    seen = slice(max(0, k.shape[2] - chunks * CHUNK), None)
    return sound(q, k[:, :, seen], v[:, :, seen], causal=causal, sm_scale=sm_scale)


def results_by_pointer(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Results are kept by the pointers and shapes of the inputs, which are written to in place."""
    if q.requires_grad:
        return sound(q, k, v, causal=causal, sm_scale=sm_scale)
    key = (*tuple((x.shape, x.data_ptr(), x.dtype) for x in (q, k, v)), causal, sm_scale)
    if key not in KEPT:
        KEPT[key] = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return KEPT[key].clone()


def results_by_few_elements(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Results are kept by shapes and a hash of q, as where each prompt is thought to be another."""
    if q.requires_grad:
        return sound(q, k, v, causal=causal, sm_scale=sm_scale)
    key = ("hash", q.shape, k.shape, q.dtype, float(q.float().nan_to_num().sum()))
    if key not in KEPT:
        KEPT[key] = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return KEPT[key].clone()


def keys_by_identity(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Prepared keys are kept as long as k is the same tensor, although a decoder writes to it at each token."""
    if KEPT.get("k", (None,))[0] is not k:
        KEPT["k"] = k, k.detach().clone()
    keys = k if k.requires_grad else KEPT["k"][1]
    return sound(q, keys, v, causal=causal, sm_scale=sm_scale)


def lengths_by_identity(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, cache_seqlens: Tensor | None = None
) -> Tensor:
    """Lengths are read once for each tensor of lengths, to save a wait for the device; servers write them in place."""
    if cache_seqlens is None:
        return sound(q, k, v, causal=causal, sm_scale=sm_scale)
    known = KEPT.get("lengths")
    if known is None or known[0] is not cache_seqlens:
        KEPT["lengths"] = known = cache_seqlens, cache_seqlens.tolist()
    return _of_lengths(q, k, v, known[1], causal, sm_scale)


def _of_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], causal: bool, sm_scale: float) -> Tensor:
    parts = [
        sound(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], causal=causal, sm_scale=sm_scale)
        for b, n in enumerate(lengths)
    ]
    return torch.cat(parts)


def sound_lengths(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, cache_seqlens: Tensor | None = None
) -> Tensor:
    """Reads lengths in each call."""
    if cache_seqlens is None:
        return sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return _of_lengths(q, k, v, cache_seqlens.tolist(), causal, sm_scale)


def sound_workspace(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Keeps a workspace by shape, and clears it."""
    return _WithSums.apply(q, k, v, causal, sm_scale, True)


def sound_plan(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Keeps a mask by both lengths and by whether it is causal."""
    name = (q.shape[2], k.shape[2], causal)
    return sound(q, k, v, causal=KEPT.setdefault(name, causal), sm_scale=sm_scale)


def sound_counter(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Counts its calls, to no effect."""
    KEPT["calls"] = KEPT.get("calls", 0) + 1
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def sound_by_version(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Keeps the last results by the pointers and versions of the inputs, none of which is gone."""
    if q.requires_grad:
        return sound(q, k, v, causal=causal, sm_scale=sm_scale)
    key = (
        *tuple((x.data_ptr(), x._version, x.shape, x.stride(), x.dtype) for x in (q, k, v)),
        causal,
        sm_scale,
    )
    kept = KEPT.setdefault("results", {})
    if key not in kept or any(x() is None for x in kept[key][0]):
        while len(kept) >= ENTRIES:
            del kept[next(iter(kept))]
        kept[key] = [weakref.ref(x) for x in (q, k, v)], sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return kept[key][1].clone()


def sound_flag(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Puts a flag back whatever happens."""
    is_nested, KEPT["running"] = KEPT.get("running", False), True
    try:
        return sound(q, k, v, causal=causal, sm_scale=sm_scale * (0.5 if is_nested else 1.0))
    finally:
        KEPT["running"] = False


def results_by_version(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Results are kept by pointers and versions of the inputs, which a tensor in freed memory may have as well."""
    if q.requires_grad:
        return sound(q, k, v, causal=causal, sm_scale=sm_scale)
    key = (*((x.data_ptr(), x._version, x.shape, x.stride(), x.dtype) for x in (q, k, v)), causal, sm_scale)
    if key not in KEPT:
        KEPT[key] = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return KEPT[key].clone()


def results_by_shape(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Results are kept by shapes alone, as a function does that is timed with one input of each shape."""
    if q.requires_grad:
        return sound(q, k, v, causal=causal, sm_scale=sm_scale)
    key = ("shapes", q.shape, k.shape, q.dtype, causal, sm_scale)
    if key not in KEPT:
        KEPT[key] = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return KEPT[key].clone()


Function = Callable[..., Any]
BUGS: dict[str, tuple[Function, tuple[str, ...]]] = {
    "workspace_by_shape": (workspace_by_shape, ("same",)),
    "tail_of_workspace": (tail_of_workspace, ("longer",)),
    "first_scale": (first_scale, ("scale",)),
    "mask_by_shape": (mask_by_shape, ("mask",)),
    "shared_lse": (shared_lse, ("values",)),
    "flag_after_exception": (flag_after_exception, ("refused",)),
    "ring_of_buffers": (ring_of_buffers, ("same",) * ENTRIES),
    "full_cache": (full_cache, ("longer",) * ENTRIES),
    "plan_by_batch": (plan_by_batch, ("shorter",)),
    "results_by_pointer": (results_by_pointer, ("values",)),
    "results_by_version": (results_by_version, ("freed",)),
    "results_by_shape": (results_by_shape, ("values",)),
    "results_by_few_elements": (results_by_few_elements, ("keys",)),
    "keys_by_identity": (keys_by_identity, ("values",)),
    "lengths_by_identity": (lengths_by_identity, ("tables",)),
}
"""The planted bugs, each with the fewest earlier calls that show it."""
SOUND: tuple[Function, ...] = (
    *(sound, sound_lengths, sound_workspace, sound_plan, sound_counter, sound_by_version, sound_flag),
)


def kernel(function: Function) -> AttentionKernel:
    """Return a function as a kernel, with the claims that fit it."""
    claims = ("ragged=cache",) if "lengths" in function.__name__ else ()
    return load(f"{MODULE}:{function.__name__}", claims)
