"""Value families: what the entries of a tensor look like, each chosen for a class of bug.

A tensor is drawn in float32 and cast to its dtype once. The reference upcasts that tensor, so no rounding of
the inputs can hide an error of the kernel.
"""

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

Shape = tuple[int, int, int, int]


def fill(family: str, shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """A contiguous CPU tensor (batch, heads, seqlen, head_dim) of ``dtype``, determined by the generator.

    Raises ValueError for a family that is not one of ``FAMILIES``.
    """
    if family not in _FAMILIES:
        raise ValueError(f"family: got {family!r}, expected one of {FAMILIES}")
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    return _FAMILIES[family](shape, dtype, generator).to(dtype)


def _zeros(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """All weights equal where q or k is zero: counts of keys, padding; a base for spikes."""
    return torch.zeros(shape)


def _ones(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Convex combinations of ones are one: normalisation."""
    return torch.ones(shape)


def _normal(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Standard normal, the data of most published tests."""
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def _wide(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Standard deviation 5; against a normal partner, so are the logits': rescaling by a new maximum."""
    return 5.0 * _normal(shape, dtype, generator)


def _positive(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """All 5 or more; against its like all logits are large and positive: a softmax without its maximum."""
    return _normal(shape, dtype, generator).abs() + 5.0


def _negative(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """All -5 or less; against positive ones every logit lies far below 0.

    With lse < -88.7, -log of float32's maximum, a padded key of score 0 gets the weight exp(0 - lse) = inf.
    """
    return -_positive(shape, dtype, generator)


def _near_ties(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """A large vector common to the rows of a head, plus noise of a few units in the last place of bfloat16.

    Logits nearly equal at a large magnitude: scores or maxima kept in too few bits.
    """
    batch, heads, _, head_dim = shape
    common = _normal((batch, heads, 1, head_dim), dtype, generator)
    return 8.0 * common + 0.1 * _normal(shape, dtype, generator)


def _dominant(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Standard normal, one row of each head 32 times larger: a key with all the weight, in any tile."""
    batch, heads, seqlen, _ = shape
    row = torch.randint(0, seqlen, (batch, heads, 1, 1), generator=generator)
    return _normal(shape, dtype, generator) * torch.where(torch.arange(seqlen)[:, None] == row, 32.0, 1.0)


def _outliers(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Standard normal, one entry in a thousand, and one of each head at least, of standard deviation 10.

    FlashAttention-3's test of numerical error (Table 3): precision lost to scales that outliers set.
    """
    chance = torch.rand(shape, generator=generator)
    chosen = chance <= chance.amin((-2, -1), keepdim=True).clamp(min=1e-3)
    return _normal(shape, dtype, generator) * torch.where(chosen, 10.0, 1.0)


def _integers(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Sparse integers from -2 to 2, whose products and sums are exact: mistaken indices."""
    kept = torch.randint(0, 4, shape, generator=generator) == 0
    return (torch.randint(-2, 3, shape, generator=generator) * kept).float()


def _subnormal(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Multiples of the smallest subnormal, below the smallest normal: flushing to zero, needless scaling."""
    finfo = torch.finfo(dtype)
    multiples = round(1 / finfo.eps)
    return torch.randint(1 - multiples, multiples, shape, generator=generator) * (finfo.tiny * finfo.eps)


def _huge(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Random signs, magnitudes from half of a peak up to it: overflow.

    The peak is the dtype's maximum or, half of the time where products of two such entries overflow float32,
    the largest whose products still sum to finite scores.
    """
    maximum = torch.finfo(dtype).max
    summable = math.sqrt(torch.finfo(torch.float32).max) / 64
    at_maximum = maximum <= summable or torch.rand((), generator=generator) < 0.5
    peak = maximum if at_maximum else summable
    magnitude = torch.rand(shape, generator=generator) * 0.5 + 0.5
    return peak * torch.where(torch.rand(shape, generator=generator) < 0.5, -magnitude, magnitude)


def _tiny_logits(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Standard deviation 1e-3: nearly uniform weights, whose casts share their error."""
    return 1e-3 * _normal(shape, dtype, generator)


def _duplicates(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Four rows, repeated in random order: equal weights, whose casts all round the same way."""
    batch, heads, seqlen, head_dim = shape
    rows = _normal((batch, heads, 4, head_dim), dtype, generator)
    return rows[:, :, torch.randint(0, 4, (seqlen,), generator=generator)]


def _constant(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """One value throughout, between 2^-8 and 2^18: scores all equal, and so large that their rounding shows.

    Where the maximum and the score are scaled along different paths, exp(score - maximum) overflows.
    """
    exponent = torch.rand((), generator=generator) * 26.0 - 8.0
    return torch.full(shape, min(float(torch.exp2(exponent)), torch.finfo(dtype).max))


_FAMILIES: dict[str, Callable[[Shape, torch.dtype, Generator], Tensor]] = {
    "zeros": _zeros,
    "ones": _ones,
    "normal": _normal,
    "wide": _wide,
    "positive": _positive,
    "negative": _negative,
    "near_ties": _near_ties,
    "dominant": _dominant,
    "outliers": _outliers,
    "integers": _integers,
    "subnormal": _subnormal,
    "huge": _huge,
    "tiny_logits": _tiny_logits,
    "duplicates": _duplicates,
    "constant": _constant,
}
FAMILIES = tuple(_FAMILIES)
"""Simplest first: the first is what a failing case shrinks towards."""
