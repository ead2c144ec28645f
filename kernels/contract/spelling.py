"""How the values of claims are spelled on the command line: read there, and written so that they can be read again."""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spelling:
    """How the values of one claim are spelled.

    Attributes:
        expected: what may be written, in words.
        read: the value that a text spells. Raises ValueError, KeyError or ArithmeticError for one that spells none.
        write: the text that spells a value: ``read(write(value)) == value``.
        examples: some texts.
    """

    expected: str
    read: Callable[[str], Any]
    write: Callable[[Any], str]
    examples: tuple[str, ...]


def words(**values: Any) -> Spelling:
    """Each value is spelled by one word."""
    texts = {_in_any_order(value): word for word, value in values.items()}

    def write(value: Any) -> str:
        return texts.get(_in_any_order(value), str(value))

    return Spelling(" or ".join(values), values.__getitem__, write, tuple(values))


def _in_any_order(value: Any) -> Any:
    return frozenset(value) if isinstance(value, tuple | list) else value


def one_of(*names: str) -> Spelling:
    """Each value is a name and spelled by itself."""
    return words(**{name: name for name in names})


def subset(names: tuple[str, ...], **others: tuple[str, ...]) -> Spelling:
    """Some of the names, divided by commas; ``all`` of them, and what is in ``others``, by one word."""
    by_word = words(all=names, **others)

    def read(text: str) -> tuple[str, ...]:
        if text in by_word.examples:
            return by_word.read(text)
        chosen = [name.strip() for name in text.split(",")]
        if not set(chosen) <= set(names):
            raise ValueError
        return tuple(name for name in names if name in chosen)

    def write(value: tuple[str, ...]) -> str:
        word = by_word.write(value)
        return word if word in by_word.examples else ",".join(value)

    expected = f"{by_word.expected}, or some of {','.join(names)}"
    return Spelling(expected, read, write, (",".join(names[:2]), *by_word.examples))


def integer(least: int, **others: Any) -> Spelling:
    """An integer that is not below ``least``, or a value that is spelled by one word."""
    by_word = words(**others)

    def read(text: str) -> Any:
        if text in by_word.examples:
            return by_word.read(text)
        if (value := int(text)) < least:
            raise ValueError
        return value

    return Spelling(
        " or ".join((f"an integer of at least {least}", *others)), read, by_word.write, ("64", *others)
    )


def numbers(*names: str) -> Spelling:
    """One of the names, which spells itself, or finite numbers, divided by commas."""

    def read(text: str) -> str | tuple[float, ...]:
        if text in names:
            return text
        values = tuple(sorted(map(float, text.split(","))))
        if not all(map(math.isfinite, values)):
            raise ValueError
        return values

    def write(value: str | tuple[float, ...]) -> str:
        return value if isinstance(value, str) else _write_numbers(value)

    return Spelling(
        f"{', '.join(names)}, or finite numbers such as 0.125,1.0", read, write, (*names, "0.125,1.0")
    )


def integers(least: int, *examples: str) -> Spelling:
    """Integers that are not below ``least``, divided by commas, and ranges of them."""

    def read(text: str) -> tuple[int, ...]:
        found: set[int] = set()
        for part in text.split(","):
            bounds, _, step = part.partition("/")
            first, _, last = bounds.partition("-")
            span = range(int(first), int(last or first) + 1, int(step or 1))
            if not span or span[0] < least:
                raise ValueError
            found.update(span)
        return tuple(sorted(found))

    expected = f"integers and ranges of at least {least}, such as {' or '.join(examples)}"
    return Spelling(expected, read, write_integers, examples)


def write_integers(numbers: Iterable[int]) -> str:
    """Numbers as they are read: three and more neighbours as ``first-last``, five in equal steps with ``/step``."""
    left, parts = sorted(numbers), list[str]()
    while left:
        run, step = _leading_run(left)
        if len(run) < (3 if step == 1 else 5):
            run = run[:1]
        by = f"/{step}" if step > 1 else ""
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}{by}")
        left = left[len(run) :]
    return ",".join(parts)


def _leading_run(numbers: list[int]) -> tuple[list[int], int]:
    """The numbers, from the first on, that are in equal steps, and the step."""
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    pairs = zip(numbers, itertools.count(numbers[0], step), strict=False)
    return [n for n, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)], step


def _read_fraction(text: str) -> float:
    """A number from 0 up to 1, or a power such as 2^-22."""
    base, _, exponent = text.partition("^")
    if not 0.0 <= (value := float(base) ** int(exponent or 1)) < 1.0:
        raise ValueError
    return value


def _read_fractions(text: str) -> tuple[float, ...]:
    return tuple(sorted(_read_fraction(part) for part in text.split(",")))


def _read_sizes(text: str) -> tuple[float, ...]:
    sizes = tuple(sorted(map(float, text.split(","))))
    if not all(0.0 <= size < math.inf for size in sizes):
        raise ValueError
    return sizes


def _write_numbers(values: Iterable[float]) -> str:
    return ",".join(map(number, values))


def number(value: float) -> str:
    """Powers of two below 1/8 as such, other numbers with as many digits as they need."""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 and exponent < -2 else str(value).removesuffix(".0")


BOOLEAN = words(true=True, false=False)
PROBABILITIES = Spelling(
    "probabilities from 0 up to 1, such as 0,0.1", _read_fractions, _write_numbers, ("0,0.1",)
)
SIZES = Spelling("finite numbers from 0 up, such as 0,30", _read_sizes, _write_numbers, ("0,30", "0,2.5,50"))
RELATIVE_ERROR = Spelling("an error from 0 up to 1", _read_fraction, number, ("2^-20", "2^-10"))
