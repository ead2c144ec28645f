"""The backward: delta, the lse that P is made of again, factors of gradients, and terms that are left out."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from reference.alternatives.declaration import BACKWARD, DK_AND_DV, DQ, Change, Given, Moved, alternative
from reference.alternatives.masks import TILES
from reference.alternatives.numbers import COLUMNS
from reference.alternatives.scaling import factor, read_without_padding
from reference.bounds import Exact
from reference.heads import fold, unfold

OF_DS = (("dq", "dk"), DQ, ("dk",))
"""The sets of tensors that follow from dS."""


def has_gradients(g: Given) -> bool:
    """Whether a call was asked for gradients."""
    return any(g.get(name) is not None for name in BACKWARD)


def gradients(g: Given, e: Exact, shift: float = 0.0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return dq, dk and dv with a delta of 0, and what dq and dk lose by delta, in float64, heads folded.

    They are computed from the kernel's own out and lse, if it returns one, of which ``shift`` is taken.
    """
    heads_kv = g["k"].shape[1]
    dout, out = (fold(g[name], heads_kv).double() for name in ("dout", "out"))
    lse = e.lse if g.get("lse") is None else fold(g["lse"], heads_kv).double()
    p = (e.scores - (lse - shift).masked_fill(e.empty, 0.0)[..., None]).exp()
    of_products = p * e.dropped(dout @ e.v.mT)
    of_delta = p * (dout * out).sum(-1, keepdim=True)
    if e.cap_slope is not None:
        of_products, of_delta = of_products * e.cap_slope, of_delta * e.cap_slope
    scale = e.sm_scale
    whole = {
        "dq": of_products @ e.k * scale,
        "dk": of_products.mT @ e.q * scale,
        "dv": e.dropped(p).mT @ dout,
    }
    return whole, {"dq": of_delta @ e.k * scale, "dk": of_delta.mT @ e.q * scale}


def _given(g: Given, name: str) -> Tensor:
    return fold(g[name], g["k"].shape[1]) if name == "dq" else g[name]


def _of_delta(g: Given, e: Exact) -> Iterator[float]:
    for name in ("dq", "dk"):
        if g.get(name) is not None:
            whole, lost = gradients(g, e)
            yield from factor(_given(g, name).double() - whole[name], -lost[name], g["q"].dtype)


def with_ds(more: Tensor, e: Exact, g: Given) -> dict[str, Moved]:
    """Return the change of dq and dk by a sum that a kernel adds to dS: ``more``, (batch, heads_kv, R, seqlen_k)."""
    dq, dk = unfold(more @ e.k, g["q"].shape[1]) * e.sm_scale, more.mT @ e.q * e.sm_scale
    return {
        "dq": lambda value, bound: (value + dq, bound),
        "dk": lambda value, bound: (value + dk, bound),
    }


def with_delta(change: Callable[[Tensor, Given], Tensor]) -> Callable[[Given], Given]:
    """Return what has the kernel's out give another delta, (batch, heads_q, seqlen_q, 1), made of the right one."""

    def call(g: Given) -> Given:
        dout = g["dout"].double()
        delta = (dout * g["out"].double()).sum(-1, keepdim=True)
        size = (dout * dout).sum(-1, keepdim=True)
        return {**g, "out": dout * (change(delta, g) / size.clamp_min(1e-300))}

    return call


@alternative("delta is left out of {tensors}", scopes=OF_DS, when=has_gradients)
def no_delta() -> Change:
    """DS is P dP."""
    return Change(call=lambda g: {**g, "out": torch.zeros_like(g["out"])})


@alternative("delta is multiplied by {value} in {tensors}", scopes=OF_DS, when=has_gradients, fits=_of_delta)
def delta_times(value: float) -> Change:
    """DS is P (dP - c delta)."""
    return Change(call=lambda g: {**g, "out": g["out"].double() * value})


@alternative(
    "delta of {which} is taken in {tensors}",
    scopes=OF_DS,
    when=has_gradients,
    which=(
        "the row before",
        "the row after",
        "the first row",
        "the first row of its tile of 16",
        "the first row of its tile of 32",
        "the first row of its tile of 64",
        "a last tile that is moved back to have 16",
        "a last tile that is moved back to have 32",
        "a last tile that is moved back to have 64",
    ),
)
def delta_of_another_row(which: str) -> Change:
    """The pointer to delta is off."""

    def change(delta: Tensor, g: Given) -> Tensor:
        rows = torch.arange(delta.shape[2], device=delta.device)
        tile = int(which.rpartition(" ")[2]) if which.endswith(("16", "32", "64")) else 0
        if which.startswith("a last tile"):
            count = len(rows)
            rows = rows - (rows >= count // tile * tile) * (-count % tile if count > tile else 0)
        elif tile:
            rows = rows // tile * tile
        elif which == "the first row":
            rows = torch.zeros_like(rows)
        else:
            rows = (rows + (1 if which == "the row after" else -1)).clamp(0, max(0, len(rows) - 1))
        return delta[:, :, rows]

    return Change(call=with_delta(change))


@alternative(
    "delta is stored in rows that are filled up with zeros to a multiple of {tile}, and read as if they were not, "
    "in {tensors}",
    scopes=OF_DS,
    when=has_gradients,
    tile=(8, *TILES),
)
def delta_padded(tile: int) -> Change:
    """Delta is stored with room for whole tiles of rows, and read as if rows of all heads followed each other."""
    return Change(call=with_delta(lambda delta, g: read_without_padding(delta[..., 0], tile)[..., None]))


@alternative(
    "delta is the sum of products of out in (batch, {out}) order and of dout in (batch, {dout}) order, in {tensors}",
    scopes=OF_DS,
    when=lambda g: has_gradients(g) and min(g["q"].shape[1:3]) > 1,
    out=("row, head", "head, row"),
    dout=("row, head", "head, row"),
)
def delta_of_other_order(out: str, dout: str) -> Change:
    """Rows are flattened as they lie in memory."""

    def change(delta: Tensor, g: Given) -> Tensor:
        flat = [
            (x.transpose(1, 2) if order.startswith("row") else x).flatten(0, 2)
            for x, order in ((g["out"].double(), out), (g["dout"].double(), dout))
        ]
        return (flat[0] * flat[1]).sum(-1).view(delta.shape)

    return Change(call=with_delta(change))


@alternative(
    "delta of the first sequence is taken for all in {tensors}",
    scopes=OF_DS,
    when=lambda g: has_gradients(g) and len(g["q"]) > 1,
)
def delta_of_first_sequence() -> Change:
    """An offset by the number of the sequence is left out."""
    return Change(call=with_delta(lambda delta, g: delta[:1].expand_as(delta)))


@alternative("delta is the sum of the squares of dout in {tensors}", scopes=OF_DS, when=has_gradients)
def delta_of_dout() -> Change:
    """One tensor is passed for the other."""
    return Change(call=lambda g: {**g, "out": g["dout"].double()})


@alternative(
    "delta of the first query head is taken for all heads in {tensors}",
    scopes=OF_DS,
    when=lambda g: has_gradients(g) and g["q"].shape[1] > 1,
)
def delta_of_first_head() -> Change:
    """An offset by the number of the head is left out."""
    return Change(call=with_delta(lambda delta, g: delta[:, :1].expand_as(delta)))


@alternative(
    "delta of the first query head of a group is taken for all of it in {tensors}",
    scopes=OF_DS,
    when=lambda g: has_gradients(g) and g["q"].shape[1] > g["k"].shape[1],
)
def delta_of_first_of_group() -> Change:
    """Delta is stored for each key head."""

    def change(delta: Tensor, g: Given) -> Tensor:
        group = g["q"].shape[1] // g["k"].shape[1]
        return delta[:, ::group].repeat_interleave(group, 1)

    return Change(call=with_delta(change))


@alternative(
    "delta is summed over the first {columns} columns alone in {tensors}",
    scopes=OF_DS,
    when=has_gradients,
    columns=(16, 32, 64, 128),
)
def delta_of_columns(columns: int) -> Change:
    """A sum over columns ends with one tile of them."""

    def call(g: Given) -> Given:
        out = g["out"].clone()
        out[..., columns:] = 0.0
        return {**g, "out": out}

    return Change(call=call)


@alternative(
    "delta of the rows past the last whole tile of {tile} is 0 in {tensors}",
    scopes=OF_DS,
    when=has_gradients,
    tile=TILES,
)
def delta_of_whole_tiles(tile: int) -> Change:
    """A last tile that is not full is left out where delta is computed."""

    def change(delta: Tensor, g: Given) -> Tensor:
        rows = torch.arange(delta.shape[2], device=delta.device)[:, None]
        return delta.masked_fill(rows >= len(rows) // tile * tile, 0.0)

    return Change(call=with_delta(change))


@alternative(
    "dP is made of the first columns of {what} again from column {first} on, in {tensors}",
    scopes=OF_DS,
    when=lambda g: has_gradients(g) and g["v"].shape[-1] > COLUMNS[0] and not g["dropout_p"],
    what=("dout", "v"),
    first=COLUMNS,
)
def columns_of_dp_repeated(what: str, first: int) -> Change:
    """The offset of a further tile of columns is left out."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        dout = fold(g["dout"], g["k"].shape[1]).double()
        at = torch.arange(dout.shape[-1], device=dout.device) % first
        dp = dout[..., at] @ e.v.mT if what == "dout" else dout @ e.v[..., at].mT
        return with_ds(e.weights * (dp - dout @ e.v.mT), e, g)

    return Change(results=results)


def _of_lse(g: Given, e: Exact) -> Iterator[float]:
    if g.get("dv") is not None:
        whole, _ = gradients(g, e)
        for found in factor(g["dv"], whole["dv"], g["q"].dtype):
            if found > 0:
                yield math.log(found)


@alternative(
    "P is computed again from an lse that is {value} too small, in {tensors}",
    scopes=(BACKWARD, DQ, DK_AND_DV, ("dv",)),
    when=has_gradients,
    fits=_of_lse,
)
def lse_too_small(value: float) -> Change:
    """Every weight of the backward is too large by the same factor."""
    return Change(call=lambda g: {**g, "lse": _lse_of(g) - value})


@alternative(
    "P is computed again from an lse {which}, in {tensors}",
    scopes=(BACKWARD, DQ, DK_AND_DV),
    when=lambda g: has_gradients(g) and g.get("lse") is not None,
    which=(
        "in base 2 taken for a natural one",
        "of the first row",
        "of the row before",
        "of the first head",
        "of the first head of its group",
        "of the first sequence",
        "of another place, as if there were as many queries as keys",
        "of another place, as if the rows of a group were stored by row and head",
        "without the sink",
    ),
)
def other_lse(which: str) -> Change:
    """The lse that was kept is read in another unit or place."""

    def call(g: Given) -> Given:
        lse = g["lse"].double()
        rows = torch.arange(lse.shape[2], device=lse.device)
        if which.startswith("in base"):
            lse = lse * math.log2(math.e)
        elif which.endswith("as keys"):
            first = torch.arange(lse[..., 0].numel(), device=lse.device)[:, None] * g["k"].shape[2]
            lse = lse.flatten()[(first + rows).clamp_max(lse.numel() - 1)].view(lse.shape)
        elif which.endswith("row and head"):
            group = lse.shape[1] // g["k"].shape[1]
            of_group = lse.unflatten(1, (-1, group)).flatten(2).unflatten(2, (-1, group))
            lse = of_group.transpose(2, 3).flatten(1, 2)
        elif which == "without the sink":
            if g["rule"].sinks is not None:
                lse = lse + torch.log1p(-(g["rule"].sinks.double()[None, :, None] - lse).exp())
        elif which == "of the first head":
            lse = lse[:, :1].expand_as(lse)
        elif which == "of the first sequence":
            lse = lse[:1].expand_as(lse)
        elif which == "of the first head of its group":
            group = lse.shape[1] // g["k"].shape[1]
            lse = lse[:, ::group].repeat_interleave(group, 1)
        else:
            lse = lse[:, :, rows * 0 if which == "of the first row" else (rows - 1).clamp_min(0)]
        return {**g, "lse": lse}

    return Change(call=call)


def _lse_of(g: Given) -> Tensor:
    if g.get("lse") is None:
        raise LookupError("the kernel returns no lse")
    return g["lse"].double()


def _of(name: str) -> Callable[[Given, Exact], Iterator[float]]:
    def fits(g: Given, e: Exact) -> Iterator[float]:
        if g.get(name) is not None:
            whole, lost = gradients(g, e)
            expected = whole[name] - lost[name] if name in lost else whole[name]
            yield from factor(_given(g, name), expected, g["q"].dtype)

    return fits


def times(names: tuple[str, ...], value: float) -> Change:
    """Return the change that these tensors are multiplied by a number."""
    return Change(call=lambda g: {**g, **{x: g[x].double() / value for x in names if g.get(x) is not None}})


@alternative(
    "{tensors} are multiplied by {value}", scopes=(("dq", "dk"), BACKWARD), when=has_gradients, fits=_of("dq")
)
def several_times(value: float) -> Change:
    """A factor that several gradients share."""
    return times(("dq", "dk", "dv"), value)


@alternative("dq is multiplied by {value}", scopes=(DQ,), when=has_gradients, fits=_of("dq"))
def dq_times(value: float) -> Change:
    """A factor of dq."""
    return times(DQ, value)


@alternative("dk is multiplied by {value}", scopes=(("dk",),), when=has_gradients, fits=_of("dk"))
def dk_times(value: float) -> Change:
    """A factor of dk."""
    return times(("dk",), value)


@alternative("dv is multiplied by {value}", scopes=(("dv",),), when=has_gradients, fits=_of("dv"))
def dv_times(value: float) -> Change:
    """A factor of dv."""
    return times(("dv",), value)


@alternative("{tensors} is 0", scopes=(DQ, ("dk",), ("dv",)), when=has_gradients)
def gradient_is_0() -> Change:
    """A gradient is never written."""
    return Change(
        results=lambda e, g: {
            name: lambda value, bound: (torch.zeros_like(value), bound) for name in BACKWARD
        }
    )


@alternative(
    "P is computed again with exponents that are {which} times as large, in {tensors}",
    scopes=(BACKWARD, DQ, DK_AND_DV, ("dk",), ("dv",)),
    when=has_gradients,
    which=("log2(e)", "ln 2"),
)
def power_of_weights(which: str) -> Change:
    """The unit of the exponents is not that of the exponential."""
    unit = math.log(2.0) if which == "ln 2" else math.log2(math.e)
    return Change(
        call=lambda g: {**g, "lse": _lse_of(g) * unit, "sm_scale": g["sm_scale"] * unit},
        exact=lambda e, g: replace(e, sm_scale=g["sm_scale"] / unit),
    )


@alternative(
    "dk and dv are exchanged",
    scopes=(DK_AND_DV,),
    when=lambda g: has_gradients(g) and g["k"].shape == g["v"].shape,
)
def exchanged() -> Change:
    """Gradients are returned in another order."""
    return Change(call=lambda g: {**g, "dk": g["dv"], "dv": g["dk"]})
