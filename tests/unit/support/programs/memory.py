"""Loads, stores, atomics and descriptors: every place is inside of its tensor, and each program writes its own."""

import math
from dataclasses import replace

from tests.unit.support.programs.spans import Span, bits_of, is_float, settled
from tests.unit.support.programs.values import Numbers, Shape, Value
from tests.unit.support.programs.writer import COMPUTED, Writer, expanded

LOADED = (*COMPUTED, "float8e4nv", "float8e5", "int1")
"""Types of tensors in memory."""

ADDED = ("int32", "int32", "int64", "uint32", "uint64", "float32", "float16", "float64")
"""Types that places are added to in, atomically."""

Term = tuple[str, int]
"""A number of a program or of a turn, and how many there are."""


class Places:
    """Where the lanes of a tile are: text, and how many places there must be."""

    def __init__(
        self, w: Writer, shape: Shape, terms: list[Term], *, apart: bool, limits: dict[int, int]
    ) -> None:
        """Draw strides; ``apart`` gives each lane of each term its own place; ``limits`` are sizes within masks."""
        lanes = w.lanes(shape)
        order = list(range(len(shape)))[::-1]
        if w.chance(0.3):
            w.random.shuffle(order)
        step = w.pick(1, 1, 1, 1, 1, 2, 3)
        parts, low, high = [], 0, 0
        span = step
        for d in order:
            reach = limits.get(d, shape[d]) if not apart else shape[d]
            stride = span if apart or w.chance(0.9) else w.whole(0, span)
            backward = w.chance(0.12)
            parts.append(self._term(w, lanes[d], -stride if backward else stride))
            ends = sorted((0, (reach - 1) * stride * (-1 if backward else 1)))
            low, high = low + ends[0], high + ends[1]
            span = stride * shape[d] + (w.whole(0, 5) if w.chance(0.3) else 0)
        span = max(span, high - low + 1)
        for text, count in terms:
            stride = span if apart or w.chance(0.7) else w.whole(0, span)
            parts.append(self._term(w, text, stride))
            high += stride * (count - 1)
            span = max(stride * count, 1)
        before = -low + (w.whole(0, 4) if w.chance(0.3) else 0)
        if before or not parts:
            parts.insert(w.whole(0, len(parts)), w.number(before))
        w.random.shuffle(parts)
        self.text = " + ".join(parts)
        self.count = before + high + 1 + (w.whole(0, 3) if w.chance(0.3) else 0)

    def _term(self, w: Writer, text: str, stride: int) -> str:
        return text if stride == 1 else f"{text} * {w.number(stride)}"


def own(w: Writer) -> list[Term]:
    """Return what tells programs apart: their number, or their place in the grid."""
    if len(w.grid) > 1 and w.chance(0.5):
        return [(f"p{d}", n) for d, n in enumerate(w.grid)]
    if w.chance(0.1):
        return [("pid.to(tl.int64)", w.programs)]
    return [("pid", w.programs)]


def load(w: Writer, shape: Shape, dtype: str, turns: list[Term] | None = None, **drawn: int | str) -> Value:
    """Load a tile of a new tensor, with or without a mask, and return it."""
    terms = own(w) if w.chance(0.8) else []
    terms += turns or []
    limits: dict[int, int] = {}
    masked = bool(shape) and w.chance(0.45)
    mask = None
    if masked and w.chance(0.7):
        mask, limits = _bounded(w, shape)
    elif masked:
        mask = w.mask(shape).text
    at = Places(w, shape, terms, apart=False, limits=limits)
    numbers, span = w.numbers(dtype, at.count, **drawn)  # type: ignore[arg-type]
    pointer = w.argument(numbers, "x")
    return loaded(w, f"{pointer} + {at.text}", shape, dtype, span, mask)


def loaded(w: Writer, at: str, shape: Shape, dtype: str, span: Span, mask: str | None) -> Value:
    """Load from places; lanes that the mask leaves out hold a number as well."""
    if dtype == "int1":
        if mask is None:
            return w.define(f"tl.load({at})", dtype, shape, span)
        return w.define(f"tl.load({at}, mask={mask}, other=0).to(tl.int1)", dtype, shape, span | Span(0, 0))
    if mask is None:
        return w.define(f"tl.load({at})", dtype, shape, span)
    number = w.pick(0, 0, 1, 3) if dtype.startswith("uint") else w.pick(0, 0, 0, 1, -1, 2)
    other = f"{number}.0" if is_float(dtype) else str(number)
    outside = Span(number, number)
    if w.chance(0.75):
        return w.define(f"tl.load({at}, mask={mask}, other={other})", dtype, shape, span | outside)
    if dtype.startswith("float8"):
        return w.define(f"tl.load({at}, mask={mask}, other=0.0)", dtype, shape, span | Span(0, 0))
    value = w.define(f"tl.load({at}, mask={mask})", dtype, shape, into=False)
    full = f"tl.full({list(shape)}, {other}, tl.{dtype})"
    return w.define(f"tl.where({mask}, {value.text}, {full})", dtype, shape, span | outside)


def _bounded(w: Writer, shape: Shape) -> tuple[str, dict[int, int]]:
    """Return a mask of the lanes below a number along some dimensions, and these numbers."""
    lanes = w.lanes(shape)
    chosen = [d for d in range(len(shape)) if shape[d] > 1 and w.chance(0.6)] or [len(shape) - 1]
    limits = {d: w.whole(1, shape[d]) for d in chosen}
    name = w.name("m")
    w.emit(f"{name} = " + " & ".join(f"({lanes[d]} < {w.number(n)})" for d, n in limits.items()))
    if w.chance(0.3):
        w.emit(f"{name} = tl.broadcast_to({name}, {list(shape)})")
    return name, limits


def store(w: Writer, value: Value, turns: list[Term] | None = None) -> None:
    """Store a value to an output of its own, where each program has its own places."""
    shape = value.shape
    at = Places(w, shape, own(w) + (turns or []), apart=True, limits={})
    dtype, text = value.dtype, value.text
    if dtype == "int1" and w.chance(0.6):
        dtype, text = "int8", f"{text}.to(tl.int8)"
    elif not value.loose and w.chance(0.2):  # a store casts by itself
        cast = w.cast(value, w.among(COMPUTED))
        dtype = cast.dtype if cast and "float64" not in (dtype, cast.dtype) else dtype
    pointer = w.argument(Numbers(dtype, at.count, "filled", 0, 0, 0), "out", is_output=True)
    mask = ""
    if shape and w.chance(0.35):
        chosen = _bounded(w, shape)[0] if w.chance(0.6) else w.mask(shape).text
        mask = f", mask={chosen}"
    w.emit(f"tl.store({pointer} + {at.text}, {text}{mask})")


def load_more(w: Writer) -> None:
    """Load a tile of a shape that is in use, or a vector along one of its dimensions."""
    shape = w.among([x.shape for x in w.values if x.shape])
    if len(shape) > 1 and w.chance(0.3):
        shape = (w.among(shape),)
    load(w, shape, w.among(LOADED))


def load_scalar(w: Writer) -> None:
    """Load one number."""
    dtype = w.pick("int32", "int32", "int64", "float32", "uint8", "bfloat16")
    load(w, (), dtype)


def load_anywhere(w: Writer) -> None:
    """Load from places that another tensor holds."""
    shape = w.among([x.shape for x in w.values if x.shape])
    count = w.whole(4, 40)
    at = load(w, shape, w.pick("int32", "int32", "int64"), kind="whole", low=0, high=count - 1)
    if at.span.low < 0 or at.span.high >= count:
        return
    dtype = w.among(COMPUTED)
    numbers, span = w.numbers(dtype, count)
    mask = w.mask(shape).text if w.chance(0.3) else None
    loaded(w, f"{w.argument(numbers, 'x')} + {at.text}", shape, dtype, span, mask)


def store_early(w: Writer) -> None:
    """Store one of the values before the rest of the program."""
    value = w.tensor()
    if value:
        store(w, value)


def load_again(w: Writer) -> None:
    """Store a tile and load it from where it is."""
    value = w.tensor()
    if value is None:
        return
    at = Places(w, value.shape, own(w), apart=True, limits={})
    numbers = Numbers(value.dtype, at.count, "filled", 0, 0, 0)
    pointer = w.argument(numbers, "out", is_output=True)
    places = w.name("at")
    w.emit(f"{places} = {pointer} + {at.text}", f"tl.store({places}, {value.text})", "tl.debug_barrier()")
    w.define(f"tl.load({places})", value.dtype, value.shape, value.span)


def count_atomically(w: Writer) -> None:
    """Add to some counters of all programs, or combine with them otherwise, in an order that does not show."""
    dtype = w.pick("int32", "int32", "int64", "uint32", "uint64")
    value = w.tensor(lambda x: x.dtype != "int1" and math.prod(x.shape) <= 1024)
    given = value and w.cast(value, dtype)
    if value is None or given is None:
        return
    count = w.pick(1, 4, 8)
    index = w.tensor(lambda x: x.shape == value.shape and x.dtype == "int32")
    at = f"({index.text} & {count - 1})" if index else f"({w.lanes(value.shape)[0]} % {count})"
    if not index and len(value.shape) > 1:
        at = f"tl.broadcast_to({at}, {list(value.shape)})"
    numbers, _ = w.numbers(dtype, count, "bits" if w.chance(0.5) else "whole")
    pointer = w.argument(numbers, "out", is_output=True)
    operation = w.pick("add", "add", "max", "min", "and", "or", "xor")
    mask = f", mask={w.mask(value.shape).text}" if w.chance(0.4) else ""
    w.emit(f"tl.atomic_{operation}({pointer} + {at}, {given.text}{mask})")


def count_one(w: Writer) -> None:
    """Add one number to a counter of all programs."""
    numbers, _ = w.numbers("int32", 3, "whole")
    pointer = w.argument(numbers, "out", is_output=True)
    w.emit(f"tl.atomic_{w.pick('add', 'add', 'max')}({pointer} + pid % 3, {w.whole(1, 9)})")


def change_atomically(w: Writer) -> None:
    """Change places of which each program has its own, and use what they held."""
    dtype = w.among(ADDED)
    value = w.tensor(lambda x: math.prod(x.shape) <= 1024)
    given = value and w.cast(value, dtype)
    if value is None or given is None:
        return
    shape = value.shape
    at = Places(w, shape, own(w), apart=True, limits={})
    numbers, span = w.numbers(dtype, at.count, "whole")
    operation = (
        "add" if is_float(dtype) else w.pick("add", "max", "min", "and", "or", "xor", "xchg", "cas", "cas")
    )
    if not w.allows(settled(span + given.span, dtype)):
        return
    pointer = w.argument(numbers, "out", is_output=True)
    places = w.name("at")
    w.emit(f"{places} = {pointer} + {at.text}")
    if operation == "cas":
        w.define(
            f"tl.atomic_cas({places}, tl.full({list(shape)}, 1, tl.{dtype}), {given.text})",
            dtype,
            shape,
            span,
        )
    elif w.chance(0.7):
        w.define(f"tl.atomic_{operation}({places}, {given.text})", dtype, shape, span)
    else:
        w.emit(f"tl.atomic_{operation}({places}, {given.text}, mask={w.mask(shape).text})")


def of_descriptor(w: Writer) -> Value:
    """Load a tile through a tensor descriptor; what is outside of its shape is 0."""
    dtype = w.pick("float32", "float16", "bfloat16", "int32", "int8", "float8e4nv", "int16")
    rows, columns = w.pick(4, 8, 16, 32), w.pick(16, 32, 64)
    all_rows = max(w.programs * rows - w.whole(0, rows), 1)
    line = w.pick(columns, columns + 16, 2 * columns)
    inside = w.whole(1, line)
    numbers, span = w.numbers(dtype, all_rows * line)
    pointer = w.argument(numbers, "x")
    name = w.name("d")
    shape, strides = f"[{w.number(all_rows)}, {w.number(inside)}]", f"[{w.number(line)}, 1]"
    w.emit(f"{name} = tl.make_tensor_descriptor({pointer}, {shape}, {strides}, [{rows}, {columns}])")
    first = w.pick(0, 0, 16) if columns < line else 0
    return w.define(f"{name}.load([pid * {rows}, {first}])", dtype, (rows, columns), span | Span(0, 0))


def to_descriptor(w: Writer) -> None:
    """Store a tile through a tensor descriptor; what is outside of its shape is left out.

    Hopper's engine for copies writes pieces of 16 bytes: one that ends outside of the shape is written as a whole.
    """
    value = w.tensor(
        lambda x: (
            len(x.shape) == 2
            and x.shape[1] * bits_of(x.dtype) >= 128
            and max(x.shape) <= 128
            and x.dtype not in ("int64", "uint64", "float64")
        )
    )
    value = value or of_descriptor(w)
    rows, columns = value.shape
    all_rows = max(w.programs * rows - w.whole(0, rows), 1)
    piece = 128 // bits_of(value.dtype) if w.exact else 1
    inside = piece * w.whole(1, columns // piece)
    numbers = Numbers(value.dtype, all_rows * columns, "filled", 0, 0, 0)
    pointer = w.argument(numbers, "out", is_output=True)
    name = w.name("d")
    shape, strides = f"[{w.number(all_rows)}, {w.number(inside)}]", f"[{columns}, 1]"
    w.emit(
        f"{name} = tl.make_tensor_descriptor({pointer}, {shape}, {strides}, [{rows}, {columns}])",
        f"{name}.store([pid * {rows}, 0], {value.text})",
    )


def of_tuple(w: Writer) -> None:
    """Load from the tensors of a tuple among the arguments."""
    shape = w.among([x.shape for x in w.values if x.shape])
    dtypes = [w.among(COMPUTED) for _ in range(2)]
    places = [Places(w, shape, own(w), apart=False, limits={}) for _ in dtypes]
    drawn = [w.numbers(dtype, at.count) for dtype, at in zip(dtypes, places, strict=True)]
    pair = w.argument((drawn[0][0], drawn[1][0], w.whole(2, 9)), "pair")
    for i in (0, 1):
        w.define(f"tl.load({pair}[{i}] + {places[i].text})", dtypes[i], shape, drawn[i][1])
    w.known(Value(f"{pair}[2]", "int32", (), Span(2, 9), loose=True))


def of_none(w: Writer) -> None:
    """Add what an argument points to, unless it is None."""
    value = w.tensor(lambda x: x.dtype in ("int32", "float32"))
    if value is None:
        return
    at = Places(w, value.shape, own(w), apart=False, limits={})
    numbers, span = w.numbers(value.dtype, at.count, "whole")
    is_none = w.chance(0.4)
    pointer = w.argument(None if is_none else numbers, "x")
    total = settled(value.span + span, value.dtype)
    if not w.allows(total):
        return
    name = w.name()
    w.emit(f"{name} = {value.text}", f"if {pointer} is not None:")
    w.emit(f"    {name} = {name} + tl.load({pointer} + {at.text})")
    w.known(Value(name, value.dtype, value.shape, value.span | total))


def of_either(w: Writer) -> None:
    """Load from one of two tensors, which the program's number decides."""
    shape = w.among([x.shape for x in w.values if x.shape])
    dtype = w.pick("int32", "float32", "float16")
    at = Places(w, shape, own(w), apart=False, limits={})
    first, span = w.numbers(dtype, at.count, "whole")
    second = replace(first, seed=first.seed + 1)
    names = [w.argument(numbers, "x") for numbers in (first, second)]
    chosen = w.name("p")
    w.emit(
        f"{chosen} = {names[0]}",
        f"if {w.pick('pid % 2 == 0', 'pid > 0', 'p0 != 1')}:",
        f"    {chosen} = {names[1]}",
    )
    w.define(f"tl.load({chosen} + {at.text})", dtype, shape, span)


def column(w: Writer) -> None:
    """Expand a vector to a tile of a shape that is in use."""
    shape = w.among([x.shape for x in w.values if len(x.shape) > 1] or [(8, 16)])
    axis = w.whole(0, len(shape) - 1)
    vector = load(w, (shape[axis],), w.among(COMPUTED))
    text = expanded(vector.text, axis, len(shape))
    if axis == len(shape) - 1 and len(shape) == 2 and w.chance(0.5):
        text = f"tl.expand_dims({vector.text}, 0)"
    w.define(f"tl.broadcast_to({text}, {list(shape)})", vector.dtype, shape, vector.span)
