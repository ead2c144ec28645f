"""Which mutants of Triton kernels mean the same as the original: those that compile to the same Triton IR.

While a kernel runs a few cases, ``recorded_launches`` notes what is launched with arguments of which types.
``judge`` then compiles the originals and each mutant for these, in a process where Triton is not interpreted,
as far as Triton's own IR after its first optimizations. That needs no GPU, and takes some 40 ms a launch.

Only jitted functions are compared. A mutant that is equivalent when compiled may still differ when interpreted, if it
changes a branch for the interpreter alone.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, KernelParam, mangle_type

from kernels.mutants.mutant import load_module
from tests.harness.running.child import Child, ChildDied
from tests.harness.worker.main import Worker, serve

SECONDS = 60
"""Seconds that one mutant may take to compile before its process is ended."""


@dataclass(frozen=True)
class RecordedLaunch:
    """A jitted function, by name, and what it is compiled for.

    ``signature`` has the type of each argument as Triton writes it ("*fp16", "i32", "constexpr"), ``constants``
    the values of those that are constants.
    """

    function: str
    signature: dict[str, str]
    constants: dict[str, Any]


@dataclass(frozen=True)
class Judgement:
    """Whether a mutant means the same as the original.

    ``verdict`` is "different"; "equivalent", if the IR is the same on every launch; or "invalid", if the mutant
    compiles for no launch that it changes and the original compiles for: it crashes the compiler or is refused.
    ``detail`` has the last line of the error, or says that no launch uses what was edited.
    """

    verdict: str
    detail: str = ""


@contextmanager
def recorded_launches() -> Iterator[list[RecordedLaunch]]:
    """Yield a list that collects each distinct launch made within the context, interpreted or not."""
    launches: list[RecordedLaunch] = []

    def recording(run: Any) -> Any:
        def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
            launch = _launch(self.fn, args, kwargs)
            if launch not in launches:
                launches.append(launch)
            return run(self, *args, **kwargs)

        return recorded

    with (
        patch.object(InterpretedFunction, "run", recording(InterpretedFunction.run)),
        patch.object(JITFunction, "run", recording(JITFunction.run)),
    ):
        yield launches


def judge(
    entry: str, mutants: Sequence[Mapping[str, str]], launches: Sequence[RecordedLaunch]
) -> list[Judgement]:
    """Judge mutants, each given as the new texts of modules that ``entry`` imports, as ``load_module`` takes them.

    If an original cannot be compiled, a mutant that may change it counts as different. Raises HarnessError if the
    original module cannot be imported, and RuntimeError if nothing can be compiled.
    """
    child, judged = Child("none", worker="tests.mutation.equivalence"), list[Judgement]()
    originals = {"do": "originals", "entry": entry, "launches": [asdict(launch) for launch in launches]}
    try:
        for mutant in mutants:
            if child.process is None:  # at first, and after a mutant that ended it
                answer = child.ask(originals)
                if not answer["compiled"]:
                    raise RuntimeError(
                        f"{entry}: no launch compiles: {(*answer['errors'], 'none recorded')[0]}"
                    )
            try:
                request = {"do": "judge", "entry": entry, "mutant": dict(mutant)}
                answer = child.ask(request, SECONDS, again=False)
                judged.append(Judgement(**answer))
            except ChildDied as death:
                judged.append(Judgement("invalid", str(death)))
    finally:
        child.close()
    return judged


def ttir(function: JITFunction, launch: RecordedLaunch) -> str:
    """Return Triton's IR of a function, without locations. Raises Triton's error if it doesn't compile."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    # This option is given only because Triton 3.9 warns of its default; this IR doesn't depend on it.
    options = backend.parse_options({"enable_fp_fusion": False})
    constants = {name: _decoded(value) for name, value in launch.constants.items()}
    source = ASTSource(function, launch.signature, constants)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, module_map = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, codegen, module_map, context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    return stages["ttir"](module, {"target": target, **options.__dict__}).str_nodebug()


_DTYPE = "triton.language.dtype:"


def _launch(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RecordedLaunch:
    parameters = inspect.signature(function).parameters
    bound = inspect.signature(function).bind(*args, **{k: v for k, v in kwargs.items() if k in parameters})
    bound.apply_defaults()
    signature, constants = {}, {}
    for i, (name, value) in enumerate(bound.arguments.items()):
        parameter = KernelParam(i, parameters[name], False, False)
        # None is a constant as well, unless an annotation says otherwise.
        kind = "constexpr" if parameter.is_constexpr else parameter.annotation_type or mangle_type(value)
        # Tuples are not supported: Triton knows no type "unknown", so the launch will not compile.
        signature[name] = kind if isinstance(kind, str) else "unknown"
        if kind == "constexpr":
            constants[name] = _encoded(value)
    return RecordedLaunch(function.__name__, signature, constants)


def _encoded(value: Any) -> Any:
    """Return a form of a constant that survives JSON."""
    value = value.value if isinstance(value, tl.constexpr) else value
    if isinstance(value, tl.dtype):
        return _DTYPE + value.name
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _decoded(value: Any) -> Any:
    return tl.dtype(value.removeprefix(_DTYPE)) if isinstance(value, str) and _DTYPE in value else value


# Everything below runs in the process that compiles.


@dataclass(frozen=True)
class _Original:
    """A launch of the original: Triton's hash of the function and all that it calls, and its IR or an error.

    ``key`` is None if there is no such function, ``ir`` if it doesn't compile.
    """

    launch: RecordedLaunch
    key: str | None = None
    ir: str | None = None
    error: str = ""


class Compiler(Worker):
    """Answers the requests of ``judge``."""

    def do_originals(self, request: dict[str, Any]) -> dict[str, Any]:
        """Compile the launches of the original, and return whether any compiles, and the errors of the others."""
        module = load_module(request["entry"], {})
        originals = [_original(module, RecordedLaunch(**record)) for record in request["launches"]]
        # Launches with the most code come first, because they show the most edits.
        self.originals = sorted(originals, key=lambda original: len(original.ir or ""), reverse=True)
        errors = [original.error for original in originals if original.error]
        return {"compiled": len(errors) < len(originals), "errors": errors}

    def do_judge(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the judgement on one mutant."""
        return asdict(_judge(request["entry"], request["mutant"], self.originals))


def _original(module: ModuleType, launch: RecordedLaunch) -> _Original:
    function = _find(module, launch.function)
    if function is None:
        return _Original(launch, error=f"no function {launch.function!r} is found")
    try:
        return _Original(launch, _key(function), ttir(function, launch))
    except Exception as error:
        return _Original(launch, _key(function), error=_last_line(error))


def _judge(entry: str, mutant: Mapping[str, str], originals: Sequence[_Original]) -> Judgement:
    try:
        module = load_module(entry, mutant)
    except Exception as error:
        return Judgement("invalid", _last_line(error))
    refusal, touched = "", False
    for original in originals:
        function = _find(module, original.launch.function)
        if function is None:
            return Judgement("different", f"no function {original.launch.function!r} is found")
        if original.key is not None and original.key == _key(function):
            continue
        touched = True
        if original.ir is None:
            return Judgement("different", f"the original does not compile: {original.error}")
        try:
            same = _same(original.ir, ttir(function, original.launch))
        except Exception as error:
            refusal = refusal or _last_line(error)
            continue
        if not same:
            return Judgement("different")
    if refusal:
        return Judgement("invalid", refusal)
    return Judgement("equivalent", "" if touched else "nothing that is launched uses it")


def _key(function: JITFunction) -> str | None:
    try:
        return function.cache_key
    except Exception:  # of a mutant that doesn't compile
        return None


def _find(module: ModuleType, name: str) -> JITFunction | None:
    """Return the jitted function ``name`` of the module, or of a module whose functions it uses."""
    spaces, seen = [vars(module)], {id(vars(module))}
    for space in spaces:
        for value in list(space.values()):
            while not isinstance(value, JITFunction) and isinstance(value, triton.runtime.KernelInterface):
                value = value.fn  # autotuned
            if isinstance(value, JITFunction) and value.__name__ == name:
                return value
            further = vars(value) if isinstance(value, ModuleType) else getattr(value, "__globals__", None)
            if isinstance(further, dict) and id(further) not in seen:
                seen.add(id(further))
                if any(imported is triton or imported is tl for imported in further.values()):
                    spaces.append(further)
    return None


_HINT = re.compile(r"tt\.(?:contiguity|divisibility|constancy) = dense<[^>]*> : [a-z]+<[^>]*>")


def _same(original: str, mutant: str) -> bool:
    """Whether two IRs are the same, apart from hints that the mutant lacks: promises that only speed code up."""
    if original == mutant:
        return True
    lines = list(zip(original.splitlines(), mutant.splitlines(), strict=False))
    return original.count("\n") == mutant.count("\n") and all(
        _without_hints(a) == _without_hints(b) and set(_HINT.findall(b)) <= set(_HINT.findall(a))
        for a, b in lines
    )


def _without_hints(line: str) -> str:
    return re.sub(r" ?\{[, ]*\}", "", _HINT.sub("", line))


def _last_line(error: BaseException) -> str:
    # The cause of an error in a function that a kernel calls comes without the caller's source around it.
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


if __name__ == "__main__":
    serve(Compiler("none"))
