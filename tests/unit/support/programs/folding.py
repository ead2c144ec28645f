"""Operations on whole tensors: reductions, scans, matrix products, orders and shapes."""

import math

from tests.unit.support.programs import arithmetic
from tests.unit.support.programs.memory import load, loaded
from tests.unit.support.programs.spans import FLOATS, Span, anything, bits_of, is_float, settled
from tests.unit.support.programs.values import Numbers, Shape, Value
from tests.unit.support.programs.writer import COMPUTED, Writer

COMBINATIONS = {
    "larger": "tl.maximum(a, b)",
    "smaller": "tl.minimum(a, b)",
    "both": "a + b",
    "bits": "a ^ b",
    "larger_by_choice": "tl.where(a > b, a, b)",
}
"""Functions of two numbers that a reduction or a scan may use; what they give doesn't depend on the order."""

OF_PAIRS = {
    "largest_at": (
        "take = (a > c) | ((a == c) & (b < d))",
        "return tl.where(take, a, c), tl.where(take, b, d)",
    ),
    "sum_and_largest": ("return a + c, tl.maximum(b, d)",),
    "affine": ("return a * c, b * c + d",),
}
"""Functions of two pairs (a, b) and (c, d). The last one is not commutative: it is for scans."""


def helper(w: Writer, name: str, parameters: str, *lines: str) -> str:
    """Return the name of a function of the program's module."""
    full = f"{w.prefix}_{name}"
    w.helpers[full] = "\n".join(
        ["@triton.jit", f"def {full}({parameters}):", *(f"    {line}" for line in lines)]
    )
    return full


def _summed(w: Writer, value: Value, count: int) -> Span | None:
    """Return the span of a sum of so many numbers; None where its bits depend on the order and have to be a GPU's."""
    span = value.span.repeated(count)
    if not is_float(value.dtype):
        return span
    exact = span.finite and span.whole and span.bound <= FLOATS[value.dtype][1]
    if w.exact:
        return Span(span.low, span.high) if exact else None
    return Span(span.low, span.high, span.whole, span.finite)


def _axis(w: Writer, shape: Shape, *, none: bool = True) -> int | None:
    return None if none and w.chance(0.2) else w.whole(0, len(shape) - 1)


def _left(shape: Shape, axis: int | None, keep: bool) -> Shape:
    if axis is None:
        return (1,) * len(shape) if keep else ()
    kept = (1,) if keep else ()
    return shape[:axis] + kept + shape[axis + 1 :]


def reduce(w: Writer) -> None:
    """Sum a tensor along an axis, or find its largest or smallest number."""
    value = w.tensor(lambda x: math.prod(x.shape) <= 4096)
    if value is None:
        return
    shape, dtype = value.shape, value.dtype
    axis = _axis(w, shape)
    keep = w.chance(0.3)
    count = math.prod(shape) if axis is None else shape[axis]
    name, span = w.pick("sum", "sum", "sum", "max", "min", "xor_sum"), value.span
    text = value.text
    if name == "xor_sum" and is_float(dtype):
        name = "sum"
    if name == "sum":
        total = _summed(w, value, count)
        if total is None:
            name = "max"
        else:
            span = total
    if name in ("max", "min") and is_float(dtype):
        clean = w.without_negative_zero(value)
        text, span = clean.text, clean.span
    if name == "xor_sum":
        span = anything(dtype)
    narrow = f".to(tl.{dtype})" if bits_of(dtype) < 32 else ""
    result = w.define(
        f"tl.{name}({text}, axis={axis}{', keep_dims=True' if keep else ''}){narrow}",
        dtype,
        _left(shape, axis, keep),
        span,
    )
    if keep and axis is not None and w.chance(0.6):
        combined = settled(value.span - result.span, dtype)
        if w.allows(combined):
            w.define(f"{value.text} - {result.text}", dtype, shape, combined)


def find(w: Writer) -> None:
    """Find where a tensor is largest or smallest."""
    value = w.tensor(lambda x: math.prod(x.shape) <= 2048)
    if value is None:
        return
    shape = value.shape
    axis = w.whole(0, len(shape) - 1)
    name = w.pick("max", "min")
    index = Span(0, shape[axis] - 1)
    left = _left(shape, axis, False)
    if w.chance(0.5):
        w.define(f"tl.arg{name}({value.text}, axis={axis})", "int32", left, index)
        return
    found, at = w.name(), w.name()
    w.emit(f"{found}, {at} = tl.{name}({value.text}, axis={axis}, return_indices=True)")
    w.define(f"{found}.to(tl.{value.dtype})", value.dtype, left, value.span)
    w.known(Value(at, "int32", left, index))


def reduce_by(w: Writer) -> None:
    """Reduce a tensor by a function of the program."""
    value = w.tensor(lambda x: math.prod(x.shape) <= 2048 and bits_of(x.dtype) >= 32)
    if value is None:
        return
    name = w.among(list(COMBINATIONS))
    axis = w.whole(0, len(value.shape) - 1)
    span: Span | None = value.span
    if name == "bits":
        name, span = ("larger", span) if is_float(value.dtype) else (name, anything(value.dtype))
    if name == "both":
        span = _summed(w, value, value.shape[axis])
    if span is None:
        name, span = "larger", value.span
    clean = w.without_negative_zero(value) if is_float(value.dtype) and name != "both" else value
    fn = helper(w, name, "a, b", f"return {COMBINATIONS[name]}")
    w.define(f"tl.reduce({clean.text}, {axis}, {fn})", value.dtype, _left(value.shape, axis, False), span)


def reduce_pair(w: Writer) -> None:
    """Reduce two tensors together, by a function of two pairs."""
    value = w.tensor(lambda x: math.prod(x.shape) <= 2048 and bits_of(x.dtype) >= 32)
    if value is None:
        return
    axis = w.whole(0, len(value.shape) - 1)
    name = w.pick("largest_at", "sum_and_largest")
    total = _summed(w, value, value.shape[axis])
    if total is None:
        name = "largest_at"
    second = w.tensor(lambda x: x.shape == value.shape and x.dtype in ("int32", "int64"))
    if second is None:
        lane = f"tl.broadcast_to({w.lanes(value.shape)[axis]}, {list(value.shape)})"
        second = w.define(lane, "int32", value.shape, Span(0, value.shape[axis] - 1))
    fn = helper(w, name, "a, b, c, d", *OF_PAIRS[name])
    results = [w.name(), w.name()]
    w.emit(f"{', '.join(results)} = tl.reduce(({value.text}, {second.text}), {axis}, {fn})")
    left = _left(value.shape, axis, False)
    span = total if name == "sum_and_largest" and total else value.span
    w.known(Value(results[0], value.dtype, left, settled(span, value.dtype)))
    w.known(Value(results[1], second.dtype, left, second.span))


def scan(w: Writer) -> None:
    """Return running sums or products along an axis."""
    # In bfloat16 the interpreter adds patterns of bits here, from Triton 3.7 on.
    value = w.tensor(lambda x: math.prod(x.shape) <= 2048 and x.dtype != "bfloat16")
    if value is None:
        return
    axis = w.whole(0, len(value.shape) - 1)
    name = w.pick("cumsum", "cumsum", "cumprod")
    if is_float(value.dtype) and w.exact:
        name = "cumsum"
    span: Span | None = None
    if name == "cumsum":
        span = _summed(w, value, value.shape[axis])
        if span is None:
            return
    narrow = f".to(tl.{value.dtype})" if bits_of(value.dtype) < 32 else ""
    reverse = ", reverse=True" if w.chance(0.4) else ""
    w.define(f"tl.{name}({value.text}, axis={axis}{reverse}){narrow}", value.dtype, value.shape, span)


def scan_by(w: Writer) -> None:
    """Scan one tensor or two by a function of the program."""
    value = w.tensor(lambda x: math.prod(x.shape) <= 256 and bits_of(x.dtype) >= 32)
    if value is None:
        value = load(w, (w.pick(4, 8), w.pick(8, 16)), w.pick("int32", "float32"))
    axis = w.whole(0, len(value.shape) - 1)
    reverse = w.pick("", ", reverse=True")
    if value.dtype == "int32" and w.chance(0.5):
        fn = helper(w, "affine", "a, b, c, d", *OF_PAIRS["affine"])
        second = w.partner(value)
        tile = second.text if second.shape == value.shape else value.text
        results = [w.name(), w.name()]
        w.emit(f"{', '.join(results)} = tl.associative_scan(({value.text}, {tile}), {axis}, {fn}{reverse})")
        for name in results:
            w.known(Value(name, "int32", value.shape, anything("int32")))
        return
    name, clean = "larger", value
    if is_float(value.dtype):
        clean = w.without_negative_zero(value)
        name = w.pick("larger", "larger_by_choice") if w.exact else w.pick("larger", "both")
    span = clean.span if name != "both" else anything(value.dtype)
    fn = helper(w, name, "a, b", f"return {COMBINATIONS[name]}")
    w.define(f"tl.associative_scan({clean.text}, {axis}, {fn}{reverse})", value.dtype, value.shape, span)


def _operand(w: Writer, shape: Shape, dtype: str, turns: list[tuple[str, int]] | None) -> Value:
    """Load an operand of a matrix product, some transposed."""
    kind = "whole" if w.exact or w.chance(0.4) else "normal"
    top = 3 if w.exact else 4
    if w.chance(0.3):
        value = load(w, shape[::-1], dtype, turns, kind=kind, low=-top, high=top)
        text = w.pick(f"tl.trans({value.text})", f"{value.text}.T")
        return Value(text, dtype, shape, value.span)
    return load(w, shape, dtype, turns, kind=kind, low=-top, high=top)


def dot(w: Writer, turns: list[tuple[str, int]] | None = None, acc: Value | None = None) -> Value:
    """Multiply two matrices, with an accumulator or without one."""
    dtype = w.pick("float16", "float16", "bfloat16", "float32", "float32", "int8", "float8e4nv", "float8e5")
    rows, columns, inner = w.pick(16, 16, 32, 64), w.pick(16, 32, 32, 64), w.pick(16, 32, 64)
    if acc:
        rows, columns = acc.shape
        dtype = "int8" if acc.dtype == "int32" else dtype if dtype != "int8" else "float16"
    if bits_of(dtype) == 8:
        inner = max(inner, 32)
    a = _operand(w, (rows, inner), dtype, turns)
    b = _operand(w, (inner, columns), dtype, turns)
    product = (a.span * b.span).repeated(inner)
    out = "int32" if dtype == "int8" else "float32"
    more = {"float32": ", input_precision='ieee'", "int8": ", out_dtype=tl.int32"}.get(dtype, "")
    if acc:
        return Value(f"tl.dot({a.text}, {b.text}, {acc.text}{more})", out, (rows, columns), product)
    if dtype == "float16" and product.bound <= 2**11 and product.whole and w.chance(0.3):
        out, more = "float16", ", out_dtype=tl.float16"
    span = settled(product, out)
    if w.exact and out == "float32":
        span = Span(product.low, product.high)
    how = w.random.random()
    if how < 0.3:
        text = f"tl.dot({a.text}, {b.text}{more})"
    else:
        held = w.tensor(
            lambda x: x.shape == (rows, columns) and x.dtype == out and x.span.whole and x.span.finite
        )
        if held is None or held.span.bound > 2**11:
            kind = "whole" if w.exact or w.chance(0.5) else "normal"
            held = load(w, (rows, columns), out, kind=kind, low=-9, high=9)
        text = f"tl.dot({a.text}, {b.text}{more})"
        if out != "float16" or (span + held.span).bound <= 2**11:
            span = span + held.span
            text = (
                f"{text} + {held.text}" if how < 0.5 else f"tl.dot({a.text}, {b.text}, acc={held.text}{more})"
            )
    return w.define(text, out, (rows, columns), span)


def multiply(w: Writer) -> None:
    """Multiply two matrices."""
    dot(w)


def multiply_batch(w: Writer) -> None:
    """Multiply two batches of matrices."""
    dtype = w.pick("float16", "float32")
    a, b = (load(w, (2, 16, 16), dtype, kind="whole", low=-3, high=3) for _ in range(2))
    more = ", input_precision='ieee'" if dtype == "float32" else ""
    w.define(f"tl.dot({a.text}, {b.text}{more})", "float32", (2, 16, 16), (a.span * b.span).repeated(16))


def reshape(w: Writer) -> None:
    """Transpose a tensor or give it another shape."""
    value = w.tensor()
    if value is None:
        return
    x, shape = value.text, value.shape
    how = w.random.random()
    if len(shape) == 2 and how < 0.5:
        text = w.pick(f"tl.trans({x})", f"tl.permute({x}, 1, 0)", f"{x}.T")
        shape = shape[::-1]
    elif len(shape) == 3 and how < 0.5:
        order = w.pick((0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1))
        text = f"tl.{w.pick('permute', 'trans')}({x}, {', '.join(map(str, order))})"
        shape = tuple(shape[d] for d in order)
    elif how < 0.65 and len(shape) < 3:
        axis = w.whole(0, len(shape))
        larger = (*shape[:axis], w.pick(2, 4), *shape[axis:])
        if math.prod(larger) > 4096:
            return
        text, shape = f"tl.broadcast_to(tl.expand_dims({x}, {axis}), {list(larger)})", larger
    else:
        count = math.prod(shape)
        first = 2 ** w.whole(0, int(math.log2(count)))
        shape = w.pick((count,), (first, count // first), (count // first, first))
        text = w.pick(f"tl.reshape({x}, {list(shape)})", f"{x}.reshape({list(shape)})")
    w.define(text, value.dtype, shape, value.span)


def sort(w: Writer) -> None:
    """Sort a tensor along its last axis."""
    value = w.tensor(lambda x: 1 < x.shape[-1] <= 32 and math.prod(x.shape) <= 256 and x.span.finite)
    if value is None:
        value = load(w, (w.pick(2, 4), w.pick(8, 16)), w.pick("int32", "int16", "float32"), kind="whole")
    order = w.pick("", ", descending=True")
    if is_float(value.dtype):
        value = w.without_negative_zero(value)
    w.define(f"tl.sort({value.text}{order})", value.dtype, value.shape, value.span)


def flip(w: Writer) -> None:
    """Reverse a tensor along an axis."""
    value = w.tensor(lambda x: x.span.finite and math.prod(x.shape) <= 2048)
    if value:
        axis = w.whole(0, len(value.shape) - 1)
        w.define(f"tl.flip({value.text}, {axis})", value.dtype, value.shape, value.span)


def count_bins(w: Writer) -> None:
    """Count how often each number occurs."""
    value = w.tensor(lambda x: x.dtype == "int32" and len(x.shape) == 1)
    value = value or load(w, (w.pick(32, 64, 128),), "int32")
    bins = w.pick(8, 16)
    text = f"tl.histogram({value.text} & {bins - 1}, {bins})"
    w.define(text, "int32", (bins,), Span(0, value.shape[0]))


def gather(w: Writer) -> None:
    """Take entries of a tensor along an axis."""
    value = w.tensor(lambda x: 32 <= math.prod(x.shape) <= 2048)
    value = value or load(w, (8, 16), "float32")
    axis = w.whole(0, len(value.shape) - 1)
    index = load(w, value.shape, "int32", kind="whole", low=0, high=7)
    text = f"tl.gather({value.text}, {index.text} & {value.shape[axis] - 1}, {axis})"
    w.define(text, value.dtype, value.shape, value.span)


def join(w: Writer) -> None:
    """Join two tensors, or split one in two, along a last axis."""
    value = w.tensor(lambda x: 4 <= math.prod(x.shape) <= 1024 and len(x.shape) < 3)
    if value is None:
        return
    if w.chance(0.4) and value.shape[-1] >= 2:
        shape = (*value.shape[:-1], value.shape[-1] // 2)
        halves = [w.name(), w.name()]
        w.emit(f"{', '.join(halves)} = tl.split(tl.reshape({value.text}, {[*shape, 2]}))")
        for name in halves:
            w.known(Value(name, value.dtype, shape, value.span))
        return
    other = w.tensor(lambda x: x.shape == value.shape and x.dtype == value.dtype) or value
    span = value.span | other.span
    if w.chance(0.5):
        shape = (*value.shape[:-1], value.shape[-1] * 2)
        w.define(f"tl.interleave({value.text}, {other.text})", value.dtype, shape, span)
    else:
        w.define(f"tl.join({value.text}, {other.text})", value.dtype, (*value.shape, 2), span)


def concatenate(w: Writer) -> None:
    """Put one vector behind another."""
    value = w.tensor(lambda x: len(x.shape) == 1 and math.prod(x.shape) <= 512)
    if value:
        other = w.tensor(lambda x: x.shape == value.shape and x.dtype == value.dtype) or value
        text = f"tl.cat({value.text}, {other.text}, can_reorder=True)"
        w.define(text, value.dtype, (2 * value.shape[0],), value.span | other.span)


def softmax(w: Writer) -> None:
    """Normalise weights along the last axis as attention does, in a loop's step or by the library's function."""
    value = w.cast(arithmetic.given(w, "float32", "float32", "float16", "bfloat16"), "float32")
    if value is None:
        return
    axis = len(value.shape) - 1
    x = w.without_negative_zero(value).text
    top = w.define(f"tl.max({x}, axis={axis}, keep_dims=True)", "float32", (*value.shape[:-1], 1))
    weights = w.define(f"tl.exp2({value.text} - {top.text})", "float32", value.shape)
    total = w.define(
        f"tl.sum({weights.text}, axis={axis}, keep_dims=True)", "float32", (*value.shape[:-1], 1)
    )
    w.define(f"{weights.text} / {total.text}", "float32", value.shape)


def copy_rows(w: Writer) -> None:
    """Load a tile through the rows that another tensor tells, as a paged cache does."""
    rows, columns = w.pick(4, 8, 16), w.pick(8, 16, 32)
    pages = w.whole(2, 9)
    page = load(w, (rows,), "int32", kind="whole", low=0, high=pages - 1)
    if page.span.low < 0 or page.span.high >= pages:
        return
    dtype = w.among(COMPUTED)
    numbers, span = w.numbers(dtype, pages * columns)
    at = f"{w.argument(numbers, 'x')} + {page.text}[:, None] * {columns} + tl.arange(0, {columns})[None, :]"
    loaded(w, at, (rows, columns), dtype, span, None)


def scatter(w: Writer) -> None:
    """Store a vector to places of a permutation."""
    value = w.tensor(lambda x: len(x.shape) == 1)
    if value is None:
        return
    count = value.shape[0]
    numbers = Numbers(value.dtype, count * w.programs, "filled", 0, 0, 0)
    pointer = w.argument(numbers, "out", is_output=True)
    at = f"(tl.arange(0, {count}) * {w.pick(3, 5, 7)} + {w.whole(0, 9)}) % {count}"
    w.emit(f"tl.store({pointer} + pid * {count} + {at}, {value.text})")
