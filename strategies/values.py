"""Value families: what the entries of a tensor look like. Each family is chosen to expose a class of bug.

A tensor is drawn in float32 and cast to its dtype once. The reference upcasts that same tensor, so no rounding of
the inputs can hide an error of the kernel. What is drawn depends on no default dtype, default device or generator of
the process, which a kernel may set.
"""

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

Shape = tuple[int, int, int, int]


def fill(family: str, shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Draw a contiguous CPU tensor (batch, heads, seqlen, head_dim) of ``dtype``, determined by the generator.

    Raises ValueError for a family that is not one of ``FAMILIES``.
    """
    if family not in _FAMILIES:
        raise ValueError(f"family: got {family!r}, expected one of {FAMILIES}")
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return _FAMILIES[family](shape, dtype, generator).to(dtype)


def _zeros(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Zeros, a base for spikes. If q or k is zero all weights are equal, which shows a wrong count of keys."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _ones(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Ones. An output of values that are all one is one, unless the normalisation is wrong."""
    return torch.ones(shape, dtype=torch.float32, device="cpu")


def _normal(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Standard normal entries, the data of most published tests."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _wide(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Standard deviation 5, and so have logits against normal partners: exposes wrong rescaling by a new maximum."""
    return _normal(shape, dtype, generator).mul_(5.0)


def _positive(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Entries of 5 or more: logits of such q and k are large, and overflow if the maximum is not subtracted."""
    return _normal(shape, dtype, generator).abs_().add_(5.0)


def _negative(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Entries of -5 or less: against positive ones every logit lies far below 0.

    With lse < -88.7, which is -log of float32's maximum, a padded key of score 0 gets the weight exp(0 - lse) = inf.
    """
    return _positive(shape, dtype, generator).neg_()


def _near_ties(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """A large vector common to the rows of a head, plus noise of a few units in the last place of bfloat16.

    Logits are nearly equal at a large magnitude, which exposes scores or maxima kept in too few bits.
    """
    batch, heads, _, head_dim = shape
    common = _normal((batch, heads, 1, head_dim), dtype, generator)
    return _normal(shape, dtype, generator).mul_(0.1).add_(common.mul_(8.0))


def _dominant(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Standard normal, but one row of each head is 32 times larger: one key, in any tile, has all the weight."""
    batch, heads, seqlen, _ = shape
    row = _whole(0, seqlen, (batch, heads, 1, 1), generator)
    is_row = torch.arange(seqlen, device="cpu")[:, None] == row
    return _normal(shape, dtype, generator).mul_(torch.where(is_row, 32, 1))


def _outliers(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Standard normal, but one entry in a thousand, and at least one in each head, has standard deviation 10.

    This is FlashAttention-3's test of numerical error (Table 3): outliers set the scales of a quantisation, and the
    other entries lose precision.
    """
    chance = _uniform(shape, generator)
    chosen = chance <= chance.amin((-2, -1), keepdim=True).clamp(min=1e-3)
    return _normal(shape, dtype, generator).mul_(torch.where(chosen, 10, 1))


def _integers(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Sparse integers from -2 to 2, whose products and sums are exact: a wrong index shows without any tolerance."""
    kept = _whole(0, 4, shape, generator) == 0
    return _whole(-2, 3, shape, generator).mul_(kept).float()


def _subnormal(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Multiples of the smallest subnormal, below the smallest normal: exposes flushing to zero and needless scaling."""
    finfo = torch.finfo(dtype)
    multiples = round(1 / finfo.eps)
    return _whole(1 - multiples, multiples, shape, generator).float() * (finfo.tiny * finfo.eps)


def _huge(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Entries of random sign and of magnitudes between half a peak and the peak: exposes overflow.

    The peak is the dtype's maximum. Where products of two such entries overflow float32, half of the draws take
    instead the largest peak whose products still sum to finite scores.
    """
    maximum = torch.finfo(dtype).max
    summable = math.sqrt(torch.finfo(torch.float32).max) / 64
    at_maximum = maximum <= summable or _uniform((), generator) < 0.5
    peak = maximum if at_maximum else summable
    magnitude = _uniform(shape, generator) * 0.5 + 0.5
    return peak * torch.where(_uniform(shape, generator) < 0.5, -magnitude, magnitude)


def _tiny_logits(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Standard deviation 1e-3: weights are nearly uniform, so that their casts have the same error."""
    return _normal(shape, dtype, generator).mul_(1e-3)


def _duplicates(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """Four rows, repeated in random order: many weights are equal, and their casts all round the same way."""
    batch, heads, seqlen, head_dim = shape
    rows = _normal((batch, heads, 4, head_dim), dtype, generator)
    return rows[:, :, _whole(0, 4, (seqlen,), generator)]


def _constant(shape: Shape, dtype: torch.dtype, generator: Generator) -> Tensor:
    """One value throughout, between 2^-8 and 2^18: scores are all equal, and so large that their rounding shows.

    Where the maximum and the score are scaled along different paths, exp(score - maximum) overflows.
    """
    exponent = _uniform((), generator) * 26.0 - 8.0
    value = min(float(torch.exp2(exponent)), torch.finfo(dtype).max)
    return torch.full(shape, value, dtype=torch.float32, device="cpu")


def _uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Draw float32 numbers from 0 to 1."""
    return torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu")


def _whole(low: int, high: int, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Draw integers from ``low`` on that are less than ``high``."""
    return torch.randint(low, high, shape, generator=generator, device="cpu")


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
"""Names of the families, simplest first: a failing case shrinks towards the first."""
