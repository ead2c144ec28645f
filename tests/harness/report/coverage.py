"""Tables of how many examples each cell of the space of cases had, as the page of a run shows them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from strategies.case import TENSORS
from strategies.features import LENGTHS

FEW = 1 / 4
"""A cell with less than this share of the mean of its field's cells is one of few examples."""
LAST = "tile - 1"
"""The column of lengths that lack one row to whole tiles."""

Cells = Mapping[str, tuple[int, str]]
"""For each value of a field its examples, and whether these are "some", "few", or "never" any."""


@dataclass(frozen=True)
class Table:
    """A title, the names of the columns, and the cells of each row by column; not every column has one."""

    title: str
    columns: Sequence[str]
    rows: Mapping[str, Cells]


def tables(coverage: Mapping[str, Mapping[str, int]]) -> Iterator[Table]:
    """Yield the tables of a kernel: remainders of lengths, then what each tensor has, then a row for any other field.

    ``coverage`` has the examples of each value by field, as summary.json has them for a kernel.
    """
    left = {field: compared(examples) for field, examples in coverage.items()}
    for length in LENGTHS:
        tiles = [field for field in left if field.startswith(f"{length} mod ")]
        yield Table(
            f"{length} modulo tile", ("0", "1", LAST, "other"), dict(of_tile(x, left.pop(x)) for x in tiles)
        )
    for what in ("layout", "values"):
        of_tensor = {x: left.pop(f"{x}_{what}") for x in TENSORS if f"{x}_{what}" in left}
        names = dict.fromkeys(name for cells in of_tensor.values() for name in cells)
        rows = {name: {x: cells[name] for x, cells in of_tensor.items() if name in cells} for name in names}
        yield Table(what, list(of_tensor), rows)
    for field, cells in left.items():
        yield Table(field, list(cells), {"": cells})


def of_tile(field: str, cells: Cells) -> tuple[str, Cells]:
    """Return a field of remainders as a row: the length of the tile, and the cells by column."""
    tile = field.rpartition(" ")[2]
    return tile, {LAST if left == str(int(tile) - 1) else left: cell for left, cell in cells.items()}


def compared(examples: Mapping[str, int]) -> Cells:
    """Say of the examples of each value of a field how they compare with those of the others."""
    few = FEW * sum(examples.values()) / len(examples)
    return {value: (n, "never" if not n else "few" if n < few else "some") for value, n in examples.items()}
