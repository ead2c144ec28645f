"""TTIR to Python: one function whose lines call NumPy, for all programs of a launch at once.

Each operation becomes a line or two. Loops and branches that all programs take alike are loops and branches of Python;
where programs part, a region becomes a function of its own, which ``control`` calls with the programs that take it.
"""

from dataclasses import dataclass

from tests.harness.interpreter.ttir.calls.numbers import DTYPES
from tests.harness.interpreter.ttir.ir.parse import Frame, Function, Unsupported
from tests.harness.interpreter.ttir.writing.regions import Regions
from tests.harness.interpreter.ttir.writing.writer import Line, Pointer, with_passes


@dataclass
class Code:
    """The source of a function that runs a kernel, with what is needed to run it and to tell of it.

    Attributes:
        text: the source.
        frames: by line, the number in the kernel's source.
        places: by number of an operation, its frames.
        largest: the elements of the largest tensor.
        one_by_one: whether each program has to end before the next one begins.
        pointers: by number of a parameter, the type that it points to.
    """

    text: str
    lines: list[int]
    places: list[tuple[Frame, ...]]
    largest: int
    one_by_one: bool
    pointers: dict[int, str]


def translate(function: Function, path: str) -> Code:
    """Return the code of a kernel. Raises Unsupported if it has something that there is no code for.

    Args:
        function: the kernel.
        path: the file that the kernel is in, which decides which of an operation's places is told.
    """
    return Translator(function, path).code()


class Translator(Regions):
    """Writes the code of one function."""

    def code(self) -> Code:
        """Write the function."""
        parameters, pointers = [], {}
        for number, value in enumerate(self.function.parameters):
            if value.type.element == "ptr" and not value.type.shape:
                pointers[number] = value.type.pointee
                parameters += [f"m{value.name}", value.name]
                self.pointers[value] = Pointer(f"m{value.name}", (value.name,), (), (), value.type.pointee)
                self.memories[self.roots[value]] = f"m{value.name}"
            elif value.type.shape or value.type.element not in DTYPES:
                raise Unsupported(f"an argument of type {value.type.element}")
            else:
                parameters.append(value.name)
        self.block("")
        self.drop_unused()
        header = f"def kernel({', '.join(['programs', 'grid', 'waiting', *parameters])}):"
        lines = [
            *(Line(f"{name} = {code}", 0, None) for code, name in self.literals.items()),
            Line(header, 0, None),
            *(Line(text, 1, None) for text in self.prelude),
            *self.lines,
        ]
        lines = [*with_passes(lines)]
        text = "".join("    " * x.depth + x.text + "\n" for x in lines)
        numbers = [x.frame[1] if x.frame else 0 for x in lines]
        return Code(text, numbers, self.places, self.largest, self.facts.one_by_one, pointers)
