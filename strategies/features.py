"""Features of a case: what may decide whether a kernel fails on it, with its values and how to change it.

Most are fields of ``Case`` and launch settings. Others follow from several fields: how large scores are, whether a row
sees no key, whether lengths fill tiles. Each is declared once, in ``FEATURES``. Functions that change a case in several
fields at once are here too.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from operator import attrgetter
from typing import Any

from strategies.case import LAYOUT_FIELDS, SIMPLEST, SIZES, TENSORS, Case, Spike, changed
from strategies.layouts import is_as_contiguous

LENGTHS = ("seqlen_q", "seqlen_k")
VALUES_OF = {"qk_values": ("q", "k"), "v_values": ("v",), "dout_values": ("dout",)}
"""Features of numbers, and their tensors. q and k are one feature, because they meet in the scores."""
UNEQUAL = "lengths"
"""Whether the lengths are equal, or which of them is longer."""
HUGE = "huge"
"""Whether any tensor has huge strides."""
SCORES = "scores"
"""How large scores are: sm_scale and the numbers of q and k decide it together."""
BLIND = "blind rows"
"""Whether rows of queries see no key, and why."""
NO_KEYS, HIDDEN, SEEN = "no keys", "all keys hidden from some rows", "keys for all rows"
"""The values of BLIND: there are no keys, the causal mask hides all of them from some rows, or every row sees one."""
HEADS = "heads_q"
"""The number of query heads."""
SLICES = "slices"
"""Whether there are several slices: a slice is one head of one sequence."""
SEVERAL, ONE = "several heads or sequences", "one head of one sequence"
"""The values of SLICES."""
MASKED = "masks"
"""Whether some score is masked, by the causal mask, by padding or beyond the last key."""
SOME, NONE = "masked scores", "no masked score"
"""The values of MASKED."""
DIFFERENT = {"seqlens_q": "different numbers of queries", "seqlens_k": "different numbers of keys"}
"""Whether the sequences of a call of ``ragged`` have numbers of queries, or of keys, of their own, by their field."""
EMPTY = {"seqlens_q": "a sequence without queries", "seqlens_k": "a sequence without keys"}
"""Whether some sequence of a call of ``ragged`` has no queries, or no keys, by the field that says how many it has."""
WHOLE_TILES = 128
"""Lengths that are multiples of this fill every tile of keys."""
NAN = "NaN"
"""Whether any entry of a tensor is set to NaN or infinity."""
WHOLE, PARTIAL = "whole", "partial"
"""The values of a feature for tiles of so many rows: both lengths fill their tiles, or one of them does not."""
SIZES_OF_TILES = (4, 8, 16, 32, 48, 64, 128)
"""Rows of a tile that a feature is declared for."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Something about a case that may decide whether a kernel fails on it.

    Attributes:
        name: as a report has it.
        value: a function of a case that returns its value there.
        change: a function of a case and a value that returns the case with this value of the feature.
        made_of: the fields of a case that it follows from, if it has a name of its own.
        tensors: whose layouts or numbers it is about.
        is_layout: whether it is the layout of one tensor, or of two.
        rows: the rows of a tile, if it says whether lengths fill tiles of so many; else 0.
        is_of_parts: whether a part of a case, as a law may call a kernel with, may have other values than the case.
        is_shrunk: whether shrinking simplifies it, although it is no field with a simplest value.
    """

    name: str
    value: Callable[[Case], Any]
    change: Callable[[Case, Any], Case]
    made_of: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    is_layout: bool = False
    rows: int = 0
    is_of_parts: bool = False
    is_shrunk: bool = False

    @property
    def is_pair(self) -> bool:
        """Whether it is about the layouts of two tensors, as where one is read by the strides of the other."""
        return self.is_layout and len(self.tensors) > 1


def _plain(name: str) -> Feature:
    """Declare a field of a case."""
    is_layout = name in LAYOUT_FIELDS
    return Feature(
        name=name,
        value=attrgetter(name),
        change=lambda case, value: _with(case, {name: value}),
        tensors=(name.removesuffix("_layout"),) if is_layout else (),
        is_layout=is_layout,
        is_of_parts=name in SIZES,
    )


def _setting(name: str) -> Feature:
    """Declare a launch setting."""
    return Feature(
        name=name,
        value=lambda case: dict(case.launch)[name],
        change=lambda case, value: changed(
            case, launch=tuple((x, value if x == name else own) for x, own in case.launch)
        ),
    )


def _pair(tensors: tuple[str, str]) -> Feature:
    """Declare whether the layouts of two tensors are both contiguous. Its only change makes them so."""
    names = [f"{tensor}_layout" for tensor in tensors]
    return Feature(
        name=pair_of(*tensors),
        value=lambda case: "contiguous" if {getattr(case, x) for x in names} == {"contiguous"} else "other",
        change=lambda case, _: _with(case, dict.fromkeys(names, "contiguous")),
        tensors=tensors,
        is_layout=True,
        is_shrunk=True,
    )


def pair_of(tensor: str, other: str) -> str:
    """Return the name of the feature for the layouts of two tensors."""
    return " and ".join(sorted((tensor, other))) + " layouts"


def _tiles(rows: int) -> Feature:
    """Declare whether both lengths fill tiles of so many rows. Its only change makes them so long that they do."""

    def filled(case: Case, _: Any) -> Case:
        return _with(case, {length: -(-getattr(case, length) // rows) * rows for length in LENGTHS})

    return Feature(
        name=tiles_of(rows),
        value=lambda case: PARTIAL if case.seqlen_q % rows or case.seqlen_k % rows else WHOLE,
        change=filled,
        rows=rows,
        is_of_parts=True,
    )


def tiles_of(rows: int) -> str:
    """Return the name of the feature that says whether both lengths fill tiles of so many rows."""
    return f"tiles of {rows}"


@dataclass(frozen=True)
class Work:
    """The tiles that all slices of a case have together, of so many ``rows`` of a ``length`` each.

    A slice is a query head of a sequence, or for keys a key head. A kernel has one program for each tile, or shares
    them out among fewer programs.
    """

    length: str
    rows: int

    @property
    def name(self) -> str:
        """As a report has it."""
        return f"tiles of {self.rows} {'queries' if self.length == 'seqlen_q' else 'keys'} in all"

    def count(self, case: Case) -> int:
        """Return how many tiles a case has."""
        heads = case.heads_q if self.length == "seqlen_q" else case.heads_kv
        return case.batch * heads * -(-getattr(case, self.length) // self.rows)

    def of_slices(self, case: Case, slices: int, length: int) -> Case:
        """Return the case with so many sequences of one head and of a length."""
        return _with(case, {"batch": slices, "heads_kv": 1, "group": 1, self.length: length})

    @property
    def feature(self) -> Feature:
        """Declare how many they are. A change leaves a single slice, of whole tiles."""
        made_of = ("batch", "heads_kv", "group", self.length)
        return Feature(
            name=self.name,
            value=self.count,
            change=lambda case, tiles: self.of_slices(case, 1, tiles * self.rows),
            made_of=made_of,
            is_of_parts=True,
        )


WORK = {work.name: work for work in (Work(*x) for x in product(LENGTHS, (128, 64, 32, 16)))}
"""The tiles of all slices that a feature is declared for, by its name; the largest tiles first."""


def _numbers(name: str, tensors: tuple[str, ...]) -> Feature:
    """Declare the family of some tensors' numbers, or "set" if single entries are. A change sets no entries."""

    def value(case: Case) -> str:
        families = [getattr(case, f"{tensor}_values") for tensor in tensors]
        is_set = any(spike.tensor in tensors for spike in case.spikes)
        return "set" if is_set else " and ".join(dict.fromkeys(families))

    def change(case: Case, family: str) -> Case:
        spikes = tuple(spike for spike in case.spikes if spike.tensor not in tensors)
        return _with(case, {"spikes": spikes, **{f"{x}_values": family for x in tensors}})

    return Feature(name=name, value=value, change=change, tensors=tensors, is_shrunk=True)


def _of_its_own(field: str, name: str) -> Feature:
    """Declare whether sequences have numbers of rows of their own by a field. Its only change gives them all rows."""
    return Feature(
        name=name,
        value=lambda case: bool(getattr(case, field)),
        change=lambda case, _: _with(case, {field: ()}),
        made_of=(field,),
        is_shrunk=True,
    )


def _empty(field: str, name: str) -> Feature:
    """Declare whether a sequence has no rows by a field. Its only change gives each such sequence one."""
    return Feature(
        name=name,
        value=lambda case: 0 in getattr(case, field)[: case.batch],
        change=lambda case, _: _with(case, {field: tuple(max(1, n) for n in getattr(case, field))}),
        made_of=(field,),
        is_shrunk=True,
    )


def _is_masked(case: Case) -> str:
    return SOME if case.causal or case.key_padding != "none" or case.seqlen_k % WHOLE_TILES else NONE


def _without_masks(case: Case, _: Any) -> Case:
    whole = -(-case.seqlen_k // WHOLE_TILES) * WHOLE_TILES
    return changed(case, causal=False, key_padding="none", seqlen_k=whole)


def _which_is_longer(case: Case) -> str:
    more = "more queries than keys" if case.seqlen_q > case.seqlen_k else "more keys than queries"
    return "equal" if case.seqlen_q == case.seqlen_k else more


def _which_are_blind(case: Case) -> str:
    hidden = HIDDEN if case.causal and case.seqlen_q > case.seqlen_k else SEEN
    return hidden if case.seqlen_k else NO_KEYS


def _how_large_scores_are(case: Case) -> str:
    return "ordinary" if case.sm_scale is None and value_of(case, "qk_values") == "normal" else "other"


DERIVED = (
    Feature(
        name=UNEQUAL,
        value=_which_is_longer,
        change=lambda case, both: changed(case, seqlen_q=both, seqlen_k=both),
        made_of=LENGTHS,
        is_of_parts=True,
        is_shrunk=True,
    ),
    Feature(
        name=HUGE,
        value=lambda case: HUGE in case.layouts,
        change=lambda case, _: _with(
            case, {x: "contiguous" for x in LAYOUT_FIELDS if getattr(case, x) == "huge"}
        ),
        tensors=TENSORS,
        is_shrunk=True,
    ),
    Feature(
        name=SCORES,
        value=_how_large_scores_are,
        change=lambda case, _: replace(with_value(case, "qk_values", "normal"), sm_scale=None),
        made_of=("sm_scale", "qk_values"),
    ),
    Feature(
        name=BLIND,
        value=_which_are_blind,
        change=lambda case, lengths: changed(case, seqlen_q=lengths[0], seqlen_k=lengths[1]),
        made_of=("causal", *LENGTHS),
        is_of_parts=True,
    ),
    Feature(
        name=HEADS,
        value=attrgetter(HEADS),
        change=lambda case, heads: changed(case, heads_kv=heads, group=1),
        made_of=("heads_kv", "group"),
        is_of_parts=True,
    ),
    Feature(
        name=SLICES,
        value=lambda case: SEVERAL if case.batch * case.heads_q > 1 else ONE,
        change=lambda case, _: changed(case, batch=1, heads_kv=1, group=1),
        made_of=("batch", "heads_kv", "group"),
        is_of_parts=True,
    ),
    Feature(
        name=MASKED,
        value=_is_masked,
        change=_without_masks,
        made_of=("causal", "seqlen_k"),
        is_of_parts=True,
    ),
    Feature(
        name=NAN,
        value=lambda case: any(isinstance(spike.value, str) for spike in case.spikes),
        change=lambda case, _: changed(
            case, spikes=tuple(x for x in case.spikes if not isinstance(x.value, str))
        ),
        made_of=tuple(VALUES_OF),
    ),
    *(_numbers(name, tensors) for name, tensors in VALUES_OF.items()),
    *(_of_its_own(field, name) for field, name in DIFFERENT.items()),
    *(_empty(field, name) for field, name in EMPTY.items()),
    *map(_pair, combinations(sorted(TENSORS), 2)),
    *map(_tiles, SIZES_OF_TILES),
    *(work.feature for work in WORK.values()),
)
"""Features that follow from several fields of a case."""
FEATURES: Mapping[str, Feature] = {x.name: x for x in (*(_plain(x.name) for x in fields(Case)), *DERIVED)}
"""Every feature but launch settings, by its name."""


def feature(name: str) -> Feature:
    """Return the feature of a name; a name that is no feature of every case is that of a launch setting."""
    return FEATURES.get(name) or _setting(name)


def value_of(case: Case, name: str) -> Any:
    """Return the value of a feature."""
    return feature(name).value(case)


def with_value(case: Case, name: str, value: Any) -> Case:
    """Return the case with another value of a feature, which is that of ``Feature.change``.

    For ``UNEQUAL`` it is the length that both get, for ``BLIND`` both lengths; of ``HEADS`` none are grouped then.
    """
    return feature(name).change(case, value)


def made_of(names: Collection[str]) -> set[str]:
    """Return the fields that features with names of their own follow from."""
    return {field for name in names for field in feature(name).made_of}


def laid_out(name: str, case: Case) -> list[str]:
    """Return the tensors that a layout, or a pair of them, is about, and that are not contiguous."""
    return [x for x in feature(name).tensors if getattr(case, f"{x}_layout") != "contiguous"]


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
    sizes = {**dict.fromkeys(feature(SLICES).made_of, 1), name: case.batch * case.heads_q}
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
    return (changed(case, seed=case.seed + at) for at in range(count))


def with_normal_numbers(case: Case) -> Case:
    """Return the case with normal numbers in all tensors, and with no entry set."""
    return _with(case, {"spikes": (), **{f"{tensor}_values": "normal" for tensor in TENSORS}})


def with_no_more_than(needed: Collection[str], case: Case) -> Case:
    """Return the case with the simplest value of each feature that is not needed.

    It keeps its lengths, its head_dim, its dtype and its launch settings.
    """
    kept = {*needed, "dtype", *made_of(needed)}
    of_layouts = (x for x in map(feature, needed) if x.name == HUGE or x.is_layout)
    kept |= {f"{tensor}_layout" for x in of_layouts for tensor in x.tensors}
    for name, simplest in {**SIMPLEST, **dict.fromkeys(VALUES_OF, "normal")}.items():
        if name not in kept:
            case = with_value(case, name, simplest)
    return case


def has_small_scores(case: Case) -> bool:
    """Whether no score is larger than ordinary ones: sm_scale is 0, or at most the default one for normal numbers."""
    is_small = abs(case.scale) * math.sqrt(case.head_dim) <= 1
    return case.sm_scale == 0 or (is_small and value_of(case, "qk_values") == "normal")


def _with(case: Case, values: dict[str, Any]) -> Case:
    return changed(case, **values)


TILES_OF = {"seqlen_q": "block_m", "seqlen_k": "block_n"}
"""The launch setting that says how many rows a tile has along each length."""


EXPANDED = ("expanded", "expanded_rows")
"""Layouts that repeat the numbers of a part of the tensor."""


def text(value: Any) -> str:
    """Return a value of a field in words."""
    if isinstance(value, tuple):
        return " and ".join(map(str, value)) or "none"
    return "default" if value is None else str(value)
