"""Heads: which key head a query head reads, and which query heads are summed in dk and dv."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from reference.alternatives.declaration import (
    BACKWARD,
    DK_AND_DV,
    EVERY,
    OUT_AND_LSE,
    Change,
    Given,
    Moved,
    alternative,
)
from reference.bounds import Exact


def is_grouped(g: Given) -> bool:
    """Whether several query heads read a key head."""
    return bool(g["q"].shape[1] > g["k"].shape[1])


def _has_several_groups(g: Given) -> bool:
    return is_grouped(g) and g["k"].shape[1] > 1


@alternative(
    "grouped heads are read interleaved: query head h reads key head h mod heads_kv",
    scopes=(EVERY, OUT_AND_LSE, BACKWARD, ("dq",), DK_AND_DV),
    when=_has_several_groups,
)
def interleaved() -> Change:
    """Query heads are numbered group by group, key heads are read in turns."""

    def order(g: Given) -> Tensor:
        return torch.arange(g["q"].shape[1]).view(-1, g["k"].shape[1]).mT.flatten()

    return Change(call=lambda g: _with_query_heads(order, g, ("dq",)))


@alternative(
    "query head h reads {what} of key head {which}",
    scopes=(EVERY, OUT_AND_LSE, ("out",)),
    when=_has_several_groups,
    what=("k", "v", "k and v"),
    which=(
        "h mod heads_kv",
        "h >> n, where 2^n is the size of a group, rounded up to a power of two",
        "h >> n, where 2^n is the size of a group, rounded down to a power of two",
    ),
)
def other_key_heads(what: str, which: str) -> Change:
    """The number of the key head follows otherwise from that of the query head."""

    def read(name: str, g: Given) -> Tensor:
        if name not in what.split(" and "):
            return _of_groups(name, g)
        if which.startswith("h mod"):
            return _in_turns(name, g)
        heads, heads_kv = _query_heads(g), g["k"].shape[1]
        rounded = math.ceil if which.endswith("up to a power of two") else math.floor
        return (heads >> rounded(math.log2(len(heads) // heads_kv))).clamp_max(heads_kv - 1)

    return _by_query_heads(read, read)


def _query_heads(g: Given) -> Tensor:
    return torch.arange(g["q"].shape[1], device=g["q"].device)


def _of_groups(name: str, g: Given) -> Tensor:
    return _query_heads(g) // (g["q"].shape[1] // g["k"].shape[1])


def _in_turns(name: str, g: Given) -> Tensor:
    return _query_heads(g) % g["k"].shape[1]


def _by_query_heads(read: Callable[[str, Given], Tensor], added: Callable[[str, Given], Tensor]) -> Change:
    """Return the change that each query head reads some key head of k and v, and adds its part to one of dk and dv.

    ``read`` and ``added`` return the number of that key head for each query head, (heads_q,) int64. They take the name
    of the tensor that is read, "k" or "v", and the call.
    """

    def call(g: Given) -> Given:
        return {**g, **{name: g[name][:, read(name, g)] for name in "kv"}}

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        def of(name: str) -> Moved:
            at = added(name, g)

            def summed(x: Tensor) -> Tensor:
                return x.new_zeros(len(x), g["k"].shape[1], *x.shape[2:]).index_add_(1, at, x)

            return lambda value, bound: (summed(value), summed(bound))

        return {"dk": of("k"), "dv": of("v")}

    return Change(call=call, results=results)


@alternative(
    "every query head reads the {which} key head",
    scopes=(OUT_AND_LSE,),
    when=lambda g: g["k"].shape[1] > 1,
    which=("first", "last"),
)
def one_head(which: str) -> Change:
    """The number of the key head is always the same."""
    at = 0 if which == "first" else -1
    return Change(
        call=lambda g: {**g, **{name: g[name][:, at].unsqueeze(1).expand_as(g[name]) for name in ("k", "v")}}
    )


@alternative(
    "every sequence of the batch reads {what} of the first one",
    scopes=(OUT_AND_LSE,),
    when=lambda g: len(g["q"]) > 1,
    what=("q", "k", "v", "k and v"),
)
def first_sequence(what: str) -> Change:
    """An offset by the number of the sequence is left out."""
    return Change(
        call=lambda g: {**g, **{name: g[name][:1].expand_as(g[name]) for name in what.split(" and ")}}
    )


@alternative(
    "k and v of a sequence are looked for at its number times heads_q, not heads_kv",
    scopes=(OUT_AND_LSE,),
    when=lambda g: is_grouped(g) and len(g["q"]) > 1,
)
def sequences_by_query_heads() -> Change:
    """A sequence has as many key heads as query heads, past the last of which the first one follows."""

    def call(g: Given) -> Given:
        batch, heads_kv = g["k"].shape[:2]
        at = torch.arange(batch)[:, None] * g["q"].shape[1] + torch.arange(heads_kv)
        at = at.flatten().to(g["k"].device) % (batch * heads_kv)
        return {**g, **{name: g[name].flatten(0, 1)[at].view(g[name].shape) for name in ("k", "v")}}

    return Change(call=call)


@alternative(
    "query heads of a group past {most} are computed with q of the last one before",
    scopes=(OUT_AND_LSE,),
    when=is_grouped,
    most=(1, 2, 4, 8),
)
def later_heads_of_group(most: int) -> Change:
    """There is no more room for heads of a group than that."""

    def call(g: Given) -> Given:
        heads = torch.arange(g["q"].shape[1], device=g["q"].device)
        of_group = heads % (len(heads) // g["k"].shape[1])
        return {**g, "q": g["q"][:, heads - of_group + of_group.clamp_max(most - 1)]}

    return Change(call=call)


def _with_heads(keeps: Callable[[int], Tensor], g: Given) -> Given:
    """Return the call with a dout of 0 for the query heads of each group that are not kept."""
    heads_kv = g["k"].shape[1]
    group = g["q"].shape[1] // heads_kv
    kept = keeps(group).to(g["q"].device).repeat(heads_kv)
    return {**g, "dout": g["dout"] * kept[:, None, None].to(g["dout"].dtype)}


@alternative(
    "only the {which} query head of each group is summed in {tensors}",
    scopes=(DK_AND_DV, ("dk",), ("dv",)),
    when=is_grouped,
    which=("first", "last"),
)
def one_of_group(which: str) -> Change:
    """Heads of a group overwrite each other, or all but one are left out."""
    return Change(
        call=lambda g: _with_heads(
            lambda group: torch.arange(group) == (0 if which == "first" else group - 1), g
        )
    )


@alternative(
    "only the first {most} query heads of each group are summed in {tensors}",
    scopes=(DK_AND_DV, ("dk",), ("dv",)),
    when=is_grouped,
    most=(2, 4, 8),
)
def first_of_group(most: int) -> Change:
    """Heads past a number are left out of the sums."""
    return Change(call=lambda g: _with_heads(lambda group: torch.arange(group) < most, g))


@alternative(
    "the last query head of each group is left out of {tensors}",
    scopes=(DK_AND_DV, ("dk",), ("dv",)),
    when=is_grouped,
)
def last_of_group_lost() -> Change:
    """A loop over the heads of a group ends one early."""
    return Change(call=lambda g: _with_heads(lambda group: torch.arange(group) < group - 1, g))


def _kept_by_halves(group: int) -> Tensor:
    kept = torch.zeros(group, dtype=torch.bool)
    left = [[head] for head in range(group)]
    while len(left) > 1:
        half = len(left) // 2
        left = [left[at] + left[half + at] for at in range(half)]
    kept[left[0]] = True
    return kept


@alternative(
    "the heads of a group are summed in {tensors} by halves, and what is left over of an odd number is lost",
    scopes=(DK_AND_DV, ("dk",), ("dv",)),
    when=is_grouped,
)
def group_by_halves() -> Change:
    """A sum in pairs expects a power of two."""
    return Change(call=lambda g: _with_heads(_kept_by_halves, g))


@alternative(
    "{tensors} are the mean over the heads of a group, not their sum",
    scopes=(DK_AND_DV, ("dk",), ("dv",)),
    when=is_grouped,
)
def mean_of_group() -> Change:
    """The sum over a group is divided by its size."""

    def call(g: Given) -> Given:
        group = g["q"].shape[1] // g["k"].shape[1]
        return {**g, **{name: g[name].double() * group for name in DK_AND_DV if g.get(name) is not None}}

    return Change(call=call)


def _with_query_heads(order: Callable[[Given], Tensor], g: Given, also: tuple[str, ...] = ()) -> Given:
    """Return the call with query heads, and what was computed of them, in another order (heads_q,) int64."""
    at, rule = order(g).to(g["q"].device), g["rule"]
    tensors = ("q", "dout", "out", "lse", *also)
    changed = {name: g[name][:, at] for name in tensors if g.get(name) is not None}
    of_heads = {name: x[at] for name, x in rule.tensors.items() if name in ("alibi_slopes", "sinks")}
    return {**g, **changed, "rule": replace(rule, **of_heads)}


@alternative(
    "{tensors} of key head h are summed over {which}",
    scopes=(DK_AND_DV, ("dk",), ("dv",)),
    when=is_grouped,
    which=(
        "the query heads from h on",
        "the first query head of its group, once for each",
    ),
)
def other_heads_summed(which: str) -> Change:
    """The number of the first query head, or the step to the next one, is left out."""

    def order(g: Given) -> Tensor:
        heads_kv = g["k"].shape[1]
        group = g["q"].shape[1] // heads_kv
        of_group, first = torch.arange(group), torch.arange(heads_kv)[:, None]
        return (first + of_group if which.endswith("on") else first * group + 0 * of_group).flatten()

    return Change(call=lambda g: _with_query_heads(order, g))


@alternative(
    "the parts of query heads in {tensors} of key head h are those of the query heads that are h modulo heads_kv",
    scopes=(DK_AND_DV, ("dk",), ("dv",)),
    when=_has_several_groups,
)
def summed_in_turns() -> Change:
    """What each query head adds is right, and is summed as if heads of a group did not follow each other."""
    return _by_query_heads(_of_groups, _in_turns)


@alternative(
    "the heads of {tensors} are in the order {order}",
    scopes=(OUT_AND_LSE, ("out",), ("lse",), ("dq",)),
    when=_has_several_groups,
    order=(
        "(group, heads_kv), not (heads_kv, group)",
        "(heads_kv, group) of heads in the order (group, heads_kv)",
    ),
)
def heads_lie_otherwise(order: str) -> Change:
    """Results of folded heads are stored, or read, with both numbers of a head exchanged."""

    def results(e: Exact, g: Given) -> dict[str, Moved]:
        heads_kv = g["k"].shape[1]
        group = g["q"].shape[1] // heads_kv
        sizes = (heads_kv, group) if order.startswith("(group") else (group, heads_kv)

        def move(x: Tensor) -> Tensor:
            return x.unflatten(1, sizes).transpose(1, 2).flatten(1, 2)

        return {name: lambda value, bound: (move(value), move(bound)) for name in (*OUT_AND_LSE, "dq")}

    return Change(results=results)
