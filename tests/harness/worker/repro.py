"""Write the stand-alone script of a failure, which needs torch and the kernel, but neither Hypothesis nor Flashproof.

The functions of the script are copies of those in ``scripted``.
"""

import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import torch

from kernels import registry
from kernels.contract import Capabilities
from kernels.contract.tuners import AT_WORK, CONFIG
from strategies.rotary import rotated
from tests.harness.accelerators import cuda, interface, lookup
from tests.harness.device import left_behind, memory, poison, process_state
from tests.harness.files import OWN_FOLDERS
from tests.harness.interpreter.installation import FORMATS, REPAIRED
from tests.harness.law import law_named
from tests.harness.run import Run
from tests.harness.trial import streams, ways
from tests.harness.trial.outputs import form_of, in_contract_form
from tests.harness.trial.ragged_form import apart
from tests.harness.verdict import INTERMITTENT, LEAK, LEAVES, STATE, Finding
from tests.harness.worker import scripted
from tests.harness.worker.source import WritingTrial

STANDARD = """\
import base64
import gc
import importlib
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any, NoReturn"""
FROM_FORMATS = re.compile(r"^from \S+\.formats import (\([^)]*\)|.*)\n", re.MULTILINE)
"""The import in the repaired interpreter of the module ``formats``, whose source stands before it in a script."""
GUARDED = "import faulthandler\nimport subprocess"
TORCH = "import torch\nfrom torch import Tensor"
INTERPRET = 'os.environ["TRITON_INTERPRET"] = "1"  # read when a Triton kernel is imported'
SIDE = """\
def {name}(
    q, k, v, dout, out, lse=None, dq=None, dk=None, dv=None, bias=None, dbias=None, sinks=None, dsinks=None
):
    return {expression}"""
OF_LSE = """\
for result in results:
    if "lse" in result:
        result["lse"] = in_contract_form(result["lse"], *{form!r})"""
"""What follows the calls of a kernel that returns lse in another form than that of the contract."""
LEFT = """\
left = left_behind(lambda storages: noted(storages, {call}), may_draw={may_draw})
print("a call leaves", "; ".join(left) or "nothing behind")
sys.exit(1 if any({what!r}.startswith(x) for x in left) else 0)"""
"""The end of the script of a call that leaves something behind."""
USUAL_STREAM = 'USUAL_STREAM = torch.accelerator.current_stream() if DEVICE != "cpu" else None'
FROM_OURS = re.compile(r"^from \S*tests\.harness\.\S+ import (?:\([^)]*\)|.*)\n", re.MULTILINE)
"""The imports in a module of modules whose sources stand before it in a script, or of what the script does not use."""
LEAKS = """\
left = growth(lambda: {call}, 4.0)
print(f"{{left / 2**20:.3g}} MiB stay behind each time")
sys.exit(1 if left else 0)"""
"""The end of the script of a leak, which has the functions of ``memory``."""


def script(run: Run, trial: WritingTrial, finding: Finding, title: str, seconds: float | None) -> str:
    """Return a program that makes the calls of a run's trial again and checks what was wrong.

    With ``seconds`` the program runs itself in another process, which is ended if it takes longer than that: the kernel
    may end its process.
    """
    # Trials that explain a failure share ``source``, and may have made further calls than this one.
    # Where each call is meant to be refused, only the one that was not is made.
    made = (
        slice(len(trial.calls))
        if not law_named(run.law).expects_refusal
        else slice(finding.call, finding.call + 1)
    )
    source = trial.source.only(made)
    device = torch.device(trial.device).type
    claims = trial.kernel.capabilities
    functions, ending = _ending(source.calls, run.law, finding, run.case.dtype, claims)
    for wrapper in (
        scripted.poisoned,
        scripted.in_sequences,
        scripted.last_program_first,
        scripted.elsewhere,
        scripted.attempted,
    ):
        if any(f"{wrapper.__name__}," in f"{function}, {arguments}" for function, arguments in source.calls):
            functions = [wrapper, *functions]
    if any("holding(" in arguments for _, arguments in source.calls):
        functions = [scripted.holding, *functions]
    if scripted.in_sequences in functions:
        functions = [apart, *functions]
    called = [scripted.finished, scripted.through_autograd, getattr(scripted, source.function), *functions]
    parts = [
        _heading(title, finding.claim),
        STANDARD,
        *([GUARDED, inspect.getsource(scripted.run_inside), "run_inside()"] if seconds else []),
        *(_interpret(run.spec, scripted.last_program_first in functions) if device == "cpu" else []),
        TORCH,
        _kernel(run.spec),
        *_configurations(trial),
        _assigned(
            DEVICE=device,
            LSE_LAYOUT=claims.lse_layout,
            MARGIN=scripted.MARGIN,
            FILLED_ELEMENTS=scripted.FILLED_ELEMENTS,
            REPEAT_SECONDS=scripted.REPEAT_SECONDS,
            watched=[],
        ),
        USUAL_STREAM,
        *([inspect.getsource(poison)] if scripted.poisoned in functions else []),
        *_modules(finding, functions),
        inspect.getsource(ways),
        *(inspect.getsource(x) for x in dict.fromkeys((scripted.numbers, scripted.window, *called))),
        "\n".join(source.tensors),
        "before = [x.clone() for x in watched]",
        *([f"faulthandler.dump_traceback_later({seconds}, exit=True)"] if seconds else []),
        *ending,
    ]
    return _spaced(parts)


def _spaced(parts: list[str]) -> str:
    """Return the text of the parts, with two blank lines before and after a function and one between other parts."""
    parts = [part.strip("\n") for part in parts]
    text = "\n\n".join(f"\n{part}\n" if part.startswith("def ") else part for part in parts)
    return re.sub(r"\n{4,}", "\n\n\n", text.strip("\n") + "\n")


def _heading(title: str, claim: str) -> str:
    told = indent(claim, "# ", lambda line: True)
    return f"# {title}\n#\n{told}\n#\n# Needs torch and the kernel. Exits 1 while the bug is there, 0 once it is gone."


def _assigned(**values: Any) -> str:
    return "\n".join(f"{name} = {value!r}" for name, value in values.items())


def _kernel(spec: str) -> str:
    """Return the lines that import the kernel."""
    root, module, attribute = _locate(spec)
    # A kernel may import modules of the current folder, and our kernels.contract to state its claims.
    folders = list(dict.fromkeys([root, *OWN_FOLDERS, str(Path.cwd())]))
    return f"sys.path[:0] = {folders!r}\nkernel = importlib.import_module({module!r}).{attribute}"


def _configurations(trial: WritingTrial) -> list[str]:
    """Return what has the tuners of the kernel take the configurations of the trial, but for those that are at work."""
    lines = [
        f"take_configuration({name.removesuffix(CONFIG)!r}, {taken[0]!r})"
        for name, taken in trial.launched.items()
        if taken[0] != AT_WORK
    ]
    parts = [inspect.getsource(x) for x in (scripted.parameters, scripted.take_configuration)]
    return [*parts, "\n".join(lines)] if lines else []


def _ending(
    calls: list[tuple[str, str]], law: str, f: Finding, dtype: str, claims: Capabilities
) -> tuple[list[Callable[..., Any]], list[str]]:
    """Return the functions that the end of the program needs, and its lines, which make the calls and check them."""
    unchanged = "must_be_unchanged(before)"
    if law_named(law).expects_refusal:
        refused = f"must_be_refused({', '.join(calls[0])})"
        return [scripted.must_be_refused, scripted.must_be_unchanged], [refused, unchanged]
    if f.kind == LEAK:
        return [], [LEAKS.format(call=f"{calls[0][0]}({calls[0][1]})")]
    if f.kind == STATE:
        function, arguments = calls[f.call]
        what, may_draw = f.claim.removeprefix(LEAVES), "dropout_p=" in arguments
        call = f"{function}, {arguments}"
        return [scripted.noted], [LEFT.format(call=call, may_draw=may_draw, what=what)]
    if f.kind == INTERMITTENT:
        return [scripted.repeat], _repeated(*calls[f.call], f)
    if "way" in law_named(law).draws.get("calls", ()) and f.kind == "contract" and not f.tensor:
        return [scripted.must_flow_back], [f"must_flow_back({', '.join(calls[f.call])})"]
    appends = "k_new=" in calls[f.call][1]
    if appends and f.kind == "contract" and not f.tensor:
        return [rotated, scripted.must_append], [f"must_append({', '.join(calls[f.call])})"]
    made = "\n".join(
        ["results = [", *(f"    {function}({arguments})," for function, arguments in calls), "]"]
    )
    if f.actual is None:
        fit = "for result in filter(None, results):\n    must_fit(result)"
        # Calls that append keys are meant to write to k and v, and between calls of a sequence the script does.
        if appends or any("holding(" in arguments for _, arguments in calls):
            return [scripted.must_fit], [made, fit]
        return [scripted.must_fit, scripted.must_be_unchanged], [made, fit, unchanged]
    name = f.expression or f.tensor
    sides = [SIDE.format(name="actual", expression=name)]
    expected = str(f.expected)
    if f.other is not None:
        sides.append(SIDE.format(name="expected", expression=f.other_expression or f.tensor))
        expected = f"expected(**results[{f.other}])"
    numbers = f"allowed={float(f.allowed or 0)}, largest={_largest(f, dtype)}"
    compared = f"compare({name!r}, {f.index}, actual(**results[{f.call}]), {expected}, {numbers})"
    functions: list[Callable[..., Any]] = [scripted.is_right, scripted.compare]
    form = form_of(claims)
    if form == form_of(Capabilities()):
        return functions, [made, *sides, compared]
    converted = OF_LSE.format(form=form)
    return [in_contract_form, *functions], [made, converted, *sides, compared]


def _repeated(function: str, arguments: str, f: Finding) -> list[str]:
    """Return the lines that repeat a call until what it returns is off by half of the error that was found.

    If there is time for all repeats, a failure that shows as often as this one did, or once in a thousand calls, is
    missed once in 10^8 runs.
    """
    name, (failed, made) = f.expression or f.tensor, f.rate
    times = math.ceil(20 * made / failed) if failed else 20_000
    error = abs(float(f.actual or 0) - float(f.expected or 0)) / 2
    least = error if math.isfinite(error) else 0.0
    call = f"lambda: actual(**{function}({arguments}))"
    return [SIDE.format(name="actual", expression=name), f"repeat({name!r}, {call}, {least}, {times})"]


def _largest(f: Finding, dtype: str) -> float:
    """Return the largest number that the wrong tensor can hold."""
    return math.inf if f.tensor == "lse" else torch.finfo(getattr(torch, dtype)).max


def _locate(spec: str) -> tuple[str, str, str]:
    """Return the folder, the module and the attribute from which the kernel of a SPEC is imported."""
    target, attribute = registry.locate(spec)
    if target.endswith(".py"):
        path = Path(target).resolve()
        return str(path.parent), path.stem, attribute
    found = importlib.util.find_spec(target)
    assert found is not None  # it has been imported to run the case
    assert found.origin is not None
    depth = target.count(".") + (Path(found.origin).name == "__init__.py")
    return str(Path(found.origin).resolve().parents[depth]), target, attribute


def _interpret(spec: str, is_repaired: bool) -> list[str]:
    """Return what a kernel needs on the CPU, which for a kernel that uses Triton includes the repaired interpreter.

    It is included at any rate if it ``is_repaired``.
    """
    if not (is_repaired or uses_triton(registry.module_of(spec))):
        return [INTERPRET]
    formats, repair = (inspect.getsource(importlib.import_module(name)) for name in (FORMATS, REPAIRED))
    told = "# What follows repairs Triton's interpreter, up to the call of repair."
    return [INTERPRET, f"{told}\n{formats}", FROM_FORMATS.sub("", repair), "repair()"]


def _modules(finding: Finding, functions: Sequence[Callable[..., Any]]) -> list[str]:
    """Return the sources of modules that a script's calls, or the judgement on them, need, without their imports."""
    found = [
        *([streams] if scripted.elsewhere in functions else []),
        *([memory] if finding.kind == LEAK else []),
        *([process_state, left_behind] if finding.kind == STATE else []),
    ]
    modules = [interface, cuda, lookup, *found] if found else []
    return [FROM_OURS.sub("", inspect.getsource(module)) for module in modules]


def _origins(value: Any) -> list[str]:
    """Return the modules that a value is from; a bound method, as ``apply`` of a class, is from its owner's as well."""
    if isinstance(value, ModuleType):
        return [value.__name__]
    found = (getattr(x, "__module__", None) for x in (value, getattr(value, "__self__", None)))
    return [name for name in found if isinstance(name, str)]


def uses_triton(module: ModuleType) -> bool:
    """Whether a module, or any module that it has names from, has names from Triton."""
    known, waiting = {module.__name__}, [module]
    while waiting:
        for name in {x for value in vars(waiting.pop()).values() for x in _origins(value)}:
            package = name.partition(".")[0]
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
