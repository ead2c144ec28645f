"""Code of loops, branches and blocks: statements of Python, or functions where programs part."""

from collections.abc import Iterable
from functools import partial

from tests.harness.interpreter.ttir.ir.parse import Operation, Region, Value
from tests.harness.interpreter.ttir.writing.places import Places
from tests.harness.interpreter.ttir.writing.writer import Pointer, targets_of, tuple_of

NOTHING_HANDED_ON = Operation("scf.yield", [], [], "", [], [])


class Regions(Places):
    """Writes operations that have others inside."""

    def passed(self, value: Value, target: Value) -> str:
        """Return the code of a value that a loop or a branch hands on as ``target``."""
        if target.type.element == "ptr":
            return self.offset_in(value, target)
        return self.wide(value) if self.is_number(target) else self.array(value)

    def enter(self, value: Value) -> None:
        """Make known what a region is entered with, or what a loop or a branch has given, by its own name."""
        self.known(value)
        if value.type.element == "ptr":
            self.pointers[value] = self.pointer_of(value)

    def hand_on(self, values: Iterable[Value], targets: list[Value]) -> None:
        """Write an assignment of values to what they become."""
        codes = [self.passed(value, target) for value, target in zip(values, targets, strict=True)]
        if targets:
            self.emit(f"{', '.join(x.name for x in targets)} = {', '.join(codes)}")

    def result_types(self, values: list[Value]) -> str:
        """Return the code of the types of results."""
        return tuple_of([str((x.type.element, x.type.rank)) for x in values])

    def do_scf_if(self, operation: Operation) -> None:
        """Write a branch."""
        condition, results = operation.operands[0], operation.results
        sides = [*operation.regions, Region([], [NOTHING_HANDED_ON])][:2]
        if self.is_number(condition):
            for word, region in zip((f"if {self.wide(condition)}:", "else:"), sides, strict=True):
                self.emit(word)
                with self.deeper():
                    self.operations(region.operations)
                    self.hand_on(region.operations[-1].operands, results)
        else:
            parts = [self.function_of(partial(self.side, region, results), ()) for region in sides]
            given = ", ".join(", ".join(part) for part in parts)
            self.emit(
                f"{targets_of(results)}branch({self.wide(condition)}, {given}, {self.result_types(results)})"
            )
        for result in results:
            self.enter(result)

    def side(self, region: Region, results: list[Value]) -> None:
        """Write one side of a branch as the body of a function."""
        self.operations(region.operations)
        given = region.operations[-1].operands
        self.emit(f"return {tuple_of([self.passed(x, y) for x, y in zip(given, results, strict=True)])}")

    def do_scf_for(self, operation: Operation) -> None:
        """Write a loop."""
        low, high, step, *inits = operation.operands
        region, results = operation.regions[0], operation.results
        index, *arguments = region.arguments
        bounds = ", ".join(self.wide(x) for x in (low, high, step))
        advances = [self.is_moved(*x) for x in zip(arguments, region.operations[-1].operands, strict=True)]
        first = [
            self.as_offset("0", argument) if moved else self.passed(init, argument)
            for init, argument, moved in zip(inits, arguments, advances, strict=True)
        ]
        origins = [
            self.pointers[init] if moved else None for init, moved in zip(inits, advances, strict=True)
        ]
        if all(self.is_number(x) for x in (low, high, step)):
            if arguments:
                self.emit(f"{', '.join(x.name for x in arguments)} = {', '.join(first)}")
            self.emit(f"for {index.name} in range({bounds}):")
            with self.deeper():
                self.body(region, origins)
                codes = self.carried_on(region, origins)
                if arguments:
                    self.emit(f"{', '.join(x.name for x in arguments)} = {', '.join(codes)}")
            for argument, result, origin in zip(arguments, results, origins, strict=True):
                self.begin(argument, origin)
                self.end(argument, result)
            return

        def write() -> None:
            self.body(region, origins)
            self.emit(f"return {tuple_of(self.carried_on(region, origins))}")

        name, given = self.function_of(write, [x.name for x in region.arguments])
        types = self.result_types(results)
        self.emit(f"{targets_of(results)}loop({bounds}, {name}, {given}, {tuple_of(first)}, {types})")
        for result, origin in zip(results, origins, strict=True):
            self.begin(result, origin)

    def body(self, region: Region, origins: list[Pointer | None]) -> None:
        """Write the body of a loop."""
        index, *arguments = region.arguments
        self.enter(index)
        for argument, origin in zip(arguments, origins, strict=True):
            self.begin(argument, origin)
        self.operations(region.operations[:-1])

    def begin(self, value: Value, origin: Pointer | None) -> None:
        """Make known what is carried: of a pointer that is moved from ``origin``, how far it is from there."""
        self.enter(value) if origin is None else self.arrays.add(value.name)
        if origin is None:
            return
        if self.is_number(value):
            self.arrays.discard(value.name)
            self.pointers[value] = origin.moved(base=(*origin.base, value.name))
        else:
            self.pointers[value] = origin.moved(parts=(*origin.parts, value.name))

    def end(self, argument: Value, result: Value) -> None:
        """Make known what a loop of Python has carried to its end."""
        if argument in self.pointers:
            self.pointers[result] = self.pointers[argument]
            return
        self.assign(result.name, self.passed(argument, result), self.is_number(result))
        self.enter(result)

    def carried_on(self, region: Region, origins: list[Pointer | None]) -> list[str]:
        """Return the code of what the body of a loop hands on to the next turn."""
        found = []
        for value, argument, origin in zip(
            region.operations[-1].operands, region.arguments[1:], origins, strict=True
        ):
            if origin is None:
                found.append(self.passed(value, argument))
                continue
            before, now = self.pointers[argument], self.pointers[value]
            moved = now.moved(
                base=(*now.base[len(origin.base) :],),
                parts=(*now.parts[len(origin.parts) :],),
                stepping=now.stepping[len(before.stepping) :],
            )
            found.append(self.as_offset(self.offset(moved), argument))
        return found

    def is_moved(self, argument: Value, value: Value) -> bool:
        """Whether what a loop carries is a pointer that each turn moves on from where it was."""
        if argument.type.element != "ptr":
            return False
        while value is not argument:
            made = self.facts.made_by.get(value)
            if made is None or made.name != "tt.addptr":
                return False
            value = made.operands[0]
        return True

    def do_scf_while(self, operation: Operation) -> None:
        """Write a loop that goes on as long as a condition holds."""
        before, after = operation.regions
        condition, *forwarded = before.operations[-1].operands
        results = operation.results
        if self.is_number(condition):
            self.hand_on(operation.operands, before.arguments)
            self.emit("while True:")
            with self.deeper():
                for argument in before.arguments:
                    self.enter(argument)
                self.operations(before.operations[:-1])
                self.hand_on(forwarded, results)
                self.emit(f"if not {self.wide(condition)}:")
                with self.deeper():
                    self.emit("break")
                self.hand_on(forwarded, after.arguments)
                for argument in after.arguments:
                    self.enter(argument)
                self.operations(after.operations[:-1])
                self.hand_on(after.operations[-1].operands, before.arguments)
            for result in results:
                self.enter(result)
            return

        def check() -> None:
            for argument in before.arguments:
                self.enter(argument)
            self.operations(before.operations[:-1])
            handed = [self.passed(x, y) for x, y in zip(forwarded, after.arguments, strict=True)]
            self.emit(f"return {self.wide(condition)}, {tuple_of(handed)}")

        def turn() -> None:
            for argument in after.arguments:
                self.enter(argument)
            self.operations(after.operations[:-1])
            last = after.operations[-1].operands
            self.emit(
                f"return {tuple_of([self.passed(x, y) for x, y in zip(last, before.arguments, strict=True)])}"
            )

        parts = [
            self.function_of(write, [x.name for x in region.arguments])
            for write, region in ((check, before), (turn, after))
        ]
        first = tuple_of(
            [self.passed(x, y) for x, y in zip(operation.operands, before.arguments, strict=True)]
        )
        given = ", ".join(", ".join(part) for part in parts)
        types = self.result_types(results)
        self.emit(f"{targets_of(results)}repeat(len(programs), {given}, {first}, {types})")
        for result in results:
            self.enter(result)

    def block(self, name: str, given: Iterable[Value] = ()) -> None:
        """Write a block of the function, and behind it those that it leads to."""
        block = self.function.blocks[name]
        for argument, value in zip(block.arguments, given, strict=True):
            if argument.type.element == "ptr":
                self.pointers[argument] = self.pointers[value]
            else:
                self.assign(argument.name, self.passed(value, argument), self.is_number(argument))
                self.enter(argument)
        self.operations(block.operations)

    def do_cf_br(self, operation: Operation) -> None:
        """Go on with another block."""
        self.block(*operation.targets[0])

    def do_cf_cond_br(self, operation: Operation) -> None:
        """Go on with one of two blocks."""
        condition = operation.operands[0]
        if self.is_number(condition):
            for word, target in zip((f"if {self.wide(condition)}:", "else:"), operation.targets, strict=True):
                self.emit(word)
                with self.deeper():
                    self.block(*target)
            return
        sides = [self.function_of(partial(self.block, *target), ()) for target in operation.targets]
        self.emit(f"branch({self.wide(condition)}, {', '.join(', '.join(side) for side in sides)})")
        self.emit("return ()")

    def do_tt_return(self, operation: Operation) -> None:
        """End the function."""
        self.emit("return ()")
