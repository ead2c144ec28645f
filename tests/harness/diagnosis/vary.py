"""Which fields of a failing case matter. Each is changed by itself, to its simplest value and to the nearest ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kernels.contract import CLAIMS, Capabilities
from kernels.contract.declaration import Claim
from kernels.contract.parsing import lesser
from strategies.case import LAYOUT_FIELDS, OPTIONS, SIMPLEST, SIZES, Case
from strategies.features import LENGTHS, TILES_OF, UNEQUAL, text, value_of, with_normal_numbers, with_value
from tests.harness.bugs.failure import Field


def fields(case: Case, fails: Callable[[Case], bool | None], capabilities: Capabilities) -> Iterator[Field]:
    """Yield every field of which the kernel claims other values, first those that are not at their simplest value.

    ``fails`` is that of ``explain``. Unequal lengths are not yielded as a field if the case holds with other unequal
    lengths of which the same one is the longer.
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
            # If some equal lengths fail too, a claim that excludes unequal ones would not help.
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
    """Yield each field with the values to try for it, among which its own may be."""
    for name in SIZES:
        value = getattr(case, name)
        allowed = c.head_dims if name == "head_dim" else range(0 if name in LENGTHS else 1, 2 * value + 2)
        block = case.blocks.get(TILES_OF.get(name, ""), 0)
        yield name, [*_near(value, allowed), *_whole_tiles(value, block)]
    if case.seqlen_q != case.seqlen_k:
        yield UNEQUAL, [x for x in (case.seqlen_q, case.seqlen_k) if x]
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
