"""Plain kernels with several bugs each, that a run must tell apart. Where ``MENDED`` is True there are none."""

import ctypes

import torch

from tests.unit.toys import sound

MENDED = False


def three(q, k, v, *, causal, sm_scale):
    """The causal corner is one key too far left; grouped heads read the wrong key head; lse in base 2 past 100 keys."""
    heads_kv, seqlen_q, seqlen_k = k.shape[1], q.shape[2], k.shape[2]
    if not MENDED and q.shape[1] > heads_kv > 1:
        k, v = k.flip(1), v.flip(1)
    if MENDED or not causal or not seqlen_k:
        out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    else:
        out, lse = shifted(q, k, v, sm_scale, seqlen_k - seqlen_q - 1)
    return out, lse * 1.4427 if seqlen_k > 100 and not MENDED else lse


def shifted(q, k, v, sm_scale, diagonal):
    """Attention under a causal mask with its corner anywhere."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    unseen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1 + diagonal)
    scores = (q.float() @ keys.transpose(-1, -2) * sm_scale).masked_fill(unseen, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    p = torch.softmax(scores, -1).masked_fill(lse[..., None] == -torch.inf, 0.0)
    return (p.to(q.dtype).float() @ values).to(q.dtype), lse


def behind_a_crash(q, k, v, *, causal, sm_scale):
    """Rows of v that are not 16 apart end the process; a negative scale is taken for a positive one."""
    if not MENDED and not v.is_contiguous() and v.stride(2) > v.shape[3]:
        ctypes.string_at(0)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale if MENDED else abs(sm_scale))


def top_left(q, k, v, *, causal, sm_scale):
    """Right for a causal mask in the other corner."""
    if not causal or not k.shape[2]:
        return sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return shifted(q, k, v, sm_scale, 0)
