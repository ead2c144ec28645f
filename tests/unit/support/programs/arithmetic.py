"""Operations on each entry of a tensor: arithmetic, bits, comparisons, choices, casts and functions."""

import math

from tests.unit.support.programs.memory import load
from tests.unit.support.programs.spans import FLOATS, INTEGERS, Span, anything, bits_of, is_float, settled
from tests.unit.support.programs.values import Value
from tests.unit.support.programs.writer import COMPUTED, Writer

COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")

MIXED = {
    ("int8", "int32"): "int32",
    ("int16", "int32"): "int32",
    ("uint8", "int32"): "int32",
    ("int32", "int64"): "int64",
    ("int32", "uint32"): "uint32",
    ("float16", "float32"): "float32",
    ("bfloat16", "float32"): "float32",
    ("int32", "float32"): "float32",
    ("int8", "float16"): "float16",
}
"""By two types, the type of what is computed from both."""

NARROWED = ("float16", "bfloat16", "int8", "int16", "uint8", "uint16")
"""Types that some releases of Triton widen for some operations: a cast follows, so that all mean the same."""


def given(w: Writer, *dtypes: str) -> Value:
    """Return a tensor of one of these types, in reach or loaded; of numbers that are finite if all have to be."""
    value = w.tensor(lambda x: x.dtype in dtypes and math.prod(x.shape) <= 2048)
    if value:
        return value
    shapes = [x.shape for x in w.values if x.shape and math.prod(x.shape) <= 2048]
    return load(w, w.among(shapes or [(16,)]), w.among(dtypes))


def updated(w: Writer, value: Value, *, bounded: bool = False) -> Value | None:
    """Return an expression of a value's type and shape that is made of it; ``bounded`` ones make no larger numbers."""
    other = w.partner(value)
    dtype, x, y = value.dtype, value.text, other.text
    if dtype == "int1":
        mask = w.mask(value.shape)
        return Value(f"{x} {w.pick('&', '|', '^')} {mask.text}", dtype, value.shape, Span(0, 1))
    hull = value.span | other.span
    how = w.random.random()
    if (bounded or how < 0.2) and (how < 0.1 or (is_float(dtype) and not hull.finite)):
        if not value.shape:
            return Value(y, dtype, (), hull) if not other.loose and other.text.isidentifier() else value
        return Value(
            f"tl.where({w.mask(value.shape).text}, {_tile(other, value)}, {x})", dtype, value.shape, hull
        )
    if bounded or how < 0.2:
        return _extreme(w, value, other)
    if is_float(dtype):
        return _of_floats(w, value, other)
    return _of_integers(w, value, other)


def _extreme(w: Writer, value: Value, other: Value) -> Value:
    """Return the larger or the smaller of two values."""
    x, y = (w.without_negative_zero(v) if is_float(v.dtype) else v for v in (value, other))
    if is_float(x.dtype) and not x.span.finite:
        nan = w.pick("", ", propagate_nan=tl.PropagateNan.ALL")
    else:
        nan = ", propagate_nan=tl.PropagateNan.ALL" if is_float(x.dtype) and w.chance(0.2) else ""
    text = f"tl.{w.pick('maximum', 'minimum')}({x.text}, {y.text}{nan})"
    if value.dtype in NARROWED:
        text += f".to(tl.{value.dtype})"
    return Value(text, value.dtype, value.shape, x.span | y.span)


def _of_floats(w: Writer, value: Value, other: Value) -> Value | None:
    sign = w.pick("+", "-", "*", "+", "-", "*") if w.exact else w.pick("+", "-", "*", "+", "-", "*", "/", "%")
    x, y, dtype = value.text, other.text, value.dtype
    if sign in "/%":
        text = f"({x} {sign} {y}).to(tl.{dtype})" if dtype != "float64" else f"{x} {sign} {y}"
        return Value(text, dtype, value.shape, anything(dtype))
    span = {"+": value.span + other.span, "-": value.span - other.span, "*": value.span * other.span}[sign]
    span = settled(span, dtype)
    if w.chance(0.2):
        x, y = f"({x})", f"{y}"
    return Value(f"{x} {sign} {y}", dtype, value.shape, span) if w.allows(span) else None


def _of_integers(w: Writer, value: Value, other: Value) -> Value:
    x, y, dtype = value.text, other.text, value.dtype
    signed = not dtype.startswith("u")
    sign = w.pick("+", "-", "*", "+", "-", "*", "&", "|", "^", "//", "%", "<<", ">>")
    low, high = INTEGERS[dtype]
    span = Span(low, high)
    if sign in ("//", "%"):
        divisor = w.whole(2, 9)
        if not (is_literal(other) or other.loose) and w.chance(0.6):
            y = f"(({y} & 7) + {divisor})"
            if signed and w.chance(0.2):
                y = f"(-({other.text} & 7) - {divisor})"
        else:
            y = str(divisor) if not signed or w.chance(0.85) else f"(-{divisor})"
        if sign == "//":
            span = Span(min(value.span.low, -value.span.high), max(value.span.high, -value.span.low))
        else:
            span = Span(0 if value.span.low >= 0 else -16, 16)
        if value.span.low >= 0 and "-" not in y:
            span = Span(0, span.high)
    elif sign in ("<<", ">>"):
        bits = bits_of(dtype)
        if not (is_literal(other) or other.loose) and w.chance(0.5):
            y = f"({y} & {bits - 1})"
        else:
            y = str(w.whole(0, min(bits - 1, 9)))
        span = Span(0, value.span.high) if sign == ">>" and value.span.low >= 0 else span
    elif sign == "&":
        if w.chance(0.4):
            number = w.pick(1, 3, 7, 15, 31)
            y, span = str(number), Span(0, number)
    elif sign in "+-*":
        ends = {"+": value.span + other.span, "-": value.span - other.span, "*": value.span * other.span}
        span = ends[sign]
    return Value(f"{x} {sign} {y}", dtype, value.shape, settled(span, dtype))


def compute(w: Writer) -> None:
    """Combine a value with another one."""
    value = w.tensor()
    result = value and updated(w, value)
    if result:
        w.define(result.text, result.dtype, result.shape, result.span)


def compute_scalar(w: Writer) -> None:
    """Combine a number with another one."""
    value = w.scalar(lambda x: not x.loose and x.dtype != "int1")
    result = value and updated(w, value)
    if result:
        w.define(result.text, result.dtype, result.shape, result.span)


def mix(w: Writer) -> None:
    """Combine values of two types."""
    first, second = w.among(list(MIXED))
    x = w.tensor(lambda v: v.dtype == first)
    if x is None:
        y = w.tensor(lambda v: v.dtype == second)
        x = y and w.cast(y, first)
    else:
        shape = x.shape
        y = w.tensor(lambda v: v.dtype == second and v.shape == shape) or w.cast(x, second)
    if x is None or y is None:
        return
    if w.chance(0.5):
        x, y = y, x
    dtype = MIXED[first, second]
    if w.chance(0.3):
        w.define(f"{x.text} {w.among(COMPARISONS)} {y.text}", "int1", x.shape, Span(0, 1))
        return
    sign = w.pick("+", "-", "*")
    spans = [settled(v.span, dtype) for v in (x, y)]
    span = {"+": spans[0] + spans[1], "-": spans[0] - spans[1], "*": spans[0] * spans[1]}[sign]
    if w.allows(settled(span, dtype)):
        w.define(f"{x.text} {sign} {y.text}", dtype, x.shape, span)


def compare(w: Writer) -> None:
    """Compare two values, and choose between two by that."""
    value = w.tensor()
    if value is None:
        return
    other = w.partner(value)
    mask = w.define(f"{value.text} {w.among(COMPARISONS)} {other.text}", "int1", value.shape, Span(0, 1))
    if w.chance(0.4):
        text = w.pick(
            f"~{mask.text}", f"{mask.text} & {w.mask(value.shape).text}", f"{mask.text} ^ {mask.text}"
        )
        mask = w.define(text, "int1", value.shape, Span(0, 1))
    x = w.tensor(lambda v: v.shape == value.shape)
    y = x and w.partner(x)
    if x and y and w.chance(0.8):
        w.define(f"tl.where({mask.text}, {x.text}, {y.text})", x.dtype, x.shape, x.span | y.span)


def cast(w: Writer) -> None:
    """Cast a value to another type, some to one of 8 bits and back."""
    value = w.tensor()
    if value is None:
        return
    if is_float(value.dtype) and value.dtype != "float64" and w.chance(0.4):
        narrow = w.cast(value, w.pick("float8e4nv", "float8e5"))
        if narrow is None:
            return
        narrow = w.define(narrow.text, narrow.dtype, narrow.shape, narrow.span)
        wide = w.cast(narrow, w.pick("float16", "float32", "bfloat16"))
        if wide:
            w.define(wide.text, wide.dtype, wide.shape, wide.span)
        return
    narrowing = value.dtype == "float32" and w.chance(0.5)
    result = w.cast(value, w.pick("float16", "bfloat16") if narrowing else w.among(COMPUTED))
    if result is None:
        return
    text = result.text
    if narrowing and w.chance(0.5):
        text = f"{value.text}.to(tl.{result.dtype}, fp_downcast_rounding='rtz')"
    w.define(text, result.dtype, result.shape, result.span)


def cast_mask(w: Writer) -> None:
    """Make a number of a condition, or a condition of a number."""
    value = w.tensor()
    if value is None:
        return
    if w.chance(0.5):
        w.define(f"{value.text}.to(tl.int1)", "int1", value.shape, Span(0, 1))
    else:
        dtype = w.pick("int32", "int8", "float32", "float16", "int64")
        w.define(f"{w.mask(value.shape).text}.to(tl.{dtype})", dtype, value.shape, Span(0, 1))


def bitcast(w: Writer) -> None:
    """Read the bits of numbers as integers, change some, and read them as numbers again."""
    value = w.tensor(lambda x: is_float(x.dtype) and x.span.finite)
    if value is None:
        return
    dtype = f"{w.pick('int', 'uint')}{bits_of(value.dtype)}"
    bits = w.define(f"{value.text}.to(tl.{dtype}, bitcast=True)", dtype, value.shape)
    changed = f"({bits.text} ^ 1)" if value.span.bound < FLOATS[value.dtype][0] / 2 else bits.text
    span = Span(value.span.low - 1, value.span.high + 1, False, True, True)
    if w.allows(settled(span, value.dtype)):
        w.define(f"{changed}.to(tl.{value.dtype}, bitcast=True)", value.dtype, value.shape, span)


def turn(w: Writer) -> None:
    """Apply a function of one value that a GPU computes with the same bits."""
    value = w.tensor()
    if value is None:
        return
    x, dtype, span = value.text, value.dtype, value.span
    if not is_float(dtype):
        if dtype.startswith("u"):  # of these, Triton 3.6's interpreter can't take the complement
            w.define(f"{x} ^ {INTEGERS[dtype][1] >> 1}", dtype, value.shape)
        elif w.chance(0.5):
            w.define(f"~{x}", dtype, value.shape)
        elif w.chance(0.5):
            w.define(f"tl.abs({x})", dtype, value.shape)
        else:
            w.define(f"-{x}", dtype, value.shape, -span)
        return
    absolute = Span(0 if span.low <= 0 <= span.high else min(abs(span.low), abs(span.high)), span.bound)
    absolute = Span(absolute.low, absolute.high, span.whole, span.finite)
    if dtype in ("float32", "float64") and w.chance(0.5):
        near = Span(span.low - 1, span.high + 1, span.finite, span.finite, True)
        w.define(f"tl.{w.pick('floor', 'ceil')}({x})", dtype, value.shape, near)
    elif w.chance(0.5):
        w.define(f"tl.abs({x})", dtype, value.shape, absolute)
    elif w.exact:  # up to Triton 3.6, -x is 0 - x, whose zero has another sign
        w.define(f"-{x} + 0.0", dtype, value.shape, -span + Span(0, 0))
    else:
        w.define(f"-{x}", dtype, value.shape, -span)


def round_once(w: Writer) -> None:
    """Multiply and add with one rounding, or divide or take a root as IEEE has it."""
    value = given(w, "float32", "float32", "float16")
    x, dtype, shape = value.text, value.dtype, value.shape
    other, third = w.partner(value), w.partner(value)
    how = w.random.random()
    if dtype == "float16" or how < 0.5:
        span = settled(value.span * other.span + third.span, dtype)
        if w.allows(span):
            y, z = (_tile(v, value) for v in (other, third))
            w.define(f"tl.fma({x}, {y}, {z})", dtype, shape, span)
    elif how < 0.8:
        y = _tile(other, value)
        size = Span(-value.span.bound, value.span.bound, False, value.span.finite and other.span.finite, True)
        w.define(f"tl.div_rn({x}, tl.abs({y}) + 1.0)", dtype, shape, size)
    else:
        size = Span(0, math.sqrt(value.span.bound) + 1, False, value.span.finite)
        w.define(f"tl.sqrt_rn(tl.abs({x}))", dtype, shape, size)


def is_literal(value: Value) -> bool:
    """Whether a value is a number in the source."""
    return not value.text[0].isalpha() and not value.shape


def _tile(value: Value, like: Value) -> str:
    """Return a value as a tensor of another one's shape."""
    if value.shape == like.shape and value.text.isidentifier():
        return value.text
    if value.loose or is_literal(value):
        return f"tl.full({list(like.shape)}, {value.text}, tl.{like.dtype})"
    return f"tl.broadcast_to({value.text}, {list(like.shape)})"


def clamp(w: Writer) -> None:
    """Limit numbers to a range."""
    value = given(w, "float32", "float16")
    low, high = w.pick(-2.0, 0.5, -1.5), w.pick(1.0, 2.5, 3.0)
    nan = ", propagate_nan=tl.PropagateNan.ALL" if w.chance(0.3) else ""
    span = Span(low, high, False, value.span.finite or not nan)
    # Triton 3.6 returns float32 for a clamped tensor of float16.
    w.define(
        f"tl.clamp({value.text}, {low}, {high}{nan}).to(tl.{value.dtype})", value.dtype, value.shape, span
    )


def multiply_high(w: Writer) -> None:
    """Return the upper half of products. Of signed numbers, Triton 3.6's interpreter gives that of signed products."""
    value = given(w, "uint32")
    other = w.partner(value)
    w.define(f"tl.umulhi({value.text}, {_tile(other, value)})", value.dtype, value.shape)


def draw_numbers(w: Writer) -> None:
    """Draw random numbers by Philox."""
    shape = w.among([x.shape for x in w.values if x.shape])
    if math.prod(shape) > 1024:
        shape = (16,)
    at = " + ".join(["pid * 7", *w.lanes(shape)])
    if w.chance(0.4):
        w.define(f"tl.randint({w.whole(2, 99)}, {at}).to(tl.int32, bitcast=True)", "int32", shape)
    elif w.exact or w.chance(0.6):
        w.define(f"tl.rand({w.whole(2, 99)}, {at})", "float32", shape, Span(0, 1, False))
    else:
        w.define(f"tl.randn({w.whole(2, 99)}, {at})", "float32", shape)


FUNCTIONS = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sigmoid", "erf", "sin", "cos")


def apply(w: Writer) -> None:
    """Apply a function that a GPU approximates."""
    found = given(w, "float32", "float16", "bfloat16", "float64")
    value = w.cast(found, w.pick("float32", "float32", "float32", "float64")) or w.cast(found, "float32")
    if value is None:
        return
    name = w.among(FUNCTIONS)
    text = (
        f"tl.{name}({value.text})" if w.chance(0.5) else f"tl.{name}(tl.abs({value.text}) * 0.125 + 0.0625)"
    )
    w.define(text, value.dtype, value.shape)


def divide(w: Writer) -> None:
    """Divide by the operator."""
    value = given(w, "float32", "float16", "bfloat16", "int32")
    other = w.partner(value)
    if not other.loose:
        w.define(f"({value.text} / {other.text}).to(tl.float32)", "float32", value.shape)
