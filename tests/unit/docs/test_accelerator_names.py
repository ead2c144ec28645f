"""One module names ``torch.cuda``: all else asks an ``Accelerator``, whatever its type."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.files import ROOT

OF_CUDA = "tests/harness/accelerators/cuda.py"
WITHOUT = ("conftest.py", "reference", "strategies", "kernels/contract", "tests/harness", "tests/properties")
"""What runs on any accelerator. Kernels, adapters and benchmarks may be for CUDA."""
LITERALS = {
    OF_CUDA,
    "tests/harness/device/process_state.py",  # flags of PyTorch that any process has
    "tests/harness/device/environments.py",  # words by which kernels ask for CUDA
    "tests/harness/interpreter/ttir/ir/front.py",  # the target that Triton's front end is given
}
"""The modules that have the name of the type in a string."""


def names(source: str) -> Iterator[str]:
    """Yield each mention of ``torch.cuda`` in a module's code, and each string that is the name of such a device."""
    tree = ast.parse(source)
    documented = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda") | ast.Attribute(attr="is_cuda"):
                yield ast.unparse(node)
            case ast.Attribute(value=ast.Attribute(attr="version"), attr="hip" | "cuda"):
                yield ast.unparse(node)
            case ast.Import(names=imported):
                yield from (x.name for x in imported if f"{x.name}.".startswith("torch.cuda."))
            case ast.ImportFrom(module=str(module), names=imported):
                found = (f"{module}.{x.name}" for x in imported)
                yield from (x for x in found if f"{x}.".startswith("torch.cuda."))
            case ast.Constant(value=str(text)) if node not in documented:
                if text.partition(":")[0] == "cuda":
                    yield repr(text)


def modules() -> Iterator[Path]:
    """Yield the paths of all modules that run on any accelerator."""
    for place in WITHOUT:
        yield from [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))


def test_no_module_but_one_names_cuda() -> None:
    found = {str(path.relative_to(ROOT)): [*names(path.read_text())] for path in modules()}
    assert any("torch.cuda" in name for name in found.pop(OF_CUDA))
    literal = {
        path: [x for x in mentions if path not in LITERALS or x[0] != "'"] for path, mentions in found.items()
    }
    assert {path: mentions for path, mentions in literal.items() if mentions} == {}
    assert all(found[path] for path in LITERALS - {OF_CUDA})


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch.cuda.synchronize()", "torch.cuda"),
        ("with torch.cuda.stream(x): pass", "torch.cuda"),
        ("assert q.is_cuda", "q.is_cuda"),
        ("import torch.cuda", "torch.cuda"),
        ("from torch import cuda", "torch.cuda"),
        ("from torch.cuda import Stream", "torch.cuda.Stream"),
        ("if torch.version.hip: pass", "torch.version.hip"),
        ("if device == 'cuda': pass", "'cuda'"),
        ("torch.ones(1, device='cuda:0')", "'cuda:0'"),
    ],
)
def test_a_mention_is_seen(line: str, name: str) -> None:
    assert [*names(f"import torch\n\n{line}\n")] == [name]


def test_words_about_cuda_are_no_mention() -> None:
    assert [*names('"""cuda"""\nx = 1\n"""cuda: a note."""\nraise ValueError("CUDA error")\n')] == []
