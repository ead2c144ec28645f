"""The stand-alone script of a failure: torch and the kernel, no Hypothesis, no Flashproof.

Its functions are those of ``tests.harness.scripted``, as their source is there.
"""

import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import torch

from kernels import registry
from tests.harness import poison, scripted
from tests.harness.home import OWN_FOLDERS
from tests.harness.interpreting import REPAIRED
from tests.harness.source import WritingTrial
from tests.harness.verdict import Finding

STANDARD = """\
import base64
import importlib
import math
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any, NoReturn"""
GUARDED = "import faulthandler\nimport subprocess"
TORCH = "import torch\nfrom torch import Tensor"
INTERPRET = 'os.environ["TRITON_INTERPRET"] = "1"  # read when a Triton kernel is imported'
SIDE = """\
def {name}(q, k, v, dout, out, lse=None, dq=None, dk=None, dv=None):
    return {expression}"""


def script(
    trial: WritingTrial, finding: Finding, *, guarded: bool, law: str, spec: str, title: str, seconds: float
) -> str:
    """The program that makes the trial's calls again and checks what was wrong.

    ``guarded`` is one that may end its process, as a crash does; ``seconds`` is how long one that hangs may run.
    """
    # A replay may have made further calls. In a rejection each call is meant to fail: only the one that didn't is made.
    made = slice(len(trial.calls)) if law != "rejection" else slice(finding.call, finding.call + 1)
    source = trial.source.only(made)
    ends_process = guarded or finding.ends_process
    device = torch.device(trial.device).type
    functions, ending = _ending(source.calls, law, finding, trial.case.dtype)
    if any(function == "poisoned" for function, _ in source.calls):
        functions = [scripted.poisoned, *functions]
    called = [scripted.finished, getattr(scripted, source.function), *functions]
    parts = [
        _heading(title, finding.claim),
        STANDARD,
        *([GUARDED, inspect.getsource(scripted.run_inside), "run_inside()"] if ends_process else []),
        *(_interpret(spec) if device == "cpu" else []),
        TORCH,
        _kernel(spec),
        _assigned(
            DEVICE=device, MARGIN=scripted.MARGIN, FILLED_ELEMENTS=scripted.FILLED_ELEMENTS, watched=[]
        ),
        *([inspect.getsource(poison)] if scripted.poisoned in functions else []),
        *(inspect.getsource(function) for function in (scripted.numbers, scripted.window, *called)),
        "\n".join(source.tensors),
        "before = [x.clone() for x in watched]",
        *([f"faulthandler.dump_traceback_later({seconds}, exit=True)"] if ends_process else []),
        *ending,
    ]
    return _spaced(parts)


def _spaced(parts: list[str]) -> str:
    """The parts with a blank line between them, and two beside a function."""
    parts = [part.strip("\n") for part in parts]
    text = "\n\n".join(f"\n{part}\n" if part.startswith("def ") else part for part in parts)
    return re.sub(r"\n{4,}", "\n\n\n", text.strip("\n") + "\n")


def _heading(title: str, claim: str) -> str:
    told = indent(claim, "# ", lambda line: True)
    return f"# {title}\n#\n{told}\n#\n# Needs torch and the kernel. Exits 1 while the bug is there, 0 once it is gone."


def _assigned(**values: Any) -> str:
    return "\n".join(f"{name} = {value!r}" for name, value in values.items())


def _kernel(spec: str) -> str:
    """The lines that import the kernel."""
    root, module, attribute = _locate(spec)
    # A kernel may import what lies in the current folder, and kernels.contract to state its claims.
    folders = list(dict.fromkeys([root, *OWN_FOLDERS, str(Path.cwd())]))
    return f"sys.path[:0] = {folders!r}\nkernel = importlib.import_module({module!r}).{attribute}"


def _ending(
    calls: list[tuple[str, str]], law: str, f: Finding, dtype: str
) -> tuple[list[Callable[..., Any]], list[str]]:
    """The end of the program, which makes the calls and checks what must hold of them, and the functions it takes."""
    unchanged = "must_be_unchanged(before)"
    if law == "rejection":
        refused = f"must_be_refused({', '.join(calls[0])})"
        return [scripted.must_be_refused, scripted.must_be_unchanged], [refused, unchanged]
    made = "\n".join(
        ["results = [", *(f"    {function}({arguments})," for function, arguments in calls), "]"]
    )
    if f.actual is None:
        fit = "for result in results:\n    must_fit(result)"
        return [scripted.must_fit, scripted.must_be_unchanged], [made, fit, unchanged]
    name = f.expression or f.tensor
    sides = [SIDE.format(name="actual", expression=name)]
    expected = str(f.expected)
    if f.other is not None:
        sides.append(SIDE.format(name="expected", expression=f.other_expression or f.tensor))
        expected = f"expected(**results[{f.other}])"
    numbers = f"allowed={float(f.allowed or 0)}, largest={_largest(f, dtype)}"
    compared = f"compare({name!r}, {f.index}, actual(**results[{f.call}]), {expected}, {numbers})"
    return [scripted.is_right, scripted.compare], [made, *sides, compared]


def _largest(f: Finding, dtype: str) -> float:
    """The largest number that a tensor can hold."""
    return math.inf if f.tensor == "lse" else torch.finfo(getattr(torch, dtype)).max


def _locate(spec: str) -> tuple[str, str, str]:
    """The folder, module and attribute from which a SPEC's kernel is imported."""
    target, _, attribute = registry.REGISTERED.get(spec, spec).rpartition(":")
    if target.endswith(".py"):
        path = Path(target).resolve()
        return str(path.parent), path.stem, attribute
    found = importlib.util.find_spec(target)
    assert found is not None  # it has been imported to run the case
    assert found.origin is not None
    depth = target.count(".") + (Path(found.origin).name == "__init__.py")
    return str(Path(found.origin).resolve().parents[depth]), target, attribute


def _interpret(spec: str) -> list[str]:
    """What a kernel needs on the CPU; of Triton, if it is of Triton, a repaired interpreter as well."""
    if not uses_triton(registry.module_of(spec)):
        return [INTERPRET]
    repair = inspect.getsource(importlib.import_module(REPAIRED))
    told = "# What follows repairs Triton's interpreter, up to the call of repair."
    return [INTERPRET, f"{told}\n{repair}", "repair()"]


def uses_triton(module: ModuleType) -> bool:
    """Whether a module, or any that it has names from, has functions of Triton."""
    known, waiting = {module.__name__}, [module]
    while waiting:
        for value in vars(waiting.pop()).values():
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            package = str(name).partition(".")[0]
            if package == "triton":
                return True
            if (
                name in known
                or name not in sys.modules
                or package in (*sys.stdlib_module_names, "torch", "numpy")
            ):
                continue
            known.add(name)
            waiting.append(sys.modules[name])
    return False
