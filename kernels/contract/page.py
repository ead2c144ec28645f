"""The documentation page of all claims, made from their declarations.

``python -m kernels.contract.page > docs/claims.md`` writes it.
"""

import inspect
import re

from kernels.contract.capabilities import CLAIMS, Capabilities
from kernels.contract.parsing import ARITHMETIC, CAPABILITIES, PLAIN_FUNCTION
from kernels.contract.spelling import Spelling
from reference.arithmetic import Arithmetic

HEAD = """\
<!-- Made by `python -m kernels.contract.page > docs/claims.md` from the declarations in
     kernels/contract/capabilities.py, kernels/contract/parsing.py and reference/arithmetic.py. Change those, then make
     it again. -->

# Claims

A kernel is judged by what it claims: cases are drawn from its claims alone. A kernel that is an `AttentionKernel`
states its claims as `Capabilities(key=value, ...)`; a plain function has those that are given here as defaults. For one
run, `--claims key=value` replaces a claim. It may be given several times; of two values for one key the last
holds, and capitals make no difference, but in those about `launch`. A run prints claims as they are written here.

## Claims about calls and answers
"""

ARITHMETIC_HEAD = """
## Claims about the arithmetic

The error bounds follow from what a kernel may round. For a kernel that states its arithmetic, a claim replaces one
value of it. The source of a plain function is not known, so the function may have any of the usual designs: a claim
drops those of them that have another value or, if all of them have the same, adds designs with the claimed one. A dtype
before the key restricts a claim to that dtype: `--claims float16:k_prescaled=true`.

The usual designs round no more than FlashAttention-2. They cast P before or after its division by l; take all keys at
once, tiles of 16 keys or more, or parts that are merged in float32, up to 8 or as many as whole tiles make, 32 at most;
compute delta in each of the ways below; cast dS before or after it is scaled; keep P from the forward or make it anew;
store dk and dv per query head or not; and multiply float32 as it is, or by three products in tf32. A design that rounds
more, such as a prescaled q or k, is no bug either: a run tells it once, with the claim that would be true.

Below, P is the softmax, l the sum that it is divided by, dP = dout v^T and dS = P (dP - delta). `output` is the format
that out and the gradients are stored in, and an envelope is one bound that is at least that of each design.
"""

IN_PYTHON_HEAD = """
## Claims that are made in Python only

These are fields of `Capabilities` that the command line has no text for.
"""


PRECISION = """\
How float32 operands are multiplied. `ieee` takes them as they are, `tf32` truncates them to 10 fraction bits, as \
Hopper's tensor cores do. `tf32` is claimed of float16 as well: a kernel that converts its inputs to float32 truncates \
P and dS to as many bits as a cast to float16 rounds them to."""


def page() -> str:
    """Return the whole page, in Markdown."""
    in_python = [name for name in CLAIMS if name not in CAPABILITIES]
    return "".join(
        (
            HEAD,
            *map(_of_a_claim, CAPABILITIES),
            IN_PYTHON_HEAD,
            *(f"\n### `{name}`\n\n{CLAIMS[name].meaning}\n" for name in in_python),
            ARITHMETIC_HEAD,
            *map(_of_the_arithmetic, ARITHMETIC),
        )
    )


def _of_a_claim(name: str) -> str:
    claim, spelling = CLAIMS[name], CAPABILITIES[name]
    less = () if claim.less is None else (spelling.write(claim.less),)
    stated, plain = (spelling.write(getattr(x, name)) for x in (Capabilities(), PLAIN_FUNCTION))
    of_plain = "" if stated == plain else f", of a plain function `{plain}`"
    example = _other_than(plain, less + spelling.examples)
    beside = f" --claims {claim.beside}" if claim.beside else ""
    return _entry(name, claim.meaning, f"`{stated}`{of_plain}", spelling, example + beside)


def _of_the_arithmetic(name: str) -> str:
    spelling = ARITHMETIC[name]
    if name == "precision":
        return _entry(name, PRECISION, "what the kernel states", spelling, "tf32")
    default = getattr(Arithmetic, name)
    written = "none" if default is None else f"`{spelling.write(default)}`"
    example = _other_than(written, spelling.examples)
    return _entry(name, attributes(Arithmetic)[name], written, spelling, example)


def _other_than(default: str, examples: tuple[str, ...]) -> str:
    return next(text for text in examples if text != default.strip("`"))


def _entry(name: str, meaning: str, default: str, spelling: Spelling, example: str) -> str:
    return f"""
### `{name}`

{meaning}

- Default: {default}
- Written: {spelling.expected}
- Example: `--claims {name}={example}`
"""


def attributes(documented: type) -> dict[str, str]:
    """Return what the section ``Attributes`` of a class's docstring says of each attribute, in Markdown."""
    section = (inspect.getdoc(documented) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    ([\w, ]+): (.+(?:\n {5,}.+)*)", section, re.MULTILINE)
    return {name: _sentence(text) for names, text in found for name in names.split(", ")}


def _sentence(text: str) -> str:
    text = " ".join(text.split()).replace("``", "`")
    is_word = re.match(r"[a-z]{3,}[ ,]", text)  # unlike dS and rowsum(P * dP)
    return text[0].upper() + text[1:] if is_word else text


if __name__ == "__main__":
    print(page(), end="")
