"""The operator mutants of a Triton file: what each operator changes, and what it leaves alone."""

import ast
from pathlib import Path

import pytest

from kernels.algorithms.flash_v2 import forward_pass
from kernels.common import tiles
from tests.mutation.operators import SourceMutant, source_mutants

HEAD = '''
import triton
import triton.language as tl
@triton.jit
def f(p, n: tl.constexpr = 2):
    """Ünicode, and 1 + 2 < 4."""
    tl.static_assert(n < 4)
'''


def mutated(line: str, before: str = "") -> set[tuple[str, str]]:
    """Return the operators and new texts for a line of a jitted function that ``before`` precedes."""
    lines = [f"    {text}" for text in (*before.splitlines(), *line.splitlines())]
    source = HEAD + "\n".join(lines) + "\n"
    number = source.splitlines().index(f"    {line.splitlines()[0]}") + 1
    return {
        (mutant.operator, mutant.source.splitlines()[number - 1].strip())
        for mutant in source_mutants(source)
        if mutant.line == number
    }


def test_comparison() -> None:
    assert mutated("x = a < b") == {("lt-to-le", "x = a <= b")}
    assert mutated("x = a >= b") == {("ge-to-gt", "x = a > b")}
    assert mutated("x = (a) == (b != c)") == {
        ("eq-to-ne", "x = (a) != (b != c)"),
        ("ne-to-eq", "x = (a) == (b == c)"),
    }


def test_sum() -> None:
    assert mutated("x = a + b") == {
        ("add-to-sub", "x = a - b"),
        ("term-dropped", "x = a"),
        ("first-term-dropped", "x = b"),
    }
    assert mutated("x = (a - b) * 2") == {
        ("sub-to-add", "x = (a + b) * 2"),
        ("term-dropped", "x = (a) * 2"),
        ("operands-swapped", "x = (b - a) * 2"),
        ("factor-dropped", "x = a - b"),
        ("constant-up", "x = (a - b) * 3"),
        ("constant-down", "x = (a - b) * 1"),
    }
    assert mutated("x = a - 1") == {("term-dropped", "x = a"), ("constant-up", "x = a - 2")}


def test_an_address_keeps_its_pointer_and_sign() -> None:
    assert mutated("x = g(p + i * s + j * t)") == {
        ("term-dropped", "x = g(p + j * t)"),
        ("term-dropped", "x = g(p + i * s)"),
    }


def test_product() -> None:
    assert mutated("x = a * g(b)") == {("factor-dropped", "x = a"), ("first-factor-dropped", "x = g(b)")}
    assert mutated("x = a / b") == {("factor-dropped", "x = a")}
    assert mutated("x = a // b % c") == {
        ("div-to-mod", "x = a % b % c"),
        ("mod-to-div", "x = a // b // c"),
    }


def test_mask() -> None:
    assert mutated("x = (a < b) & c") == {
        ("mask-term-1-dropped", "x = c"),
        ("mask-term-2-dropped", "x = a < b"),
        ("lt-to-le", "x = (a <= b) & c"),
    }
    assert mutated("x = tl.load(p, mask=m, other=0.0)") == {
        ("mask-dropped", "x = tl.load(p)"),
        ("other-changed", "x = tl.load(p, mask=m, other=1.0)"),
    }
    assert mutated("x = tl.load(p, other=c, mask=m)") == {
        ("mask-dropped", "x = tl.load(p)"),
        ("other-changed", "x = tl.load(p, other=0.0, mask=m)"),
    }
    assert mutated("tl.store(p, x, mask=m)") == {
        ("mask-dropped", "tl.store(p, x)"),
        ("statement-deleted", "pass"),
    }


def test_selection() -> None:
    assert mutated("x = 2.0 * tl.maximum(a - 1, g(b))") >= {
        ("maximum-arm-1", "x = 2.0 * (a - 1)"),
        ("maximum-arm-2", "x = 2.0 * g(b)"),
        ("maximum-to-minimum", "x = 2.0 * tl.minimum(a - 1, g(b))"),
    }
    # ``x = x`` would be the same mutant as the deletion of the statement.
    assert mutated("x = tl.minimum(x, 0)", before="x = g()") == {
        ("minimum-to-maximum", "x = tl.maximum(x, 0)"),
        ("constant-up", "x = tl.minimum(x, 1)"),
        ("statement-deleted", "pass"),
    }
    assert mutated("x = tl.where(c, a, b)") == {
        ("where-arm-1", "x = a"),
        ("where-arm-2", "x = b"),
        ("where-swapped", "x = tl.where(c, b, a)"),
    }
    assert mutated("x = a if c else b") == {("if-true", "x = a"), ("if-false", "x = b")}


def test_constants() -> None:
    assert mutated("x = a * 1.5") == {
        ("factor-dropped", "x = a"),
        ("constant-to-zero", "x = a * 0.0"),
        ("constant-doubled", "x = a * 3.0"),
        ("constant-negated", "x = a * (-1.5)"),
    }
    assert mutated("x = 0") == {("constant-up", "x = 1")}
    assert mutated("x = tl.full([2 + 1], 0.0, tl.float32)") == {
        ("zero-to-one", "x = tl.full([2 + 1], 1.0, tl.float32)"),
        ("float32-to-float16", "x = tl.full([2 + 1], 0.0, tl.float16)"),
    }
    assert mutated('x = g(float("-inf"), 3)') == set(), "an argument of another function may be an axis"
    assert mutated("x = g(True, keep=False)") == {
        ("flag-flipped", "x = g(False, keep=False)"),
        ("flag-flipped", "x = g(True, keep=True)"),
    }


def test_casts() -> None:
    assert mutated("x = (a).to(tl.float32)") == {
        ("cast-dropped", "x = a"),
        ("float32-to-float16", "x = (a).to(tl.float16)"),
    }
    assert mutated("x = a.to(tl.int64)") == {("int64-to-int32", "x = a.to(tl.int32)")}


def test_single_arguments() -> None:
    assert mutated("x = tl.exp2(-a)") == {
        ("exp2-to-exp", "x = tl.exp(-a)"),
        ("minus-dropped", "x = tl.exp2(a)"),
    }
    assert mutated("x = tl.log(a)") == {("log-to-log2", "x = tl.log2(a)")}
    assert mutated("x = a[:, None]") == {("axes-swapped", "x = a[None, :]")}
    assert mutated("x = tl.dot(a, b, input_precision=n)") == {("input_precision-dropped", "x = tl.dot(a, b)")}


def test_statements() -> None:
    assert mutated("x += a", before="x = b") == {
        ("add-to-sub", "x -= a"),
        ("accumulation-lost", "x = a"),
        ("statement-deleted", "pass"),
    }
    assert mutated("x = b", before="x = a") == {("statement-deleted", "pass")}
    assert mutated("y = b", before="if n:\n    y = a") == set(), "y may have no other value"
    assert mutated('tl.device_print("x", 1 + 2)') == set()
    assert mutated("x: tl.constexpr = a") == set()


def test_control_flow() -> None:
    assert mutated("if n and not c:\n    pass") == {
        ("if-true", "if True:"),
        ("if-false", "if False:"),
        ("condition-1-dropped", "if not c:"),
        ("condition-2-dropped", "if n:"),
        ("not-dropped", "if n and c:"),
    }
    assert mutated("for i in range(a):\n    pass") == {
        ("stop-later", "for i in range(a + 1):"),
        ("stop-earlier", "for i in range(a - 1):"),
        ("start-later", "for i in range(1, a):"),
    }
    assert mutated("for i in tl.static_range(0, a if n else b):\n    pass") >= {
        ("stop-later", "for i in tl.static_range(0, (a if n else b) + 1):"),
        ("start-later", "for i in tl.static_range(1, a if n else b):"),
    }


def test_only_jitted_functions() -> None:
    source = (
        "from triton import jit, language as L\n"
        "def host(a): return a + 1\n"
        "@cache\ndef cached(a): return a + 1\n"
        "@jit\ndef kernel(a, b=1 + 1): L.store(a, b + c)\n"
        "@jit\ndef helper(a): return a + 1\n"
    )
    assert {mutant.function for mutant in source_mutants(source)} == {"kernel", "helper"}
    assert all("b=1 + 1" in mutant.source for mutant in source_mutants(source))


def test_a_mutant() -> None:
    source = HEAD + "    x = a < b < c\n"
    assert [mutant.name for mutant in source_mutants(source)] == ["f:8:lt-to-le", "f:8:lt-to-le:2"]
    assert source_mutants(source)[0] == SourceMutant(
        name="f:8:lt-to-le",
        function="f",
        line=8,
        operator="lt-to-le",
        source=HEAD + "    x = a <= b < c\n",
    )
    assert source_mutants(source)[0].diff(source).splitlines()[2:] == [
        "@@ -7,2 +7,2 @@",
        "     tl.static_assert(n < 4)",
        "-    x = a < b < c",
        "+    x = a <= b < c",
    ]


@pytest.mark.parametrize("module", [forward_pass, tiles])
def test_mutants_of_a_real_file(module) -> None:
    """Each mutant parses, differs from all others, and differs from the original only in its function."""
    source = Path(module.__file__).read_text()
    mutants = source_mutants(source)
    assert len(mutants) > 100
    assert (
        len({mutant.name for mutant in mutants}) == len({mutant.source for mutant in mutants}) == len(mutants)
    )
    lines = source.splitlines()
    spans = {
        node.name: (node.body[0].lineno - 1, node.end_lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
    }
    for mutant in mutants:
        first, last = spans[mutant.function]
        assert last is not None
        edited = mutant.source.splitlines()
        assert edited[:first] == lines[:first]
        assert edited[len(edited) - len(lines) + last :] == lines[last:]
        ast.parse("\n".join(edited[first : len(edited) - len(lines) + last]).replace("\n    ", "\n").strip())
