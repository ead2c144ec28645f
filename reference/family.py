"""Kernels whose source is not known: every arithmetic that a plausible design of such a kernel has.

A member of a family is one design, and its bounds are exactly its own. A call is right if one member explains all of
it; that is tighter than the largest bound over all members, and sound where one call runs one code path.

A family is stored as three factors: its members combine each of ``bases`` with each of ``forward`` and each of
``backward``. The last two are independent, because gradients are judged at the kernel's own out and lse, whose bounds
do not enter those of the gradients.

Laws that compare calls with each other, rather than with the truth, use the ``envelope``: an arithmetic whose bounds
are at least those of every member.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from reference.arithmetic import FLOAT8_E4M3, HOPPER_FP8_ROUNDOFF, TF32_TRUNCATED, TF32X3, Arithmetic, Format

Changes = Mapping[str, Any]
"""Fields of an ``Arithmetic`` with the values that a design has there."""

ALL_KEYS = 2**31
"""Tile size of a softmax that takes every key at once."""

MOST_PARTS = 32
"""The most parts of the keys that a split-KV kernel handles separately, at lengths up to 4096."""

FIXED_PARTS = 8
"""The most parts of the keys where their number is the same at all lengths; a part may be shorter than a tile then."""

DELTAS = ("out", "probabilities", "weights")


@dataclass(frozen=True)
class Family:
    """The designs that a kernel may have, the usual one first.

    Attributes:
        bases: what the forward and the backward have in common.
        forward: changes to a base that a forward may have.
        backward: changes to a base that a backward may have.
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

    def of_keys(self, keys: int) -> "Family":
        """Return the designs as they are in calls with so many keys: with as many parts as these can be cut into.

        A kernel that divides its work among more programs gives each part whole tiles of ``tile_min`` keys or more, the
        first and the last part excepted; one that does not has ``FIXED_PARTS`` at most. What is declared for a base, as
        by a kernel that knows the number of its parts, stays.
        """
        most = max(FIXED_PARTS, math.ceil(keys / self.bases[0].tile_min) + 1)
        forward = tuple(
            {**way, "merged": min(way["merged"], most)} if "merged" in way else way for way in self.forward
        )
        return self if forward == self.forward else replace(self, forward=forward)

    def claimed(self, changes: Changes) -> "Family":
        """Return the family of a kernel of which these fields are claimed.

        Where members differ in a claimed field, those with the claimed value stay. Claims of other fields add to
        each base a copy with the claimed values.
        """
        forward, backward = (_with(changes, factor) for factor in (self.forward, self.backward))
        known = {name for factor in (*self.forward, *self.backward) for name in factor}
        added = {name: value for name, value in changes.items() if name not in known}
        bases = (*self.bases, *(replace(base, **added) for base in self.bases if added))
        return Family(tuple(dict.fromkeys(bases)), forward, backward)


def _with(changes: Changes, factor: tuple[Changes, ...]) -> tuple[Changes, ...]:
    """Return the members of a factor that agree with the claims, or all of them if none does."""

    def agrees(member: Changes) -> bool:
        named = {name for other in factor for name in other}
        return all(
            member.get(name, getattr(Arithmetic, name)) == value
            for name, value in changes.items()
            if name in named
        )

    return tuple(filter(agrees, factor)) or factor


def full_precision(base: Arithmetic) -> Family:
    """Return every plausible design that rounds no more than ``base``, the arithmetic of FlashAttention-2."""
    base = replace(base, tile_max=ALL_KEYS, rounded_reference=True)
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
"""How a design is described: the text for each value of a field in which members differ; empty texts say nothing."""


def in_words(ways: tuple[Changes, ...], way: Changes) -> str:
    """Describe ``way``, one of the ``ways`` of a family's factor, by the fields in which these differ."""
    fields_ = [name for name in WORDS if any(name in other for other in ways)]
    return ", ".join(
        filter(None, (WORDS[name][way.get(name, getattr(Arithmetic, name))] for name in fields_))
    )


def in_tf32x3(base: Arithmetic) -> Arithmetic:
    """Return the arithmetic with each float32 product made of three tf32 products."""
    return replace(base, weights=TF32X3, operand_rounding=TF32X3.roundoff)


def with_8_bit_inputs(family: Family, device_type: str, *, values: bool) -> Family:
    """Return the designs of a family for calls whose q and k are float8_e4m3fn, and whose v is too if ``values``.

    The scales of these numbers are powers of two, so that a kernel may multiply the numbers by them first, or scores
    and out, without a rounding that other calls do not have. A design may also answer such a call as any other: what
    the numbers stand for is exact in bfloat16. Beside the designs of the family there are those whose products are of
    8-bit operands, so that no operand of a score is scaled and rounded before. Their scores stay in float32.

    Scores. A product of two e4m3 numbers has 8 significant bits. A GPU may sum it as a Hopper's tensor core does, with
    13 fraction bits of the largest of what an instruction adds: 32 products, and the sum so far unless that is added in
    float32 (FlashAttention-3, and Triton by default, do not). The largest addend is exact, so that at most 32 others
    err by 2^-13 of it each, and the sum by 2^-13 of itself: 33 * 2^-13 for 32 products, ``HOPPER_FP8_ROUNDOFF`` for
    each, and the sums of all instructions together err by no more for each product. Operands below the smallest normal
    number, 2^-6 in units of their scale, count as if they were as large (``Arithmetic.smallest_operand``). A CPU has no
    such products, and sums like those of other calls.

    P v, if ``values``. P, at most 1 before its division by l, is cast to e4m3, with a unit roundoff of 2^-4 and, as the
    smallest subnormal number is 2^-9, an error of 2^-10 where it underflows. A factor of P before the cast, as the 2^8
    of FlashAttention-3, only makes that smaller. Products are summed as above. A v in bfloat16 needs a P in bfloat16.
    """
    rounded = ("k_prescaled", "q_prescaled", "qk_prescaled", "rounded_scores")
    sums: dict[str, Any] = dict.fromkeys(rounded, False)
    of_weights: dict[str, Any] = {"weights": FLOAT8_E4M3}
    if device_type != "cpu":
        smallest_normal = FLOAT8_E4M3.underflow / FLOAT8_E4M3.roundoff
        sums |= {"score_accumulate": HOPPER_FP8_ROUNDOFF, "smallest_operand": smallest_normal}
        of_weights |= {"accumulate": HOPPER_FP8_ROUNDOFF}
    bases = [*family.bases, *(replace(base, **sums) for base in family.bases)]
    if values:
        bases += [replace(base, **sums, **of_weights) for base in family.bases]
    return replace(family, bases=tuple(dict.fromkeys(bases)))


def _product(*factors: Iterable[Changes]) -> tuple[Changes, ...]:
    """Return every combination of one choice from each factor; the last factor varies fastest."""
    return tuple({k: v for part in choice for k, v in part.items()} for choice in itertools.product(*factors))


def widest(members: Iterable[Arithmetic]) -> Arithmetic:
    """Return the arithmetic that errs, in each of its fields, at least as much as every member.

    Scores that some member sums unlike other products have a roundoff of their own in all members then.
    """
    members = tuple(members)
    if len({member.score_accumulate for member in members}) > 1:
        members = tuple(
            replace(x, score_accumulate=x.accumulate) if x.score_accumulate is None else x for x in members
        )
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
    # These count terms between two roundings, None meaning that there are none: the smallest number rounds most often.
    return min(filter(None, values)) if name in ("dk_dv_rows", "dq_keys") else max(values)


def _widest_format(formats: list[Format]) -> Format:
    return Format(
        name=" or ".join(dict.fromkeys(f.name for f in formats)),
        roundoff=max(f.roundoff for f in formats),
        underflow=max(f.underflow for f in formats),
        maximum=min(f.maximum for f in formats),
        truncates=any(f.truncates for f in formats),
    )


LESS_PRECISE: Mapping[str, dict[str, Any]] = {
    "merged_by_difference=true": {"merged_by_difference": True},
    "rounded_group_sums=true": {"rounded_group_sums": True},
    "rounded_partials=true": {"rounded_partials": True},
    "exp_error=1e-4": {"exp_error": 1e-4},
    "tanh_error=2^-10": {"tanh_error": 2.0**-10},
    "rounded_largest_weight=true": {"rounded_largest_weight": True},
    "l_from_rounded_p=true": {"l_from_rounded_p": True},
    "k_prescaled=true": {"k_prescaled": True},
    "q_prescaled=true": {"q_prescaled": True},
    "qk_prescaled=true": {"qk_prescaled": True},
    "rounded_bias=true": {"rounded_bias": True},
    "rounded_scores=true": {"rounded_scores": True},
    "precision=tf32": {"weights": TF32_TRUNCATED, "operand_rounding": TF32_TRUNCATED.roundoff},
}
"""Claims of sound designs that round more than FlashAttention-2 does, with the fields that they change. Partial results
come first, because they change out most, while whatever errs in a softmax shows in lse as well. The others follow by
the size of their errors, smallest first."""


AND = " + "
PAIRS: Mapping[str, tuple[str, str]] = {
    AND.join(claims): claims
    for claims in (
        ("rounded_scores=true", "l_from_rounded_p=true"),
        ("rounded_scores=true", "rounded_group_sums=true"),
        ("rounded_partials=true", "merged_by_difference=true"),
        ("precision=tf32", "q_prescaled=true"),
        ("precision=tf32", "k_prescaled=true"),
    )
}
"""Pairs of claims that one kernel may need together.

Attention by parts or head by head that computes in the inputs' dtype needs such a pair, and so does a ring that stores
its parts. A kernel that converts its inputs to float32 and scales one of them truncates the product, if it multiplies
in tf32.
"""


def implied(claims: Sequence[str]) -> list[str]:
    """Return the claims that explain a call, with each pair of claims one of which explains it."""
    pairs = (pair for pair, parts in PAIRS.items() if not {*parts}.isdisjoint(claims))
    return list(dict.fromkeys([*claims, *pairs]))


OF_16_BITS = (
    "rounded_group_sums=true",
    "rounded_largest_weight=true",
    "l_from_rounded_p=true",
    "k_prescaled=true",
    "q_prescaled=true",
    "qk_prescaled=true",
    "rounded_bias=true",
    "rounded_scores=true",
)
"""Claims of casts to the format of the inputs, which lose something where that is not float32."""


def concerns(claim: str, dtype: str) -> bool:
    """Whether a less precise design rounds more at this dtype: a cast of float32 to itself loses nothing."""
    if claim in PAIRS:
        return any(concerns(part, dtype) for part in PAIRS[claim])
    if claim in OF_16_BITS:
        return dtype != "float32"
    # A kernel that converts its inputs to float32 truncates P to 11 bits, as many as float16 rounds it to.
    return claim != "precision=tf32" or dtype != "bfloat16"


def at_dtype(changes: Changes, dtype: str) -> Changes:
    """Return what a claim changes where inputs have this dtype: those of 16 bits are operands of which tf32 loses none.

    Their fraction has 10 bits at most, which are those that a truncation to tf32 leaves.
    """
    exact = () if dtype == "float32" else ("operand_rounding",)
    return {name: value for name, value in changes.items() if name not in exact}


def less_precise(family: Family) -> Iterator[tuple[str, Family]]:
    """Yield each claim of ``LESS_PRECISE`` that matters at the family's dtype, with the family of its designs."""
    yield from _changed(family, LESS_PRECISE)


def in_pairs(family: Family) -> Iterator[tuple[str, Family]]:
    """Yield each pair of claims that matters at the family's dtype, with the family of the designs that have both."""
    yield from _changed(
        family, {pair: LESS_PRECISE[one] | LESS_PRECISE[two] for pair, (one, two) in PAIRS.items()}
    )


def _changed(family: Family, designs: Mapping[str, Changes]) -> Iterator[tuple[str, Family]]:
    dtype = family.bases[0].output.name
    for claim, changes in designs.items():
        if concerns(claim, dtype):
            yield claim, replace(family, bases=(replace(family.bases[0], **at_dtype(changes, dtype)),))
