"""Scales: sm_scale, the change of base, and factors of single tensors."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from reference.alternatives.declaration import (
    BACKWARD,
    DQ,
    EVERY,
    OUT_AND_LSE,
    Change,
    Given,
    Moved,
    alternative,
)
from reference.alternatives.masks import TILES
from reference.bounds import Exact
from reference.heads import fold, unfold

LEAST = 2.0**-12
"""The least distance of a fitted factor from 1, and the least fitted shift.

An exponential that errs by 1e-4, as that of a less precise design may, can err so everywhere.
"""
OTHER_SCALES: dict[str, Callable[[float, int, int], float]] = {
    "the default 1 / sqrt(head_dim), whatever is given": lambda given, d, d_v: d**-0.5,
    "left out": lambda given, d, d_v: 1.0,
    "applied twice": lambda given, d, d_v: given * given,
    "its absolute value": lambda given, d, d_v: abs(given),
    "log2(e) times as large": lambda given, d, d_v: given * math.log2(math.e),
    "ln 2 times as large": lambda given, d, d_v: given * math.log(2.0),
    "1 / sqrt of the next power of two": lambda given, d, d_v: 2.0 ** (-0.5 * math.ceil(math.log2(d))),
    "1 / sqrt of the columns of v": lambda given, d, d_v: d_v**-0.5,
    "1 / head_dim": lambda given, d, d_v: 1.0 / d,
    "given times 1 / sqrt(head_dim)": lambda given, d, d_v: given * d**-0.5,
    "given times sqrt(head_dim / next power of two)": lambda given, d, d_v: (
        given * math.sqrt(d / 2.0 ** math.ceil(math.log2(d)))
    ),
    "its square root": lambda given, d, d_v: math.sqrt(abs(given)),
}
"""What a scale may be in place of the given one, of that and the columns of q and of v, by what is said of it."""


def other_scale(which: str, g: Given) -> float:
    """Return the scale that a call has by a rule of ``OTHER_SCALES``."""
    return OTHER_SCALES[which](g["sm_scale"], g["q"].shape[-1], g["v"].shape[-1])


@alternative("the scale of the scores is {which}", which=tuple(OTHER_SCALES))
def scale_of_all(which: str) -> Change:
    """Scores, and the gradients that follow, have another scale."""
    return Change(call=lambda g: {**g, "sm_scale": other_scale(which, g)})


def _of_scores(g: Given, e: Exact) -> Iterator[float]:
    """Yield the factor of the scores that fits lse best, by Gauss and Newton, if that is not 1."""
    if g.get("lse") is None:
        return
    actual = fold(g["lse"], g["k"].shape[1]).double()
    known = actual.isfinite() & e.lse.isfinite()
    scores, lse, value = e.scores[known], actual[known], 1.0
    if e.softcap or e.added_size is not None or e.sink is not None or not len(lse):
        return
    for _ in range(8):
        scaled = scores * value
        slope = (scaled.softmax(-1) * scores.nan_to_num(neginf=0.0)).sum(-1)
        value -= float(slope @ (scaled.logsumexp(-1) - lse) / (slope @ slope).clamp_min(1e-30))
        if not 0.05 < abs(value) < 20.0:
            return
    if abs(value - 1.0) > LEAST:
        yield value


@alternative("the scores are multiplied by {value}", fits=_of_scores)
def scores_times(value: float) -> Change:
    """A constant of the exponential is rounded, or its base is mistaken."""
    return Change(call=lambda g: {**g, "sm_scale": g["sm_scale"] * value})


@alternative(
    "the scores have a scale that is {which}, while dq and dk are multiplied by the given one",
    scopes=(EVERY, BACKWARD),
    which=tuple(OTHER_SCALES),
)
def scale_of_scores(which: str) -> Change:
    """P is computed with another scale than that of its gradients."""
    return Change(
        call=lambda g: {**g, "sm_scale": other_scale(which, g), "given_scale": g["sm_scale"]},
        exact=lambda e, g: replace(e, sm_scale=float(g["given_scale"])),
    )


@alternative(
    "the scale that multiplies {tensors} is {which}",
    scopes=(("dq", "dk"), DQ, ("dk",)),
    which=tuple(OTHER_SCALES),
)
def scale_of_gradients(which: str) -> Change:
    """DS k and dS^T q are multiplied by another scale than the scores are."""
    return Change(exact=lambda e, g: replace(e, sm_scale=other_scale(which, g)))


def factor(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> Iterator[float]:
    """Yield the factor by which an actual tensor is nearest to what is expected, unless that is about 1, or unknown.

    What is cut to a dtype instead of rounded is too small by up to half of its eps in the mean, both weights and their
    sum; so a factor that is nearer to 1 than eps is none.
    """
    known = actual.isfinite() & expected.isfinite()
    x, y = expected[known].double(), actual[known].double()
    if len(x) and float(x @ x) > 0:
        found = float(x @ y / (x @ x))
        if found and abs(found - 1.0) > max(LEAST, torch.finfo(dtype).eps):
            yield found


def _of_out(g: Given, e: Exact) -> Iterator[float]:
    return factor(fold(g["out"], g["k"].shape[1]), e.out, g["q"].dtype)


@alternative("out is multiplied by {value}", scopes=(("out",), ("out", *BACKWARD)), fits=_of_out)
def out_times(value: float) -> Change:
    """A factor of out, which its gradients share or not."""
    return Change(call=lambda g: {**g, "out": g["out"].double() / value})


@alternative(
    "lse is {which}",
    scopes=(("lse",), ("lse", *BACKWARD)),
    when=lambda g: g.get("lse") is not None,
    which=("in base 2", "in base 10", "divided by log2(e) once too often", "of the wrong sign"),
)
def other_base(which: str) -> Change:
    """The logarithm is not the natural one."""
    of_base = {"in base 2": math.log(2.0), "in base 10": math.log(10.0), "of the wrong sign": -1.0}
    unit = of_base.get(which, math.log2(math.e))
    return Change(call=lambda g: {**g, "lse": g["lse"].double() * unit})


@alternative(
    "lse is in base 2 in the rows past the last whole tile of {tile}",
    scopes=(("lse",), ("lse", *BACKWARD)),
    when=lambda g: g.get("lse") is not None,
    tile=TILES,
)
def base_of_tail(tile: int) -> Change:
    """The last tile of rows is stored by other code."""

    def call(g: Given) -> Given:
        lse = g["lse"].double()
        tail = torch.arange(lse.shape[2], device=lse.device) >= lse.shape[2] // tile * tile
        return {**g, "lse": torch.where(tail, lse * math.log(2.0), lse)}

    return Change(call=call)


@alternative(
    "lse is stored as (batch, seqlen_q, heads) and read as (batch, heads, seqlen_q)",
    scopes=(("lse",), ("lse", *BACKWARD)),
    when=lambda g: g.get("lse") is not None and min(g["lse"].shape[1:]) > 1,
)
def lse_in_other_order() -> Change:
    """Rows and heads are mixed up."""

    def call(g: Given) -> Given:
        batch, heads, rows = g["lse"].shape
        return {**g, "lse": g["lse"].reshape(batch, rows, heads).transpose(1, 2)}

    return Change(call=call)


@alternative(
    "lse of a group is stored as (row, head) and read as (head, row)",
    scopes=(("lse",), ("lse", *BACKWARD)),
    when=lambda g: g.get("lse") is not None and g["q"].shape[1] > g["k"].shape[1] and g["q"].shape[2] > 1,
)
def lse_of_group_in_other_order() -> Change:
    """Rows that are folded head by head are unfolded row by row."""

    def call(g: Given) -> Given:
        batch, heads, rows = g["lse"].shape
        heads_kv = g["k"].shape[1]
        lse = g["lse"].reshape(batch, heads_kv, rows, heads // heads_kv).transpose(2, 3)
        return {**g, "lse": lse.reshape(batch, heads, rows)}

    return Change(call=call)


def _shift(g: Given, e: Exact) -> Iterator[float]:
    if g.get("lse") is not None:
        apart = fold(g["lse"], g["k"].shape[1]).double() - e.lse
        known = apart[apart.isfinite()]
        if len(known) and abs(float(known.median())) > LEAST:
            yield float(known.median())


@alternative("lse is larger by {value}", scopes=(("lse",), ("lse", *BACKWARD)), fits=_shift)
def lse_shifted(value: float) -> Change:
    """A number that is added to each logarithm."""
    return Change(call=lambda g: {**g, "lse": g["lse"].double() - value})


@alternative(
    "lse is {which}",
    scopes=(("lse",), OUT_AND_LSE),
    when=lambda g: g.get("lse") is not None,
    which=(
        "the logarithm of the sum without the maximum",
        "the maximum alone",
        "the sum, without a logarithm",
        "the maximum, and the logarithm of the sum in base 2",
        "the maximum in base 2, and the natural logarithm of the sum",
        "the maximum before the scale, and the logarithm of the sum",
    ),
)
def lse_in_part(which: str) -> Change:
    """A part of m + log l is left out."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        top = e.row_max.reshape(len(e.q), e.q.shape[1] * e.group, -1)

        def move(lse: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
            if which == "the maximum alone":
                return top.where(lse.isfinite(), lse), bound
            if which == "the sum, without a logarithm":
                total = (lse - top).exp()
                return total, bound * (total + 1)
            if which.startswith("the maximum, and"):
                return torch.where(lse.isfinite(), top + (lse - top) * math.log2(math.e), lse), 2 * bound
            if which.startswith("the maximum in base 2"):
                return lse + top * (math.log2(math.e) - 1.0), 2 * bound
            if which.startswith("the maximum before"):
                factor = 1.0 / g["sm_scale"] if g["sm_scale"] else 0.0
                return lse + top * (factor - 1.0), bound * max(1.0, abs(factor))
            return lse - top, bound

        return {"lse": move}

    return Change(results=results)


@alternative(
    "lse is stored in rows that are filled up with zeros to a multiple of {tile}, and read as if they were not",
    scopes=(("lse",),),
    when=lambda g: g.get("lse") is not None,
    tile=(8, *TILES),
)
def lse_padded(tile: int) -> Change:
    """The memory of lse has room for whole tiles."""
    return Change(
        results=lambda e, g: {
            "lse": lambda lse, bound: (read_without_padding(lse, tile), read_without_padding(bound, tile))
        }
    )


def read_without_padding(x: Tensor, tile: int) -> Tensor:
    """Return what is read of a tensor (batch, heads, rows) by its shape, if it lies in rows of whole tiles."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % tile)).flatten()[: x.numel()].view(x.shape)


@alternative(
    "lse is rounded to the dtype of the inputs",
    scopes=(("lse",), ("lse", *BACKWARD)),
    when=lambda g: g.get("lse") is not None and g["q"].dtype != torch.float32,
)
def rounded_lse() -> Change:
    """It is stored in few bits. A number that has more is not what is told, however near it is."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        actual, dtype = g["lse"].double(), g["q"].dtype

        def move(lse: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
            reach = bound + torch.finfo(dtype).eps / 2.0 * lse.abs()
            is_rounded = (actual.to(dtype).double() == actual) & ((actual - lse).abs() <= reach)
            return torch.where(is_rounded, actual, lse.to(dtype).double()), bound

        return {"lse": move}

    return Change(results=results)


@alternative(
    "lse is {value}", scopes=(("lse",),), when=lambda g: g.get("lse") is not None, value=(0.0, -math.inf)
)
def lse_is(value: float) -> Change:
    """It is not computed."""
    return Change(results=lambda e, g: {"lse": lambda lse, bound: (torch.full_like(lse, value), bound)})


@alternative(
    "{tensors} is multiplied by sm_scale", scopes=(("out",), ("dv",)), when=lambda g: bool(g["sm_scale"])
)
def scaled_too() -> Change:
    """The scale of the scores is applied to what they do not multiply."""
    names = ("out", "dv")
    return Change(
        call=lambda g: {**g, **{x: g[x].double() / g["sm_scale"] for x in names if g.get(x) is not None}}
    )


@alternative("out is not divided by the sum of the weights", scopes=(("out",), ("out", *BACKWARD)))
def not_normalised() -> Change:
    """Out is the sum of exp(score - maximum) times v."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        total = unfold((e.lse - e.row_max).exp().nan_to_num(), e.q.shape[1] * e.group)[..., None]
        return {"out": lambda out, bound: (out * total, bound * total)}

    return Change(results=results)
