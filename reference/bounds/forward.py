"""Bounds of out and lse.

With weights P_j (1 + t_j), cast errors c_j, accumulation error e_a and relative error e_l of the sum,
    out' - out = (sum_j P_j t_j (v_j - out) + sum_j P_j (1 + t_j) c_j v_j + e_a - out e_l)
                 / (1 + sum_j P_j t_j + e_l)
exactly: whatever is common to a row (its shift, its rescaling) cancels through v_j - out. Where the t_j are
so large that nothing is left of this, out' is still a convex combination of the v_j that the row sees.

Where partial results are merged (``Arithmetic.partial_results``; Dao et al. 2022, algorithm 1, line 12), key
block t turns the quotient o = acc / l of the blocks before it into acc' = (l alpha) o + sum_j p_j v_j, and that
into o' = acc' / l'. The computed l of the division and of the product are one number, which cancels, so acc'
differs from its exact value by a rounding of the quotient (div_error), one of l alpha and one of the product
with o (U each), relative to alpha acc, and by the rounding of the sum, which is among those of e_a. Before the
first block there is nothing to divide, and the last division is every kernel's: T blocks merge T - 1 times,
    e_m <= (T - 1) (div_error + 2 U) max_t |acc_t|,  T <= ceil(N / tile_min),
acc_t being the sum over the first t blocks brought to the final maximum. It is a partial sum of the N terms, in
rule 1 at most sum_j P_j |v_j|, in rule 2 as large as ``probable_partial_sum`` says. Both the quotient and its
product may flush a subnormal, which later steps only make smaller, as l alpha <= l'. l and m are those of the
running sum, so that merging adds no error to lse.

Where ``Arithmetic.merged`` parts of the keys give an out_s and lse_s each, and out is their mean with weights
exp(lse_s - mu), mu a running maximum, each part's weights share one more factor 1 + t: ``part_error``. Where out is
the sum of the parts with weights exp(lse_s - lse) (``Arithmetic.merged_by_lse``), it may leave the hull by as much.

Where parts are merged by difference (``Arithmetic.merged_by_difference``), merge t moves out by s_t (out - out_s) with
s_t = sigmoid(lse_s - lse). What of this is relative to a weight is in ``part_error``: the argument's rounding, and the
errors of the running lse, d at each merge, of which later ones leave the share of what came before, so that T merges
leave T d at most. What remains is relative to the distance of two partial results, which is at most the width of the
hull: ``Arithmetic.difference_error``. Where the weight of all before vanishes, it is what they leave in out.

Where rescaling is lazy, P is taken relative to a reference r of its row, which may lie below the running maximum by
up to t = log(``Arithmetic.largest_weight``). r grows only where the maximum does, so that ``rescalings`` bounds the
number of its changes too. A weight's exponent errs by roundings of S - r, and by those of what r grows by later: 2 U
(|S - r| + r' - r) with the last reference r'. If S is at most r, that is at most 2 U |S - shift|; if S is larger, by up
to t, at most 2 U |S - shift| + 4 U t. l is larger by a factor of up to e^t, which adds up to t to the logarithm that
lse is made of, and acc is as much larger, so that it overflows earlier. A cast of P that underflows loses no more
than one relative to the maximum does, as r is no larger than that.

Under dropout out is the sum of P_j z_j v_j, with z_j of 0 or 1 / (1 - p) known exactly: the mask is the
reference's, bit for bit. All of the above holds with z_j v_j for v_j, which then differs by row: P z stands wherever
P meets v, the hull is that of the z_j v_j, within 0 and v / (1 - p), and t_j gains 2 U, for the rounding of
1 / (1 - p) and of its product. A cast before that product underflows by as much times 1 / (1 - p). Dropout does not
enter l and lse.

A sink (``Exact.sink``) is one further term of l, whose weight errs like those of the keys, relative to |sink|, and
whose value is 0: the hull of v is widened by 0. A design may sum it with the keys, or as a part of its own, which takes
a rescaling and a sum more, and whose shift is then the maximum of the keys alone. What a kernel returns as lse of a row
that sees no key, its sink or -inf, is not judged.

A padded key adds an exact zero: its score is -inf, and even a whole tile of such keys leaves the running maximum as
it is and alpha at 1. Wherever else roundings are counted by terms or by tiles, padded keys count like others.

Where a mask is a number that is added to scores, a hidden score of +inf becomes inf - inf = NaN, in a row that may see
no key at all. If the kernel claims no more (``Exact.leaky``), nothing is known of rows in which a hidden product may
leave float32, nor, of a design that scales an operand or stores scores in 16 bits, where it may leave that format. In
its backward the P of such a row is NaN for every key, and so are dk and dv of the head.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from reference.arithmetic import FP32_ROUNDOFF, PARTIAL_STORES, Arithmetic
from reference.bounds.accumulation import multiplicity, probable_partial_sum, probable_steps
from reference.bounds.exact import FLOAT32_SAFE, Exact, largest, operand_size
from reference.bounds.scores import LARGEST_EXPONENT, WeightError, rescalings, weight_error
from reference.masks import hide

FLOAT64_SLACK = 1e-13
"""Error of the float64 reference itself, relative to max |v| (measured at 1e-10 of the bound at most)."""

SUBNORMAL_FLUSH = 2.0**-126
"""What one flush of a float32 subnormal to zero loses."""

UNDERFLOW_MARGIN = 16.0
"""If any weight of a row is within this factor of the cast's normal range, all its casts count as underflowing."""


@dataclass(frozen=True)
class ForwardBounds:
    """Bounds for out (B, H, R, D) and lse (B, H, R); inf where float32 may overflow, 0 on empty rows."""

    out: Tensor
    lse: Tensor

    def unknown_in(self, rows: Tensor) -> "ForwardBounds":
        """The bounds with nothing known of ``rows`` (B, H, R): there they are infinite."""
        return ForwardBounds(
            self.out.masked_fill(rows[..., None], math.inf), self.lse.masked_fill(rows, math.inf)
        )


def forward_bounds(
    e: Exact, arithmetic: Arithmetic, *, safety: float | None = None, clustered: bool = True
) -> ForwardBounds:
    """Return the bounds of rule 1 (``safety=None``) or rule 2 (``safety`` standard deviations), never above rule 1.

    ``clustered=False`` counts equal weights as if they rounded independently, which is a cheap lower bound of rule 2.
    """
    of_empty_rows = 0.0 if e.sink is None else math.inf
    if e.k.shape[-2] == 0:
        return ForwardBounds(torch.zeros_like(e.out), torch.full_like(e.lse, of_empty_rows))
    extra = rescalings(e, arithmetic) * (arithmetic.exp_error + 2 * FP32_ROUNDOFF)
    if arithmetic.lag:
        extra = extra + 4 * FP32_ROUNDOFF * arithmetic.lag
    if arithmetic.merged > 1:
        extra = extra + part_error(arithmetic, e.largest_size[..., 0], e.k.shape[-2])
    if e.sink is not None:  # Shifts may be the largest score, the sink, or the larger one.
        tops = e.largest_size[..., 0] + e.sink[..., 0].abs()
        extra = extra + 2 * (arithmetic.exp_error + 2 * FP32_ROUNDOFF) + FP32_ROUNDOFF * (1 + 4 * tops)
    if arithmetic.normalised_first:  # Each weight is divided, rather than the sum once.
        extra = extra + arithmetic.div_error
    err = weight_error(e, arithmetic, shift=e.row_max, extra=extra, shift_terms=0.0)
    sums = _Sums.of(e, arithmetic, err)
    out = _out_bound(e, arithmetic, err, sums, safety, clustered).masked_fill_(err.lost, math.inf)
    lse = _lse_bound(e, arithmetic, err, sums).masked_fill_(err.lost[..., 0], math.inf)
    bounds = ForwardBounds(
        out.masked_fill_(e.empty[..., None], 0.0), lse.masked_fill_(e.empty, of_empty_rows)
    )
    return bounds if e.leaky is None else bounds.unknown_in(e.leaky | err.lost[..., 0])


def fused_overflow(size: Tensor, v: Tensor) -> Tensor:
    """Rows (B, H, R) whose largest weight a fused multiply-add may make infinite, and with it lse and out.

    ``size`` (B, H, R) is |S| of the largest score of a row, or more, and v (B, H, N, D) what the weights multiply.
    The maximum of a row is a rounded product m = fl(c s). Where the exponent is computed as fl(c s - m), with one
    rounding, as GPUs do it by default, it is not 0 for the largest score but that rounding of m, at most U |S| in
    natural units. So a weight may be as large as exp(U |S|), and l and acc are sums of N of them, of which those of acc
    are multiplied by v. They may become infinite where exp(U |S|) N max(1, |v|) does, of the v that are finite, unless
    exp(U |S|) is less than 2: then the weights are about as large as those of any other design.
    """
    exponent = FP32_ROUNDOFF * math.log2(math.e) * size
    size_v = largest(v.abs().nan_to_num(nan=1.0, posinf=1.0).flatten(-2), -1).clamp_min(1.0)
    most = exponent + (max(1, v.shape[-2]) * size_v).log2()
    return (exponent >= 1) & (most >= math.log2(FLOAT32_SAFE))


@dataclass(frozen=True)
class _Sums:
    """Quantities of a row that both bounds use, (B, H, R, 1) each except ``sized``, which is P A (B, H, R, N).

    drift: relative error of l that comes from the weights' errors. of_sum: that of l's own additions. cast: relative
    error of the cast of P. flush: absolute error of each cast that may underflow.
    """

    sized: Tensor
    drift: Tensor
    of_sum: Tensor | float
    cast: Tensor
    flush: Tensor

    @classmethod
    def of(cls, e: Exact, a: Arithmetic, err: WeightError) -> "_Sums":
        p, sized = e.weights, e.weights * err.size
        largest_p, size = p.amax(-1, keepdim=True), sized.sum(-1, keepdim=True)
        if e.sink is not None:
            of_sink = (e.sink - e.lse[..., None]).exp()
            largest_p, size = torch.maximum(largest_p, of_sink), size + of_sink * e.sink.abs()
        drift = torch.addcmul(err.intercept, err.slope, size)
        # P is relative to the running maximum when it is cast, or to twice that, unless it is divided by l before.
        flush = a.weights.underflow * (torch.ones_like(size) if a.normalised_first else largest_p)
        flush = flush * (1 + a.rounded_largest_weight)
        smallest = hide(p, e.seen, 1.0).amin(-1, keepdim=True)
        may_flush = smallest < UNDERFLOW_MARGIN / a.weights.roundoff * flush
        flush = torch.where(may_flush, flush * err.factor, 0.0)
        cast = a.weights.roundoff * err.factor
        of_sum = sum_error(a, p.shape[-1]) + (cast + flush * p.shape[-1] if a.l_from_rounded_p else 0.0)
        return cls(sized, drift, of_sum, cast, flush)


def part_error(a: Arithmetic, top: Tensor | float, terms: int) -> Tensor | float:
    """Return the relative error of the weight of one of ``a.merged`` parts, whose scores are at most ``top`` in size.

    Its lse_s, of size top + log n at most, errs by its logarithm and by U (3 top + 2 |lse_s|), as in ``_lse_bound``.
    The argument lse_s - mu of the exponential errs by U (2 top + log n). Then come the exponential; the division of
    out_s by the same sum that lse_s is the logarithm of; and for each other part a rescaling (exp2, two roundings), a
    product and a sum.

    A merge by difference rounds lse_s - lse, which is 2 top + log n at most, the logarithm of the sigmoid of that, and
    the sum of lse and this logarithm: U (5 top + 3 log n), and the error of the logarithm.
    """
    log_terms = math.log(max(terms, 1))
    of_lse = a.log_error * max(1.0, log_terms + a.lag) + FP32_ROUNDOFF * (7 * top + 3 * log_terms)
    of_merges: Tensor | float = a.merged * (a.exp_error + 4 * FP32_ROUNDOFF)
    if a.merged_by_difference:
        of_running_lse = a.log_error * max(1.0, log_terms) + FP32_ROUNDOFF * (5 * top + 3 * log_terms)
        of_merges = of_merges + PARTIAL_STORES * of_running_lse
    return of_lse + a.div_error + of_merges


def sum_error(arithmetic: Arithmetic, terms: int) -> float:
    """Relative error of l: the additions within a tile, then one addition for each tile, in any order."""
    return FP32_ROUNDOFF * min(
        terms, arithmetic.tile_max + terms / arithmetic.tile_min + arithmetic.merged - 1
    )


def merge_error(arithmetic: Arithmetic, terms: int) -> float:
    """Relative error that partial sums of P v gain over all tiles by being divided by l and multiplied by it again."""
    a, tiles = arithmetic, math.ceil(terms / arithmetic.tile_min)
    return max(0, tiles - 1) * (a.div_error + 2 * FP32_ROUNDOFF) if a.partial_results else 0.0


def _lse_bound(e: Exact, a: Arithmetic, err: WeightError, s: _Sums) -> Tensor:
    """Absolute error of lse (B, H, R): from the error of l (at most that of any weight), and from its logarithm.

    An lse that is returned in base 2 has the error of its conversion as well (``Arithmetic.lse_conversion``).
    """
    of_weights = torch.minimum(s.drift / (1 - s.drift.clamp_max(0.5)), err.log)
    of_log = (e.lse - e.row_max).abs_().add_(a.lag).clamp_min_(1.0).mul_(a.log_error)
    # Such a kernel may round the logarithm as well.
    rounding = a.weights.roundoff if a.rounded_scores else 0.0
    underflow = a.weights.underflow if a.rounded_scores else 0.0
    error = (of_weights + s.of_sum)[..., 0] + of_log.add_(underflow)
    error.add_(e.row_max.abs(), alpha=3 * FP32_ROUNDOFF + rounding)
    return error.add_(e.lse.abs(), alpha=2 * FP32_ROUNDOFF + rounding + a.lse_conversion)


def _out_bound(
    e: Exact, a: Arithmetic, err: WeightError, s: _Sums, safety: float | None, clustered: bool
) -> Tensor:
    p, size_out, terms = e.dropped(e.weights), e.out.abs(), e.k.shape[-2]
    size_v = operand_size(e.v, a.operand_floor)
    of_weights = p @ size_v
    error = (
        (e.dropped(s.sized) @ size_v)
        .mul_(err.slope)
        .addcmul_(of_weights, err.intercept + a.operand_rounding + err.factor * e.of_keep)
        .addcmul_(size_out, s.drift + s.of_sum)
        .addcmul_(e.sum_seen(size_v), s.flush * e.keep_scale)
    )
    partial_sum = of_weights.mul_(err.factor)
    of_merges = merge_error(a, terms)
    cast_and_sum = partial_sum * (s.cast + a.accumulation(terms) + of_merges)
    if safety is not None:
        squares = p * p
        if clustered:
            squares.mul_(multiplicity(e.scores, e.seen, a.weights.roundoff))
        root = (squares @ (e.v * e.v)).sqrt_()
        probable = probable_partial_sum(size_out, root).mul_(a.accumulate * probable_steps(terms) + of_merges)
        probable.addcmul_(root, safety * s.cast)
        if a.weights.truncates:
            probable.addcmul_(size_out, s.cast)
        cast_and_sum = torch.minimum(cast_and_sum, probable)
    error.add_(cast_and_sum)
    if a.rounded_partials:  # The out of each part is rounded; the weights of the parts sum to 1.
        error.add_(a.output.roundoff * partial_sum + a.output.underflow, alpha=PARTIAL_STORES)
    low, high = hull(e)
    error.add_(a.difference_error * (high - low))
    error.div_((1 - s.drift - s.of_sum).clamp_min_(1e-3))
    # Errors of scores beyond LARGEST_EXPONENT were cut there, so what follows from them bounds nothing.
    error.masked_fill_(~(err.log < LARGEST_EXPONENT), math.inf)
    size_hull = torch.maximum(low.abs(), high.abs())
    relative = a.weights.roundoff + a.operand_rounding + 2 * a.accumulation(terms) + 2 * s.of_sum + of_merges
    relative = relative + e.of_keep + PARTIAL_STORES * a.rounded_partials * a.output.roundoff
    relative = relative + 2 * a.difference_error
    anywhere = torch.maximum(high - e.out, e.out - low)
    anywhere.add_(size_hull * (relative + a.weights.underflow * terms))
    if a.merged_by_lse:
        of_parts = torch.as_tensor(
            part_error(a, e.largest_size, terms), dtype=torch.float64, device=e.v.device
        )
        anywhere = anywhere + size_hull * torch.expm1(
            of_parts.nan_to_num(math.inf).clamp_max(LARGEST_EXPONENT)
        )
        anywhere = anywhere.masked_fill(~(of_parts < LARGEST_EXPONENT), math.inf)
    last = a.output.roundoff + a.div_error
    # There is at most one merge for each key, and each takes two operations.
    floor = a.output.underflow + terms * (3 if a.partial_results else 1) * SUBNORMAL_FLUSH
    floor = floor + PARTIAL_STORES * a.rounded_partials * a.output.underflow
    bound = torch.minimum(error, anywhere).mul_(1 + last).add_(size_out, alpha=last)
    bound.add_(size_hull, alpha=FLOAT64_SLACK).add_(floor)
    # The unnormalised accumulator holds up to seqlen_k times the largest v, each times the largest P.
    return bound.masked_fill_(size_hull * (terms * a.largest_weight) >= FLOAT32_SAFE, math.inf)


def hull(e: Exact) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest v that each row sees, (B, H, R or 1, D); arbitrary for rows that see none.

    A row sees all attended keys from its first one to its last one. Under dropout the hull is that of 0 and
    v / (1 - p), with a sink that of 0 and v.
    """
    if e.seen is None:
        low, high = e.v.amin(-2, keepdim=True), e.v.amax(-2, keepdim=True)
    elif e.seen.ndim == 2:
        last = (e.seen.sum(-1) - 1).clamp_min(0)
        low, high = e.v.cummin(-2).values[..., last, :], e.v.cummax(-2).values[..., last, :]
    else:
        keys = torch.arange(e.seen.shape[-1], device=e.v.device)
        first = torch.where(e.seen, keys, len(keys) - 1).amin(-1)[:, 0]
        last = torch.where(e.seen, keys, 0).amax(-1)[:, 0].maximum(first)
        attended = e.seen.any(-2)[..., None]
        low = -_largest_of_runs(-e.v.masked_fill(~attended, math.inf), first, last)
        high = _largest_of_runs(e.v.masked_fill(~attended, -math.inf), first, last)
    if e.keep is None and e.sink is None:
        return low, high
    return low.clamp_max(0.0) * e.keep_scale, high.clamp_min(0.0) * e.keep_scale


def _largest_of_runs(x: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Return the largest x (B, H, N, D) from row ``first`` to row ``last``, each (B or 1, R): (B, H, R, D).

    Each run is covered by two runs whose length is the largest power of two that fits; they may overlap. The largest
    x of every run of such a length is computed once, from two of half that length.
    """
    power = torch.frexp((last - first + 1).double()).exponent.long() - 1
    tables = [x]
    for i in range(max(power.flatten().tolist(), default=0)):
        tables.append(torch.maximum(tables[i][..., : -(2**i), :], tables[i][..., 2**i :, :]))
    begins = torch.tensor([0, *accumulate(table.shape[-2] for table in tables)], device=x.device)[power]
    table, batch = torch.cat(tables, -2).transpose(1, 2), torch.arange(len(x), device=x.device)[:, None]
    both = (table[batch, begins + at] for at in (first, last - 2**power + 1))
    return torch.maximum(*both).transpose(1, 2)
