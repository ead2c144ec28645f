"""What cases that a kernel refuses have in common, in words."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kernels.contract import default_scale
from strategies.case import DECLARED, OPTIONS, SIMPLEST, Case

FEW = 0.05
"""A trait, or several together, tell refused cases from answered ones if no more than this share of these have them."""

MOST = 3
"""The most traits that are told together."""

OF_OPTIONS = ("batch", "heads_kv", "group", *(name for name in OPTIONS if name != "sm_scale"))
"""Fields of which it tells whether they are at their simplest value."""

NUMBERS = ("seqlen_q", "seqlen_k", "head_dim")
"""Fields of which it tells how large they are, and of what they are multiples."""

MULTIPLES = (4, 8, 16, 32, 64, 128)
"""Even numbers, beside 2, of which lengths and head dims may have to be multiples."""


@dataclass(frozen=True)
class Trait:
    """Something that a case has or has not, in words."""

    text: str
    has: Callable[[Case], bool]


def alike(refused: Sequence[Case], answered: Sequence[Case]) -> list[str]:
    """Return, in words, the fewest traits that all refused cases have, and hardly any answered ones have together.

    Returns none if there are no such traits, or no answered cases.
    """
    if not refused or not answered:
        return []
    common = [trait for trait in traits(refused) if all(map(trait.has, refused))]
    told: list[str] = []
    left = list(answered)
    while len(left) > FEW * len(answered):
        having = {trait: list(filter(trait.has, left)) for trait in common}
        best = min(common, key=lambda trait: len(having[trait]), default=None)
        if best is None or len(having[best]) == len(left) or len(told) == MOST:
            return []
        told.append(best.text)
        left = having[best]
    return told


def traits(refused: Sequence[Case]) -> Iterator[Trait]:
    """Yield traits that all the refused cases may have, the simplest first."""
    yield Trait("dense calls", lambda case: case.ragged == "none")
    yield Trait("no causal mask", lambda case: not case.causal)
    for name in OF_OPTIONS:
        yield Trait(DECLARED[name]["called"], partial(_is_other, name))
    dtypes = {case.dtype for case in refused}
    yield Trait(f"dtype {' or '.join(sorted(dtypes))}", lambda case: case.dtype in dtypes)
    yield Trait("an sm_scale that is not positive", lambda case: case.scale <= 0)
    yield Trait("an sm_scale other than the default", lambda case: case.scale != default_scale(case.head_dim))
    yield Trait("tensors that are not contiguous", lambda case: {*case.layouts} != {"contiguous"})
    yield Trait("more queries than keys", lambda case: case.longer == "q")
    yield Trait("more keys than queries", lambda case: case.longer == "k")
    yield Trait("unequal lengths", lambda case: bool(case.longer))
    for name in NUMBERS:
        numbers = [getattr(case, name) for case in refused]
        yield Trait(f"{name} above {min(numbers) - 1}", partial(_is_within, name, min(numbers), math.inf))
        yield Trait(f"{name} below {max(numbers) + 1}", partial(_is_within, name, -math.inf, max(numbers)))
        yield Trait(f"odd {name}", partial(_is_no_multiple, name, 2))
        for number in MULTIPLES:
            yield Trait(f"{name} that is no multiple of {number}", partial(_is_no_multiple, name, number))


def _is_other(name: str, case: Case) -> bool:
    """Whether an option of the call, or a count, is not at its simplest value."""
    value: object = getattr(case, name)
    return value != SIMPLEST[name]


def _is_within(name: str, least: float, most: float, case: Case) -> bool:
    """Whether a number lies between two others, or is one of them."""
    return bool(least <= getattr(case, name) <= most)


def _is_no_multiple(name: str, number: int, case: Case) -> bool:
    """Whether a length or a head_dim is no multiple of a number."""
    return bool(getattr(case, name) % number)
