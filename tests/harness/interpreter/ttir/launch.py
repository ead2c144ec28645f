"""Launching Triton kernels without a GPU: by code that was made of their IR, else in Triton's interpreter.

``install`` has ``triton.jit`` make functions of this kind from then on.

All programs of a launch run at once, line by line, so that a program loads what any of them has stored in an earlier
line. Where several store to one place, they do so by their numbers, of which x counts slowest and z fastest, as
Triton's interpreter goes through a grid: what the last one stores stays. A sum to which several add by a load and a
store loses all parts but one, as on a GPU it may.

Another order can be asked for (``repaired.programs``), of which a GPU promises none: one program after the other by
their numbers ("forward"), or from the last one ("backward"). Kernels whose programs may wait for each other in a
``while`` loop always run forward, since backward a program would wait for ever for the one before it, although on a GPU
both run at once.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITCallable, JITFunction, TensorWrapper
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.harness.interpreter.accesses import Touched
from tests.harness.interpreter.repaired import programs
from tests.harness.interpreter.ttir import store
from tests.harness.interpreter.ttir.calls.atomics import Waiting, finish
from tests.harness.interpreter.ttir.calls.memory import Outside, memory_at
from tests.harness.interpreter.ttir.calls.nearest import told
from tests.harness.interpreter.ttir.calls.numbers import Array
from tests.harness.interpreter.ttir.ir.front import Arguments, arguments_of, ir_of, parsed_once
from tests.harness.interpreter.ttir.ir.parse import Unsupported, parse
from tests.harness.interpreter.ttir.store import Compiled
from tests.harness.interpreter.ttir.writing.translate import translate

MOST_ELEMENTS = 2**18
"""So many programs run at once that their largest tensors together have about so many elements."""

MOST_TOLD = 1000
"""So many accesses outside of tensors are remembered for who asks for them."""

_state = SimpleNamespace(interprets=False, kernels=0, has_executed=False, unwritten={})
_fallbacks: dict[str, str] = {}
_outside: list[Touched] = []


def has_kernels() -> bool:
    """Whether this process has a kernel that may be run here."""
    return bool(_state.kernels)


def fallbacks() -> dict[str, str]:
    """Return why kernels were left to Triton's interpreter in this process, by their names."""
    return dict(_fallbacks)


def accesses_outside() -> list[Touched]:
    """Return the accesses outside of tensors since the last call of this function: see ``nearest.told``."""
    found = _outside.copy()
    _outside.clear()
    return found


def has_executed_all() -> bool:
    """Whether kernels have run here in this process, and none of them had to be interpreted."""
    return _state.has_executed and not _fallbacks and not _state.interprets


@contextmanager
def interpreted() -> Iterator[None]:
    """Launch kernels in Triton's interpreter."""
    before, _state.interprets = _state.interprets, True
    try:
        yield
    finally:
        _state.interprets = before


@contextmanager
def telling_unwritten(unwritten: Mapping[int, int]) -> Iterator[None]:
    """Tell loads of certain bits from storages, which are given by their addresses: nobody has written there."""
    before, _state.unwritten = _state.unwritten, unwritten
    try:
        yield
    finally:
        _state.unwritten = before


class ExecutedFunction(JITFunction[Any]):
    """A kernel, or a function that kernels call, of which a launch runs all programs at once on the CPU."""

    def __init__(self, fn: Any, **options: Any) -> None:
        super().__init__(fn, **options)
        self.options = options
        self.codes: dict[Any, Compiled | None] = {}
        self.refusals: dict[Any, str] = {}
        self.path = fn.__code__.co_filename
        _state.kernels += 1

    @property
    def interpreted(self) -> Any:
        """Return the same function for Triton's interpreter."""
        return interpreted_twin(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function from a kernel that is interpreted."""
        return self.interpreted(*args, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Launch the kernel; a warm-up does nothing."""
        if warmup:
            return
        if _state.interprets:
            self.interpreted.run(*args, grid=grid, warmup=False, **kwargs)
            return
        values = self.values(args, kwargs)
        arguments = arguments_of(self, values)
        compiled = self.compiled(arguments)
        if compiled is None:
            with self.refused(_key(arguments)):
                self.interpreted.run(*args, grid=grid, warmup=False, **kwargs)
            return
        for hook in self.pre_run_hooks:
            hook(*args, **kwargs)
        sizes = grid(values) if callable(grid) else grid
        try:
            execute(compiled, arguments, (*sizes, 1, 1)[:3])
        except (AssertionError, MemoryError) as e:  # the kernel's own, of its assertions and of the machine
            raise InterpreterError(repr(e)) from e
        except Exception as e:  # nothing else in a kernel makes the code raise: it is the code that is wrong
            self.leave(f"Flashproof's code for it raised {_in_a_line(e)}")
            self.codes[_key(arguments)] = None
            self.interpreted.run(*args, grid=grid, warmup=False, **kwargs)

    @contextmanager
    def refused(self, key: Any) -> Iterator[None]:
        """Raise what the compiler has raised for such arguments, if the interpreter can't run the kernel either."""
        try:
            yield
        except Exception as e:
            if key not in self.refusals:
                raise
            _fallbacks.pop(self.fn.__name__, None)
            raise CompilationError(None, None, self.refusals[key]) from e

    def values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by name, those that have a default included. Raises TypeError as a call does."""
        if len(args) == len(self.arg_names):
            return dict(zip(self.arg_names, args, strict=True))
        given = {name: x for name, x in kwargs.items() if name in self.signature.parameters}
        bound = self.signature.bind(*args, **given)
        bound.apply_defaults()
        return dict(bound.arguments)

    def compiled(self, arguments: Arguments) -> Compiled | None:
        """Return the code for arguments of these kinds; None if the kernel has to be interpreted."""
        key = _key(arguments)
        if key not in self.codes:
            self.codes[key] = self.compile(arguments)
        return self.codes[key]

    def compile(self, arguments: Arguments) -> Compiled | None:
        """Return the code from disk, or make it; None, with a line that says why, if there can be none."""
        name = self.fn.__name__
        try:
            debug = bool(self.debug or knobs.runtime.debug)
            key = store.key_of(self.cache_key, debug, *_told(arguments))
            if found := store.find(name, key, self.path):
                return found
            text = ir_of(self, arguments, debug=debug)
        except CompileTimeAssertionFailure:
            raise
        except Exception as e:
            if isinstance(e, CompilationError):
                self.refusals[_key(arguments)] = str(e)
            # Kernels that are written for the interpreter alone may be none for Triton's compiler.
            self.leave(f"Triton's compiler raised {_in_a_line(e)}")
            return None
        try:
            return store.keep(name, key, translate(parse(text), self.path), self.path)
        except Unsupported as e:
            self.leave(f"it has {e}")
        except Exception as e:
            self.leave(f"Flashproof can't read its IR and raised {_in_a_line(e)}")
        return None

    def leave(self, reason: str) -> None:
        """Leave the kernel to the interpreter; a line says why, once for each kernel."""
        name = self.fn.__name__
        if name not in _fallbacks:
            _fallbacks[name] = reason
            print(f"Triton's interpreter runs {name}, slowly, because {reason}", file=sys.stderr)


def _key(arguments: Arguments) -> Any:
    """Return what the code depends on as the key of a dictionary."""
    try:
        hash(arguments.key)
    except TypeError:  # of a constant that can't be a key
        return repr(arguments.key)
    return arguments.key


def _in_a_line(error: Exception) -> str:
    """Return the type of an exception and the last line of its message, which in Triton's compiler is what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _told(arguments: Arguments) -> tuple[Any, ...]:
    """Return what tells arguments apart in every process: functions by what they do."""
    return tuple(
        getattr(x, "cache_key", x)
        if not isinstance(x, tuple)
        else tuple(getattr(y, "cache_key", y) for y in x)
        for x in arguments.key
    )


_twins: dict[Any, Any] = {}


def interpreted_twin(function: JITFunction[Any]) -> Any:
    """Return a function for Triton's interpreter."""
    twin = _twins.get(function.fn)
    if twin is None:
        options = getattr(function, "options", {})
        twin = _twins[function.fn] = _InterpretedFunction(function.fn, **options)
    twin.pre_run_hooks = function.pre_run_hooks
    return twin


_InterpretedFunction = interpreter.InterpretedFunction


def execute(compiled: Compiled, arguments: Arguments, grid: tuple[int, ...]) -> None:
    """Run all programs of a launch, as many at once as memory is fast for."""
    outside: list[Outside] = []
    waiting: Waiting = []
    called: list[Any] = []
    tensors: list[tuple[str, Tensor]] = []
    for number, (name, value) in enumerate(_leaves(arguments)):
        element = compiled.pointers.get(number)
        if element is None:
            called.append(np.float32(value) if isinstance(value, float) else value)
            continue
        tensor = value.base if isinstance(value, TensorWrapper) else value
        tensors.append((name, tensor))
        storage = tensor.untyped_storage()
        called += memory_at(name, storage.data_ptr(), storage.nbytes(), tensor.data_ptr(), element, outside)
        if _state.unwritten:
            called[-2].unwritten = _state.unwritten.get(storage.data_ptr())
    count = grid[0] * grid[1] * grid[2]
    numbers, at_once = order_of(compiled, count)
    # PyTorch converts numbers below. What watches its operators, as poisoned memory does, is about those of launchers.
    with np.errstate(all="ignore"), torch._C._DisableTorchDispatch():
        for first in range(0, count, at_once):
            compiled.function(numbers[first : first + at_once], grid, waiting, *called)
        if waiting:
            finish(waiting, backward=bool(numbers[0] > numbers[-1]))
    _state.has_executed = True
    if outside:
        _outside.extend(told(outside, tensors, compiled.places)[: MOST_TOLD - len(_outside)])


def order_of(compiled: Compiled, count: int) -> tuple[Array, int]:
    """Return the numbers of the programs of a launch in the order in which they run, and how many run at once."""
    numbers = np.arange(count)
    if compiled.one_by_one:
        return numbers, 1
    programs.most = max(programs.most, count)
    if programs.order:
        return numbers[::-1] if programs.order == "backward" else numbers, 1
    return numbers, max(1, MOST_ELEMENTS // compiled.largest)


def _leaves(arguments: Arguments) -> Iterator[tuple[str, Any]]:
    """Yield what a kernel's IR has as parameters, with the names of the user's: several for a tensor descriptor."""
    for name, value in zip(arguments.names, arguments.given, strict=True):
        if not isinstance(value, TensorDescriptor):
            yield name, value
            continue
        sizes = (*value.shape, *value.strides)
        flags = [value.padding == "nan"]
        if hasattr(value, "round_f32_to_tf32"):  # from Triton 3.7
            flags.append(value.round_f32_to_tf32)
        for part in (value.base, *sizes, *flags, *sizes):
            yield name, part


@contextmanager
def _methods_of_tensors() -> Iterator[None]:
    """While a kernel is interpreted, let functions that are methods of tensors get the tensor first."""
    found = {name: x for name, x in vars(tl.tensor).items() if isinstance(x, JITFunction)}
    for name, function in found.items():
        setattr(tl.tensor, name, lambda self, *args, _f=function, **kwargs: _f(self, *args, **kwargs))
    try:
        yield
    finally:
        for name, function in found.items():
            setattr(tl.tensor, name, function)


def _take_over() -> None:
    """Replace functions of Triton's own that are for its interpreter, if it was imported for that before."""
    modules = [x for name, x in sys.modules.items() if name.partition(".")[0] == "triton"]
    taken: dict[Any, ExecutedFunction] = {}  # several modules may have the same function
    for module in modules:
        for name, value in [*vars(module).items()]:
            if isinstance(value, _InterpretedFunction):
                function = taken.get(value) or ExecutedFunction(value.fn, **value.kwargs)
                taken[value] = function
                setattr(module, name, function)
                if module is tl.standard and name in vars(tl.tensor):
                    setattr(tl.tensor, name, function)


def install() -> None:
    """Have Triton kernels of this process that would be interpreted run here, those that are decorated from now on."""
    interpreter.InterpretedFunction = ExecutedFunction
    # Now ``triton.jit`` makes such functions, whatever the environment says.
    knobs.runtime.interpret = True
    _take_over()
    JITCallable.parse = parsed_once
    JITFunction.__call__ = lambda self, *args, **kwargs: interpreted_twin(self)(*args, **kwargs)
    of_interpreter = _InterpretedFunction.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _methods_of_tensors():
            return of_interpreter(self, *args, **kwargs)

    _InterpretedFunction.run = run
