"""What a program is made of: its values, its arguments, and the numbers in its tensors."""

from dataclasses import dataclass

from tests.unit.support.programs.spans import Span

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """An expression of a program, its type, its shape, and what is known of its numbers.

    A loose one is a Python number in the interpreter and may be a constant when it is compiled, so that it takes the
    type of what it is beside: it is only put beside int32, which it is otherwise.
    """

    text: str
    dtype: str
    shape: Shape
    span: Span
    loose: bool = False


@dataclass(frozen=True)
class Numbers:
    """The numbers of a tensor (count,), which a seed draws.

    ``kind`` is ``"whole"`` (integers from low to high), ``"normal"`` (with a standard deviation of a quarter of high,
    and none beyond it), ``"bits"`` (random bits) or ``"filled"`` (all bytes are 0x55, for what is yet to be written).
    """

    dtype: str
    count: int
    kind: str
    low: int
    high: int
    seed: int


@dataclass(frozen=True)
class Argument:
    """An argument of a kernel: its name and what it is given; ``annotation`` makes it a constant."""

    name: str
    given: "Numbers | int | float | bool | tuple[Numbers | int, ...] | None"
    annotation: str = ""
    is_output: bool = False
