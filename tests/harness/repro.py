"""The stand-alone script of a failure: torch and the kernel, no Hypothesis, no Flashproof."""

import base64
import importlib.util
import inspect
import math
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels import registry
from tests.harness import poison
from tests.harness.home import OWN_FOLDERS
from tests.harness.interpreting import REPAIRED
from tests.harness.poison import PoisonedAllocations
from tests.harness.trial import Problem, Trial
from tests.harness.verdict import Finding

LITERAL_ELEMENTS = 64
"""Tensors up to this size are written as numbers; larger ones by the few that are not 0, else as compressed bytes."""

MARGIN = 4096
"""Elements of poison behind each tensor: reading them is part of some bugs."""

FILLED_ELEMENTS = 2**26
"""Storages above this (huge strides) are not filled with poison."""

PROGRAM = '''\
# {title}
#
{claim}
#
# Needs torch and the kernel. Exits 1 while the bug is there, 0 once it is gone.
import base64
import importlib
import math
import os
import sys
import zlib
from math import inf, nan
{guard}{interpret}
import torch

sys.path[:0] = {folders!r}
kernel = importlib.import_module({module!r}).{attribute}
forward = getattr(kernel, "forward", kernel)
DEVICE = {device!r}
watched = []  # the inputs and what lies around them


def numbers(dtype, count, data):
    if isinstance(data, list):
        return torch.tensor(data, dtype=dtype)
    if isinstance(data, dict):  # by place, what is not 0
        places, values = torch.tensor(list(data), dtype=torch.long), torch.tensor(list(data.values()), dtype=dtype)
        return torch.zeros(count, dtype=dtype).index_put((places,), values)
    return torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(data))), dtype=dtype)


def window(dtype, shape, stride, offset, data, around=nan):
    """A tensor with these strides at an offset into a larger storage."""
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride) if n)
    storage = torch.empty(offset + span + {margin}, dtype=dtype, device=DEVICE)
    small = storage.numel() <= {filled}
    if small and dtype.is_floating_point:
        storage.fill_(around)
    once = [1 if s == 0 and n else n for n, s in zip(shape, stride)]
    entries = storage.as_strided(once, stride, offset)
    entries.copy_(numbers(dtype, entries.numel(), data).reshape(once))
    watched.append(storage if small else entries)
    return storage.as_strided(shape, stride, offset)


def call(q, k, v, dout, gradients, **options):
{call}
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    return {{name: x.detach() for name, x in results.items() if x is not None}}


{poisoned}{tensors}
before = [x.clone() for x in watched]
{time_limit}{check}'''

BY_AUTOGRAD = """\
    if gradients:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    returned = forward(q, k, v, **options)
    out, lse = returned if isinstance(returned, tuple) else (returned, None)
    results = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    if gradients and out.requires_grad:
        grads = torch.autograd.grad(out, (q, k, v), dout, materialize_grads=True)
        results |= zip(("dq", "dk", "dv"), grads)"""

BY_KERNEL = """\
    out, lse = forward(q, k, v, **options)
    results = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}
    if gradients:
        results |= zip(("dq", "dk", "dv"), kernel.backward(dout, q, k, v, out, lse, **options))"""

GUARD = """
import faulthandler
import subprocess

if "--inside" not in sys.argv:  # what ends the process must be another one's end
    sys.exit(1 if subprocess.run([sys.executable, __file__, "--inside"]).returncode else 0)
faulthandler.enable()
"""

TIME_LIMIT = """
faulthandler.dump_traceback_later({seconds}, exit=True)
"""

INTERPRET = """
os.environ["TRITON_INTERPRET"] = "1"  # read when a Triton kernel is imported
"""

REPAIR = """
# What follows repairs Triton's interpreter, up to the call of repair.
{source}

repair()
"""

POISONED = '''\
{source}

def poisoned(value, *args, fenced=False, **options):
    """A call that finds ``value`` in the memory it allocates; fenced, all memory ends where no one may read."""
    if fenced:
        args = [behind_fence(x) for x in args]
        options = {{name: behind_fence(x) if torch.is_tensor(x) else x for name, x in options.items()}}
    with PoisonedAllocations(value, fenced=fenced) as allocations:
        results = call(*args, **options)
    if allocations.broken_guards():
        sys.exit("something was written outside of what was allocated")
    return results


'''

CALLS = """\
results = [
{calls}
]
"""

COMPARE = """

def actual(q, k, v, dout, out, lse=None, dq=None, dk=None, dv=None):
    return {actual}


def expected(q, k, v, dout, out, lse=None, dq=None, dk=None, dv=None):
    return {expected}


index = {index}
a = float(actual(**results[{call}])[index])
e = {value}
allowed = {allowed}
print(f"{actual}{{list(index)}}: actual {{a!r}}, expected {{e!r}}, allowed error {{allowed!r}}")
sys.exit(0 if {right} else 1)
"""

CONTRACT = """
for q, k, result in ((result["q"], result["k"], result) for result in results):
    shapes = {"out": q.shape, "lse": q.shape[:3], "dq": q.shape, "dk": k.shape, "dv": k.shape}
    for name in shapes.keys() & result.keys():
        x, dtype = result[name], torch.float32 if name == "lse" else q.dtype
        if (x.shape, x.dtype, x.device) != (shapes[name], dtype, q.device):
            print(f"{name} is {tuple(x.shape)}, {x.dtype}, {x.device}")
            sys.exit(f"expected {tuple(shapes[name])}, {dtype}, {q.device}")
"""

REFUSE = """
try:
    {call}
except Exception as error:
    print(f"refused: {{type(error).__name__}}: {{error}}")
else:
    sys.exit("accepted, but should be refused")
"""

UNCHANGED = """
if not all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(watched, before)):
    sys.exit("an input, or what lies around it, was written to")
print("right")
"""


@dataclass
class Source:
    """Python text that makes the same calls again: each distinct tensor once, an expression for each call."""

    names: dict[tuple[Any, ...], str] = field(default_factory=dict)
    tensors: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def add(
        self,
        problem: Problem,
        launch: Mapping[str, Any],
        memory: PoisonedAllocations | None,
        *,
        gradients: bool,
    ) -> None:
        """Write a call down as it is now; the kernel may change what it is given."""
        poison = memory.value if memory else None
        arguments = [self._tensor(role, getattr(problem, role), poison) for role in ("q", "k", "v", "dout")]
        options = {"gradients": gradients, **problem.options, **launch}
        if memory and memory.fenced:
            options["fenced"] = True
        arguments += [f"{name}={_literal(value)}" for name, value in options.items()]
        function = "call(" if poison is None else f"poisoned({poison}, "
        self.calls.append(f"{function}{', '.join(arguments)})")

    def only(self, number: int) -> "Source":
        """One of the calls, and the tensors it takes."""
        call = self.calls[number]
        taken = [line for line in self.tensors if f"{line.partition(' ')[0]}," in call]
        return Source(tensors=taken, calls=[call])

    def _tensor(self, role: str, x: Tensor, poison: float | None) -> str:
        key = (role, x.data_ptr(), tuple(x.shape), x.stride(), str(poison))
        if key not in self.names:
            self.names[key] = f"{role}{sum(known[0] == role for known in self.names)}"
            self.tensors.append(f"{self.names[key]} = {_window(x, poison)}")
        return self.names[key]


@dataclass
class Recorder(Trial):
    """A trial that also writes its calls down as source; the memory of each, where a law or ``with_memory`` asks."""

    with_memory: bool = False
    source: Source = field(default_factory=Source)

    def record(self, problem: Problem, memory: PoisonedAllocations | None = None, *, backward: bool) -> int:
        """Write a call down before it is made."""
        if memory is None and self.with_memory:
            memory = PoisonedAllocations(self.fill)
        gradients = backward and self.kernel.capabilities.backward
        self.source.add(problem, self.launch, memory, gradients=gradients)
        return super().record(problem, memory, backward=backward)


def script(
    trial: Recorder, finding: Finding, *, guarded: bool, law: str, spec: str, title: str, seconds: float
) -> str:
    """The program that makes the trial's calls again and checks what was wrong.

    ``guarded`` is one that may end its process, as a crash does; ``seconds`` is how long one that hangs may run.
    """
    source = trial.source
    if law == "rejection":  # each of its calls is meant to fail: only the one that didn't is made
        source = source.only(finding.call)
    ends_process = guarded or finding.ends_process
    root, module, attribute = _locate(spec)
    device = torch.device(trial.device).type
    is_poisoned = any(call.startswith("poisoned") for call in source.calls)
    return PROGRAM.format(
        title=title,
        claim=indent(finding.claim, "# ", lambda line: True),
        guard=GUARD if ends_process else "",
        interpret=_interpret(spec) if device == "cpu" else "",
        # A kernel may import what lies in the current folder, and kernels.contract to state its claims.
        folders=list(dict.fromkeys([root, *OWN_FOLDERS, str(Path.cwd())])),
        module=module,
        attribute=attribute,
        device=device,
        margin=MARGIN,
        filled=FILLED_ELEMENTS,
        call=BY_AUTOGRAD if trial.kernel.backward is None else BY_KERNEL,
        poisoned=POISONED.format(source=inspect.getsource(poison)) if is_poisoned else "",
        tensors="\n".join(source.tensors),
        time_limit=TIME_LIMIT.format(seconds=seconds) if ends_process else "",
        check=_check(source.calls, law, finding, trial.case.dtype),
    )


def _check(calls: list[str], law: str, f: Finding, dtype: str) -> str:
    """The end of the program: the calls, and what must hold of them."""
    if law == "rejection":
        return REFUSE.format(call=calls[0]) + UNCHANGED
    made = CALLS.format(calls="\n".join(f"    {call}," for call in calls))
    if f.actual is None:
        return made + CONTRACT + UNCHANGED
    value = f.expected if f.other is None else f"float(expected(**results[{f.other}])[index])"
    return made + COMPARE.format(
        actual=f.expression or f.tensor,
        expected=f.other_expression or f.tensor,
        index=f.index,
        call=f.call,
        value=value,
        allowed=f.allowed,
        right=_right(f, dtype),
    )


def _right(f: Finding, dtype: str) -> str:
    """The condition under which ``a``, of which ``e`` is expected, is right."""
    if f.expected == "nan" and f.other is None:
        return "not math.isfinite(a)"
    largest = math.inf if f.tensor == "lse" else torch.finfo(getattr(torch, dtype)).max
    if abs(float(f.expected or 0)) + float(f.allowed or 0) >= largest:
        # Either may have been rounded to infinity.
        clipped = [f"max(-{largest}, min({largest}, {x}))" for x in "ae"]
        return f"a == e or (not math.isnan(a) and abs({clipped[0]} - {clipped[1]}) <= allowed)"
    return "a == e or abs(a - e) <= allowed"


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


def _interpret(spec: str) -> str:
    """The lines that a kernel needs on the CPU; of Triton, if it is of Triton, a repaired interpreter as well."""
    if not uses_triton(registry.module_of(spec)):
        return INTERPRET
    return INTERPRET + REPAIR.format(source=inspect.getsource(importlib.import_module(REPAIRED)))


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


def _literal(option: Any) -> str:
    """An option of a call as source; lengths of sequences and masks of keys are small tensors."""
    if not isinstance(option, Tensor):
        return repr(option)
    return f"torch.tensor({option.tolist()}, dtype={option.dtype}, device=DEVICE)"


def _window(x: Tensor, poison: float | None) -> str:
    """The expression that builds a tensor with its strides and the poison around it."""
    sizes = [1 if step == 0 and size else size for size, step in zip(x.shape, x.stride(), strict=True)]
    flat = x.detach().as_strided(sizes, x.stride()).cpu().contiguous().flatten()
    places = ((flat != 0) | flat.signbit()).nonzero().flatten()
    if flat.numel() <= LITERAL_ELEMENTS:
        data = repr(flat.tolist())
    elif len(places) <= LITERAL_ELEMENTS:
        data = repr(dict(zip(places.tolist(), flat[places].tolist(), strict=True)))
    else:
        data = repr(base64.b64encode(zlib.compress(flat.view(torch.uint8).numpy().tobytes())).decode())
    around = "" if poison is None or math.isnan(poison) else f", around={poison}"
    place = f"{tuple(x.shape)}, {tuple(x.stride())}, {x.storage_offset()}"
    return f"window({x.dtype}, {place}, {data}{around})"
