"""What is done to scores between the product of q and k and the softmax, as one record.

With x = sm_scale * q k^T, the scores of a row are S = softcap * tanh(x / softcap) - slope * distance + bias, where
distance is |i + seqlen_k - seqlen_q - j| for query i and key j, or |i - j| where masks are aligned top-left. The sum of
exponentials that softmax divides by has one further term, exp(sink), whose value is 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from reference.heads import fold, unfold


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreRule:
    """What a call does to its scores; 0 and None stand for nothing.

    Attributes:
        softcap: the limit of the scores' size (Gemma Team 2024, arXiv 2408.00118, section 2).
        alibi_slopes: (heads_q,), how fast the scores of each query head fall with the distance of a key (Press et al.
            2022, arXiv 2108.12409).
        bias: what is added to scores, of a shape that broadcasts to (batch, heads_q, seqlen_q, seqlen_k) and has its
            last dimension (Raffel et al. 2019, arXiv 1910.10683, section 2.1).
        sinks: (heads_q,), a logit of each query head that takes part in the softmax without a key (OpenAI 2025, arXiv
            2508.10925, section 2.2).
    """

    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors among the keywords."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    @property
    def options(self) -> dict[str, Any]:
        """The keywords with which a kernel is asked for it."""
        return {**({"softcap": self.softcap} if self.softcap else {}), **self.tensors}

    def __bool__(self) -> bool:
        """Whether it may change a score or a sum."""
        return bool(self.options)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "ScoreRule":
        """The rule with each of its tensors changed, such as copied to a device."""
        changed: dict[str, Any] = {name: change(x) for name, x in self.tensors.items()}
        return replace(self, **changed)

    def part(
        self,
        batch: slice = slice(None),
        heads: slice = slice(None),
        rows: slice = slice(None),
        keys: Any = slice(None),
    ) -> "ScoreRule":
        """The rule of some sequences, query heads, queries and keys; dimensions of size 1 stay as they are."""
        changed: dict[str, Any] = {
            name: x[heads] for name, x in self.tensors.items() if name in ("alibi_slopes", "sinks")
        }
        if self.bias is not None:
            changed["bias"] = _part(self.bias, batch, heads, rows)[..., keys].contiguous()
        return replace(self, **changed)

    @property
    def is_biased(self) -> bool:
        """Whether anything is added to scores."""
        return self.alibi_slopes is not None or self.bias is not None

    def capped(self, x: Tensor) -> Tensor:
        """Return scaled products ``x`` after the soft-cap."""
        return (x / self.softcap).tanh_().mul_(self.softcap) if self.softcap else x

    def slope(self, capped: Tensor) -> Tensor:
        """Return the derivative of ``capped`` scores by scaled products, 1 - tanh^2."""
        return 1.0 - (capped / self.softcap).square_() if self.softcap else torch.ones_like(capped)

    def applied(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the scores made of scaled products ``x`` and what ``bias`` has for them."""
        return self.capped(x) + bias if self.is_biased else self.capped(x)

    def undone(self, grad: Tensor, scores: Tensor, bias: Tensor) -> Tensor:
        """Return the gradient of the scaled products from that of ``scores``."""
        return grad * self.slope(scores - bias) if self.softcap else grad

    def summed(self, grad: Tensor, heads_q: int) -> Tensor:
        """Return the gradient of the bias from that of the scores: its sum over the dimensions that the bias lacks.

        ``grad`` is (batch, heads_kv, group * rows, seqlen_k), heads folded; the result has as many rows, or one, and is
        in its other dimensions like the bias. Raises ValueError if there is none.
        """
        if self.bias is None:
            raise ValueError("bias: got None, expected a bias whose gradient is wanted")
        whole, dims = unfold(grad, heads_q), broadcast(self.bias.shape)
        return whole.sum(dims, keepdim=True) if dims else whole

    def added(self, q: Tensor, k: Tensor, alignment: str, rows: slice = slice(None)) -> Tensor:
        """Return what is added to capped scores, (batch or 1, heads_kv, group * rows, seqlen_k) float64, heads folded.

        q is (batch, heads_q, seqlen_q, head_dim), k (batch, heads_kv, seqlen_k, head_dim); ``rows`` of q are taken.
        """
        seqlen_q, seqlen_k = q.shape[2], k.shape[2]
        count = len(range(*rows.indices(seqlen_q)))
        total = q.new_zeros((), dtype=torch.float64).expand(1, q.shape[1], count, seqlen_k)
        if self.alibi_slopes is not None:
            queries = torch.arange(seqlen_q, device=q.device)[rows]
            diagonals = queries + (seqlen_k - seqlen_q if alignment == "bottom_right" else 0)
            distance = (diagonals[:, None] - torch.arange(seqlen_k, device=q.device)).abs()
            total = total - self.alibi_slopes.double()[:, None, None] * distance
        if self.bias is not None:
            total = total + _part(self.bias, slice(None), slice(None), rows)
        return fold(total, k.shape[1])

    def sizes(self) -> "ScoreRule":
        """The rule that adds the size of each term, slope * distance and |bias|, to scores."""
        sizes = self.mapped(torch.abs)
        return sizes if sizes.alibi_slopes is None else replace(sizes, alibi_slopes=-sizes.alibi_slopes)

    def sink(self, q: Tensor, k: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return the sink of each row, (1, heads_kv, group * rows, 1) float64, heads folded; -inf stands for none."""
        sinks = q.new_full((q.shape[1],), -torch.inf) if self.sinks is None else self.sinks
        count = len(range(*rows.indices(q.shape[2])))
        return fold(sinks.double()[None, :, None, None].expand(1, -1, count, 1), k.shape[1])


def broadcast(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of (batch, heads_q, seqlen_q, seqlen_k) in which a bias of this shape has one of all."""
    return tuple(dim for dim in range(3) if shape[dim] == 1)


def _part(bias: Tensor, *wanted: slice) -> Tensor:
    """Return a part of the first dimensions, of which those of size 1 stay as they are."""
    taken = zip(bias.shape, wanted, strict=False)
    return bias[tuple(slice(None) if size == 1 else part for size, part in taken)]


PLAIN = ScoreRule()
"""Scores are sm_scale * q k^T, and nothing else is summed."""
