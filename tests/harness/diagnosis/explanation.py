"""Why a case fails: what its wrong elements have in common, which fields matter, and what that points to.

Each field is changed by itself, to its simplest value and to the nearest ones. As the case has been shrunk, no feature
that it still has could be removed alone. A length itself is not named as a cause, since most failures require some
rows; its relation to the tiles is, such as "a last tile of keys that is not full".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kernels.contract import CLAIMS, Capabilities
from kernels.contract.declaration import Claim
from kernels.contract.parsing import lesser
from strategies.case import LAYOUT_FIELDS, OPTIONS, SIMPLEST, SIZES, TENSORS, Case
from strategies.features import (
    DIFFERENT,
    EMPTY,
    EXPANDED,
    LENGTHS,
    TILES_OF,
    UNEQUAL,
    text,
    value_of,
    with_normal_numbers,
    with_value,
)
from strategies.landmarks import MANY
from tests.harness.bugs.failure import COMES_AND_GOES, EVER_OTHER, Explanation, Field
from tests.harness.clock import BudgetSpent
from tests.harness.running.runs import Seen

FURTHER = 70
"""How many queries and keys are added: for most tile sizes, they reach into one more tile."""
WIDE = 16
"""With at least this many columns, a single wrong column stands out."""

TELLING_SCALE = 0.3
"""Differs from every other constant in ``known_numbers``, so that a wrong factor of 0.3 is named unambiguously."""

FEW_COLUMNS = 16
"""A head_dim up to this is not named: it may matter only because changing it changes the numbers of the case."""

FEW_ENTRIES = 16
"""A case with more single entries than this was not shrunk to its end."""

CONSTANT = ("zeros", "ones")
"""Families of numbers that stay the same in another shape or layout."""

UNSCALED = ("zeros",)
"""Families of numbers that make every score 0, whatever the scale and the number of columns."""

SCORING = {"head_dim", "sm_scale"}
"""Fields that change all scores."""

STRUCTURE = SIMPLEST.keys() - set(SIZES) - SCORING - {"dtype"}
"""Fields that change neither shapes nor scores nor how numbers are rounded."""


def explain(
    case: Case,
    fails: Callable[[Case], bool | None],
    look: Callable[[Case], Seen | None] | None,
    capabilities: Capabilities,
    *,
    lengths_tell: bool = True,
) -> Explanation:
    """Explain a failing case.

    ``fails`` says whether a case breaks the law, or None if that is not known. ``look`` describes the wrong elements of
    a case that fails as this one does, and returns None for any other case; ``look`` itself is None if the failure has
    no wrong numbers. Either may raise BudgetSpent, which ends the search with what is known by then. With
    ``lengths_tell=False`` lengths are not named as causes, because the law draws lengths of its own, up to those of the
    case.
    """
    known = Explanation()
    with suppress(BudgetSpent):
        if look:
            others = [*_larger(case, capabilities)]
            larger = ((x, look(x)) for x in (replace(others[0], sm_scale=TELLING_SCALE), *others))
            other, seen = next(((x, found) for x, found in larger if found), (case, Seen((), ())))
            if seen.sentences and other != case:
                seen = replace(seen, sentences=(f"a larger case, {other}:", *seen.sentences))
            larger_case = other if other != case else None
            known = Explanation(seen.sentences, pictures=seen.pictures, larger=larger_case)
            known = replace(known, sentences=(*seen.sentences, *_repeated(case, look)))
        elif not (fails(case) and fails(case)):
            return Explanation((COMES_AND_GOES,))
        for field in fields(case, fails, capabilities):
            known = replace(known, fields=(*known.fields, field))
        found = causes(case, known.fields, capabilities.launch)
        needed = [
            cause
            for field, cause in found
            if (lengths_tell or field.name not in (*LENGTHS, UNEQUAL))
            and fails(_with_more(case, field, capabilities))
            and fails(_with_more(field.held[-1], field, capabilities)) is False
        ]
        known = replace(known, causes=tuple(needed))
    return known


def _with_more(case: Case, field: Field, capabilities: Capabilities) -> Case:
    """Return a larger case with normal numbers, in which the field keeps its value even if it is a size.

    A small case may pass without a feature by luck, and its few numbers may be all that makes it fail with the feature.
    """
    larger = next(_larger(case, capabilities))
    # The default sm_scale is computed from head_dim, so head_dim is kept for it.
    size = "head_dim" if field.name == "sm_scale" else field.name
    if size in SIZES:
        larger = replace(larger, **{size: getattr(case, size)})
    return larger if capabilities.admits(larger) else case


def _repeated(case: Case, look: Callable[[Case], Seen | None]) -> list[str]:
    """Run the case twice, and return a sentence if it passes, or if the two runs differ; [] if they are the same."""
    first, second = look(case), look(case)
    if first is None or second is None:
        return [COMES_AND_GOES]
    return [] if first == second else [EVER_OTHER]


def _larger(case: Case, capabilities: Capabilities) -> Iterator[Case]:
    """Yield larger cases with normal numbers, the largest first, and at last the case itself.

    A shrunk case has one wrong element; a larger case shows the pattern, such as "every row of the last tile".
    """
    wide = next((x for x in capabilities.head_dims if x >= WIDE), case.head_dim)
    dense: dict[str, Any] = {f"{tensor}_values": "normal" for tensor in TENSORS}
    more: dict[str, Any] = {"batch": max(2, case.batch), "heads_kv": max(2, case.heads_kv)}
    longer: dict[str, Any] = {"seqlen_q": case.seqlen_q + FURTHER, "seqlen_k": case.seqlen_k + FURTHER}
    wider: dict[str, Any] = {"head_dim": max(wide, case.head_dim)}
    for changes in ({**more, **longer, **wider}, {**more, **longer}, longer, more, {}):
        larger = replace(case, spikes=(), **dense, **changes)
        if capabilities.admits(larger):
            yield larger
    yield case


def fields(case: Case, fails: Callable[[Case], bool | None], capabilities: Capabilities) -> Iterator[Field]:
    """Vary every field of which the kernel claims other values, first those that are not at their simplest value.

    ``fails`` is that of ``explain``. Unequal lengths do not matter as such, and are left out, if the case passes with
    other unequal lengths in the same order. Example: 5 queries and 9 keys fail, 5 queries and 8 keys pass.
    """
    simple = {**SIMPLEST, **{name: values[0] for name, values in capabilities.launch.items()}}
    others = [(name, value_of(case, name), values) for name, values in _others(case, capabilities)]
    holding: list[Case] = []
    for name, value, values in sorted(others, key=lambda x: x[1] == simple.get(x[0], x[1])):
        if name == UNEQUAL and any(_is_unequal_as(case, other) for other in holding):
            continue
        changed = ((x, with_value(case, name, x)) for x in dict.fromkeys(values) if x != value)
        answers = [(x, other, fails(other)) for x, other in changed if capabilities.admits(other)]
        outcomes = [x for x in answers if x[2] is not None]
        if name == "head_dim":
            outcomes = [x for x in outcomes if x[2] or not _is_of_columns(case, x[1], fails)]
        if outcomes:
            held = tuple(other for _, other, failed in outcomes if not failed)
            holding += held
            # If some equal lengths fail too, a claim that excludes unequal lengths does not exclude the bug.
            excluded = held and (name != UNEQUAL or len(held) == len(outcomes))
            told = [(f"both {x}" if name == UNEQUAL else text(x), failed) for x, _, failed in outcomes]
            yield Field(
                name=name,
                value=text(value),
                fails=tuple(x for x, failed in told if failed),
                holds=tuple(x for x, failed in told if not failed),
                held=held,
                claim=_claim_without(name, case, capabilities) if excluded else "",
            )


def _others(case: Case, c: Capabilities) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield each field with the values to try for it. The case's own value may be among them."""
    for name in SIZES:
        value = getattr(case, name)
        allowed = (
            c.head_dims
            if name == "head_dim"
            else range(0 if name in LENGTHS else min(1, value), 2 * value + 2)
        )
        block = case.blocks.get(TILES_OF.get(name, ""), 0)
        yield name, [*_near(value, allowed), *_whole_tiles(value, block)]
    if case.seqlen_q != case.seqlen_k and max(case.seqlen_q, case.seqlen_k) <= MANY:
        yield UNEQUAL, [x for x in (case.seqlen_q, case.seqlen_k) if x]
    yield "dtype", c.dtypes
    yield from OPTIONS.items()
    yield "page_size", c.page_sizes if case.page_size else ()
    yield from ((name, [False]) for name in (*DIFFERENT.values(), *EMPTY.values()))
    for name in LAYOUT_FIELDS:
        yield name, ["bnhd" if getattr(case, name) == "contiguous" else "contiguous"]
    for name, _ in case.launch:
        yield name, c.launch[name]


def _is_of_columns(case: Case, changed: Case, fails: Callable[[Case], bool | None]) -> bool:
    """Whether a case with another head_dim may pass only because its set entries are in other columns.

    Columns are taken modulo head_dim: an entry in column 20 of 32 is in column 4 of 16.

    1. No, if the case itself has its entries in the same columns as the changed case, or fails all the same with its
       entries moved there. Rule 1 is left out if v is the first columns of k, since head_dim then decides which columns
       of k are not those of v.
    2. Else both cases are tried with normal numbers and no set entries. No, if the case fails and the changed one
       passes, so that head_dim itself matters; yes otherwise.
    """
    moved = _in_columns_of(changed, case)
    if not case.v_is_of_k and (moved == _in_columns_of(case, case) or fails(moved)):
        return False
    dense, other = map(with_normal_numbers, (case, changed))
    return fails(other) is not False or not fails(dense)


def _in_columns_of(other: Case, case: Case) -> Case:
    """Return the case with its entries moved to the columns in which ``other``, of another head_dim, has them."""
    columns = (spike.index[3] % other.head_dim % case.head_dim for spike in case.spikes)
    moved = (replace(x, index=(*x.index[:3], at)) for x, at in zip(case.spikes, columns, strict=True))
    return replace(case, spikes=tuple(moved))


def _is_unequal_as(case: Case, other: Case) -> bool:
    """Whether ``other`` differs from a case in lengths alone, which are not 0, and unequal in the same order."""
    lengths = (other.seqlen_q, other.seqlen_k)
    if replace(other, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k) != case:
        return False
    return 0 < min(lengths) < max(lengths) and (lengths[0] < lengths[1]) == (case.seqlen_q < case.seqlen_k)


def _near(value: int, allowed: Sequence[int]) -> list[int]:
    """Return the smallest and the largest allowed value, and those next below and next above this value."""
    at = list(allowed).index(value)
    return [allowed[0], *allowed[max(at - 1, 0) : at], *allowed[at + 1 : at + 2], allowed[-1]]


def _whole_tiles(length: int, block: int) -> list[int]:
    """Return lengths near this one that fill their tiles; none if the size of tiles is not known.

    For length 100 and tiles of 64: 64 (the tiles that it fills), 128 (those that it touches), 192 (one tile more).
    """
    if not block:
        return []
    filled, touched = length // block, -(-length // block)
    return [tiles * block for tiles in (filled, touched, touched + 1) if tiles]


def _claim_without(name: str, case: Case, c: Capabilities) -> str:
    """Return a plausible claim that excludes this value of the field, such as ``layouts=contiguous``, or ""."""
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


def causes(
    case: Case, fields: Sequence[Field], launch: Mapping[str, tuple[Any, ...]]
) -> list[tuple[Field, str]]:
    """Return the features and launch settings that a failure points to, each with its field; [] if none is clear.

    ``launch`` has the claimed values of each launch setting.

    1. No cause, if every change fixes the case: then all fields seem to matter by chance.
    2. head_dim is no cause if the default sm_scale, which is computed from it, matters by itself, or if the kernel may
       choose its tiles by head_dim.
    3. If the dtype matters, causes of ``STRUCTURE`` are named in its place, since in another dtype numbers may be
       rounded to the right result by luck. If there are none, the dtype is named, unless an sm_scale other than the
       default matters: the dtype may then only decide how large a number must be.
    4. Beside causal, tiles are no cause, because another length moves the diagonal. No queries and no keys remain.
    5. Beside tiles, the launch setting of their size is no cause.
    """
    if not any(x.fails for x in fields):
        return []
    scale_tells = any(x.name == "sm_scale" and x.value == "default" and "1.0" in x.holds for x in fields)
    found = [
        (x, cause)
        for x in fields
        if x.matters and _tells(case, x.name)
        if not (x.name == "head_dim" and (scale_tells or _has_tiles_of_its_own(case)))
        for cause in _of_a_field(case, x, launch)
    ]
    named = {x.name for x, _ in found}
    if "dtype" in named:
        structure = [(x, cause) for x, cause in found if x.name in STRUCTURE]
        scaled = any(x.name == "sm_scale" and "default" in x.holds for x in fields)
        return structure or [(x, cause) for x, cause in found if x.name == "dtype" and not scaled]
    if "causal" in named:
        found = [(x, cause) for x, cause in found if x.name not in TILES_OF or cause.startswith("no_")]
    tiled = {TILES_OF[x.name] for x, _ in found if x.name in TILES_OF}
    return [(x, cause) for x, cause in found if x.name not in tiled]


def _has_tiles_of_its_own(case: Case) -> bool:
    """Whether the kernel itself chooses the size of its tiles, mostly by head_dim, and the case has several rows."""
    return max(case.seqlen_q, case.seqlen_k) > 1 and not case.blocks.keys() >= set(TILES_OF.values())


def _tells(case: Case, name: str) -> bool:
    """Whether changing a field changes nothing else: neither numbers nor strides."""
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
    if field.name in (*DIFFERENT.values(), *EMPTY.values()) or (field.name == "batch" and not case.batch):
        return []
    if field.name == UNEQUAL:
        # Not named if a length is 0 (then one equal length is tried, not two), if some equal lengths fail too, or if
        # single entries are set, which are in other places in another shape.
        return [] if field.fails or len(field.holds) < 2 or case.spikes else [UNEQUAL]
    if field.name == "sm_scale" and field.value == "default":
        # A kernel that forgets the scale, or applies it twice, passes with a scale of 1.
        return ["sm_scale"] if field.holds == ("1.0",) and field.fails else []
    if field.value in EXPANDED and getattr(case, field.name.replace("_layout", "_values")) not in CONSTANT:
        return []  # an expanded tensor repeats its numbers, so that another layout changes them
    simple = launch[field.name][0] if field.name in launch else SIMPLEST[field.name]
    # Only the simplest value decides. float32 alone is no cause: dtypes of fewer bits allow larger errors, which may
    # hide the same bug.
    return [field.name] if text(simple) in field.holds else []


def _of_a_length(field: Field, block: int) -> list[str]:
    """Return how failing lengths relate to tiles of ``block`` rows, if passing lengths relate to them otherwise.

    Examples, with tiles of 64 keys:

    1. "no_keys": only 0 keys fail.
    2. "key_tail", a last tile that is not full: 63 and 65 keys fail, 64 and 128 pass.
    3. "key_tiles", the number of tiles: 65 and 128 keys fail, 64 and fewer pass. Or failures begin at the end of a
       later tile: 129 and 130 keys fail, 128 and fewer pass.
    """
    rows = "query" if field.name == "seqlen_q" else "key"
    fails, holds = _numbers(field)
    if fails == [0]:
        return ["no_queries" if rows == "query" else "no_keys"]
    if not block or len(fails) < 2:
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
