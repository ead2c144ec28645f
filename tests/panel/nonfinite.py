"""Masks through which NaN and infinity leak: they are added to scores, or weights are multiplied by them.

They claim ``nonfinite=seen``, as a plain function does unless it is told otherwise.
"""

import torch
from torch import Tensor

from tests.panel.eager import blank_empty_rows
from tests.panel.heads import LOG2_E, finite_shift, for_each_query_head, not_zero, seen_keys

STRICT = ("nonfinite=strict",)
"""The claim that these functions do not keep."""


def products(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Return the scores of all pairs of a query and a key, and the values of each query head, in float32."""
    k, v = (for_each_query_head(x.float(), q) for x in (k, v))
    return q.float() @ k.mT * sm_scale, v


def added_mask(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """The mask of most repositories: -inf is added to what is hidden, where NaN stays NaN, and +inf becomes it.

    Claims: none
    """
    seen = seen_keys(q, k, causal)
    s, v = products(q, k, v, sm_scale)
    s = s + torch.where(seen, 0.0, -torch.inf)
    live = seen.any(-1, keepdim=True)
    p = torch.softmax(torch.where(live, s, 0.0), -1)
    return blank_empty_rows(p @ v, seen).to(q.dtype), torch.logsumexp(s.detach(), -1)


def added_smallest_number(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """The mask of model files: the smallest float32 is added, so that a row that sees no key would see all of them.

    Claims: none
    """
    seen = seen_keys(q, k, causal)
    s, v = products(q, k, v, sm_scale)
    s = s + torch.where(seen, 0.0, torch.finfo(s.dtype).min)
    lse = torch.logsumexp(s.detach(), -1).masked_fill(~seen.any(-1), -torch.inf)
    return blank_empty_rows(torch.softmax(s, -1) @ v, seen).to(q.dtype), lse


def multiplied_by_mask(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Weights times a mask of 0 and 1, those of hidden keys limited to 1: 0 times NaN is NaN, and 0 times 1 is 0.

    Claims: none
    """
    seen = seen_keys(q, k, causal)
    s, v = products(q, k, v, sm_scale * LOG2_E)
    m = (
        torch.where(seen, s.detach(), -torch.inf).amax(-1, keepdim=True)
        if s.shape[-1]
        else s.sum(-1)[..., None]
    )
    s = s - finite_shift(m)
    p = torch.exp2(torch.where(seen, s, s.clamp(max=0.0))) * seen
    l = p.sum(-1, keepdim=True)
    lse = ((m + l.detach().log2()) / LOG2_E)[..., 0]
    return (p @ v / not_zero(l)).to(q.dtype), lse.masked_fill(~seen.any(-1), -torch.inf)
