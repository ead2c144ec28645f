"""Loops, branches, and functions that a program calls."""

from collections.abc import Callable

from tests.unit.support.programs import arithmetic, folding, memory
from tests.unit.support.programs.spans import Span, anything, bits_of, is_float, settled
from tests.unit.support.programs.values import Value
from tests.unit.support.programs.writer import COMPUTED, Writer

Step = Callable[[Writer], object]

STEPS: tuple[Step, ...] = (
    *(arithmetic.compute,) * 5,
    arithmetic.compute_scalar,
    arithmetic.compare,
    arithmetic.cast,
    arithmetic.turn,
    arithmetic.mix,
    memory.load_scalar,
    folding.reduce,
    folding.reshape,
)
"""What a body of a loop or of a branch is made of."""

DEEPEST = 2
"""How many loops and branches may be inside of one another."""


def body(w: Writer, turns: list[memory.Term]) -> None:
    """Write some lines of a body, perhaps with a loop or a branch in it."""
    w.depth += 1
    if turns and w.chance(0.6):
        shape = w.among([x.shape for x in w.values if x.shape] or [(16,)])
        memory.load(w, shape, w.among(COMPUTED), turns)
    for _ in range(w.whole(0, 2)):
        w.among(STEPS)(w)
    if w.depth < DEEPEST and w.chance(0.35):
        w.pick(loop, branch, branch)(w)
    if w.chance(0.3):
        value = w.tensor()
        if value:
            memory.store(w, value, turns)
    w.depth -= 1


class Carried:
    """A value that each turn of a loop changes."""

    def __init__(self, w: Writer, trips: int) -> None:
        """Define it before the loop."""
        self.trips = trips
        found = w.tensor() if w.chance(0.85) else w.scalar(lambda x: not x.loose and x.dtype != "int1")
        if found is None:
            found = memory.load(w, (16,), w.pick("int32", "float32"))
        self.bounded = w.exact and is_float(found.dtype)
        self.sum = self.bounded and w.chance(0.5)
        name, span = w.name("acc"), found.span
        if found.shape and w.chance(0.4):
            text = w.pick(f"tl.zeros({list(found.shape)}, tl.{found.dtype})", f"tl.zeros_like({found.text})")
            span = Span(0, 0)
        else:
            text = found.text
        self.value = w.define(text, found.dtype, found.shape, span, name=name, into=False)
        if not self.bounded:
            # Inside of the loop nothing is known of it but its type.
            self.value = Value(name, found.dtype, found.shape, anything(found.dtype))
            w.values.append(self.value)

    def update(self, w: Writer) -> None:
        """Change it at the end of a turn."""
        value = self.value
        if self.sum:
            other = w.partner(value)
            total = settled(value.span + other.span.repeated(self.trips), value.dtype)
            if total.finite:
                w.emit(
                    f"{value.text} += {other.text}"
                    if w.chance(0.5)
                    else f"{value.text} = {value.text} + {other.text}"
                )
                self.value = Value(value.text, value.dtype, value.shape, total)
                return
        changed = arithmetic.updated(w, value, bounded=self.bounded)
        if changed:
            w.emit(f"{value.text} = {changed.text}")
            span = value.span | changed.span
            self.value = Value(value.text, value.dtype, value.shape, settled(span, value.dtype))

    def after(self, w: Writer) -> None:
        """Take its last value among those that can be used."""
        w.values = [x for x in w.values if x.text != self.value.text]
        w.known(self.value)


def loop(w: Writer) -> None:
    """Write a loop whose bounds are known, are an argument's, or differ from program to program."""
    header, name, index, trips = _for(w)
    carried = [Carried(w, trips) for _ in range(w.pick(1, 1, 2, 3))]
    pointer = _Pointer(w, trips) if w.chance(0.4) else None
    with w.block(header):
        w.values.append(Value(name, "int32", (), index, loose=True))
        if pointer:
            pointer.load(w)
        body(w, _turns(name, index, trips))
        for x in carried:
            x.update(w)
        if pointer:
            pointer.advance(w)
    for x in carried:
        x.after(w)


def _turns(name: str, index: Span, trips: int) -> list[memory.Term]:
    """Return the loop's number as a term of places, which start at 0."""
    return [(name, int(index.high) + 1)] if index.low >= 0 and index.high < 12 and trips else []


def _for(w: Writer) -> tuple[str, str, Span, int]:
    name = w.name("i")
    trips = w.pick(0, 1, 2, 3, 3, 4, 5)
    kind = w.pick(
        "constant", "argument", "program", "program", "range", "down", "unrolled", "loaded", "triangle"
    )
    if kind == "constant":
        text = f"{trips}"
    elif kind == "argument":
        text = w.argument(trips, "n")
    elif kind == "program":
        trips = w.pick(2, 3, 4)
        text = w.pick(
            f"pid % {trips + 1}", f"p0 % {trips + 1}", f"tl.minimum(pid, {trips})", f"{trips} - pid % 2"
        )
    elif kind == "range":
        first, step = w.whole(0, 3), w.pick(1, 2, 3)
        text = f"{w.number(first)}, {w.number(first + trips * step)}, {step}"
        return f"for {name} in range({text}):", name, Span(first, first + trips * step), trips
    elif kind == "down":
        text = f"{trips}, 0, -1"
        return f"for {name} in range({text}):", name, Span(1, max(trips, 1)), trips
    elif kind == "unrolled":
        text = (
            f"0, {trips}, num_stages={w.pick(1, 2)}" if w.chance(0.5) else f"0, {trips}, loop_unroll_factor=2"
        )
        return f"for {name} in tl.range({text}):", name, Span(0, max(trips - 1, 0)), trips
    elif kind == "loaded":
        found = memory.load(w, (), "int32", kind="whole", low=0, high=4)
        trips, text = int(found.span.high), found.text
        if found.span.low < -9 or trips > 9:
            text, trips = "2", 2
    else:
        trips = 4
        text = f"{w.pick('pid % 2', 'p0 % 3', '0')}, tl.minimum({trips}, pid + 1)"
    return f"for {name} in range({text}):", name, Span(0, max(trips - 1, 0)), trips


class _Pointer:
    """A pointer that each turn of a loop moves on."""

    def __init__(self, w: Writer, trips: int) -> None:
        shape = w.among([x.shape for x in w.values if x.shape] or [(16,)])
        self.dtype, self.shape = w.among(COMPUTED), shape
        turn = w.whole(1, 40)
        backward = w.chance(0.2)
        at = memory.Places(w, shape, memory.own(w), apart=False, limits={})
        numbers, self.span = w.numbers(self.dtype, at.count + trips * turn)
        start = f" + {trips * turn}" if backward else ""
        self.name = w.name("p")
        w.emit(f"{self.name} = {w.argument(numbers, 'x')} + {at.text}{start}")
        self.turn = f"{'-' if backward else '+'}= {w.number(turn)}"

    def load(self, w: Writer) -> None:
        """Load what it points to."""
        mask = w.mask(self.shape).text if w.chance(0.3) else None
        memory.loaded(w, self.name, self.shape, self.dtype, self.span, mask)

    def advance(self, w: Writer) -> None:
        """Move it on."""
        w.emit(f"{self.name} {self.turn}")


def repeat(w: Writer) -> None:
    """Write a loop that goes on while a condition holds, which may differ from program to program."""
    trips = w.pick(1, 3, 4)
    name = w.name("k")
    how = w.pick("count", "count", "program", "halve", "both")
    carried = [Carried(w, 12) for _ in range(w.pick(1, 2))]
    if how == "halve":
        found = memory.load(w, (), "int32", kind="whole", low=0, high=20)
        text = found.text if found.span.low >= 0 and found.span.high <= 1000 else f"pid * 3 + {trips}"
        start, header, step = text, f"while {name} > 1:", f"{name} = {name} // 2"
        index = Span(0, 1000)
    elif how == "both":
        start = "pid * 0"
        header = f"while ({name} < {trips}) & ({name} <= pid):"
        step, index = f"{name} += 1", Span(0, trips)
    else:
        limit = w.number(trips) if how == "count" else f"pid % {trips + 1}"
        start, header, step = w.pick("0", "pid * 0"), f"while {name} < {limit}:", f"{name} += 1"
        index = Span(0, trips)
    w.emit(f"{name} = {start}")
    with w.block(header):
        w.values.append(Value(name, "int32", (), index, loose=True))
        body(w, _turns(name, index, trips) if how in ("count", "both") else [])
        for x in carried:
            x.update(w)
        w.emit(step)
    for x in carried:
        x.after(w)


def condition(w: Writer) -> str:
    """Return a condition on the program, on an argument, or on a number of memory."""
    how = w.random.random()
    if how < 0.45:
        return w.pick(
            "pid % 2 == 0", "pid > 0", "p0 == 0", f"pid < {w.whole(1, 4)}", "pid % 3 != 1", "not (pid == 1)"
        )
    if how < 0.6:
        return f"{w.argument(w.whole(0, 9), 'n')} {w.among(arithmetic.COMPARISONS)} {w.whole(0, 9)}"
    if how < 0.7:
        return w.argument(w.chance(0.5), "FLAG", ": tl.constexpr")
    found = w.scalar(lambda x: x.dtype != "int1")
    if found and how < 0.8:
        return f"pid >= 1 {w.pick('and', 'or')} {found.text} > 2" if not found.loose else f"{found.text} > 1"
    if found is None:
        found = memory.load(w, (), w.pick("int32", "float32"))
    return f"{found.text} {w.among(arithmetic.COMPARISONS)} {w.whole(0, 3)}"


def branch(w: Writer) -> None:
    """Write an if, with an else or without, that changes some values."""
    chosen = [x for x in (w.tensor(), w.tensor() if w.chance(0.5) else None) if x]
    scalar = w.scalar(lambda x: not x.loose and x.dtype != "int1")
    if scalar and (w.chance(0.3) or not chosen):
        chosen.append(scalar)
    if not chosen:
        return
    test = condition(w)
    headers = [f"if {test}:"]
    if w.chance(0.15):
        headers.append(f"elif {condition(w)}:")
    if w.chance(0.6):
        headers.append("else:")
    names = [w.name("b") for _ in chosen]
    spans: list[Span | None] = [None] * len(chosen)
    if headers[-1] != "else:" or w.chance(0.3):
        for i, (name, x) in enumerate(zip(names, chosen, strict=True)):
            w.emit(f"{name} = {x.text}")
            spans[i] = x.span
    for header in headers:
        with w.block(header):
            body(w, [])
            for i, (name, x) in enumerate(zip(names, chosen, strict=True)):
                new = arithmetic.updated(w, x) if w.chance(0.85) else x
                new = new or x
                w.emit(f"{name} = {new.text}")
                old = spans[i]
                changed = settled(new.span, x.dtype)
                spans[i] = changed if old is None else old | changed
    for name, x, span in zip(names, chosen, spans, strict=True):
        w.known(Value(name, x.dtype, x.shape, span or x.span))


def choose(w: Writer) -> None:
    """Choose between two numbers by a conditional expression."""
    x = w.scalar(lambda v: not v.loose and v.dtype != "int1")
    if x is None:
        memory.load_scalar(w)
        x = w.scalar(lambda v: not v.loose and v.dtype != "int1")
    y = x and w.scalar(lambda v: v.dtype == x.dtype and not v.loose and v.text != x.text)
    if x is None:
        return
    y = y or memory.load(w, (), x.dtype)
    w.define(
        f"{x.text} if {w.pick('pid % 2 == 1', 'pid > 1', 'p0 < 1')} else {y.text}",
        x.dtype,
        (),
        x.span | y.span,
    )


def unroll(w: Writer) -> None:
    """Write a loop that is unrolled when it is compiled."""
    name = w.name("j")
    trips = w.pick(1, 2, 3)
    carried = [Carried(w, trips)]
    text = w.pick(f"{trips}", f"0, {trips}")
    with w.block(f"for {name} in tl.static_range({text}):"):
        index = Span(0, trips - 1)
        w.values.append(Value(name, "int32", (), index, loose=True))
        body(w, _turns(name, index, trips))
        for x in carried:
            x.update(w)
    carried[0].after(w)


def accumulate(w: Writer) -> None:
    """Write the loop of a matrix product, which adds to an accumulator in each turn."""
    rows, columns = w.pick(16, 32), w.pick(16, 32)
    dtype = w.pick("float32", "float32", "int32")
    name, index = w.name("acc"), w.name("i")
    trips = w.pick(0, 2, 3)
    w.emit(f"{name} = tl.zeros([{rows}, {columns}], tl.{dtype})")
    limit = w.pick(str(trips), w.argument(trips, "n"), f"tl.minimum({trips}, pid + 1)")
    with w.block(f"for {index} in range({limit}):"):
        acc = Value(name, dtype, (rows, columns), Span(0, 0))
        product = folding.dot(w, [(index, max(trips, 1))], acc)
        w.emit(
            f"{name} = {product.text}"
            if w.chance(0.7)
            else f"{name} += {product.text.replace(f', {name}', '')}"
        )
    w.known(Value(name, dtype, (rows, columns), settled(product.span.repeated(max(trips, 1)), dtype)))


def attend(w: Writer) -> None:
    """Write a loop of the online softmax, whose values depend on one another from turn to turn."""
    rows, keys, columns = 16, w.pick(16, 32), 16
    dtype = w.pick("float16", "float32", "bfloat16")
    ieee = ", input_precision='ieee'" if dtype == "float32" else ""
    q = memory.load(w, (rows, columns), dtype, kind="normal", low=-3, high=3)
    names = [w.name(x) for x in ("top", "total", "acc", "i")]
    top, total, acc, i = names
    w.emit(
        f"{top} = tl.full([{rows}], float('-inf'), tl.float32)",
        f"{total} = tl.zeros([{rows}], tl.float32)",
        f"{acc} = tl.zeros([{rows}, {columns}], tl.float32)",
    )
    trips = w.pick(1, 2, 3)
    with w.block(f"for {i} in range({w.pick(str(trips), f'1 + pid % {trips}')}):"):
        k, v = (
            memory.load(w, (keys, columns), dtype, [(i, trips)], kind="normal", low=-3, high=3)
            for _ in range(2)
        )
        w.emit(
            f"s = tl.dot({q.text}, tl.trans({k.text}){ieee}) * 0.25",
            f"new = tl.maximum({top}, tl.max(s, 1))",
            "p = tl.exp2(s - new[:, None])",
            f"old = tl.exp2({top} - new)",
            f"{total} = {total} * old + tl.sum(p, 1)",
            f"{acc} = {acc} * old[:, None] + tl.dot(p.to({v.text}.dtype), {v.text}{ieee})",
            f"{top} = new",
        )
    w.define(f"{acc} / {total}[:, None]", "float32", (rows, columns))
    w.known(Value(top, "float32", (rows,), anything("float32")))


def call(w: Writer) -> None:
    """Call a function of the program."""
    value = w.tensor()
    if value is None:
        return
    x, dtype, shape = value.text, value.dtype, value.shape
    how = w.pick("pair", "constant", "load", "loop")
    if how == "pair":
        other = w.tensor(lambda v: v.shape == shape and v.dtype == dtype) or value
        clean = [w.without_negative_zero(v) if is_float(dtype) else v for v in (value, other)]
        narrow = f".to(tl.{dtype})" if bits_of(dtype) < 32 else ""
        difference = settled(clean[0].span - clean[1].span, dtype)
        if not w.allows(difference):
            return
        fn = folding.helper(w, f"pair_{dtype}", "a, b", f"return tl.maximum(a, b){narrow}, a - b")
        names = [w.name(), w.name()]
        w.emit(f"{', '.join(names)} = {fn}({clean[0].text}, {clean[1].text})")
        w.known(Value(names[0], dtype, shape, clean[0].span | clean[1].span))
        w.known(Value(names[1], dtype, shape, difference))
    elif how == "constant":
        fn = folding.helper(
            w,
            "scaled",
            "a, FACTOR: tl.constexpr",
            "if FACTOR > 2:",
            "    return a * FACTOR",
            "return a + FACTOR",
        )
        factor = w.pick(1, 2, 3, 5)
        span = value.span * Span(factor, factor) if factor > 2 else value.span + Span(factor, factor)
        if w.allows(settled(span, dtype)):
            w.define(f"{fn}({x}, {w.pick('', 'FACTOR=')}{factor})", dtype, shape, span)
    elif how == "load":
        fn = folding.helper(
            w, "fetched", "pointer, at, inside", "return tl.load(pointer + at, mask=inside, other=0)"
        )
        at = memory.Places(w, shape, memory.own(w), apart=False, limits={})
        numbers, span = w.numbers(dtype, at.count)
        mask = w.mask(shape)
        text = f"{fn}({w.argument(numbers, 'x')}, {at.text}, {mask.text})"
        w.define(text, dtype, shape, span | Span(0, 0))
    else:
        floats = is_float(dtype)
        name, changed = ("swung", "b = a - b") if floats else ("repeated", "b = b + a")
        fn = folding.helper(
            w, name, "a, times", "b = a", "for i in range(times):", f"    {changed}", "return b"
        )
        low, high, known = value.span.low, value.span.high, value.span
        around = Span(
            min(0, low, 2 * low - high),
            max(0, high, 2 * high - low),
            known.whole,
            known.finite,
            known.negative_zero,
        )
        span = around if floats else anything(dtype)
        times = w.pick("pid % 3", "2")
        if not is_float(dtype) or (w.allows(settled(span, dtype)) and span.whole):
            w.define(f"{fn}({x}, {times})", dtype, shape, span)


def call_apart(w: Writer) -> None:
    """Call a function that is not inlined."""
    found = w.scalar(lambda x: x.dtype == "int32")
    fn = f"{w.prefix}_apart"
    w.helpers[fn] = f"@triton.jit(noinline=True)\ndef {fn}(a):\n    return a * 3 + 1"
    text = found.text if found and not found.loose else "pid"
    w.define(f"{fn}({text})", "int32", ())


def end_early(w: Writer) -> None:
    """Let some programs end without doing what follows."""
    w.emit(f"if pid {w.pick('>=', '==')} {w.whole(1, 4)}:", "    return")
