"""Code of numbers: arithmetic, comparisons, casts and constants, element by element."""

import re

import numpy as np

from tests.harness.interpreter.ttir.calls.numbers import DTYPES, RAW, library_function
from tests.harness.interpreter.ttir.ir.parse import Operation, Unsupported
from tests.harness.interpreter.ttir.writing.assembly import expression_of
from tests.harness.interpreter.ttir.writing.writer import Writer, literal_of, width_of

INFIX = {
    "arith.addf": "+",
    "arith.subf": "-",
    "arith.mulf": "*",
    "arith.divf": "/",
    "tt.precise_divf": "/",
    "arith.addi": "+",
    "arith.subi": "-",
    "arith.muli": "*",
    "arith.andi": "&",
    "arith.ori": "|",
    "arith.xori": "^",
    "arith.shli": "<<",
    "arith.shrsi": ">>",
}
CALLS = {
    "arith.maxnumf": "np.fmax",
    "arith.minnumf": "np.fmin",
    "arith.maximumf": "np.maximum",
    "arith.minimumf": "np.minimum",
    "arith.maxsi": "np.maximum",
    "arith.minsi": "np.minimum",
    "arith.negf": "np.negative",
    "arith.remf": "np.fmod",
    "math.absf": "np.abs",
    "math.absi": "np.abs",
    "tt.precise_sqrt": "np.sqrt",
    "arith.divsi": "quotient",
    "arith.remsi": "remainder",
    "math.erf": "erf",
    "math.rsqrt": "rsqrt",
} | {
    f"math.{name}": f"np.{name}"
    for name in ("exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "tan", "tanh", "floor", "ceil", "trunc")
}
OF_NUMBERS = {"np.maximum": "max", "np.minimum": "min", "np.abs": "abs"}
"""Functions of arrays of integers, and those of Python's integers."""
UNSIGNED = {"arith.divui": "unsigned_quotient", "arith.remui": "unsigned_remainder"} | {
    "arith.maxui": "np.maximum",
    "arith.minui": "np.minimum",
}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
WRAPS = {"+", "-", "*", "<<"}
"""Operators by which an integer of Python may outgrow its type."""
EXACT = {"arith.maxnumf", "arith.minnumf", "arith.maximumf", "arith.minimumf", "arith.negf", "math.absf"}
"""Operations on numbers with a fraction that need no rounding."""


class Arithmetic(Writer):
    """Writes operations on elements at the same place."""

    def operation(self, operation: Operation) -> None:
        """Write one operation."""
        if operation.name in INFIX or operation.name in CALLS or operation.name in UNSIGNED:
            self.elementwise(operation)
        else:
            super().operation(operation)

    def elementwise(self, operation: Operation) -> None:
        """Write an operation on elements at the same place."""
        name, result = operation.name, operation.result
        element = result.type.element
        if element == "i1" and name == "arith.andi" and result.type.shape and not self.is_number(result):
            self.masks[result] = tuple(
                dict.fromkeys(
                    mask for x in operation.operands for mask in self.masks.get(x) or (self.wide(x),)
                )
            )
            return
        self.define(result, self.expression(operation, [self.wide(x) for x in operation.operands]))

    def expression(self, operation: Operation, operands: list[str]) -> str:
        """Return the code of an operation on elements, of the code of its operands."""
        name, result = operation.name, operation.result
        element, is_number = result.type.element, self.is_number(result)
        bits = width_of(element)
        if name in UNSIGNED:
            views = ", ".join(
                f"unsigned({x}, {bits})" for x, o in zip(operands, operation.operands, strict=True)
            )
            return f"signed({UNSIGNED[name]}({views}), {bits})"
        if name in CALLS:
            call = CALLS[name]
            if element[0] == "i" and is_number:
                call = OF_NUMBERS.get(call, call)
            found = f"{call}({', '.join(operands)})"
            return f"rounded({found}, {element!r})" if element in RAW and name not in EXACT else found
        sign = INFIX[name]
        if element == "i1" and sign in ("+", "-", "*"):
            sign = "&" if sign == "*" else "^"
        found = f"{operands[0]} {sign} {operands[1]}"
        if is_number and element[0] == "i" and bits > 1 and sign in WRAPS:
            return f"wrap({found}, {bits})"
        return f"rounded({found}, {element!r})" if element in RAW else found

    def do_arith_constant(self, operation: Operation) -> None:
        """Write a constant into the lines that use it."""
        result = operation.result
        text = operation.text.partition(" : ")[0].strip()
        text = re.sub(r"^dense<(.*)>$", r"\1", text)
        if text.startswith("["):
            raise Unsupported(self.told("a constant of several numbers", operation))
        code = literal_of(text, result.type.element)
        self.constants[result] = self.literal(code)
        if code in ("0", "np.float32(0.0)", "np.float64(0.0)"):
            self.zeros.add(self.constants[result])

    def do_ub_poison(self, operation: Operation) -> None:
        """Take 0 for what is not defined."""
        self.constants[operation.result] = self.literal(literal_of("0", operation.result.type.element))

    def do_arith_cmpi(self, operation: Operation) -> None:
        """Compare integers."""
        predicate = operation.text.split(",")[0].split()[0]
        a, b = (self.wide(x) for x in operation.operands)
        bits = width_of(operation.operands[0].type.element)
        if predicate[0] == "u":
            a, b = (f"unsigned({x}, {bits})" for x in (a, b))
        self.define(operation.result, f"{a} {COMPARISONS[predicate[-2:]]} {b}")

    def do_arith_cmpf(self, operation: Operation) -> None:
        """Compare numbers: ordered comparisons are false of NaN, unordered ones true."""
        predicate = re.findall(r"\b[uo](?:eq|ne|lt|le|gt|ge|no|rd)\b|\bord\b|\buno\b", operation.text)[0]
        a, b = (self.wide(x) for x in operation.operands)
        if predicate in ("ord", "uno"):
            sign = "==" if predicate == "ord" else "!="
            joined = "&" if predicate == "ord" else "|"
            self.define(operation.result, f"({a} {sign} {a}) {joined} ({b} {sign} {b})")
        elif predicate in ("une", *(f"o{x}" for x in COMPARISONS if x != "ne")):
            self.define(operation.result, f"{a} {COMPARISONS[predicate[1:]]} {b}")
        elif predicate == "one":
            self.define(operation.result, f"({a} < {b}) | ({a} > {b})")
        else:
            opposite = {"ueq": "!=", "ult": ">=", "ule": ">", "ugt": "<=", "uge": "<"}[predicate]
            if opposite == "!=":
                self.define(operation.result, f"np.logical_not(({a} < {b}) | ({a} > {b}))")
            else:
                self.define(operation.result, f"np.logical_not({a} {opposite} {b})")

    def do_math_fma(self, operation: Operation) -> None:
        """Multiply and add with one rounding."""
        operands = ", ".join(self.wide(x) for x in operation.operands)
        self.define(operation.result, f"fma({operands}, {operation.result.type.element!r})")

    def do_tt_clampf(self, operation: Operation) -> None:
        """Limit numbers to a range."""
        stays = "propagateNan = all" in operation.text
        operands = ", ".join(self.wide(x) for x in operation.operands)
        self.define(operation.result, f"clamped({operands}, propagates_nan={stays})")

    def do_tt_mulhiui(self, operation: Operation) -> None:
        """Multiply, and take the upper half of the product."""
        operands = ", ".join(self.wide(x) for x in operation.operands)
        self.define(operation.result, f"high_product({operands}, {width_of(operation.result.type.element)})")

    def do_arith_shrui(self, operation: Operation) -> None:
        """Shift to the right without the sign."""
        operands = ", ".join(self.wide(x) for x in operation.operands)
        self.define(operation.result, f"shifted_right({operands}, {width_of(operation.result.type.element)})")

    def cast(self, operation: Operation, of_number: str, of_array: str) -> None:
        """Write a cast: ``x`` stands for what is cast, ``to`` for the type of arrays."""
        operand, result = operation.operands[0], operation.result
        text = of_number if self.is_number(result) else of_array
        to = f"np.{np.dtype(DTYPES[result.type.element]).name}"
        self.define(
            result,
            text.format(
                x=self.wide(operand),
                to=to,
                bits=width_of(operand.type.element),
                wide=width_of(result.type.element),
            ),
        )

    def do_arith_extsi(self, operation: Operation) -> None:
        """Widen signed integers: -1 is the only other one of a single bit."""
        one_bit = operation.operands[0].type.element == "i1"
        self.cast(
            operation,
            "-int({x})" if one_bit else "{x}",
            "-({x}.astype({to}))" if one_bit else "{x}.astype({to})",
        )

    def do_arith_extui(self, operation: Operation) -> None:
        """Widen unsigned integers."""
        one_bit = operation.operands[0].type.element == "i1"
        self.cast(
            operation,
            "int({x})" if one_bit else "unsigned({x}, {bits})",
            "{x}.astype({to})" if one_bit else "unsigned({x}, {bits}).astype({to})",
        )

    def do_arith_trunci(self, operation: Operation) -> None:
        """Keep the lowest bits of integers."""
        one_bit = operation.result.type.element == "i1"
        self.cast(
            operation,
            "bool({x} & 1)" if one_bit else "wrap({x}, {wide})",
            "({x} & 1) != 0" if one_bit else "{x}.astype({to})",
        )

    def do_arith_sitofp(self, operation: Operation) -> None:
        """Turn signed integers into numbers with a fraction."""
        operand, result = operation.operands[0], operation.result
        code = self.wide(operand)
        if operand.type.element == "i1":
            code = f"-number({code}, 'i8')" if not self.is_number(operand) else f"-int({code})"
        self.define(result, self.number_of(code, result.type.element))

    def do_arith_uitofp(self, operation: Operation) -> None:
        """Turn unsigned integers into numbers with a fraction."""
        operand, result = operation.operands[0], operation.result
        code = self.wide(operand)
        if operand.type.element != "i1":
            code = f"unsigned({code}, {width_of(operand.type.element)})"
        self.define(result, self.number_of(code, result.type.element))

    def number_of(self, code: str, element: str) -> str:
        """Return the code of an integer as a number with a fraction: rounded once, also to 16 bits."""
        if element in RAW:
            return f"rounded(number({code}, 'f64'), {element!r})"
        return f"number({code}, {element!r})"

    def do_arith_fptosi(self, operation: Operation) -> None:
        """Cut numbers off to signed integers."""
        self.define(
            operation.result,
            f"integer({self.wide(operation.operands[0])}, {operation.result.type.element!r})",
        )

    def do_arith_fptoui(self, operation: Operation) -> None:
        """Cut numbers off to unsigned integers."""
        code = self.wide(operation.operands[0])
        self.define(operation.result, f"unsigned_integer({code}, {operation.result.type.element!r})")

    def do_arith_extf(self, operation: Operation) -> None:
        """Give numbers more bits."""
        operand, result = operation.operands[0], operation.result
        code = self.wide(operand)
        if DTYPES[operand.type.element] is DTYPES[result.type.element]:
            self.define(result, code)
        else:
            self.define(result, f"number({code}, {result.type.element!r})")

    def do_arith_truncf(self, operation: Operation) -> None:
        """Round numbers to fewer bits."""
        operand, result = operation.operands[0], operation.result
        element, code = result.type.element, self.wide(operand)
        if "rounding = rtz" in operation.text or "toward_zero" in operation.text:
            self.define(result, f"cut({code}, {element!r})")
        elif element not in RAW:
            self.define(result, f"number({code}, {element!r})")
        elif result in self.facts.raw and not self.is_number(result):
            self.define_raw(result, f"narrow({code}, {element!r})")
        else:
            self.define(result, f"rounded({code}, {element!r})")

    def do_tt_fp_to_fp(self, operation: Operation) -> None:
        """Cast from or to an 8-bit format."""
        if DTYPES[operation.result.type.element] is DTYPES["f32"] and operation.result.type.element in RAW:
            self.do_arith_truncf(operation)
        else:
            self.do_arith_extf(operation)

    def do_tt_bitcast(self, operation: Operation) -> None:
        """Take bits for another type."""
        operand, result = operation.operands[0], operation.result
        source, element = operand.type.element, result.type.element
        if {source, element} <= {"i1", "i8"} and source != element:
            raise Unsupported(self.told("a bitcast of int1", operation))
        if self.is_number(operand) and source in RAW:
            self.define_raw(
                result, f"bits_of(narrow({self.wide(operand)}, {source!r})[()], {source!r}, {element!r})"
            )
        else:
            self.define_raw(result, f"bits_of({self.raw(operand)}, {source!r}, {element!r})")

    def do_tt_extern_elementwise(self, operation: Operation) -> None:
        """Call a function of a device library."""
        found = re.search(r'symbol = ""', operation.text)
        symbol = operation.strings[-1] if found else ""
        function = library_function(symbol, len(operation.operands))
        if function is None:
            raise Unsupported(self.told(f"the function {symbol} of a device library", operation))
        operands = ", ".join(self.array(x) for x in operation.operands)
        self.define(operation.result, f"{function}({operands})")

    def do_tt_elementwise_inline_asm(self, operation: Operation) -> None:
        """Compute what an instruction of inline assembly does, of those that are known."""
        expression = expression_of(
            operation.strings[0], operation.strings[1], [x.type.element for x in operation.operands]
        )
        if expression is None or len(operation.results) != 1 or operation.integer("packed_element") != 1:
            raise Unsupported(self.told("inline assembly (tl.inline_asm_elementwise)", operation))
        operands = [self.array(x) for x in operation.operands]
        self.define(operation.result, expression.format(*operands))

    def do_tt_get_program_id(self, operation: Operation) -> None:
        """Find out which program this is: the last dimension of the grid counts fastest."""
        axis = re.findall(r"\b[xyz]\b", operation.text)[0]
        code = {
            "x": "programs // (grid[1] * grid[2])",
            "y": "programs // grid[2] % grid[1]",
            "z": "programs % grid[2]",
        }[axis]
        self.assign(operation.result.name, f"({code}).astype(np.int32)", False)

    def do_tt_get_num_programs(self, operation: Operation) -> None:
        """Tell how many programs there are."""
        axis = re.findall(r"\b[xyz]\b", operation.text)[0]
        self.assign(operation.result.name, f"grid[{'xyz'.index(axis)}]", True)

    def do_tt_assert(self, operation: Operation) -> None:
        """Raise an exception if a condition does not hold everywhere."""
        code = self.wide(operation.operands[0])
        self.emit(f"assert np.all({code}), {operation.strings[0]!r}")

    def do_llvm_intr_assume(self, operation: Operation) -> None:
        """Raise an exception if what is assumed is wrong."""
        self.emit(f"assert np.all({self.wide(operation.operands[0])}), 'Assume failed'")

    def do_tt_print(self, operation: Operation) -> None:
        """Print values."""
        values = ", ".join(self.wide(x) for x in operation.operands)
        self.emit(f"print({operation.strings[0]!r}, {values})")
