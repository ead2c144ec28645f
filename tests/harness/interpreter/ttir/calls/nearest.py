"""What is told of accesses outside of tensors, beside what was known when they were to be made."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from tests.harness.interpreter.accesses import Touched
from tests.harness.interpreter.ttir.calls.memory import Outside
from tests.harness.interpreter.ttir.ir.parse import Frame

Operands = Sequence[tuple[str, Tensor]]
"""The tensors of a launch, with the names of the kernel's parameters."""


def told(
    outside: Iterable[Outside], operands: Operands, places: Sequence[tuple[Frame, ...]]
) -> list[Touched]:
    """Return the first access of each operation before the beginning of a tensor, and its first past the end."""
    found: dict[tuple[int, bool], Touched] = {}
    for access in outside:
        touched = _told(access, operands, places[access.place])
        found.setdefault((access.place, touched.is_before), touched)
    return list(found.values())


def _told(access: Outside, operands: Operands, frames: tuple[Frame, ...]) -> Touched:
    # A pointer to one of several tensors counts as that to the first of them.
    names = access.tensor.split(" or ")
    tensor = next(x for name, x in operands if name == names[0])
    begin, end = _ends(tensor)
    start = tensor.data_ptr()
    return Touched(
        kind=access.kind,
        operand=access.tensor,
        index=(access.address - start) // access.item,
        elements=range(-((start - begin) // access.item), (end - start) // access.item),
        shape=tuple(tensor.shape) if len(names) == 1 else None,
        nearest=nearest(access.address, operands, access.tensor),
        program=access.program,
        frames=frames,
    )


def nearest(address: int, operands: Operands, operand: str) -> str:
    """Say where an address is, by the tensor that is nearest to it: of several, by that which was meant."""

    def distance(of: tuple[str, Tensor]) -> tuple[int, bool]:
        begin, end = _ends(of[1])
        return max(begin - address, address - end + 1, 0), of[0] != operand

    name, tensor = min(operands, key=distance)
    begin, end = _ends(tensor)
    if begin <= address < end:
        return f"in {name}, of which it is element {(address - tensor.data_ptr()) // tensor.itemsize}"
    if address < begin:
        return f"{begin - address} bytes before the beginning of {name}"
    return f"{address - end} bytes past the end of {name}" if address > end else f"right at the end of {name}"


def _ends(tensor: Tensor) -> tuple[int, int]:
    """Return the address where the storage of a tensor begins, and the address behind it."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
