"""Plain functions with several bugs each, which a run must tell apart."""

import ctypes

import torch

from tests.unit.support.toys import sound


def three(q, k, v, *, causal, sm_scale):
    """Has three bugs: the causal corner is one key too far left, groups read wrong key heads, long lse is in base 2."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    if q.shape[1] > k.shape[1] > 1:
        k, v = k.flip(1), v.flip(1)
    if causal and seqlen_k:
        out, lse = with_corner(q, k, v, sm_scale, seqlen_k - seqlen_q - 1)
    else:
        out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return out, lse * 1.4427 if seqlen_k > 100 else lse


def with_corner(q, k, v, sm_scale, diagonal):
    """Return out and lse of attention under a causal mask whose corner is at ``diagonal``."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    unseen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + diagonal)
    scores = (q.float() @ keys.transpose(-1, -2) * sm_scale).masked_fill(unseen, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    p = torch.softmax(scores, -1).masked_fill(lse[..., None] == -torch.inf, 0.0)
    return (p.to(q.dtype).float() @ values).to(q.dtype), lse


def behind_a_crash(q, k, v, *, causal, sm_scale):
    """Has two bugs: rows of v with gaps between them end the process, and a negative scale loses its sign."""
    if not v.is_contiguous() and v.stride(2) > v.shape[3]:
        ctypes.string_at(0)
    return sound(q, k, v, causal=causal, sm_scale=abs(sm_scale))


def top_left(q, k, v, *, causal, sm_scale):
    """Has a causal mask that is aligned to the top left corner, and is right otherwise."""
    if not causal or not k.shape[2]:
        return sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return with_corner(q, k, v, sm_scale, 0)


def always_and_in_a_tail(q, k, v, *, causal, sm_scale):
    """The lse is in base 2; beside a last tile of 64 keys that is not full, out and lse are wrong."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    tail = k.shape[2] % 64
    return (1.5 * out if tail else out), lse * 1.4427 + tail


def scaled_in_float32(q, k, v, *, causal, sm_scale):
    """Out is half as large again in float32, and right in other dtypes."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return 1.5 * out if q.dtype == torch.float32 else out, lse


def dead_row(q, k, v, *, causal, sm_scale):
    """The first row of out is 0 if its first score is negative."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    if not k.shape[2] or not q.shape[2]:
        return out, lse
    is_negative = (q[0, 0, 0].float() * k[0, 0, 0].float()).sum() * sm_scale < 0
    is_dead = torch.zeros(q.shape[2], 1, dtype=torch.bool)
    is_dead[0] = is_negative
    return torch.where(is_dead, 0.0, out), lse


def dead_short_rows(q, k, v, *, causal, sm_scale):
    """Out is 0 where there are fewer than 32 keys."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return (0.0 * out if k.shape[2] < 32 else out), lse
