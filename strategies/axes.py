"""The axes of the space of cases: claimed fields with a few levels each, of which a run tries all pairs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from strategies.case import LAYOUT_FIELDS, SIMPLEST, TENSORS, Case, changed
from strategies.cases import BATCHES, GROUPS, HEADS_KV, Space, claimed_scales, without_huge_strides
from strategies.earlier import kinds_of, last_earlier, with_last_earlier
from strategies.landmarks import BEYOND, MANY
from strategies.scales import scale_of

MOST_LEVELS = 12
"""A field with more claimed values has a level for each power of two, and one for the values between two of them."""
OF_MODELS = (128, 64)
"""The head dims that models use most, the more frequent first."""
WHOLE_TILE = 128
"""A length that is a multiple of this is whole tiles in all kernels that are known."""
MOST_TILES = 2
"""So many such tiles have the equal lengths that are given to a case, at most."""
POWERS = (10, 11, 12)
"""Exponents: a long sequence is a little longer than two to the power of one of these."""
FEW_ROWS = 16
"""The most rows beside many keys, and the most keys beside many rows."""
LARGE_BATCHES = (4, 5, 17)
MANY_HEADS = (7, 20, 25, 32, 71)
MANY_IN_GROUP = (7, 16, 32, 71, 128)
"""Numbers of heads of models, most of which few other numbers divide."""

MANY_OF = "many"
"""The name of the level of a batch, key heads or groups of many."""

Level = Any
"""A value of a field, or a name for several."""


@dataclass(frozen=True)
class Axis:
    """A field of a case, or several fields that go together, with the levels that are claimed.

    Attributes:
        name: the field, or what the fields are together.
        levels: at least two, what models use comes first.
        level: the level that a case has; a case may have none of ``levels``.
        give: a case with a level. Other claims may then need further changes.
        usual: how many of the levels models use, the most frequent first; the first alone if none.
        is_compiled: whether a kernel in Triton is compiled anew for each level, as its constants follow from it.
    """

    name: str
    levels: tuple[Level, ...]
    level: Callable[[Case], Level]
    give: Callable[[Case, Level], Case]
    usual: int = 1
    is_compiled: bool = False


def axes_of(space: Space, dtypes: Sequence[str], *, numbers: bool = True) -> tuple[Axis, ...]:
    """Return the axes of a space at all of these dtypes, each with two levels at least.

    Without ``numbers``, what is in the tensors is left out, as for a law that sets them.
    """
    c = space.claims
    of_models = [head_dim for head_dim in OF_MODELS if head_dim in c.head_dims]
    layouts = without_huge_strides(c).layouts
    compiled = [
        _of_field("dtype", ("bfloat16", *dtypes) if "bfloat16" in dtypes else dtypes),
        _of_field("causal", sorted(c.causal, reverse=True)),
        _of_field("head_dim", (*of_models, *c.head_dims), len(of_models)),
        _of_field("v_head_dim", c.v_head_dim),
        _of_field("v_in_k", c.v_in_k),
        *(_of_field(name, (SIMPLEST[name], *values)) for name, values in space.options.items()),
        *(_of_call(space, name) for name in space.call_fields if name != "way"),
        *(_of_setting(name, values) for name, values in c.launch.items()),
    ]
    found = [
        *(replace(axis, is_compiled=True) for axis in compiled),
        *(_of_ways(space.values_of_call(name)) for name in space.call_fields if name == "way"),
        Axis("layout", layouts, _layout, _in_layout, sum(name in ("contiguous", "bnhd") for name in layouts)),
        Axis("sm_scale", _scales(space), _scale, partial(_with_scale, space)),
    ]
    if space.earlier:
        found.append(Axis("earlier", kinds_of(c), last_earlier, with_last_earlier))
        found.append(_of_field("inference", (True, False) if c.backward else (False,), 2))
    if space.large:
        found.append(Axis("size", space.scales, scale_of, space.with_scale))
    elif space.heads is None:
        if c.grouped_heads:
            found.append(_of_ranges("group", _counts((1, 4, 8, *GROUPS), MANY_IN_GROUP), 3))
        found.append(_of_ranges("batch", _counts(BATCHES, LARGE_BATCHES), 3))
        found.append(_of_ranges("heads_kv", _counts((2, *HEADS_KV), MANY_HEADS), 3))
    if numbers and not space.nonfinite and not space.large:
        found.append(Axis("numbers", ("normal", "others"), _numbers, _with_numbers))
    if not space.large:
        found.append(Axis("lengths", _length_levels(space), _lengths, partial(_with_lengths, space), 2))
    return tuple(axis for axis in found if len(axis.levels) > 1)


def _of_field(name: str, values: Iterable[Any], usual: int = 1) -> Axis:
    """Return the axis of one field: its values, or ranges of numbers where it has many."""
    levels = tuple(dict.fromkeys(values))
    if len(levels) <= MOST_LEVELS:
        return _of_values(name, levels, usual)
    members: dict[Level, list[int]] = {}
    for value in levels:
        members.setdefault(range_of(value), []).append(value)
    return _of_ranges(name, members, usual)


def _of_ways(names: tuple[str, ...]) -> Axis:
    """Return the axis of the way of calling, for none of which a kernel is compiled anew."""
    return _of_values("way", names, len(names))


def _of_values(name: str, levels: tuple[Level, ...], usual: int = 1) -> Axis:
    """Return the axis of one field, each of whose values is a level."""
    return Axis(name, levels, partial(_field, name), partial(_with_field, name), usual)


def _of_ranges(name: str, members: Mapping[Level, Sequence[Any]], usual: int = 1) -> Axis:
    """Return the axis of one field; ``members`` has the values of the field that count as each level."""
    levels = {value: level for level, own in members.items() for value in own}

    def give(case: Case, level: Level) -> Case:
        own = members[level]
        return case if getattr(case, name) in own else _with_field(name, case, own[case.seed % len(own)])

    return Axis(name, tuple(members), lambda case: levels.get(getattr(case, name)), give, usual)


def _counts(few: Iterable[int], many: Sequence[int]) -> dict[Level, Sequence[int]]:
    """Return a level for each of a few numbers, and one for many."""
    return {**{number: (number,) for number in few}, MANY_OF: many}


def range_of(value: int) -> str:
    """Return 0 and a power of two as they are, and any other number by the powers around it, as kernels pad it."""
    power = 1 << (value - 1).bit_length() if value else 0
    return str(value) if value in (power, 3) else f"{power // 2 + 1}-{power - 1}"


def _field(name: str, case: Case) -> Level:
    return getattr(case, name)


def _with_field(name: str, case: Case, value: Level) -> Case:
    return changed(case, **{name: value})


def _of_call(space: Space, name: str) -> Axis:
    """Return the axis of a field that says what call a law makes."""
    return _of_field(name, space.values_of_call(name))


def _of_setting(name: str, values: Iterable[Any]) -> Axis:
    def give(case: Case, level: Level) -> Case:
        return changed(case, launch=tuple((x, level if x == name else value) for x, value in case.launch))

    levels = tuple(dict.fromkeys(values))
    return Axis(name, levels, lambda case: dict(case.launch).get(name), give, len(levels))


def _layout(case: Case) -> Level:
    """Return the layout that q, k and v share; None if they do not, but for rows that are all one row."""
    names = {case.q_layout, case.k_layout, case.v_layout}
    if "expanded_rows" in names:
        return "expanded_rows"
    return names.pop() if len(names) == 1 else None


def _in_layout(case: Case, level: Level) -> Case:
    if level != "expanded_rows":
        layouts: dict[str, Any] = dict.fromkeys(LAYOUT_FIELDS, level)
        return changed(case, **layouts)
    # If the rows of k are all one row, dq is 0, and if those of q are, dk says little: one tensor has such rows.
    one = LAYOUT_FIELDS[case.seed % 3]
    return case if _layout(case) == level else _with_field(one, case, level)


def _scales(space: Space) -> tuple[Level, ...]:
    scales = claimed_scales(space.claims)
    others = ("another",) if any(scale is not None for scale in scales) else ()
    return (*(("default",) if None in scales else ()), *others)


def _scale(case: Case) -> Level:
    return "default" if case.sm_scale is None else "another"


def _with_scale(space: Space, case: Case, level: Level) -> Case:
    if _scale(case) == level:
        return case
    others = [scale for scale in claimed_scales(space.claims) if scale is not None]
    return changed(case, sm_scale=None if level == "default" else others[case.seed % len(others)])


def _numbers(case: Case) -> Level:
    """Return whether all tensors have normal numbers and no entry is set."""
    families = {getattr(case, f"{tensor}_values") for tensor in TENSORS}
    return "normal" if families == {"normal"} and not case.spikes else "others"


def _with_numbers(case: Case, level: Level) -> Case:
    if _numbers(case) == level:
        return case
    if level == "normal":
        normal: dict[str, Any] = {f"{tensor}_values": "normal" for tensor in TENSORS}
        return changed(case, **normal, spikes=())
    return changed(case, k_values="duplicates")


def _length_levels(space: Space) -> tuple[Level, ...]:
    c = space.claims
    most = space.longest if c.max_seqlen_q is None else min(c.max_seqlen_q, space.longest)
    equal = ("equal",) if c.length_from(c.min_seqlen_k) <= most and c.seqlen_multiple % WHOLE_TILE else ()
    whole = ("whole tiles",) if most >= WHOLE_TILE and WHOLE_TILE % c.seqlen_multiple == 0 else ()
    if not c.unequal_lengths:
        return (*whole, *equal)
    one = ("one query",) if c.seqlen_multiple == 1 and c.min_seqlen <= 1 else ()
    more = ("more queries",) if c.seqlens == "any" and most > c.min_seqlen_k else ()
    may_be_long = space.max_seqlen is None and c.seqlen_multiple == 1 and c.min_seqlen < FEW_ROWS
    keys = ("many keys",) if may_be_long else ()
    queries = ("many queries",) if may_be_long and more and c.max_seqlen_q is None else ()
    return (*whole, *one, "fewer queries", *equal, *more, *keys, *queries)


def _lengths(case: Case) -> Level:
    if case.seqlen_q == case.seqlen_k:
        return "equal" if case.seqlen_q % WHOLE_TILE or not case.seqlen_q else "whole tiles"
    if max(case.seqlen_q, case.seqlen_k) > MANY:
        return "many queries" if case.seqlen_q > case.seqlen_k else "many keys"
    if case.seqlen_q == 1:
        return "one query"
    return "fewer queries" if case.seqlen_q < case.seqlen_k else "more queries"


def _with_lengths(space: Space, case: Case, level: Level) -> Case:
    """Return a case whose seqlen_q and seqlen_k are of a level, such as equal, and near those that it had."""
    if _lengths(case) == level:
        return case
    few, many = sorted((case.seqlen_q, case.seqlen_k))
    step = space.claims.seqlen_multiple
    some = max(few, step, 2)
    # The seed decides about layouts and numbers too: here other digits of it do.
    long = 2 ** POWERS[case.seed // 7 % len(POWERS)] + BEYOND[case.seed // 5 % len(BEYOND)]
    short = max(space.claims.min_seqlen, space.claims.min_seqlen_k, 1 + case.seed % FEW_ROWS)
    match level:
        case "whole tiles":
            few = many = WHOLE_TILE * (1 + case.seed % min(MOST_TILES, space.longest // WHOLE_TILE))
        case "equal":
            few = many = many - step if many and many % WHOLE_TILE == 0 else many
        case "one query":
            few, many = 1, max(2, many)
        case "fewer queries":
            few, many = some, max(many, some + step)
        case "more queries":
            few, many = max(many, some + step), some
        case "many keys":
            few, many = short, long
        case "many queries":
            few, many = long, short
    return changed(case, seqlen_q=few, seqlen_k=many)
