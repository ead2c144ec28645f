"""Cells: parts of the space of cases, each one value of one field, for which the examples of a run are counted."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from kernels.contract import Capabilities
from reference.mask_pattern import MaskPattern
from strategies.case import DECLARED, LAYOUT_FIELDS, OF_CALLS, TENSORS, Case
from strategies.cases import BATCHES, GROUPS, HEADS_KV, MAX_SEQLEN, TILES, claimed_scales, shortest_lengths
from strategies.features import LENGTHS, UNEQUAL, text
from strategies.padding import FAMILIES as PADDINGS
from strategies.values import FAMILIES
from tests.harness.law import law_named

VALUES = tuple(f"{tensor}_values" for tensor in TENSORS)
FIELDS = (*DECLARED, *VALUES)
"""The fields of a case of which each value is a cell."""
COMPARED = ("shorter q", "equal", "longer q")
"""The values of ``lengths``: seqlen_q is below seqlen_k, equal to it, or above it."""


def cells(case: Case) -> list[str]:
    """Return the cells that a case is in, as ``field=value``.

    A length of 0 or 1 is a cell of its own. Any other has one cell for each of ``TILES``: see ``remainder``.
    """
    longer = (case.seqlen_q > case.seqlen_k) - (case.seqlen_q < case.seqlen_k)
    return [
        *(f"{name}={text(getattr(case, name))}" for name in FIELDS),
        f"head_dim={of_head_dim(case.head_dim)}",
        *of_length("seqlen_q", case.seqlen_q),
        *of_length("seqlen_k", case.seqlen_k),
        f"lengths={COMPARED[1 + longer]}",
        *(f"{name}={text(value)}" for name, value in case.launch),
    ]


@cache
def of_head_dim(head_dim: int) -> str:
    """Return a power of two as it is, and any other head_dim by the powers around it, as kernels pad it to the next."""
    power = 1 << (head_dim - 1).bit_length()
    return str(head_dim) if head_dim == power else f"between {power // 2} and {power}"


@cache
def of_length(name: str, length: int) -> tuple[str, ...]:
    """Return the cells of a length; ``name`` is seqlen_q or seqlen_k."""
    if length < 2:
        return (f"{name}={length}",)
    return tuple(f"{name} mod {tile}={remainder(length, tile)}" for tile in TILES)


def remainder(length: int, tile: int) -> str:
    """Return what is left of a length after whole tiles: "0", "1", all but one row of a tile, or "other"."""
    left = length % tile
    return str(left) if left in (0, 1, tile - 1) else "other"


def claimed(c: Capabilities) -> list[str]:
    """Return the cells that a kernel claims to answer and that the laws draw, field by field."""
    values: dict[str, Iterable[Any]] = {
        "dtype": c.dtypes,
        "head_dim": map(of_head_dim, c.head_dims),
        "v_head_dim": (0, *c.v_head_dim),
        "v_in_k": c.v_in_k,
        "causal": c.causal,
        UNEQUAL: _compared(c),
        "batch": BATCHES,
        "heads_kv": HEADS_KV,
        "group": GROUPS if c.grouped_heads else (1,),
        "sm_scale": claimed_scales(c),
        "key_padding": ("none", *(PADDINGS if c.key_padding else ())),
        "dropout_p": (0.0, *c.dropout),
        **{x.name: (0, *getattr(c, x.name)) for x in fields(MaskPattern)},
        "softcap": (0.0, *c.softcap),
        "alibi_slopes": (False, *((True,) if c.alibi_slopes else ())),
        "bias": ("none", *c.bias),
        "sinks": (False, *((True,) if c.sinks else ())),
        **{name: ("none", *getattr(c, name)) for name in OF_CALLS},
        **dict.fromkeys(LAYOUT_FIELDS, c.layouts),
        **dict.fromkeys(VALUES, FAMILIES),
        **c.launch,
    }
    found = [f"{name}={text(value)}" for name in values for value in values[name]]
    for name, shortest in zip(LENGTHS, shortest_lengths(c), strict=True):
        most = c.max_seqlen_q if name == "seqlen_q" else None
        end = shortest + MAX_SEQLEN if most is None else most + 1
        lengths = range(shortest, end, c.seqlen_multiple)
        found += [cell for length in lengths for cell in of_length(name, length)]
    return [cell for cell in dict.fromkeys(found) if c.backward or not cell.startswith("dout_")]


def _compared(c: Capabilities) -> tuple[str, ...]:
    """Return the values of ``lengths`` that are claimed."""
    if not c.unequal_lengths:
        return COMPARED[1:2]
    return COMPARED[:2] if c.seqlens == "q_at_most_k" else COMPARED


def is_judged(law: str, cell: str) -> bool:
    """Whether the examples of a law are judged by what the cell's field says.

    They are not if the calls have to be refused, if the law sets the numbers of the tensors, or if nothing reads dout.
    """
    declared = law_named(law)
    if cell.partition("=")[0] in VALUES and "numbers" in declared.sets:
        return False
    return not declared.expects_refusal and (declared.takes_gradients or not cell.startswith("dout_"))


def by_field(claims: Iterable[str], examples: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the examples of each value by field, 0 for a claimed one that was never drawn.

    A field is left out if it can have only one value, or if nothing is claimed of it.
    """
    found: dict[str, dict[str, int]] = {}
    for cell in claims:
        field, _, value = cell.partition("=")
        found.setdefault(field, {})[value] = examples.get(cell, 0)
    return {field: values for field, values in found.items() if len(values) > 1}
