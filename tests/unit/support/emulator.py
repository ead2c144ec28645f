"""A FlashAttention-2 kernel emulated in torch on the CPU: every rounding explicit, every bug injectable.

It rounds where ``Arithmetic`` says that a kernel may, as badly as it may: elementary functions err by random
amounts up to their documented errors, sums run in any order or truncate like a tensor core's. All heads and
the whole batch are computed at once, so a batch of random problems costs little more than one.

Values are float32 tensors throughout; a cast to a narrower format rounds them to values of that format.
"""

import math
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from reference.arithmetic import BFLOAT16, FORMATS, HOPPER_FP8_ROUNDOFF, HOPPER_FP8_TERMS, Arithmetic, Format
from reference.dropout import keep_mask
from reference.heads import fold, unfold
from reference.mask_pattern import NO_PATTERN, MaskPattern
from reference.masks import blocks, visible

BUGS = (
    "last_key_dropped",
    "causal_one_more",
    "causal_one_less",
    "causal_wrong_in_one_row",
    "one_cell_dropped",
    "accumulator_16bit",
    "p_in_bfloat16",
    "scores_16bit",
    "alpha_not_on_l",
    "alpha_not_on_acc",
    "scale_off_by_1_percent",
    "lse_base_2",
    "padding_unmasked",
    "key_tiles_swapped",
    "dk_unscaled",
    "delta_rolled",
    "delta_zero",
)

Sums = Literal["gemm", "shuffled", "truncated"]
SUMS: tuple[Sums, ...] = ("gemm", "shuffled", "truncated")

LOG2_E, LN_2 = torch.tensor(1 / math.log(2)), torch.tensor(math.log(2))

TENSOR_CORE_TERMS = 16
"""Products that Hopper's tensor cores add up before they truncate (Khattak & Mikaitis 2025)."""

FP8 = {"float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def cast(x: Tensor, to: Format) -> Tensor:
    """Return float32 ``x`` rounded to a value of the format."""
    if to.name in ("float16", "bfloat16"):
        return x.to(getattr(torch, to.name)).float()
    name = to.name.split()[-1]
    if name in FP8:  # 8-bit operands may have a scale
        factor = FORMATS[name].maximum / to.maximum
        return (x * factor).to(FP8[name]).float() / factor
    dropped = {"float32": 0, "tf32": 13, "tf32_truncated": 13}[to.name]
    half = 0 if to.truncates or dropped == 0 else 1 << (dropped - 1)
    bits = (x.contiguous().view(torch.int32) + half) & -(1 << dropped)
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


def truncated(x: Tensor) -> Tensor:
    """Return float64 values as float32, rounded towards zero."""
    nearest = x.float()
    return torch.where(nearest.double().abs() > x.abs(), nearest.nextafter(torch.zeros(())), nearest)


def aligned(x: Tensor, y: Tensor, smallest_normal: float = 2.0**-14, bits: int = 25) -> Tensor:
    """Return float64 x @ y^T of (M, K) and (N, K), summed as in one step of a tensor core, which limits K.

    Products are cut off ``bits`` below the largest product of the powers of two in two operands, where a subnormal
    has that of the smallest normal number. Of the published models (Fasi et al. 2021; Khattak & Mikaitis 2025)
    this one alone explains that scores of subnormal float16 q changed on an H200 when q was multiplied by 4.
    """
    x, y = x.double()[:, None], y.double()[None]
    lowest = math.frexp(smallest_normal)[1]
    of_x, of_y = (torch.frexp(z).exponent.clamp_min(lowest) - 1 for z in (x, y))
    last = torch.exp2(((of_x + of_y).amax(-1, keepdim=True) - bits).double())
    return ((x * y / last).trunc() * last).sum(-1)


def in_few_bits(x: Tensor) -> Tensor:
    """Return the sum over dimension -2 in 13 bits of its largest term, then in 13 of the sum, as Hopper sums fp8."""

    def unit(top: Tensor) -> Tensor:
        return torch.exp2(torch.frexp(top).exponent.double() - 14)

    of_terms = unit(x.abs().amax(-2, keepdim=True))
    total = ((x / of_terms).trunc() * of_terms).sum(-2)
    return (total / unit(total)).trunc() * unit(total)


@dataclass(frozen=True, kw_only=True)
class Emulator:
    """A kernel for one mask and scale.

    Attributes:
        arithmetic: what is rounded, and where.
        tile_q, tile_k: rows and keys of a tile.
        reverse: the forward walks the keys from last to first.
        sums: matrix products by torch's ``gemm``; ``shuffled``, rounding to nearest; or ``truncated`` after
            every TENSOR_CORE_TERMS products.
        fused: scaling and subtraction of the maximum are one fused multiply-add.
        base_2: exponents are kept in base 2 rather than converted at every exp.
        raised: P is 2^raised times what it is relative to the maximum, as this is subtracted from the maximum before it
            is taken from the scores; in base 2.
        key_padding_mask: (batch, keys) bool, True where a key may be attended.
        pattern: what else hides keys by their places.
        dropout_p, dropout_seed: as ``reference.dropout`` takes them.
        bug: one of BUGS.
        generator: of the errors of elementary functions and the order of sums.
    """

    arithmetic: Arithmetic
    sm_scale: float
    causal: bool = False
    alignment: str = "bottom_right"
    tile_q: int = 64
    tile_k: int = 64
    reverse: bool = False
    sums: Sums = "gemm"
    fused: bool = True
    base_2: bool = True
    raised: float = 0.0
    key_padding_mask: Tensor | None = None
    pattern: MaskPattern = NO_PATTERN
    dropout_p: float = 0.0
    dropout_seed: int = 0
    bug: str | None = None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and lse for q (B, heads_q, M, D) and k, v (B, heads_kv, N, D)."""
        a, heads_q = self.arithmetic, q.shape[1]
        seen, z = self._seen(q, k), self._dropout_factors(q, k)
        q, k, v = (
            self._operand(self._queries(fold(q, k.shape[1]))),
            self._operand(self._keys(k)),
            self._operand(v),
        )
        m = torch.full((*q.shape[:-1], 1), -math.inf)
        l, acc = torch.zeros_like(m), torch.zeros_like(q)
        # A design that takes the softmax over whole rows before the product is emulated as a single tile.
        tiles = list(blocks(k.shape[2], max(1, k.shape[2]) if a.normalised_first else self.tile_k))
        if self.bug == "key_tiles_swapped":
            k = torch.cat([k[:, :, tiles[1]], k[:, :, tiles[0]], k[:, :, tiles[1].stop :]], 2)
        for j in reversed(tiles) if self.reverse else tiles:
            k_j, v_j, seen_j = k[:, :, j], v[:, :, j], seen[..., j]
            if self.bug == "padding_unmasked":
                rest = self.tile_k - v_j.shape[2]
                k_j, v_j = (torch.nn.functional.pad(x, (0, 0, 0, rest)) for x in (k_j, v_j))
                seen_j = torch.nn.functional.pad(seen_j, (0, rest), value=True)
            products = self._products(q, k_j)
            scores = torch.where(seen_j, products * self._unit, -math.inf)
            m_new = torch.maximum(m, scores.amax(-1, keepdim=True) - self.raised)
            if a.largest_weight > 1:
                m_new = torch.where(m_new - m <= (a.lag / math.log(2) if self.base_2 else a.lag), m, m_new)
            shift = m_new.clamp_min(torch.finfo(torch.float32).min)
            p = self._exp2(torch.where(seen_j, self._exponent(products, shift), -math.inf))
            change = m - shift
            alpha = self._exp2(change if self.base_2 else change * LOG2_E)
            m = m_new
            weights = BFLOAT16 if self.bug == "p_in_bfloat16" else a.weights
            added = (cast(p, weights) if a.l_from_rounded_p else p).sum(-1, keepdim=True)
            z_j = z[..., j] if self.dropout_p else z
            rounded = cast(p * 2.0**-self.raised * z_j, weights) * 2.0**self.raised
            before, l = l, l + added if self.bug == "alpha_not_on_l" else l * alpha + added
            if a.normalised_first:
                rounded = cast(self._divide(p, l.clamp_min(1.0)) * z_j, a.weights)
            if a.partial_results:  # acc is the answer to the tiles so far, divided by their sum of weights
                alpha = alpha * before
            acc = acc if self.bug == "alpha_not_on_acc" else acc * alpha
            acc = self._dot(rounded, v_j, acc, together=a.accumulate_terms)
            if a.partial_results:
                acc = self._divide(acc, l.clamp_min(1.0))
            if self.bug == "accumulator_16bit":
                acc = cast(acc, a.output)
        l = torch.where(m == -math.inf, 1.0, l)
        out = acc if a.normalised_first or a.partial_results else self._divide(acc, l)
        m, l = m + self.raised, l * 2.0**-self.raised
        log2_l = l.log2() + self._noise(l, a.log_error) * l.log2().clamp_min(1.0)
        lse = (m + log2_l) * LN_2 if self.base_2 else m + log2_l * LN_2
        if self.bug == "lse_base_2":
            lse = lse * LOG2_E
        return unfold(cast(out, a.output), heads_q), unfold(lse.squeeze(-1), heads_q)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients (dq, dk, dv) from the inputs and the results of ``forward``."""
        a, heads_q, heads_kv = self.arithmetic, q.shape[1], k.shape[1]
        seen, z = self._seen(q, k), self._dropout_factors(q, k)
        group = heads_q // heads_kv
        q, dout = (self._operand(x) for x in (self._queries(fold(q, heads_kv)), fold(dout, heads_kv)))
        out, lse = fold(out, heads_kv), fold(lse, heads_kv)[..., None]
        keys, v = self._operand(self._keys(k)), self._operand(v)
        shift = lse.clamp_min(torch.finfo(torch.float32).min)
        exponent = self._exponent(self._products(q, keys), shift * LOG2_E if self.base_2 else shift)
        p = torch.where(seen & (lse > -math.inf), self._exp2(exponent), 0.0)
        grad_p = self._dot(dout, v.mT) * z
        if self.bug == "delta_rolled":
            out = out.roll(1, 2)
        delta = (out * dout if a.delta == "out" else p * grad_p).sum(-1, keepdim=True)
        if self.bug == "delta_zero":
            delta = torch.zeros_like(delta)
        weights = BFLOAT16 if self.bug == "p_in_bfloat16" else a.weights
        before, after = (self._scale, 1.0) if a.ds_scaled else (1.0, self._scale)
        rounded = cast(p * z, weights)
        factor = cast(p, weights) if a.ds_from_rounded_p else p
        grad_s = cast(factor * (grad_p - delta) * torch.tensor(before), weights)
        scale = torch.tensor(after)
        if a.qk_prescaled or a.k_prescaled:
            scale = LN_2 if self.base_2 else torch.ones(())
        dv = self._sum_over_rows(rounded, dout, torch.ones(()), group)
        of_q = torch.tensor(after) if a.k_prescaled else scale
        dk = self._sum_over_rows(grad_s, q, torch.ones(()) if self.bug == "dk_unscaled" else of_q, group)
        dq = cast(self._tiled(grad_s, keys, self.tile_k, a.dq_keys) * scale, a.output)
        if a.qk_prescaled:
            dq, dk = (cast(x * f, a.output) for x, f in ((dq, self._roots[0]), (dk, self._roots[1])))
        return unfold(dq, heads_q), dk, dv

    @property
    def _scale(self) -> float:
        return self.sm_scale * (1.01 if self.bug == "scale_off_by_1_percent" else 1.0)

    @property
    def _unit(self) -> Tensor:
        """Return the factor that turns products of q and keys into scores."""
        if self.arithmetic.k_prescaled or self.arithmetic.qk_prescaled:
            return torch.ones(())
        return torch.tensor(self._scale / math.log(2) if self.base_2 else self._scale)

    def _seen(self, q: Tensor, k: Tensor) -> Tensor:
        """Return which keys each row sees, (rows, N) or (B, 1, rows, N) bool; bugs change the middle of the mask."""
        rows, keys = q.shape[2], k.shape[2]
        seen = visible(rows, keys, self.causal, self.alignment, "cpu", pattern=self.pattern)
        seen = torch.ones(rows, keys, dtype=torch.bool) if seen is None else seen.reshape(rows, keys)
        offset = keys - rows if self.alignment == "bottom_right" else 0
        if self.bug == "last_key_dropped":
            seen[:, -1] = False
        elif self.bug == "causal_one_more":
            seen = torch.ones_like(seen).tril(offset + 1)
        elif self.bug == "causal_one_less":
            seen = seen.tril(offset - 1)
        elif self.bug == "causal_wrong_in_one_row":
            seen[rows // 2, rows // 2 + offset + 1] = True
        elif self.bug == "one_cell_dropped":
            seen[rows // 2, keys // 4] = False
        seen = seen.repeat(q.shape[1] // k.shape[1], 1)
        return seen if self.key_padding_mask is None else seen & self.key_padding_mask[:, None, None]

    def _dropout_factors(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the factors by which dropout multiplies weights, (B, heads_kv, rows, N), or 1."""
        if not self.dropout_p:
            return torch.ones(())
        keep = keep_mask((*q.shape[:3], k.shape[2]), dropout_p=self.dropout_p, seed=self.dropout_seed)
        return fold(keep.float() * torch.tensor(1 / (1 - self.dropout_p)), k.shape[1])

    def _operand(self, x: Tensor) -> Tensor:
        """Return an operand as the matrix unit reads it."""
        return cast(x, self.arithmetic.weights) if self.arithmetic.operand_rounding else x

    @property
    def _roots(self) -> tuple[Tensor, Tensor]:
        """Return the factors of q and k whose product is the scale."""
        root = math.sqrt(abs(self._scale) / (math.log(2) if self.base_2 else 1.0))
        return torch.tensor(math.copysign(root, self._scale)), torch.tensor(root)

    def _queries(self, q: Tensor) -> Tensor:
        return cast(q * self._roots[0], self.arithmetic.weights) if self.arithmetic.qk_prescaled else q

    def _keys(self, k: Tensor) -> Tensor:
        if self.arithmetic.qk_prescaled:
            return cast(k * self._roots[1], self.arithmetic.weights)
        if not self.arithmetic.k_prescaled:
            return k
        return cast(k * torch.tensor(self._scale / math.log(2)), self.arithmetic.weights)

    def _products(self, q: Tensor, keys: Tensor) -> Tensor:
        together = {None: self.arithmetic.accumulate_terms, HOPPER_FP8_ROUNDOFF: q.shape[-1]}
        products = self._dot(q, keys.mT, together=together.get(self.arithmetic.score_accumulate))
        return cast(products, self.arithmetic.output) if self.bug == "scores_16bit" else products

    def _exponent(self, products: Tensor, shift: Tensor) -> Tensor:
        """Return log2 of the weights: scores minus ``shift``, which is in the kernel's base."""
        if self.fused:
            x = (products.double() * self._unit.double() - shift.double()).float()
        else:
            x = products * self._unit - shift
        return x if self.base_2 else x * LOG2_E

    def _noise(self, like: Tensor, error: float) -> Tensor:
        """Return random errors that are at most ``error`` together with the rounding to float32 that follows."""
        return (2 * torch.rand(like.shape, generator=self.generator) - 1) * (error - 2.0**-24)

    def _exp2(self, x: Tensor) -> Tensor:
        """Return 2^x as ``ex2.approx.ftz.f32`` has it: exact at 0 (PTX ISA), and 0 below 2^-126."""
        error = self._noise(x, self.arithmetic.exp_error).masked_fill(x == 0, 0.0)
        y = torch.exp2(x.double()) * (1 + error.double())
        return torch.where(y < 2.0**-126, 0.0, y).float()

    def _divide(self, x: Tensor, y: Tensor) -> Tensor:
        return (x.double() / y.double() * (1 + self._noise(x, self.arithmetic.div_error).double())).float()

    def _dot(self, x: Tensor, y: Tensor, acc: Tensor | None = None, *, together: int | None = None) -> Tensor:
        """Return float32 acc + x @ y; with ``together``, so many products of fp8 are summed as a Hopper does it."""
        acc = torch.zeros(*x.shape[:-1], y.shape[-1]) if acc is None else acc
        terms = x.shape[-1]
        if together is not None:
            for first in range(0, terms, together):
                total = torch.zeros_like(acc, dtype=torch.float64)
                for at in range(first, min(first + together, terms), HOPPER_FP8_TERMS):
                    some = slice(at, min(at + HOPPER_FP8_TERMS, first + together, terms))
                    products = x[..., some, None].double() * y[..., None, some, :]
                    total = in_few_bits(torch.cat([total[..., None, :], products], -2))
                acc = acc + total.float()
            return acc
        if self.sums == "gemm":
            return acc + x @ y
        if self.sums == "truncated":
            for part in blocks(terms, TENSOR_CORE_TERMS):
                acc = truncated(acc.double() + x[..., part].double() @ y[..., part, :].double())
            return acc
        order = torch.randperm(terms, generator=self.generator)
        for some in order.split(int(torch.randint(1, 9, (), generator=self.generator))):
            acc = acc + x[..., some] @ y[..., some, :]
        return acc

    def _tiled(self, x: Tensor, y: Tensor, tile: int, stored_every: int | None) -> Tensor:
        """Return float32 x @ y, summed tile by tile; a kernel may store the sum in the output's format in between."""
        acc = torch.zeros(*x.shape[:-1], y.shape[-1])
        for part in blocks(x.shape[-1], stored_every or tile):
            acc = self._dot(x[..., part], y[..., part, :], acc)
            if part.stop - part.start == stored_every or self.bug == "accumulator_16bit":
                acc = cast(acc, self.arithmetic.output)
        return acc

    def _sum_over_rows(self, x: Tensor, y: Tensor, scale: Tensor, group: int) -> Tensor:
        """Return scaled x^T y in the output's format.

        The heads of a group are summed before or after rounding or, from the last to the first, in that format.
        """
        a = self.arithmetic
        heads = group if a.dk_dv_per_head or a.rounded_group_sums else 1
        pairs = zip(x.chunk(heads, 2), y.chunk(heads, 2), strict=True)
        sums = [cast(self._tiled(p.mT, o, self.tile_q, a.dk_dv_rows) * scale, a.output) for p, o in pairs]
        if a.rounded_group_sums:
            return reduce(lambda x, y: cast(x + y, a.output), reversed(sums))
        return cast(torch.stack(sums).sum(0), a.output)
