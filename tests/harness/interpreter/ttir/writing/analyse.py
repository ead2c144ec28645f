"""What is known of values before a kernel runs: which are the same in all programs, and in which form they are used.

A value is *uniform* if it is one number, the same in all programs and in all places of its tensor: the code computes it
once, with Python's numbers. A tensor of integers *steps* along a dimension if it is the sum of something uniform and a
uniform multiple of the index along that dimension.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.harness.interpreter.ttir.calls.numbers import RAW
from tests.harness.interpreter.ttir.ir.parse import Function, Operation, Region, Value, walk

SHAPING = {"tt.expand_dims", "tt.broadcast", "tt.splat", "tt.trans", "tt.reshape", "tt.unsplat"}
"""Operations that give the elements that they take, in another shape."""

VARYING = {
    *(
        "tt.get_program_id",
        "tt.make_range",
        "tt.dot",
        "tt.reduce",
        "tt.scan",
        "tt.join",
        "tt.split",
        "tt.cat",
    ),
    *("tt.gather", "tt.histogram", "tt.atomic_rmw", "tt.atomic_cas", "tt.elementwise_inline_asm"),
    "tt.extern_elementwise",
}
"""Operations whose results are never taken for uniform."""

TAKES_BITS = {"tt.store", "tt.bitcast", "tt.atomic_rmw", "tt.atomic_cas"}
"""Operations that take numbers of 16 and 8 bits as they lie in memory."""

STEPS_ON = {"arith.extsi", "arith.extui", "tt.expand_dims", "tt.broadcast"}
"""Operations of one operand that leave its steps equal."""


Root = tuple[int, str]
"""A parameter, by its number, and the type of the elements that a pointer to it is taken to point to."""


@dataclass
class Facts:
    """What is known of the values of a function.

    Attributes:
        uniform: values that are one number.
        wide: values that are used as numbers.
        raw: values of 16 or 8 bits with a fraction that are used as they lie in memory.
        steps: by tensor, the dimension along which it changes in equal steps, counted with that of the programs.
        roots: by pointer, the parameters that it may come from.
        touched: parameters that the kernel loads from or stores to, other than atomically.
        made_by: by value, the operation that gives it.
        one_by_one: whether programs wait for each other, so that each has to end before the next one begins.
    """

    uniform: set[Value] = field(default_factory=set)
    wide: set[Value] = field(default_factory=set)
    raw: set[Value] = field(default_factory=set)
    steps: dict[Value, int] = field(default_factory=dict)
    roots: dict[Value, frozenset[Root]] = field(default_factory=dict)
    touched: set[int] = field(default_factory=set)
    made_by: dict[Value, Operation] = field(default_factory=dict)
    one_by_one: bool = False


def facts_of(function: Function) -> Facts:
    """Return what is known of a function's values."""
    facts = Facts()
    operations = [x for block in function.blocks.values() for x in walk(block.operations)]
    _find_uniform(function, facts)
    _find_forms(operations, facts)
    _find_steps(operations, facts)
    _find_roots(function, operations, facts)
    facts.made_by = {result: x for x in operations for result in x.results}
    accesses = [x for x in operations if x.name in ("tt.load", "tt.store")]
    facts.touched = {parameter for x in accesses for parameter, _ in facts.roots.get(x.operands[0], ())}
    facts.one_by_one = any(_waits(function, x) for x in operations if x.name == "scf.while")
    return facts


def _waits(function: Function, loop: Operation) -> bool:
    """Whether a loop may wait for another program: it has an atomic operation, or goes on by what it loads."""
    before, after = loop.regions
    inside = [x for region in loop.regions for x in walk(region.operations)]
    made_by = {result: x for x in inside for result in x.results}
    given = {target: source for source, target in handed_on(function, loop)}
    values, known = [before.operations[-1].operands[0]], set[Value]()
    while values:
        if (value := values.pop()) in known:
            continue
        known.add(value)
        if value in (*before.arguments, *after.arguments):
            values.append(given[value])
        elif value in made_by:
            parts = list(walk([made_by[value]]))
            if any(x.name == "tt.load" for x in parts):
                return True
            values += [operand for x in parts for operand in x.operands]
    return any(x.name.startswith("tt.atomic") for x in inside)


def _find_uniform(function: Function, facts: Facts) -> None:
    """Take all values for uniform that can be, and take back what then turns out to differ, until nothing changes."""
    varying: set[Value] = set()
    before = -1
    for block in list(function.blocks.values())[1:]:
        varying.update(block.arguments)
    while before != len(varying):
        before = len(varying)
        for block in function.blocks.values():
            _spread(block.operations, varying)
    every = [x for block in function.blocks.values() for x in walk(block.operations)]
    facts.uniform = {
        value
        for value in [
            *function.parameters,
            *(x for operation in every for x in operation.results),
            *(x for operation in every for region in operation.regions for x in region.arguments),
        ]
        if value not in varying
    }


def _spread(operations: list[Operation], varying: set[Value]) -> None:
    for operation in operations:
        name = operation.name
        if name == "scf.for":
            low, high, step, *inits = operation.operands
            region = operation.regions[0]
            index, *arguments = region.arguments
            given = _yielded(region)
            _vary([index], (low, step), varying)
            parts = any(x in varying for x in (low, high, step))
            for argument, init, value, result in zip(arguments, inits, given, operation.results, strict=True):
                _vary([argument], (init, value), varying)
                _vary([result], (argument, init, value), varying, also=parts)
        elif name == "scf.if":
            parts = operation.operands[0] in varying
            sides = [_yielded(region) for region in operation.regions]
            for i, result in enumerate(operation.results):
                _vary([result], [side[i] for side in sides], varying, also=parts)
        elif name == "scf.while":
            before, after = operation.regions
            condition = before.operations[-1]
            parts = condition.operands[0] in varying
            for argument, init, value in zip(
                before.arguments, operation.operands, _yielded(after), strict=True
            ):
                _vary([argument], (init, value), varying)
            for argument, value, result in zip(
                after.arguments, condition.operands[1:], operation.results, strict=True
            ):
                _vary([argument], (value,), varying)
                _vary([result], (value,), varying, also=parts)
        elif name in VARYING:
            varying.update(operation.results)
            for region in operation.regions:
                varying.update(region.arguments)
        else:
            loads = name == "tt.load" and operation.result.type.shape != ()
            _vary(operation.results, operation.operands, varying, also=loads)
        for region in operation.regions:
            _spread(region.operations, varying)


def _vary(
    results: Iterable[Value], operands: Iterable[Value], varying: set[Value], *, also: bool = False
) -> None:
    if also or any(x in varying for x in operands):
        varying.update(results)


def _yielded(region: Region) -> list[Value]:
    return region.operations[-1].operands


def _find_forms(operations: list[Operation], facts: Facts) -> None:
    """Find out which numbers of 16 and 8 bits are needed as they lie in memory, and which as what they stand for."""
    for operation in reversed(operations):
        shaping = operation.name in SHAPING and operation.result.type.element in RAW
        for operand in operation.operands:
            if operand.type.element not in RAW:
                continue
            if shaping:
                facts.raw |= {operand} if operation.result in facts.raw else set()
                facts.wide |= {operand} if operation.result in facts.wide else set()
            elif operation.name in TAKES_BITS or sums_halves(operation):
                facts.raw.add(operand)
            else:
                facts.wide.add(operand)


def sums_halves(operation: Operation) -> bool:
    """Whether an operation is a sum of float16, for which NumPy has a way of its own."""
    return (
        operation.name in ("tt.reduce", "tt.scan")
        and operation.operands[0].type.element == "f16"
        and is_plain(operation, "arith.addf")
    )


def is_plain(operation: Operation, *names: str) -> bool:
    """Whether a reduction's region is one operation of these on what it is given, as Triton's own functions have it."""
    region = operation.regions[0]
    if len(region.operations) != 2 or len(region.arguments) != 2:
        return False
    combine = region.operations[0]
    is_of_triton = bool(combine.frames) and combine.frames[0][0].endswith("triton/language/standard.py")
    return combine.name in names and combine.operands == region.arguments and is_of_triton


def _find_steps(operations: list[Operation], facts: Facts) -> None:
    steps, uniform = facts.steps, facts.uniform
    for operation in operations:
        name, operands = operation.name, operation.operands
        if name == "tt.make_range":
            steps[operation.result] = 1
        elif name in STEPS_ON and operands[0] in steps:
            axis = steps[operands[0]]
            if name == "tt.expand_dims" and operation.integer("axis") < axis:
                axis += 1
            steps[operation.result] = axis
        elif name == "tt.reshape" and operands[0] in steps:
            axis = _axis_after(operation, steps[operands[0]])
            if axis:
                steps[operation.result] = axis
        elif name in ("arith.addi", "arith.subi", "arith.muli"):
            stepping = [x for x in operands if x in steps]
            others = [x for x in operands if x in uniform]
            if len(stepping) == 1 and len(others) == 1:
                steps[operation.result] = steps[stepping[0]]
            elif len(stepping) == 2 and name != "arith.muli" and steps[operands[0]] == steps[operands[1]]:
                steps[operation.result] = steps[operands[0]]


def _axis_after(reshape: Operation, axis: int) -> int:
    """Return the dimension that is that one before a reshape which only puts in or takes away ones, else 0."""
    source, target = reshape.operands[0].type.shape, reshape.result.type.shape
    of_source = [i for i, size in enumerate(source, 1) if size != 1]
    of_target = [i for i, size in enumerate(target, 1) if size != 1]
    same = [source[i - 1] for i in of_source] == [target[i - 1] for i in of_target]
    return of_target[of_source.index(axis)] if same and axis in of_source else 0


def _find_roots(function: Function, operations: list[Operation], facts: Facts) -> None:
    """Follow pointers from the parameters to where they are used, until nothing new is found."""
    roots = facts.roots
    for number, value in enumerate(function.parameters):
        if value.type.element == "ptr":
            roots[value] = frozenset({(number, value.type.pointee)})
    before = -1
    while before != (before := sum(len(x) for x in roots.values())):
        for operation in operations:
            for source, target in handed_on(function, operation):
                if target.type.element == "ptr":
                    found = roots.get(source, frozenset())
                    if source.type.pointee != target.type.pointee:
                        found = frozenset((number, target.type.pointee) for number, _ in found)
                    roots[target] = roots.get(target, frozenset()) | found


def handed_on(function: Function, operation: Operation) -> Iterable[tuple[Value, Value]]:
    """Yield pairs of values of an operation of which the second one may be the first one, or a pointer near to it."""
    name, regions = operation.name, operation.regions
    if name == "scf.for":
        for group in (operation.operands[3:], _yielded(regions[0])):
            for targets in (regions[0].arguments[1:], operation.results):
                yield from zip(group, targets, strict=True)
    elif name == "scf.if":
        for region in regions:
            yield from zip(_yielded(region), operation.results, strict=False)
    elif name == "scf.while":
        before, after = regions
        yield from zip(operation.operands, before.arguments, strict=True)
        yield from zip(_yielded(after), before.arguments, strict=True)
        yield from zip(_yielded(before)[1:], after.arguments, strict=True)
        yield from zip(_yielded(before)[1:], operation.results, strict=True)
    elif name == "arith.select":
        yield from ((x, operation.result) for x in operation.operands[1:])
    elif name in SHAPING or name in ("tt.addptr", "tt.bitcast"):
        yield operation.operands[0], operation.result
    for block, given in operation.targets:
        yield from zip(given, function.blocks[block].arguments, strict=True)
