"""Kernels whose errors have a mean that rounding to nearest does not give, and sound twins of another design each.

No element shows most of these biases. ``BIASED`` and ``SOUND`` have the steps of plain functions by name.
``kernel`` makes such a function.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reference.masks import visible

LOG2_E = 1 / math.log(2.0)


def cut(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 numbers in a dtype, rounded towards 0."""
    nearest = x.to(dtype)
    lower = torch.nextafter(nearest, torch.zeros((), dtype=dtype))
    return torch.where(nearest.float().abs() > x.abs(), lower, nearest)


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 numbers in a dtype, rounded to nearest."""
    return x.to(dtype)


def one_sided_exp(x: Tensor) -> Tensor:
    """Return exp by a power of two times a line for the rest, lowered so that the line is never above exp by much."""
    whole = (x * LOG2_E).floor()
    rest = x * LOG2_E - whole
    line = 1.0 + rest * (0.6951 + rest * (0.2276 + rest * 0.0773))  # a cubic polynomial, up to 2e-4 too small
    return torch.ldexp(line * (1 - 1e-4), whole.to(torch.int32))


@dataclass(frozen=True)
class Steps:
    """The steps of attention that may be biased, or done in another way."""

    cast: Callable[[Tensor, torch.dtype], Tensor] = nearest
    cast_ds: Callable[[Tensor, torch.dtype], Tensor] = nearest
    store: Callable[[Tensor, torch.dtype], Tensor] = nearest
    exp: Callable[[Tensor], Tensor] = torch.exp
    weight: float = 1.0
    lse_shift: float = 0.0
    of_lse: float = 1.0
    delta: float = 1.0
    dq: float = 1.0
    dk: float = 1.0
    dv: float = 1.0
    of_scores: float = 1.0
    narrow: bool = False
    """Running sums of out are cut to the inputs' dtype after every 16 keys."""
    normalised: bool = False
    parts: int = 1
    delta_of_p: bool = False
    scaled_ds: bool = False


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float, steps: Steps
    ) -> tuple[Tensor, Tensor]:
        s, seen = scores(q, k, causal, sm_scale * steps.of_scores)
        parts = [_part(s[..., x], v[:, :, x], q, steps) for x in _parts(k.shape[2], steps.parts)]
        lse = torch.stack([of_part for _, of_part in parts]).logsumexp(0)
        whole = sum(out * (of_part - lse).exp().nan_to_num(0.0) for out, of_part in parts)
        out = steps.store(parts[0][0] if steps.parts == 1 else whole, q.dtype)  # type: ignore[arg-type]  # a sum of tensors
        ctx.save_for_backward(q, k, v, out, lse, seen)
        ctx.rest = sm_scale, steps
        ctx.mark_non_differentiable(lse)
        return out, lse[..., 0] * steps.of_lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, seen = ctx.saved_tensors
        sm_scale, steps = ctx.rest
        group, dtype = q.shape[1] // k.shape[1], q.dtype
        kf, vf = (x.float().repeat_interleave(group, 1) for x in (k, v))
        qf, do = q.float(), grads[0].float()
        shift = lse.masked_fill(lse == -math.inf, 0.0) - steps.lse_shift
        there = seen & (lse != -math.inf)
        s = qf @ kf.mT * (sm_scale * steps.of_scores)
        p = torch.where(there, steps.exp(s.masked_fill(~there, 0.0) - shift), 0.0)
        dp = do @ vf.mT
        delta = (p * dp if steps.delta_of_p else out.float() * do).sum(-1, keepdim=True) * steps.delta
        unit = sm_scale if steps.scaled_ds else 1.0
        ds = steps.cast_ds(p * (dp - delta) * unit, dtype).float() / unit
        low = steps.cast(p, dtype).float()
        dq, dk, dv = ds @ kf * sm_scale * steps.dq, ds.mT @ qf * sm_scale * steps.dk, low.mT @ do * steps.dv
        dk, dv = (x.unflatten(1, (k.shape[1], group)).sum(2) for x in (dk, dv))
        return (*(steps.store(x, dtype) for x in (dq, dk, dv)), None, None, None)


def scores(q: Tensor, k: Tensor, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Return scores in float32, -inf where a query does not see a key, and where it does."""
    seen = visible(q.shape[2], k.shape[2], causal, "bottom_right", q.device)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool) if seen is None else seen
    s = q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * sm_scale
    return s.masked_fill(~seen, -math.inf), seen


def _parts(keys: int, parts: int) -> list[slice]:
    size = max(1, math.ceil(keys / parts))
    return [slice(at, at + size) for at in range(0, max(keys, 1), size)]


def _part(s: Tensor, v: Tensor, q: Tensor, steps: Steps) -> tuple[Tensor, Tensor]:
    """Return out and lse (..., rows, 1) of some keys, in float32."""
    m = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
    empty = m == -math.inf
    m = m.masked_fill(empty, 0.0)
    p = torch.where(s == -math.inf, 0.0, steps.exp((s - m).clamp_min(-85.0)))
    l = p.sum(-1, keepdim=True)
    divisor = l.masked_fill(empty, 1.0)
    values = v.float().repeat_interleave(q.shape[1] // v.shape[1], 1)
    low = steps.cast((p / divisor if steps.normalised else p) * steps.weight, q.dtype).float()
    acc = torch.zeros(*q.shape[:3], v.shape[3])
    if steps.narrow:
        for at in range(0, s.shape[-1], 16):
            acc = cut(acc + low[..., at : at + 16] @ values[:, :, at : at + 16], q.dtype).float()
    else:
        acc = low @ values
    return (acc if steps.normalised else acc / divisor), (m + l.log()).masked_fill(empty, -math.inf)


def kernel(**steps: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a plain function with these steps."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
        return _Attention.apply(q, k, v, causal, sm_scale, Steps(**steps))

    return attention


BIASED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "p_cut": ({"cast": cut}, ("out", "dv")),
    "ds_cut": ({"cast_ds": cut}, ("dq", "dk")),
    "stores_cut": ({"store": cut}, ("out", "dq", "dk", "dv")),
    "p_small": ({"weight": 1 - 2.0**-10}, ("out",)),
    "lse_shifted": ({"lse_shift": 1e-3}, ("dq", "dk", "dv")),
    "delta_large": ({"delta": 1.004}, ("dq", "dk")),
    "dq_large": ({"dq": 1 + 2.0**-9}, ("dq",)),
    "dk_large": ({"dk": 1 + 2.0**-9}, ("dk",)),
    "dv_large": ({"dv": 1 + 2.0**-9}, ("dv",)),
    "lse_large": ({"of_lse": 1 + 2.0**-17}, ("lse",)),
    "exp_small": ({"exp": one_sided_exp}, ("lse",)),
    "narrow_accumulator": ({"narrow": True}, ("out",)),
}
"""Steps of biased kernels, with the tensors that the bias shows in where inputs are float16."""

SOUND: dict[str, dict[str, Any]] = {
    "plain": {},
    "normalised": {"normalised": True},
    "split_4": {"parts": 4},
    "split_8_normalised": {"parts": 8, "normalised": True},
    "delta_of_p": {"delta_of_p": True},
    "scaled_ds": {"scaled_ds": True},
    "scaled_ds_delta_of_p_split": {"scaled_ds": True, "delta_of_p": True, "parts": 3},
    "base_2": {"exp": lambda x: torch.exp2(x * LOG2_E)},
    "doubtful_exp": {"exp": lambda x: torch.exp(x) * (1 + 2.0**-23)},
}
"""Steps of sound kernels."""
