"""Kernels whose source is not known: every arithmetic that a plausible design of them has.

A member of a family is one design, and its bounds are exactly its own. A call is right if one member explains all of
it; that is tighter than the largest bound over all members, and sound where one call runs one code path. A family is
kept as its factors: ``bases``, each with every one of ``forward`` and every one of ``backward``, as what a forward
rounds does not enter the bounds of gradients that are judged at its own results.

Laws that compare calls with each other, and judge neither, use the ``envelope``: an arithmetic whose bounds are at
least those of every member.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from reference.arithmetic import FORMATS, TF32X3, Arithmetic, Format

Changes = Mapping[str, Any]
"""Fields of an ``Arithmetic`` with the values that a design has there."""

ALL_KEYS = 2**31
"""Tile size of a softmax that takes every key at once."""

MOST_PARTS = 32
"""Parts of the keys that give results of their own: split-KV kernels use as many as that for lengths up to 4096."""

DELTAS = ("out", "probabilities", "weights")


@dataclass(frozen=True)
class Family:
    """The designs that a kernel may have, the usual one first.

    Attributes:
        bases: what forward and backward share.
        forward: what a forward may have beside.
        backward: what a backward may have beside.
    """

    bases: tuple[Arithmetic, ...]
    forward: tuple[Changes, ...] = ({},)
    backward: tuple[Changes, ...] = ({},)

    @cached_property
    def envelope(self) -> Arithmetic:
        """An arithmetic whose bounds are at least those of every member."""
        return widest(
            replace(base, **changes) for base in self.bases for changes in ({}, *self.forward, *self.backward)
        )

    def claimed(self, changes: Changes) -> "Family":
        """The family of a kernel of which these fields are claimed.

        Of what members differ in, those with the claimed value stay. Other claims add a member to each base.
        """
        forward, backward = (_with(changes, factor) for factor in (self.forward, self.backward))
        known = {name for factor in (*self.forward, *self.backward) for name in factor}
        added = {name: value for name, value in changes.items() if name not in known}
        bases = (*self.bases, *(replace(base, **added) for base in self.bases if added))
        return Family(tuple(dict.fromkeys(bases)), forward, backward)


def _with(changes: Changes, factor: tuple[Changes, ...]) -> tuple[Changes, ...]:
    """Those of a factor that agree with the claims, or all of it where none does."""

    def agrees(member: Changes) -> bool:
        named = {name for other in factor for name in other}
        return all(
            member.get(name, getattr(Arithmetic, name)) == value
            for name, value in changes.items()
            if name in named
        )

    return tuple(filter(agrees, factor)) or factor


def full_precision(base: Arithmetic) -> Family:
    """Every plausible design that rounds no more than FlashAttention-2 does, ``base`` being that in its formats."""
    base = replace(base, tile_max=ALL_KEYS)
    narrow = base.weights.name != "float32"
    split: Changes = {"partial_results": True, "merged": MOST_PARTS, "merged_by_lse": True}
    deltas = [{"delta": delta} for delta in (DELTAS if narrow else DELTAS[:2])]
    return Family(
        bases=(base,) if narrow else (base, in_tf32x3(base)),
        forward=_product(({}, {"normalised_first": True}), ({}, split)),
        backward=_product(
            deltas,
            ({}, {"ds_scaled": True}),
            ({}, {"dk_dv_per_head": True}),
            ({}, {"saved_weights": True}),
            ({}, {"ds_from_rounded_p": True}) if narrow else ({},),
        ),
    )


WORDS: Mapping[str, Mapping[Any, str]] = {
    "normalised_first": {False: "P cast before the division", True: "P cast after the division"},
    "partial_results": {False: "", True: "parts of the keys merged"},
    "ds_scaled": {False: "dS unscaled at its cast", True: "dS scaled at its cast"},
    "delta": {
        "out": "delta from out",
        "probabilities": "delta from P dP",
        "weights": "delta from P dP after P's cast",
    },
    "dk_dv_per_head": {False: "", True: "dk and dv stored per head"},
    "saved_weights": {False: "", True: "P kept from the forward"},
    "ds_from_rounded_p": {False: "", True: "dS from P after its cast"},
}
"""What to say of a design, for each field in which members of a family differ; an empty text says nothing."""


def in_words(ways: tuple[Changes, ...], way: Changes) -> str:
    """One way of a factor of a family: what it is, in each field in which the ways of the factor differ."""
    fields_ = [name for name in WORDS if any(name in other for other in ways)]
    return ", ".join(
        filter(None, (WORDS[name][way.get(name, getattr(Arithmetic, name))] for name in fields_))
    )


def in_tf32x3(base: Arithmetic) -> Arithmetic:
    """Float32 products as three of tf32."""
    return replace(base, weights=TF32X3, operand_rounding=TF32X3.roundoff)


def _product(*factors: Iterable[Changes]) -> tuple[Changes, ...]:
    """Every choice of one of each factor; the first factors change last."""
    return tuple({k: v for part in choice for k, v in part.items()} for choice in itertools.product(*factors))


def widest(members: Iterable[Arithmetic]) -> Arithmetic:
    """The arithmetic that errs at least as much as each of these, in each of its fields."""
    members = tuple(members)
    return Arithmetic(
        **{f.name: _widest(f.name, [getattr(m, f.name) for m in members]) for f in fields(Arithmetic)}
    )


def _widest(name: str, values: list[Any]) -> Any:
    first = values[0]
    if all(value == first for value in values):
        return first
    if name in ("delta", "ds_scaled"):
        return "any"
    if isinstance(first, Format):
        return _widest_format(values)
    if name == "tile_min":
        return min(values)
    # How often, where None is never: a smaller number is more often.
    return min(filter(None, values)) if name in ("dk_dv_rows", "dq_keys") else max(values)


def _widest_format(formats: list[Format]) -> Format:
    return Format(
        name=" or ".join(dict.fromkeys(f.name for f in formats)),
        roundoff=max(f.roundoff for f in formats),
        underflow=max(f.underflow for f in formats),
        maximum=min(f.maximum for f in formats),
        truncates=any(f.truncates for f in formats),
    )


LESS_PRECISE: Mapping[str, Changes] = {
    "rounded_partials=true": {"rounded_partials": True},
    "exp_error=1e-4": {"exp_error": 1e-4},
    "l_from_rounded_p=true": {"l_from_rounded_p": True},
    "k_prescaled=true": {"k_prescaled": True},
    "q_prescaled=true": {"q_prescaled": True},
    "rounded_scores=true": {"rounded_scores": True},
    "precision=tf32": {"weights": FORMATS["tf32_truncated"], "operand_rounding": 2.0**-10},
}
"""Claims of sound designs that round more than FlashAttention-2 does, with what they change; the smallest errors
first, after that of out alone: whatever errs in a softmax shows in lse as well."""


def concerns(claim: str, dtype: str) -> bool:
    """Whether a less precise design rounds anything more at a dtype: float32 loses nothing by a cast to itself."""
    if claim in ("exp_error=1e-4", "rounded_partials=true"):
        return True
    return (claim == "precision=tf32") == (dtype == "float32")


def less_precise(family: Family) -> Iterator[tuple[str, Family]]:
    """Each claim that would add members to a family of full precision, with what it adds."""
    for claim, changes in LESS_PRECISE.items():
        if concerns(claim, family.bases[0].output.name):
            yield claim, replace(family, bases=tuple(replace(base, **changes) for base in family.bases[:1]))
