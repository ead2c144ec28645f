"""The float64 quantities that bounds are made of, computed once for forward and backward."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.arithmetic import FP32_ROUNDOFF, Quantisation
from reference.dropout import factors
from reference.heads import fold, group_size
from reference.mask_pattern import NO_PATTERN, MaskPattern
from reference.masks import blank, hide, visible
from reference.quantisation import block_scales, dequantised
from reference.score_rule import PLAIN, ScoreRule

FLOAT32_SAFE = 2.0**125
"""Below this no sum, product with log2(e), or partial sum of a float32 computation reaches infinity."""

SCORE_GAP = 256.0
"""If a score is this far below another one of its row, in natural logarithms, its weight is at most exp(-256), about
2^-369, which is 0 in float32."""

LARGEST_SHARE = 32
"""A scaled product of q and k errs by less than this part of the sum of the sizes of its terms: with everything rounded
to bfloat16 five times, by 1 / 51."""


@dataclass(frozen=True)
class Exact:
    """The forward's quantities in float64, with query heads folded into rows (``reference.heads``).

    q (B, H, R, D), k and v (B, H, N, D); scores S, score_size A and weights P (B, H, R, N), S -inf and A and P 0 where
    a row does not see a key; largest_size (B, H, R, 1) the largest A of each row; row_max, lse (B, H, R); out (B, H, R,
    D); seen (R, N) bool, under key padding or a pattern (B or 1, 1, R or 1, N), or None where every key is seen; empty
    (B, H, R) bool: rows that see no key; overflow (B, H, R) bool: rows whose products may leave float32; leaky (B, H,
    R) bool: rows that a hidden product may spoil by leaving float32, or None if it must not; group: how many query
    heads read a key head; keep (B, H, R, N), the factor by which dropout multiplies each weight, 0 or keep_scale = 1 /
    (1 - dropout_p), or None without dropout; softcap: the limit of scores, or 0; cap_slope (B, H, R, N), their
    derivative by the scaled products, or None where it is 1; sink (B or 1, H, R, 1), the logit that takes part in each
    row's softmax, -inf for none; added_size (B or 1, H, R, N), the size of what is added to scores, term by term, or
    None if nothing is; is_part: whether the rows are some of a longer sequence.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sm_scale: float
    scores: Tensor
    score_size: Tensor
    largest_size: Tensor
    weights: Tensor
    row_max: Tensor
    lse: Tensor
    out: Tensor
    seen: Tensor | None
    empty: Tensor
    overflow: Tensor
    leaky: Tensor | None = None
    group: int = 1
    keep: Tensor | None = None
    keep_scale: float = 1.0
    softcap: float = 0.0
    cap_slope: Tensor | None = None
    sink: Tensor | None = None
    added_size: Tensor | None = None
    is_part: bool = False

    def dropped(self, x: Tensor) -> Tensor:
        """``x`` (B, H, R, N) after dropout."""
        return x if self.keep is None else x * self.keep

    @property
    def of_keep(self) -> float:
        """Relative error that dropout adds to a weight: 1 / (1 - dropout_p) is rounded, and so is the product."""
        return 0.0 if self.keep is None else 2 * FP32_ROUNDOFF

    def sum_seen(self, x: Tensor) -> Tensor:
        """Sum ``x`` (B, H, N, D) over the keys that each row sees: under a causal mask alone, the first ones.

        Returns (B, H, R, D), or (B, H, 1, D) where every row sees every key.
        """
        if self.seen is None:
            return x.sum(-2, keepdim=True)
        if self.seen.ndim == 4:
            return self.seen.to(x.dtype) @ x
        sums = torch.nn.functional.pad(x.cumsum(-2), (0, 0, 1, 0))
        return sums[..., self.seen.sum(-1), :]


def largest(x: Tensor, dim: int) -> Tensor:
    """Return the largest entry along ``dim``, which is kept: 0 where it has no entries, NaN where one is NaN."""
    return x.amax(dim, keepdim=True) if x.shape[dim] else x.sum(dim, keepdim=True)


def operand_size(x: Tensor, floor: float | Tensor) -> Tensor:
    """Return |x| of a product's raw operand, raised to ``floor`` except where x is 0.

    ``floor`` is ``Arithmetic.operand_floor`` or ``Arithmetic.product_floor``.
    """
    size = x.abs()
    if isinstance(floor, float) and not floor:
        return size
    return size.clamp_min_(floor).masked_fill_(x == 0, 0.0)


def exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    alignment: str = "bottom_right",
    product_floor: float = 0.0,
    quantisation: Quantisation | None = None,
    units: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    first_head: int = 0,
    pattern: MaskPattern = NO_PATTERN,
    rule: ScoreRule = PLAIN,
    hides_all: bool = True,
    diagonals: Tensor | None = None,
    rescored: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]] | None = None,
) -> Exact:
    """Compute safe softmax attention (Milakov & Gimelshein 2018, eq. 2), keeping everything that bounds need.

    q is (batch, heads_q, seqlen_q, head_dim), k and v (batch, heads_kv, seqlen_k, head_dim), of any float
    dtype; key_padding_mask (batch, seqlen_k) bool is True where a key may be attended. Weights are dropped as
    ``reference.dropout`` says; first_head is that of ``keep_mask``, pattern that of ``masks.visible``, rule that
    of ``reference.score_rule``. With a ``quantisation``, everything is computed from the quantised operands, and
    ``product_floor`` is in units of a block's scale. ``units`` (2, batch, heads_kv) are the units of ``product_floor``
    for q and for k, if these are products of 8-bit numbers with such scales. ``hides_all`` is that of ``Capabilities``,
    ``diagonals`` that of ``masks.visible``; what else goes by the numbers of rows, dropout, ALiBi and blocks of a
    quantisation, is not known for some rows of a longer sequence. ``rescored`` returns other scores (B, H, R, N), -inf
    where hidden, and which of them are seen, in place of the given ones.

    Raises ValueError if heads_q is no multiple of heads_kv, or the alignment is unknown.
    """
    seqlen_k, group = k.shape[2], group_size(q, k)
    seen = visible(
        *(q.shape[2], seqlen_k, causal, alignment, q.device),
        group=group,
        key_padding_mask=key_padding_mask,
        pattern=pattern,
        diagonals=diagonals,
    )
    z = None
    if dropout_p:
        z = factors(q, k, dropout_p=dropout_p, seed=dropout_seed, first_head=first_head)
    k, v = blank(k, key_padding_mask), blank(v, key_padding_mask)
    unit_q: float | Tensor = 1.0
    unit_k: float | Tensor = 1.0
    if quantisation is not None:
        q, k, v = dequantised(q, k, v, quantisation)
        if not quantisation.only_v:
            unit_q = fold(block_scales(q, quantisation.block_q), k.shape[1])
            unit_k = block_scales(k, quantisation.block_k)
    if units is not None:
        unit_q, unit_k = units.double()[..., None, None]
    bias = rule.added(q, k, alignment)
    added_size = rule.sizes().added(q, k, alignment) if rule.is_biased else None
    sink = None if rule.sinks is None else rule.sink(q, k)
    q, k, v = (x.to(torch.float64, memory_format=torch.contiguous_format) for x in (q, k, v))
    q = fold(q, k.shape[1])
    size_q, size_k = operand_size(q, product_floor * unit_q), operand_size(k, product_floor * unit_k)
    products = (q @ k.mT).mul_(sm_scale)
    size = size_q @ size_k.mT
    # A kernel may multiply q, k or their product by sm_scale.
    scaled = max(1.0, abs(sm_scale))
    leaky = None if hides_all else ~(largest(size, -1)[..., 0] * scaled < FLOAT32_SAFE)
    applied = rule.applied(products, bias)
    scores = hide(applied, seen, -math.inf)
    if rescored is not None:
        scores, seen = rescored(scores, seen)
    size = hide(size, seen)
    top = torch.maximum(largest(size, -1), largest(size_q, -1))
    top = torch.maximum(top, largest(size_k.flatten(-2), -1)[..., None])[..., 0] * scaled
    size = _score_size(size.mul_(abs(sm_scale)), products, added_size, rule, seen)
    row_max = scores.amax(-1) if seqlen_k else q.new_full(q.shape[:-1], -math.inf)
    empty = row_max == -math.inf
    if sink is not None:
        row_max = torch.maximum(row_max, sink[..., 0])
    row_max = row_max.masked_fill(row_max == -math.inf, 0.0)
    weights = (scores - row_max[..., None]).exp_()
    total = weights.sum(-1)
    if sink is not None:
        total += (sink[..., 0] - row_max).exp_()
    weights.div_(total.masked_fill(empty, 1.0)[..., None])
    return Exact(
        q=q,
        k=k,
        v=v,
        sm_scale=sm_scale,
        scores=scores,
        score_size=size,
        largest_size=largest(size, -1),
        weights=weights,
        row_max=row_max,
        lse=row_max + total.log(),
        out=(weights if z is None else weights * z) @ v,
        seen=seen,
        empty=empty,
        overflow=~(top < FLOAT32_SAFE),
        leaky=leaky,
        group=group,
        keep=z,
        keep_scale=1.0 / (1.0 - dropout_p),
        softcap=rule.softcap,
        cap_slope=rule.slope(applied - bias) if rule.softcap else None,
        sink=sink,
        added_size=added_size,
        is_part=diagonals is not None,
    )


def _score_size(
    size: Tensor, products: Tensor, added_size: Tensor | None, rule: ScoreRule, seen: Tensor | None
) -> Tensor:
    """Return what errors of scores are relative to, (B, H, R, N), given A = ``size`` of the scaled ``products``.

    A soft-cap multiplies the error of x, a scaled product, by the slope 1 - tanh(x / softcap)^2 somewhere between x
    and the computed x, which errs by less than A / ``LARGEST_SHARE``: the largest slope is that of the smallest |x|.
    Later roundings are relative to the capped score. What is added is a product and a sum more, so it counts twice;
    where a bias and ALiBi cancel, the errors of both are left.
    """
    if rule.softcap:
        nearest = (products.abs() - size / LARGEST_SHARE).clamp_min_(0.0)
        size = rule.slope(rule.capped(nearest)) * size + rule.capped(products).abs()
    if added_size is not None:
        size = size + 2 * added_size
    return hide(size, seen) if rule else size
