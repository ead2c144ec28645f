"""Which fields of a failing case matter. Each is changed by itself, to its simplest value and to the nearest ones."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kernels.contract import CLAIMS, Capabilities
from kernels.contract.declaration import Claim
from kernels.contract.parsing import lesser
from strategies.case import LAYOUT_FIELDS, OPTIONS, SIMPLEST, SIZES, TENSORS, Case, Spike
from strategies.layouts import is_as_contiguous

LENGTHS = ("seqlen_q", "seqlen_k")
TILES_OF = {"seqlen_q": "block_m", "seqlen_k": "block_n"}
"""The launch setting that says how many rows a tile has along each length."""
EXPANDED = ("expanded", "expanded_rows")
"""Layouts that repeat the numbers of a part of the tensor."""
VALUES_OF = {"qk_values": ("q", "k"), "v_values": ("v",), "dout_values": ("dout",)}
"""Fields of numbers, and their tensors. q and k are one field, because they meet in the scores."""
SCORES = "scores"
"""The name of one field for sm_scale and the numbers of q and k, which decide together how large scores are."""
BLIND = "blind rows"
"""The name of a field for rows of queries that see no key."""
NO_KEYS, HIDDEN, SEEN = "no keys", "all keys hidden from some rows", "keys for all rows"
"""The values of BLIND: there are no keys, the causal mask hides all of them from some rows, or every row sees one."""
HEADS = "heads_q"
"""The name of a field for the number of query heads."""
SLICES = "slices"
"""The name of a field for whether there are several slices: a slice is one head of one sequence."""
SEVERAL, ONE = "several heads or sequences", "one head of one sequence"
"""The values of SLICES."""
MASKED = "masks"
"""The name of a field for whether some score is masked, by the causal mask, by padding or beyond the last key."""
SOME, NONE = "masked scores", "no masked score"
"""The values of MASKED."""
WHOLE_TILES = 128
"""Lengths that are multiples of this fill every tile of keys."""
NAN = "NaN"
"""The name of a field for whether any entry of a tensor is set to NaN or infinity."""
MADE_OF: Mapping[str, tuple[str, ...]] = {
    SCORES: ("sm_scale", "qk_values"),
    BLIND: ("causal", *LENGTHS),
    HEADS: ("heads_kv", "group"),
    SLICES: ("batch", "heads_kv", "group"),
    MASKED: ("causal", "seqlen_k"),
    NAN: tuple(VALUES_OF),
}
"""The fields that a field with a name of its own follows from."""
WHOLE, PARTIAL = "whole", "partial"
"""The values of a field for tiles of so many rows: both lengths fill their tiles, or one of them does not."""
TILES_OF_SIZE = "tiles of "
"""The beginning of the name of such a field."""
PAIR = " layouts"
"""The end of the name of a field for two tensors' layouts, as where one is read by the strides of the other."""
OF_LAYOUTS = ("_layout", PAIR)
"""The ends of the names of fields for the layout of one tensor or of two."""


@dataclass(frozen=True)
class Field:
    """A field with its value, and the other values with which the case still fails (``fails``) or holds (``holds``).

    ``held`` are the cases that hold. ``claim`` is the ``--claims`` value for a kernel that is not meant to take the
    field's value; "" if there is none.
    """

    name: str
    value: str
    fails: tuple[str, ...]
    holds: tuple[str, ...]
    held: tuple[Case, ...] = ()
    claim: str = ""

    @property
    def matters(self) -> bool:
        """Whether another value makes the failure go away."""
        return bool(self.holds)


def fields(case: Case, fails: Callable[[Case], bool | None], capabilities: Capabilities) -> Iterator[Field]:
    """Yield every field of which the kernel claims other values, first those that are not at their simplest value.

    ``fails`` is that of ``explain``. Unequal lengths are not yielded as a field if the case holds with other unequal
    lengths of which the same one is the longer.
    """
    simple = {**SIMPLEST, **{name: values[0] for name, values in capabilities.launch.items()}}
    others = [(name, value_of(case, name), values) for name, values in _others(case, capabilities)]
    holding: list[Case] = []
    for name, value, values in sorted(others, key=lambda x: x[1] == simple.get(x[0], x[1])):
        if name == "lengths" and any(_is_unequal_as(case, other) for other in holding):
            continue
        changed = ((x, with_value(case, name, x)) for x in dict.fromkeys(values) if x != value)
        answers = [(x, other, fails(other)) for x, other in changed if capabilities.admits(other)]
        outcomes = [x for x in answers if x[2] is not None]
        if name == "head_dim":
            outcomes = [x for x in outcomes if x[2] or not _is_of_columns(case, x[1], fails)]
        if outcomes:
            held = tuple(other for _, other, failed in outcomes if not failed)
            holding += held
            # If some equal lengths fail too, a claim that excludes unequal ones would not help.
            excluded = held and (name != "lengths" or len(held) == len(outcomes))
            told = [(f"both {x}" if name == "lengths" else text(x), failed) for x, _, failed in outcomes]
            yield Field(
                name=name,
                value=text(value),
                fails=tuple(x for x, failed in told if failed),
                holds=tuple(x for x, failed in told if not failed),
                held=held,
                claim=_claim_without(name, case, capabilities) if excluded else "",
            )


def _others(case: Case, c: Capabilities) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield each field with the values to try for it, among which its own may be."""
    for name in SIZES:
        value = getattr(case, name)
        allowed = c.head_dims if name == "head_dim" else range(0 if name in LENGTHS else 1, 2 * value + 2)
        block = case.blocks.get(TILES_OF.get(name, ""), 0)
        yield name, [*_near(value, allowed), *_whole_tiles(value, block)]
    if case.seqlen_q != case.seqlen_k:
        yield "lengths", [x for x in (case.seqlen_q, case.seqlen_k) if x]
    yield "dtype", c.dtypes
    yield from OPTIONS.items()
    for name in LAYOUT_FIELDS:
        yield name, ["bnhd" if getattr(case, name) == "contiguous" else "contiguous"]
    for name, _ in case.launch:
        yield name, c.launch[name]


def _is_of_columns(case: Case, changed: Case, fails: Callable[[Case], bool | None]) -> bool:
    """Whether a case with another head_dim may hold only because entries are set in other columns.

    Columns are taken modulo head_dim. If the case itself holds with its entries in the other case's columns, normal
    numbers without any entry set tell whether head_dim matters. So they do if v is the first columns of k, as it
    depends on head_dim then which of k's columns are not v's.
    """
    moved = _in_columns_of(changed, case)
    if not case.v_is_of_k and (moved == _in_columns_of(case, case) or fails(moved)):
        return False
    dense, other = map(with_normal_numbers, (case, changed))
    return fails(other) is not False or not fails(dense)


def _in_columns_of(other: Case, case: Case) -> Case:
    """Return the case with its entries set in the columns in which the other case has them."""
    columns = (spike.index[3] % other.head_dim % case.head_dim for spike in case.spikes)
    moved = (replace(x, index=(*x.index[:3], at)) for x, at in zip(case.spikes, columns, strict=True))
    return replace(case, spikes=tuple(moved))


def _is_unequal_as(case: Case, other: Case) -> bool:
    """Whether a case differs in its lengths alone, neither of them 0, of which the same one is the longer."""
    lengths = (other.seqlen_q, other.seqlen_k)
    if replace(other, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k) != case:
        return False
    return 0 < min(lengths) < max(lengths) and (lengths[0] < lengths[1]) == (case.seqlen_q < case.seqlen_k)


def value_of(case: Case, name: str) -> Any:
    """Return the value of a field, of a launch setting, or of something that follows from several fields.

    The last are "lengths" (whether both are equal, or which there are more of), "tiles of 16" and the like, "k and v
    layouts" and the like, "huge" (whether any layout is), the names in ``MADE_OF``, and those of ``VALUES_OF``: the
    family of the tensors' numbers, or "set" if single entries are set.
    """
    layouts = {getattr(case, f"{tensor}_layout") for tensor in _tensors_of(name)}
    if name.endswith(PAIR):
        return "contiguous" if layouts == {"contiguous"} else "other"
    if name == "lengths":
        more = "more queries than keys" if case.seqlen_q > case.seqlen_k else "more keys than queries"
        return "equal" if case.seqlen_q == case.seqlen_k else more
    if name == "huge":
        return "huge" in layouts
    if name.startswith(TILES_OF_SIZE):
        return PARTIAL if any(getattr(case, length) % _rows(name) for length in LENGTHS) else WHOLE
    if name == BLIND:
        hidden = HIDDEN if case.causal and case.seqlen_q > case.seqlen_k else SEEN
        return hidden if case.seqlen_k else NO_KEYS
    if name == SLICES:
        return SEVERAL if case.batch * case.heads_q > 1 else ONE
    if name == MASKED:
        is_masked = case.causal or case.key_padding != "none" or case.seqlen_k % WHOLE_TILES
        return SOME if is_masked else NONE
    if name == NAN:
        return any(isinstance(spike.value, str) for spike in case.spikes)
    if name == SCORES:
        is_ordinary = case.sm_scale is None and value_of(case, "qk_values") == "normal"
        return "ordinary" if is_ordinary else "other"
    if name in VALUES_OF:
        families = [getattr(case, f"{tensor}_values") for tensor in VALUES_OF[name]]
        is_set = any(spike.tensor in VALUES_OF[name] for spike in case.spikes)
        return "set" if is_set else " and ".join(dict.fromkeys(families))
    settings = dict(case.launch)
    return settings[name] if name in settings else getattr(case, name)


def with_value(case: Case, name: str, value: Any) -> Case:
    """Return the case with another value of what ``value_of`` returns.

    For "lengths" it is the length that both get, for ``BLIND`` both lengths. For whole tiles both become so long that
    they fill theirs. The layouts of a pair become contiguous, and so do huge ones; entries that are NaN or infinity are
    not set. Of any number of query heads none are grouped. Slices become one. Without masks the keys fill their tiles.
    """
    if name == HEADS:
        return replace(case, heads_kv=value, group=1)
    if name == SLICES:
        return replace(case, batch=1, heads_kv=1, group=1)
    if name == MASKED:
        whole = -(-case.seqlen_k // WHOLE_TILES) * WHOLE_TILES
        return _with(case, {"causal": False, "key_padding": "none", "seqlen_k": whole})
    if name == NAN:
        return replace(case, spikes=tuple(x for x in case.spikes if not isinstance(x.value, str)))
    if name == BLIND:
        return replace(case, seqlen_q=value[0], seqlen_k=value[1])
    if name == "lengths":
        return replace(case, seqlen_q=value, seqlen_k=value)
    if name.startswith(TILES_OF_SIZE):
        rows = _rows(name)
        return _with(case, {length: -(-getattr(case, length) // rows) * rows for length in LENGTHS})
    if name.endswith(PAIR):
        return _with(case, {f"{tensor}_layout": "contiguous" for tensor in _tensors_of(name)})
    if name == "huge":
        return _with(case, {x: "contiguous" for x in LAYOUT_FIELDS if getattr(case, x) == "huge"})
    if name == SCORES:
        return replace(with_value(case, "qk_values", "normal"), sm_scale=None)
    if name in VALUES_OF:
        spikes = tuple(spike for spike in case.spikes if spike.tensor not in VALUES_OF[name])
        return _with(case, {"spikes": spikes, **{f"{x}_values": value for x in VALUES_OF[name]}})
    if name in dict(case.launch):
        return replace(case, launch=tuple((x, value if x == name else own) for x, own in case.launch))
    return _with(case, {name: value})


def tiles_of(rows: int) -> str:
    """Return the name of the field that says whether both lengths fill tiles of so many rows."""
    return f"{TILES_OF_SIZE}{rows}"


def _rows(name: str) -> int:
    """Return the rows of a tile from the name of such a field."""
    return int(name.removeprefix(TILES_OF_SIZE))


def laid_out(name: str, case: Case) -> list[str]:
    """Return the tensors that a field of one layout, or of a pair of them, is about, and that are not contiguous."""
    tensors = _tensors_of(name) if name.endswith(PAIR) else (name.removesuffix("_layout"),)
    return [tensor for tensor in tensors if getattr(case, f"{tensor}_layout") != "contiguous"]


def lie_as_contiguous(tensors: Collection[str], case: Case) -> bool:
    """Whether tensors lie in memory as contiguous ones of their shapes in a case do, whatever their layouts are."""
    return all(is_as_contiguous(getattr(case, f"{x}_layout"), case.shape(x)) for x in tensors)


def in_plain_layouts(case: Case) -> Case:
    """Return the case with the layout contiguous for each tensor that is empty, or lies as a contiguous one does."""
    plain = (x for x in TENSORS if 0 in case.shape(x) or lie_as_contiguous((x,), case))
    return _with(case, {f"{tensor}_layout": "contiguous" for tensor in plain})


def with_contiguous_inputs(case: Case) -> Case:
    """Return the case with contiguous q, k and v. dout keeps its layout, as it is no argument of the forward."""
    return _with(case, {f"{tensor}_layout": "contiguous" for tensor in ("q", "k", "v")})


def with_slices_as(name: str, case: Case) -> Case:
    """Return the case with as many slices, all of them sequences or all key heads: ``name`` is "batch" or "heads_kv".

    Entries that are set stay in their slices. Those of k and v, which a group of query heads shares, are set in each.
    """
    spikes = [
        replace(spike, index=(i, 0, *spike.index[2:]) if name == "batch" else (0, i, *spike.index[2:]))
        for spike in case.spikes
        for i in _slices_of(spike, case)
    ]
    sizes = {**dict.fromkeys(MADE_OF[SLICES], 1), name: case.batch * case.heads_q}
    return _with(case, {**sizes, "spikes": tuple(spikes)})


def _slices_of(spike: Spike, case: Case) -> range:
    """Return the numbers of the slices that an entry is in."""
    sequence, head = spike.index[0] % case.batch, spike.index[1] % case.shape(spike.tensor)[1]
    each = case.heads_q // case.shape(spike.tensor)[1]
    first = sequence * case.heads_q + head * each
    return range(first, first + each)


def with_zeros(tensor: str, case: Case) -> Case:
    """Return the case with a tensor of zeros, of which no entry is set."""
    spikes = tuple(spike for spike in case.spikes if spike.tensor != tensor)
    return _with(case, {f"{tensor}_values": "zeros", "spikes": spikes})


def with_seeds(case: Case, count: int) -> Iterator[Case]:
    """Yield the case with its own seed and with the next ones, ``count`` in all: other numbers of the same families."""
    return (replace(case, seed=case.seed + at) for at in range(count))


def with_normal_numbers(case: Case) -> Case:
    """Return the case with normal numbers in all tensors, and with no entry set."""
    return _with(case, {"spikes": (), **{f"{tensor}_values": "normal" for tensor in TENSORS}})


def with_no_more_than(needed: Collection[str], case: Case) -> Case:
    """Return the case with the simplest value of each field that is not needed.

    It keeps its lengths, its head_dim, its dtype and its launch settings.
    """
    kept = {*needed, "dtype", *(field for name in needed for field in MADE_OF.get(name, ()))}
    of_layouts = (name for name in needed if name == "huge" or name.endswith(PAIR))
    kept |= {f"{tensor}_layout" for name in of_layouts for tensor in _tensors_of(name)}
    for name, simplest in {**SIMPLEST, **dict.fromkeys(VALUES_OF, "normal")}.items():
        if name not in kept:
            case = with_value(case, name, simplest)
    return case


def has_small_scores(case: Case) -> bool:
    """Whether no score is larger than ordinary ones: sm_scale is 0, or at most the default one for normal numbers."""
    is_small = abs(case.scale) * math.sqrt(case.head_dim) <= 1
    return case.sm_scale == 0 or (is_small and value_of(case, "qk_values") == "normal")


def _tensors_of(name: str) -> tuple[str, ...]:
    """Return the tensors of a pair, or all tensors for any other field."""
    return tuple(name.removesuffix(PAIR).split(" and ")) if name.endswith(PAIR) else TENSORS


def _with(case: Case, fields: dict[str, Any]) -> Case:
    return replace(case, **fields)


def _near(value: int, allowed: Sequence[int]) -> list[int]:
    """Return the smallest allowed value, those next to this one, and the largest."""
    at = list(allowed).index(value)
    return [allowed[0], *allowed[max(at - 1, 0) : at], *allowed[at + 1 : at + 2], allowed[-1]]


def _whole_tiles(length: int, block: int) -> list[int]:
    """Return the length of the filled tiles, of the touched ones, and of one more; none if tiles are not known."""
    if not block:
        return []
    filled, touched = length // block, -(-length // block)
    return [tiles * block for tiles in (filled, touched, touched + 1) if tiles]


def text(value: Any) -> str:
    """Return a value of a field in words."""
    return "default" if value is None else str(value)


def _claim_without(name: str, case: Case, c: Capabilities) -> str:
    """Return the claim that leaves out this value of the field, if one does and a kernel might be meant that way."""
    if name == "head_dim":
        powers = [x for x in c.head_dims if x.bit_count() == 1]
        return "" if case.head_dim in powers else f"head_dims={','.join(map(str, powers))}"
    if name in LAYOUT_FIELDS:
        return f"layouts={','.join(x for x in c.layouts if x != getattr(case, name))}"
    if name in LENGTHS and getattr(case, name):
        return ""
    without = (text for key, text in lesser(c).items() if _leaves_out(CLAIMS[key], name, case))
    return next(without, "")


def _leaves_out(claim: Claim, name: str, case: Case) -> bool:
    return name in claim.fields and not claim.admits(claim.less, case)
