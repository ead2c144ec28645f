"""What a failure points to: the features of its smallest case without which it goes away.

The case has been shrunk, so none of the features that are left could be left out by itself. A length alone is not
named, since most failures need some rows; how it relates to the tiles is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from strategies.case import SIMPLEST, SIZES, TENSORS, Case
from strategies.features import EXPANDED, TILES_OF, UNEQUAL, text
from tests.harness.bugs.failure import Field

FEW_COLUMNS = 16
"""A head_dim up to this may matter only because another one gives the case other numbers, so it is not named."""

FEW_ENTRIES = 16
"""A case with more single entries than this was not shrunk to its end."""

CONSTANT = ("zeros", "ones")
"""Families of values that stay the same in another shape or layout."""

UNSCALED = ("zeros",)
"""Families of values that make every score 0, whatever the scale and the number of columns."""

SCORING = {"head_dim", "sm_scale"}
"""Fields that change all scores."""

STRUCTURE = SIMPLEST.keys() - set(SIZES) - SCORING - {"dtype"}
"""Fields that change neither shapes nor scores nor how numbers are rounded."""


def causes(
    case: Case, fields: Sequence[Field], launch: Mapping[str, tuple[Any, ...]]
) -> list[tuple[Field, str]]:
    """Return the features and launch settings that a failure points to, each with its field; () if nothing is certain.

    ``launch`` are the settings that are claimed.
    """
    if not any(x.fails for x in fields):
        return []  # it goes away with any change, so all of them seem to matter by accident
    # The default scale follows from head_dim.
    scale_tells = any(x.name == "sm_scale" and x.value == "default" and "1.0" in x.holds for x in fields)
    found = [
        (x, cause)
        for x in fields
        if x.matters and _tells(case, x.name)
        if not (x.name == "head_dim" and (scale_tells or _has_tiles_of_its_own(case)))
        for cause in _of_a_field(case, x, launch)
    ]
    named = {x.name for x, _ in found}
    if "dtype" in named:  # other numbers may be rounded the right way by luck
        structure = [(x, cause) for x, cause in found if x.name in STRUCTURE]
        # If a scale other than the default matters too, the dtype may only decide how large a number must be.
        scaled = any(x.name == "sm_scale" and "default" in x.holds for x in fields)
        return structure or [(x, cause) for x, cause in found if x.name == "dtype" and not scaled]
    if "causal" in named:  # another length moves the diagonal
        found = [(x, cause) for x, cause in found if x.name not in TILES_OF or cause.startswith("no_")]
    # If tiles are named, it is no news that another launch setting makes them smaller or larger.
    tiled = {TILES_OF[x.name] for x, _ in found if x.name in TILES_OF}
    return [(x, cause) for x, cause in found if x.name not in tiled]


def _has_tiles_of_its_own(case: Case) -> bool:
    """Whether a kernel may choose its tiles of several rows itself, which most kernels do by head_dim."""
    return max(case.seqlen_q, case.seqlen_k) > 1 and not case.blocks.keys() >= set(TILES_OF.values())


def _tells(case: Case, name: str) -> bool:
    """Whether another value of a field changes nothing else: neither the numbers nor strides that follow from it."""
    if name in STRUCTURE or name == "dtype":
        return True
    neutral = UNSCALED if name in SCORING else CONSTANT
    plain = all(getattr(case, f"{tensor}_values") in neutral for tensor in TENSORS)
    dense = set(case.layouts) == {"contiguous"}
    return plain and dense and len(case.spikes) <= FEW_ENTRIES


def _of_a_field(case: Case, field: Field, launch: Mapping[str, tuple[Any, ...]]) -> list[str]:
    if field.name in TILES_OF:
        return _of_a_length(field, case.blocks.get(TILES_OF[field.name], 0))
    if field.name == "head_dim":
        return _of_head_dim(field)
    if field.name == UNEQUAL:
        # Unequal lengths are not named if one is 0 or matters by itself, nor if single entries are set, because in
        # another shape these are in other places.
        return [] if field.fails or len(field.holds) < 2 or case.spikes else [UNEQUAL]
    if field.name == "sm_scale" and field.value == "default":
        # The scale may be forgotten or applied twice, which can't be seen with a scale of 1.
        return ["sm_scale"] if field.holds == ("1.0",) and field.fails else []
    if field.value in EXPANDED and getattr(case, field.name.replace("_layout", "_values")) not in CONSTANT:
        return []  # in another layout the tensor has other numbers
    simple = launch[field.name][0] if field.name in launch else SIMPLEST[field.name]
    # Fewer bits allow larger errors, so that a failure in float32 alone may be present in every dtype.
    return [field.name] if text(simple) in field.holds else []


def _of_a_length(field: Field, block: int) -> list[str]:
    """Return on which side of a line all failing lengths are, if a length that holds is on the other."""
    rows = "query" if field.name == "seqlen_q" else "key"
    fails, holds = _numbers(field)
    if fails == [0]:
        return ["no_queries" if rows == "query" else "no_keys"]
    if not block or len(fails) < 2:  # a single length tells no side of a line
        return []
    if all(x % block for x in fails) and sum(x and x % block == 0 for x in holds) > 1:
        return [f"{rows}_tail"]
    second = all(x > block for x in fails) and any(0 < x <= block for x in holds)
    border = min(fails) >= block and min(fails) % block in (0, 1) and max(holds) == min(fails) - 1
    return [f"{rows}_tiles"] if second or border else []


def _of_head_dim(field: Field) -> list[str]:
    fails, holds = _numbers(field)
    if all(x.bit_count() > 1 for x in fails) and any(x.bit_count() == 1 for x in holds):
        return ["odd_head_dim"]
    return ["head_dim"] if min(holds) < min(fails) > FEW_COLUMNS else []


def _numbers(field: Field) -> tuple[list[int], list[int]]:
    return [int(x) for x in (field.value, *field.fails)], [int(x) for x in field.holds]
