"""Code of pointers: where they point, and loads, stores and atomic operations there."""

from collections.abc import Iterable

from tests.harness.interpreter.ttir.calls.numbers import RAW, raw_dtype
from tests.harness.interpreter.ttir.ir.parse import Operation, Unsupported, Value
from tests.harness.interpreter.ttir.writing.analyse import SHAPING, Root
from tests.harness.interpreter.ttir.writing.tensors import Tensors
from tests.harness.interpreter.ttir.writing.writer import Pointer, tuple_of

WAITS = {"fadd"}
"""Atomic operations whose result depends on their order."""


class Places(Tensors):
    """Writes what has to do with memory, and operations that pointers go through as numbers do."""

    def operation(self, operation: Operation) -> None:
        """Write one operation."""
        if operation.name in SHAPING:
            self.shape(operation)
        else:
            super().operation(operation)

    def shape(self, operation: Operation) -> None:
        """Write an operation that gives its elements in another shape."""
        operand, result = operation.operands[0], operation.result
        if operand in self.pointers:
            self.pointers[result] = self.shaped_pointer(self.pointers[operand], operation)
            return
        if operand in self.masks and operation.name == "tt.broadcast":
            self.masks[result] = self.masks[operand]
            return
        if self.is_number(result):
            self.constants[result] = self.wide(operand)
            return
        forms = (
            [("", self.wide(operand))] if result.type.element not in RAW or result in self.facts.wide else []
        )
        if result.type.element in RAW and (result in self.facts.raw or not forms):
            forms.append(("r", self.raw(operand)))
        for suffix, code in forms:
            self.assign(
                result.name + suffix, self.shaped(code, operation, is_number=self.is_number(operand)), False
            )

    def do_arith_select(self, operation: Operation) -> None:
        """Choose between two values."""
        condition, a, b = operation.operands
        result = operation.result
        code = self.wide(condition)
        if not condition.type.shape and result.type.shape and not self.is_number(condition):
            code = f"{code}.reshape(-1{', 1' * result.type.rank})"
        if result.type.element == "ptr":
            self.whole_pointer(
                result, f"select({code}, {self.offset_in(a, result)}, {self.offset_in(b, result)}, 'i64')"
            )
            return
        self.define(result, f"select({code}, {self.wide(a)}, {self.wide(b)}, {result.type.element!r})")

    def shaped_pointer(self, pointer: Pointer, operation: Operation) -> Pointer:
        """Return a pointer whose offsets have another shape."""
        if operation.name == "tt.broadcast":
            return pointer
        parts, stepping = [], []
        for number, part in [*((0, x) for x in pointer.parts), *pointer.stepping]:
            name = self.new("p")
            self.assign(name, self.shaped(part, operation), False)
            axis = self.axis_after(operation, number) if number else 0
            if axis:
                stepping.append((axis, name))
            else:
                parts.append(name)
        return pointer.moved(parts=tuple(parts), stepping=tuple(stepping))

    def axis_after(self, operation: Operation, axis: int) -> int:
        """Return which dimension a dimension becomes, 0 if that is not known."""
        if operation.name == "tt.expand_dims":
            return axis + (operation.integer("axis") < axis)
        if operation.name == "tt.trans":
            order = [int(x) + 1 for x in (operation.attribute("order") or "").split(",")]
            return order.index(axis) + 1
        return 0

    def do_tt_addptr(self, operation: Operation) -> None:
        """Add an offset to a pointer."""
        pointer, offset = operation.operands
        self.pointers[operation.result] = self.added(self.pointers[pointer], offset)

    def added(self, pointer: Pointer, offset: Value) -> Pointer:
        """Return a pointer further on."""
        code = self.wide(offset)
        if self.is_number(offset):
            return pointer.moved(base=(*pointer.base, code))
        if axis := self.facts.steps.get(offset):
            return pointer.moved(stepping=(*pointer.stepping, (axis, code)))
        return pointer.moved(parts=(*pointer.parts, code))

    def recast(self, operation: Operation) -> None:
        """Take a pointer for one to elements of another type."""
        pointer, value = self.pointers[operation.operands[0]], operation.result
        (parameter, _), *others = self.roots[operation.operands[0]]
        size, wanted = (raw_dtype(x).itemsize for x in (pointer.element, value.type.pointee))
        if others:
            raise Unsupported(self.told("a cast of a pointer that was chosen between tensors", operation))
        memory = self.memory(frozenset({(parameter, value.type.pointee)}))
        offset = f"{self.offset(pointer)} * {size} // {wanted}"
        self.whole_pointer(value, self.as_offset(offset, value), memory)

    def whole_pointer(self, value: Value, offset: str, memory: str | None = None) -> None:
        """Define a pointer by one offset from the beginning of a memory."""
        self.assign(value.name, offset, self.is_number(value))
        self.pointers[value] = self.pointer_of(value, memory)

    def pointer_of(self, value: Value, memory: str | None = None) -> Pointer:
        """Return a pointer whose offset is the value's own name."""
        memory = memory or self.memory(self.roots[value])
        base, parts = ((value.name,), ()) if self.is_number(value) else ((), (value.name,))
        return Pointer(memory, base, parts, (), value.type.pointee)

    def as_offset(self, code: str, value: Value) -> str:
        """Return the code of an offset as a number or an array, whichever a pointer is."""
        return code if self.is_number(value) else f"as_offsets({code}, {value.type.rank})"

    def memory(self, roots: frozenset[Root]) -> str:
        """Return the name of the memory that a pointer with these roots points into."""
        if roots not in self.memories:
            if not roots:
                raise Unsupported("a pointer that was loaded, or computed from a number")
            self.memories[roots] = self.new("m")
            of = [self.memory_of(*root) for root in sorted(roots, key=str)]
            code = of[0] if len(of) == 1 else f"anywhere({', '.join(of)})"
            self.prelude.append(f"{self.memories[roots]} = {code}")
        return self.memories[roots]

    def memory_of(self, parameter: int, element: str) -> str:
        """Return the code of the memory of one parameter, with elements of a type."""
        value = self.function.parameters[parameter]
        return f"m{value.name}" if value.type.pointee == element else f"m{value.name}.as_type({element!r})"

    def offset_in(self, value: Value, target: Value) -> str:
        """Return the code of a pointer's offset in the memory of the pointer that it becomes."""
        pointer, roots = self.pointers[value], self.roots[target]
        code = self.offset(pointer)
        if self.roots[value] != roots:
            code = f"{self.memory(roots)}.moved({pointer.memory}, {code})"
        return self.as_offset(code, target)

    def access(self, pointer: Value) -> str:
        """Return the code of the arguments that say where an access is."""
        p = self.pointers[pointer]
        stepping = tuple_of(f"({axis}, {name})" for axis, name in p.stepping)
        return f"{p.memory}, programs, {p.number}, {tuple_of(p.parts)}, {stepping}"

    def masks_of(self, values: Iterable[Value]) -> str:
        """Return the code of masks."""
        masks = [mask for x in values for mask in self.masks.get(x) or (self.wide(x),)]
        return tuple_of(x for x in masks if x != "True")

    def do_tt_load(self, operation: Operation) -> None:
        """Load from memory."""
        pointer, *rest = operation.operands
        other = self.raw(rest[1]) if len(rest) > 1 else "None"
        result = operation.result
        where = f"{self.access(pointer)}, {self.masks_of(rest[:1])}"
        code = f"load({where}, {other}, {result.type.shape}, {self.place(operation)})"
        if result.type.shape == () and not self.is_number(result):
            code = f"as_scalars({code})"
        self.define_raw(result, code, pure=False)

    def do_tt_store(self, operation: Operation) -> None:
        """Store to memory."""
        pointer, value, *masks = operation.operands
        where = f"{self.access(pointer)}, {self.masks_of(masks)}"
        shape = pointer.type.shape
        self.emit(f"store({where}, {self.raw(value)}, {shape}, {self.place(operation)})")

    def do_tt_atomic_rmw(self, operation: Operation) -> None:
        """Change memory atomically."""
        pointer, value, *masks = operation.operands
        kind = operation.text.split(",")[0].strip()
        where = f"{self.atomic_access(pointer)}, {self.masks_of(masks)}, {self.raw(value)}"
        where += f", {pointer.type.shape}, {self.place(operation)}, {kind!r}"
        if operation.result.uses:
            self.define_raw(operation.result, f"exchange({where})", pure=False)
            return
        waits = kind in WAITS and not self.is_read(pointer)
        self.emit(f"change({where}, {'waiting' if waits else 'None'})")

    def do_tt_atomic_cas(self, operation: Operation) -> None:
        """Change memory atomically where it holds what is expected."""
        pointer, compared, value = operation.operands
        where = f"{self.atomic_access(pointer)}, (), {self.raw(value)}, {pointer.type.shape}"
        where += f", {self.place(operation)}, 'exch', {self.raw(compared)}"
        self.define_raw(operation.result, f"exchange({where})", pure=False)

    def atomic_access(self, pointer: Value) -> str:
        """Return the code of the arguments that say where an atomic operation is."""
        p = self.pointers[pointer]
        return f"{p.memory}, programs, {p.number}, {tuple_of(p.arrays)}"

    def is_read(self, pointer: Value) -> bool:
        """Whether the kernel loads or stores, not atomically, where a pointer may point."""
        return not self.facts.touched.isdisjoint(parameter for parameter, _ in self.roots[pointer])

    def do_tt_bitcast(self, operation: Operation) -> None:
        """Take bits, or a pointer, for another type."""
        if operation.operands[0] in self.pointers:
            self.recast(operation)
        else:
            super().do_tt_bitcast(operation)
