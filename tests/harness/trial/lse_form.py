"""The forms in which a kernel may return lse, by its claims ``lse_base``, ``lse_layout`` and ``lse_of_no_keys``."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.contract import Capabilities


def form_of(claims: Capabilities) -> tuple[str, str, str]:
    """Return the form of lse that is claimed: its base, its layout, and its value in rows that see no key."""
    return claims.lse_base, claims.lse_layout, claims.lse_of_no_keys


def in_contract_form(lse: Tensor, base: str, layout: str, of_no_keys: str) -> Tensor:
    """Return an lse in the contract's form: the natural logarithm, (batch, heads_q, seqlen_q), -inf where no key is.

    ``lse`` (batch, heads_q, seqlen_q), or (batch, seqlen_q, heads_q) if ``layout`` is "bnh", is a logarithm to
    ``base``, "e" or "2". In base 2 the result is float64, so that the conversion adds no rounding that matters. In base
    e the result has the dtype of ``lse``. If ``of_no_keys`` is "inf", infinities change their sign, wherever they are:
    the other infinity is then as wrong in a row that sees no key as any infinity is in another row.
    """
    if layout == "bnh":
        lse = lse.transpose(1, 2).contiguous()
    if of_no_keys == "inf":
        lse = torch.where(lse.isinf(), -lse, lse)
    return lse.double() * math.log(2.0) if base == "2" else lse


def in_claimed_form(lse: Tensor, base: str, layout: str, of_no_keys: str) -> Tensor:
    """Return a natural lse (batch, heads_q, seqlen_q) as a kernel with these claims returns it, in its own dtype."""
    if base == "2":
        lse = lse / math.log(2.0)
    if of_no_keys == "inf":
        lse = torch.where(lse.isinf(), -lse, lse)
    return lse.transpose(1, 2).contiguous() if layout == "bnh" else lse


def shape_of_lse(shape_of_q: Sequence[int], layout: str) -> tuple[int, ...]:
    """Return the shape in which lse is returned for q (batch, heads_q, seqlen_q, head_dim), by the layout claimed."""
    batch, heads_q, seqlen_q = shape_of_q[:3]
    return (batch, seqlen_q, heads_q) if layout == "bnh" else (batch, heads_q, seqlen_q)
