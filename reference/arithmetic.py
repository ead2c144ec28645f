"""What a kernel is allowed to round, and where: the description from which its error bounds are computed.

Unit roundoffs follow Higham, *Accuracy and Stability of Numerical Algorithms*, section 2.2. Every constant
below is a property of hardware or of a format; none was tuned to make a kernel pass.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

FP32_ROUNDOFF = 2.0**-24
"""Unit roundoff of IEEE float32, round to nearest; the unit in which accumulation errors are counted."""

EX2_APPROX_ERROR = 2.0**-22
"""Relative error of PTX ``ex2.approx.ftz.f32`` (PTX ISA), which ``tl.exp2`` and ``tl.exp`` lower to."""

LG2_APPROX_ERROR = 2.0**-22
"""Error of PTX ``lg2.approx.f32``, absolute for arguments in [1/2, 2] and relative elsewhere."""

DIV_FULL_ERROR = 2.0**-22
"""Relative error of PTX ``div.full.f32``: 2 ulp (PTX ISA)."""

TANH_ERROR = 2.0**-20
"""Absolute error of a tanh made of an exponential e = exp(-2 x), 16 U: as 2 / (1 + e) - 1 it errs by 2 U for that of e,
as the derivative by log e is 1/2 at most, by 2 U for its argument's, by 10 U for those of the sum and of the quotient,
which are doubled, and by U for the subtraction; as (1 - e) / (1 + e) by less."""

HOPPER_FP8_TERMS = 32
HOPPER_FP8_ROUNDOFF = 33 / 32 * 2.0**-13
"""A Hopper's tensor core aligns 32 fp8 products to the largest, with 13 fraction bits, and truncates: together
with the sum's own truncation at most 33 * 2^-13 of the largest product (Khattak & Mikaitis 2025)."""


@dataclass(frozen=True)
class Format:
    """A floating-point format and the way values are cast to it.

    ``roundoff`` bounds the relative error of a cast of a normal value, ``underflow`` the absolute error
    of a cast near zero, ``maximum`` is the largest finite value. A cast that ``truncates`` errs in one
    direction, so its errors don't average out.
    """

    name: str
    roundoff: float
    underflow: float
    maximum: float
    truncates: bool = False

    def scaled(self, factor: float) -> "Format":
        """The format of values that are multiplied by ``factor``, a power of two, before their cast."""
        return replace(
            self,
            name=f"{factor:g} * {self.name}",
            underflow=self.underflow / factor,
            maximum=self.maximum / factor,
        )


FLOAT16 = Format("float16", 2.0**-11, 2.0**-25, 65504.0)
# exp2 flushes below 2^-126, so bfloat16 and float32 subnormals are lost whole rather than rounded.
BFLOAT16 = Format("bfloat16", 2.0**-8, 2.0**-126, 3.3895313892515355e38)
FLOAT32 = Format("float32", FP32_ROUNDOFF, 2.0**-126, 3.4028234663852886e38)
TF32 = Format("tf32", 2.0**-11, 2.0**-126, 3.4028234663852886e38)
# Float32 as two tf32 halves, without the product of the small ones (CUTLASS's OpMultiplyAddFastF32, tf32x3).
TF32X3 = Format("tf32x3", 2.0**-21, 2.0**-126, 3.4028234663852886e38)
# Hopper's wgmma ignores the low 13 bits of a float32 operand: a truncation, so the error doubles.
TF32_TRUNCATED = Format("tf32_truncated", 2.0**-10, 2.0**-126, 3.4028234663852886e38, truncates=True)
# OCP 8-bit formats (Micikevicius et al. 2022, arXiv 2209.05433). e4m3 has no infinity.
FLOAT8_E4M3 = Format("float8_e4m3", 2.0**-4, 2.0**-10, 448.0)
FLOAT8_E5M2 = Format("float8_e5m2", 2.0**-3, 2.0**-17, 57344.0)

FORMATS = {
    f.name: f
    for f in (
        FLOAT16,
        BFLOAT16,
        FLOAT32,
        TF32,
        TF32X3,
        TF32_TRUNCATED,
        FLOAT8_E4M3,
        FLOAT8_E5M2,
    )
}


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """How q, k and v are rounded before anything else is done with them.

    The rows of a head are cut into blocks. A block is divided by the power of two that brings the largest of its
    finite entries into [2^7, 2^8), though by no less than SMALLEST_SCALE, and rounded to nearest even. Powers of
    two divide exactly, so the cast is the only rounding and what the kernel multiplies is known to the last
    bit: errors are bounded from there. Entries that are not finite become nan; a rotation spreads them over
    their row.

    Attributes:
        format: the format of the quantised entries.
        block_q, block_k: rows of q, and of k and v, that share a scale. None: all rows of a head share one.
        rotation: q and k, padded with zeros to a power of two and 32 columns at least, are multiplied by a
            random-sign Hadamard matrix first: column j is negated where bit j of ``rotation`` is set, and all are
            divided by their number; then each row goes through the fast transform in float32, which begins with
            sums and differences of neighbouring columns.
            None: they are not rotated.
        only_v: v alone is rounded, without a scale: entries beyond the format's largest become that, and entries
            that are not finite stay as they are. q and k are not quantised.
    """

    format: Format
    block_q: int | None = None
    block_k: int | None = None
    rotation: int | None = None
    only_v: bool = False

    def __str__(self) -> str:
        if self.only_v:
            return f"of v to {self.format.name}"
        rows = f"{self.block_q} rows of q, {self.block_k} of k and v" if self.block_q else "a head"
        return f"to {self.format.name}, a scale for {rows}{', rotated' if self.rotation else ''}"


SMALLEST_SCALE = 2.0**-100
"""The smallest scale that a block may have; it gets it if all its entries lie below 2^-92. Then even the product of two
scales is a normal number."""


PARTIAL_STORES = 8
"""At most this many parts of a sum are merged one after the other, where each is stored in the output's format, or
merged by difference."""


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The roundings that a kernel may make. More of them give wider bounds, so declare only what the source shows.

    Attributes:
        weights: format that P and dS are cast to before they enter a matrix product.
        output: format that out and gradients are stored in.
        operand_rounding: relative rounding of each raw operand of a product (0 where products are exact:
            16-bit inputs; 2^-10 for float32 inputs through Hopper's tf32).
        accumulate: relative error of one step of a float32 accumulation: 2^-24 for IEEE additions in any order and
            for Hopper's and Blackwell's tensor cores, 1.4 times that on A100, 3 times on V100 (Fasi et al. 2021).
        smallest_operand: the smallest normal number of the inputs' format if tensor cores sum their products, else 0.
            These align products by the exponents of the operands, and a subnormal operand has the exponent of the
            smallest normal number, so that its products keep fewer bits. If the inputs are quantised, this is in
            units of a block's scale, and in calls with 8-bit inputs in units of theirs.
        accumulate_terms: how many products are summed with roundoff ``accumulate``; their sums are then added in
            IEEE float32. None: one accumulation takes all products.
        score_accumulate: the roundoff of one step of a score, where its operands are wider than those of the other
            products and one accumulation takes them all. None: scores are summed like other products.
        exp_error: relative error of one exponential.
        tanh_error: absolute error of one tanh, where scores are soft-capped.
        log_error: error of the logarithm of l, relative to that logarithm, or absolute where it lies between -1 and 1.
        div_error: relative error of one division.
        tile_min: the smallest number of keys that one step of the softmax loop takes.
        tile_max: the largest number of keys that one step of the softmax loop takes.
        largest_weight: the largest P before it is divided by l. It is above 1 if rescaling is lazy, as in
            FlashAttention-4: P is taken relative to an earlier maximum of its row until a score exceeds that by
            log(largest_weight).
        rounded_reference: what is subtracted from the scores of a row need be none of them, such as their maximum
            rounded up to an integer, so that no P is exactly 1 before it is divided by l. Such a P is in float32.
        rounded_largest_weight: the same with a P that is cast: the largest one of a row is between 1/2 and 1, and is
            rounded like the others.
        normalised_first: P is divided by l before it is cast and multiplied by v (softmax as a whole, then a
            matrix product), rather than the product by l at the end.
        partial_results: results over parts of the keys are divided by their own l and then merged (V1, split
            keys), so that even sums of integers do not come out exact. Each merge rounds the result so far once more
            (``reference.bounds.forward``).
        merged: into how many parts the keys are split, if each part s gives a normalised float32 out_s and an lse_s,
            and out is merged from these.
        merged_by_lse: out is the sum of the out_s with weights exp(lse_s - lse), which need not sum to 1, rather
            than their weighted mean.
        merged_by_difference: out and lse of one part after the other are merged into those so far, as ring attention
            does it: ``out -= sigmoid(lse_s - lse) * (out - out_s)``, at most eight parts (``PARTIAL_STORES``). What a
            part before has left in out vanishes but for a rounding of its size, where its weight vanishes; likewise
            its gradients, where autograd differentiates the merges.
        rounded_partials: partial results, of out and of the gradients, are stored in ``output`` before they are
            merged, so that a sum is rounded up to eight times (``PARTIAL_STORES``) before its last store.
        l_from_rounded_p: the softmax sum is taken over P after its cast.
        k_prescaled: scores are the product of q with ``round(k * sm_scale * log2 e)``, and the gradient of that
            product may be stored before it is scaled.
        q_prescaled: scores are the product of k with ``round(q * sm_scale)`` or ``round(q * sm_scale * log2 e)``,
            and the gradient of that product may be stored before it is scaled.
        qk_prescaled: scores are the product of ``round(q * r)`` and ``round(k * r)``, where r is the root of |sm_scale|
            or of |sm_scale| log2 e, and the gradients of both products may be stored before they are scaled.
        rounded_bias: what is added to scores is rounded to ``output``, up to twice: a bias once it is multiplied by
            log2 e, a slope of ALiBi, its product with the distance, or the sum of the two. The gradient of a bias may
            be stored before it is scaled.
        rounded_scores: everything between two matrix products is in the format of the weights: scores before and
            after they are scaled, dP, and dS before and after it is scaled.
        delta: how delta is computed. ``out``: rowsum(dout * out) from the stored out. ``probabilities``:
            rowsum(P * dP) from P in float32. ``weights``: rowsum(P * dP) from P after its cast, or rowsum(dout * out)
            before out is stored. An envelope (``reference.family``) has ``any``, which allows all three.
        saved_weights: the backward reads the P that the forward saved, rather than making it from the scores and the
            stored lse.
        ds_from_rounded_p: dS is the product of dP - delta with P as it was cast for its own product with dout.
        ds_scaled: dS is multiplied by sm_scale before its cast, so that a small scale makes it underflow and a large
            one overflow. An envelope has ``any``, which allows both.
        dk_dv_per_head: with grouped heads, each query head's dk and dv is stored in ``output`` before the sum over
            the group, where it may overflow although the sum does not.
        rounded_group_sums: dk and dv of the query heads of a group are stored in ``output``, and added one after the
            other in that format, so that each running sum is rounded. Autograd does so with the gradients of a key head
            that several calls share.
        dk_dv_rows: running sums of dk and dv are rounded to ``output`` after every so many query rows. None: they stay
            in float32 to the end.
        dq_keys: the running sum of dq is rounded to ``output`` after every so many keys. None: it stays in float32 to
            the end.
        dq_atomic: dq is summed over key tiles by float32 atomic adds, which flush subnormals (PTX ISA, atom.add).
        lse_in_base_2: lse is returned as a logarithm to base 2, as the claim ``lse_base`` says.
        quantisation: how q, k and v are quantised. Results are judged at the quantised operands: what is lost
            in them is the algorithm's error, not the kernel's.
    """

    weights: Format
    output: Format
    operand_rounding: float = 0.0
    accumulate: float = FP32_ROUNDOFF
    smallest_operand: float = 0.0
    accumulate_terms: int | None = None
    score_accumulate: float | None = None
    exp_error: float = EX2_APPROX_ERROR
    tanh_error: float = TANH_ERROR
    log_error: float = LG2_APPROX_ERROR
    div_error: float = DIV_FULL_ERROR
    tile_min: int = 16
    tile_max: int = 256
    largest_weight: int = 1
    rounded_reference: bool = False
    rounded_largest_weight: bool = False
    normalised_first: bool = False
    partial_results: bool = False
    merged: int = 1
    merged_by_lse: bool = False
    merged_by_difference: bool = False
    rounded_partials: bool = False
    l_from_rounded_p: bool = False
    k_prescaled: bool = False
    q_prescaled: bool = False
    qk_prescaled: bool = False
    rounded_bias: bool = False
    rounded_scores: bool = False
    delta: Literal["out", "probabilities", "weights", "any"] = "out"
    saved_weights: bool = False
    ds_from_rounded_p: bool = False
    ds_scaled: bool | Literal["any"] = False
    dk_dv_per_head: bool = False
    rounded_group_sums: bool = False
    dk_dv_rows: int | None = None
    dq_keys: int | None = None
    dq_atomic: bool = False
    lse_in_base_2: bool = False
    quantisation: Quantisation | None = None

    @property
    def lse_conversion(self) -> float:
        """Error, relative to lse, of the conversion of a natural lse to base 2; 0 if lse is returned in base e.

        A kernel returns fl(lse c) with c = fl(log2 e), which differs from log2 e by 0.224 U of it. So the returned
        number times ln 2 differs from lse by one rounding and the error of the constant, (1 + 0.224) U < 5/4 U of lse.
        The product with ln 2 in float64, by which it is judged, adds 2^-52, which is far below the difference. A kernel
        that takes the logarithm in base 2 and returns it as it is makes no such error.
        """
        return 1.25 * FP32_ROUNDOFF if self.lse_in_base_2 else 0.0

    @property
    def difference_error(self) -> float:
        """Error of all merges by difference, relative to the largest distance between two partial results.

        The roundings of the sigmoid's sum, of the difference and of the product err by U each, and its quotient by
        ``div_error``, all relative to the move s_t (out - out_s). Later merges leave (1 - s) of an error, and the sum
        of all s_t times the (1 - s) of later merges is 1 at most, as these are the final weights of the parts.
        """
        return 3 * FP32_ROUNDOFF + self.div_error if self.merged_by_difference else 0.0

    @property
    def rotates(self) -> bool:
        """Whether q and k are rotated before they are quantised, so that no input is certain to pass unchanged."""
        return self.quantisation is not None and self.quantisation.rotation is not None

    @property
    def lag(self) -> float:
        """How far a score may lie above the maximum that P is taken relative to, in natural units."""
        return math.log(self.largest_weight)

    def accumulation(self, terms: int) -> float:
        """Error of a sum of ``terms`` products, relative to the sum of their sizes."""
        if self.accumulate_terms is None:
            return terms * self.accumulate
        return min(terms, self.accumulate_terms) * self.accumulate + terms * FP32_ROUNDOFF

    def score_accumulation(self, terms: int) -> float:
        """Error of a score, a sum of ``terms`` products, relative to the sum of their sizes."""
        return self.accumulation(terms) if self.score_accumulate is None else terms * self.score_accumulate

    def ds_units(self, sm_scale: float) -> tuple[float, float]:
        """Return the smallest and the largest factor by which dS may be multiplied before its cast."""
        scaled = abs(sm_scale) or 1.0
        if self.ds_scaled == "any" or self.rounded_scores:
            return min(1.0, scaled), max(1.0, scaled)
        return (scaled, scaled) if self.ds_scaled else (1.0, 1.0)

    @property
    def operand_floor(self) -> float:
        """Below this, 2^-126, which rounding may lose of any operand, is more than ``operand_rounding`` of it."""
        return 2.0**-126 / self.operand_rounding if self.operand_rounding else 0.0

    @property
    def product_floor(self) -> float:
        """In products of two inputs, q k^T and dout v^T, sums err as if every nonzero operand were at least this large.

        Products of P or dS with an input need no such floor. For all their subnormals, 16 products of float16 lose
        2^-35 of the largest weight, and the cast of that weight alone may lose as much, 2^-11 of the smallest
        subnormal. The same holds in 8 bits: 32 products of e5m2 lose 2^-22, and the cast 2^-3 of 2^-16.
        """
        return max(self.operand_floor, self.smallest_operand)
