"""Code of tensors as a whole: shapes, products of matrices, reductions and scans."""

import re

from tests.harness.interpreter.ttir.calls.numbers import RAW
from tests.harness.interpreter.ttir.ir.parse import Operation, Value
from tests.harness.interpreter.ttir.writing.analyse import is_plain, sums_halves
from tests.harness.interpreter.ttir.writing.arithmetic import Arithmetic

INPUT_PRECISION = re.compile(r"\binputPrecision = (\w+)")
"""How a product of float32 says which of their bits it takes; it takes all if nothing is said."""

REDUCTIONS = {
    "arith.addf": "np.add",
    "arith.addi": "np.add",
    "arith.maxnumf": "np.fmax",
    "arith.minnumf": "np.fmin",
    "arith.maxsi": "np.maximum",
    "arith.minsi": "np.minimum",
}
SCANS = {
    "arith.addf": "np.add",
    "arith.addi": "np.add",
    "arith.mulf": "np.multiply",
    "arith.muli": "np.multiply",
}


class Tensors(Arithmetic):
    """Writes operations on whole tensors."""

    def shaped(self, code: str, operation: Operation, *, is_number: bool = False) -> str:
        """Return the code of an array in the shape that an operation gives it."""
        name, source, target = operation.name, operation.operands[0].type, operation.result.type
        if is_number or name == "tt.broadcast":
            return code
        if name == "tt.splat":
            return f"{code}.reshape(-1{', 1' * target.rank})"
        if name == "tt.unsplat":
            return f"{code}.reshape(-1)"
        if name == "tt.expand_dims":
            return f"{code}[{':, ' * (operation.integer('axis') + 1)}None]"
        if name == "tt.trans":
            order = [int(x) + 1 for x in (operation.attribute("order") or "").split(",")]
            return f"{code}.transpose(0, {', '.join(map(str, order))})"
        of_source = [i for i, size in enumerate(source.shape, 1) if size != 1]
        of_target = [i for i, size in enumerate(target.shape) if size != 1]
        if [source.shape[i - 1] for i in of_source] == [target.shape[i] for i in of_target]:
            kept = iter(of_source)
            return f"with_ones({code}, {[next(kept) if size != 1 else 0 for size in target.shape]})"
        return f"reshaped({code}, {source.shape}, {target.shape})"

    def do_tt_make_range(self, operation: Operation) -> None:
        """Count."""
        start, end = operation.integer("start"), operation.integer("end")
        self.assign(operation.result.name, f"np.arange({start}, {end}, dtype=np.int32)[None]", False)

    def do_tt_join(self, operation: Operation) -> None:
        """Join two tensors along a new dimension."""
        a, b = (self.array(x) for x in operation.operands)
        self.define(operation.result, f"join({a}, {b}, {operation.operands[0].type.shape})")

    def do_tt_split(self, operation: Operation) -> None:
        """Split a tensor along its last dimension."""
        both = self.new("both")
        self.assign(
            both, f"split({self.array(operation.operands[0])}, {operation.operands[0].type.shape})", False
        )
        for i, result in enumerate(operation.results):
            self.define(result, f"{both}[{i}]")
        self.arrays.discard(both)

    def do_tt_cat(self, operation: Operation) -> None:
        """Put one tensor behind another one."""
        a, b = (self.array(x) for x in operation.operands)
        self.define(operation.result, f"cat({a}, {b}, {operation.operands[0].type.shape})")

    def do_tt_gather(self, operation: Operation) -> None:
        """Take entries at indices."""
        source, indices = operation.operands
        shapes = f"{source.type.shape}, {indices.type.shape}"
        axis = operation.integer("axis") + 1
        self.define(
            operation.result, f"gather({self.array(source)}, {self.array(indices)}, {axis}, {shapes})"
        )

    def do_tt_histogram(self, operation: Operation) -> None:
        """Count how often numbers occur."""
        source, *masks = operation.operands
        mask = self.wide(masks[0]) if masks else "True"
        bins = operation.result.type.shape[0]
        self.define(operation.result, f"histogram({self.array(source)}, {mask}, {bins}, {source.type.shape})")

    def do_tt_dot(self, operation: Operation) -> None:
        """Multiply matrices."""
        a, b, c = operation.operands
        result = operation.result
        element = result.type.element
        shapes = f"{a.type.shape}, {b.type.shape}"
        function = "integer_dot" if a.type.element[0] == "i" else "dot"
        operands = [self.array(x) for x in (a, b)]
        if element == "f64" or "f64" in (a.type.element, b.type.element):
            operands = [f"number({x}, 'f64')" for x in operands]
        asked = INPUT_PRECISION.search(operation.text) if a.type.element == "f32" else None
        precision = f", {asked[1]!r}" if asked else ""
        found = f"{function}({', '.join(operands)}, {shapes}{precision})"
        if self.constants.get(c) not in self.zeros:
            found = f"{found} + {self.wide(c)}"
        self.define(result, f"rounded({found}, {element!r})" if element in RAW else found)

    def do_tt_reduce(self, operation: Operation) -> None:
        """Reduce tensors along a dimension."""
        axis = operation.integer("axis") + 1
        shape = operation.operands[0].type.shape
        combine = operation.regions[0].operations[0]
        operand = operation.operands[0]
        adds = combine.name == "arith.addf" and operand.type.element in RAW and not sums_halves(operation)
        if is_plain(operation, *REDUCTIONS) and not adds:
            if sums_halves(operation):
                code = f"reduce_by(np.add, {self.halves(operand)}, {axis}, {shape})"
                self.define_raw(operation.result, code)
            else:
                found = f"reduce_by({REDUCTIONS[combine.name]}, {self.array(operand)}, {axis}, {shape})"
                self.define(operation.result, found)
            return
        function = self.combination(operation)
        operands = "".join(self.array(x) + ", " for x in operation.operands)
        self.define_all(operation.results, f"reduce_pairs({function}, ({operands}), {axis}, {shape})")

    def halves(self, value: Value) -> str:
        """Return the code of float16 numbers as an array of NumPy's own."""
        return (
            f"array({self.wide(value)}, {value.type.rank}, 'f16').astype(np.float16)"
            if self.is_number(value)
            else self.raw(value)
        )

    def do_tt_scan(self, operation: Operation) -> None:
        """Accumulate tensors along a dimension."""
        axis, reverse = operation.integer("axis") + 1, operation.attribute("reverse") == "true"
        shape = operation.operands[0].type.shape
        combine = operation.regions[0].operations[0]
        if is_plain(operation, *SCANS):
            operand, function = operation.operands[0], SCANS[combine.name]
            if sums_halves(operation):
                self.define_raw(
                    operation.result,
                    f"scan_by({function}, {self.halves(operand)}, {axis}, {shape}, reverse={reverse})",
                )
                return
            if operand.type.element not in RAW:
                found = f"scan_by({function}, {self.array(operand)}, {axis}, {shape}, reverse={reverse})"
                self.define(operation.result, found)
                return
        function = self.combination(operation)
        operands = "".join(self.array(x) + ", " for x in operation.operands)
        self.define_all(
            operation.results, f"scan_each({function}, ({operands}), {axis}, {shape}, reverse={reverse})"
        )

    def combination(self, operation: Operation) -> str:
        """Write the region of a reduction as a function, and return its name."""
        region, name = operation.regions[0], self.new("combine")
        arguments = ", ".join(x.name for x in region.arguments)
        self.emit(f"def {name}({arguments}):")
        self.arrays.update(x.name for x in region.arguments)
        self.depth += 1
        self.operations(region.operations[:-1])
        self.emit(f"return ({''.join(self.wide(x) + ', ' for x in region.operations[-1].operands)})")
        self.depth -= 1
        return name

    def do_tt_reduce_return(self, operation: Operation) -> None:
        """Leave the end of a region to what writes the region."""

    do_tt_scan_return = do_scf_yield = do_scf_condition = do_tt_reduce_return
