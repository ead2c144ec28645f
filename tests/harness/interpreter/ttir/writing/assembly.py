"""Inline assembly that is known: instructions of PTX which attention kernels write by hand, as NumPy has them."""

import re

UNARY = {
    "ex2": "np.exp2({0})",
    "lg2": "np.log2({0})",
    "rcp": "1 / {0}",
    "sqrt": "np.sqrt({0})",
    "rsqrt": "rsqrt({0})",
    "tanh": "np.tanh({0})",
    "sin": "np.sin({0})",
    "cos": "np.cos({0})",
    "abs": "np.abs({0})",
    "neg": "np.negative({0})",
    "mov": "{0}",
}
BINARY = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "max": "np.fmax({0}, {1})",
    "min": "np.fmin({0}, {1})",
}
TERNARY = {"fma": "fma({0}, {1}, {2}, 'f32')"}
INSTRUCTION = re.compile(r"(\w+)((?:\.\w+)*)\.f32\s+\$0\s*,\s*(\$\d(?:\s*,\s*\$\d)*)\s*;?")


def expression_of(text: str, constraints: str, elements: list[str]) -> str | None:
    """Return the code of one instruction on float32, with operands as {0}, {1}; None if it is not known.

    Args:
        text: the assembly.
        constraints: those of its registers, the result's first.
        elements: the types of the operands.
    """
    found = INSTRUCTION.fullmatch(text.strip())
    if found is None or set(elements) != {"f32"} or not constraints.startswith("="):
        return None
    operands = [int(x) - 1 for x in re.findall(r"\$(\d)", found[3])]
    table = {1: UNARY, 2: BINARY, 3: TERNARY}.get(len(operands), {})
    if found[1] not in table or any(x not in range(len(elements)) for x in operands):
        return None
    return table[found[1]].format(*(f"{{{x}}}" for x in operands))
