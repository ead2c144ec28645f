"""The SPEC of a kernel that is given as an object: the name by which another process imports it."""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

KERNEL = "kernel"
"""The attribute of a test made by ``flashproof.kernel`` that is the kernel itself."""
EXPECTED = (
    "expected an object with a name at the top of a module, such as attention in mine.py, because another process "
    "imports it by that name"
)
NO_FILE = (
    "expected one in a file, because another process imports it from there: in a notebook, let the cell begin with "
    "%%writefile mine.py, and give 'mine.py:attention'"
)


def spec_of(kernel: object, caller: str) -> str:
    """Return the SPEC of a kernel: a string is one already; of any other object it is the module and the name there.

    It may be a function, a lambda, a partial, a bound method or an ``AttentionKernel``, in its own module or in that
    of the ``caller``. Raises ValueError, in one line, if it has no name there.
    """
    if isinstance(kernel, str):
        return kernel
    for module in _modules(kernel, caller):
        for name in _names(module, kernel):
            return f"{_location(module, kernel)}:{name}"
    raise ValueError(f"kernel: got {_shown(kernel)}, {EXPECTED}")


def _modules(kernel: object, caller: str) -> Iterator[ModuleType]:
    """Yield the modules in which a kernel may have a name, the likeliest first."""
    inner = kernel.func if isinstance(kernel, partial) else kernel
    of_method = type(inner.__self__) if isinstance(inner, MethodType) else inner
    names = [getattr(x, "__module__", None) for x in (kernel, inner, of_method, type(of_method))]
    for name in dict.fromkeys([*names, caller]):
        if name in sys.modules and name not in ("builtins", "functools"):
            yield sys.modules[name]


def _names(module: ModuleType, kernel: Any) -> Iterator[str]:
    """Yield the names by which a kernel is reached from its module, the shortest kind first.

    They are its own, that of a test whose kernel it is, one in a class, and that of the object whose method it is.
    """
    values = list(vars(module).items())
    yield from (name for name, value in values if value is kernel or _is_same_method(value, kernel))
    yield from (f"{name}.{KERNEL}" for name, value in values if _kernel_of(value) is kernel)
    path = getattr(kernel, "__qualname__", "<")
    if "<" not in path and _reached(module, path) is kernel:
        yield path
    if isinstance(kernel, MethodType):
        yield from (f"{name}.{kernel.__name__}" for name, value in values if value is kernel.__self__)


def _kernel_of(value: object) -> object:
    """Return the kernel of a test made by ``flashproof.kernel``; of anything else something that is no kernel."""
    return vars(value).get(KERNEL) if isinstance(value, FunctionType) else None


def _is_same_method(value: object, kernel: object) -> bool:
    """Whether two bound methods are one: each look-up makes another object."""
    return isinstance(value, MethodType) and isinstance(kernel, MethodType) and value == kernel


def _reached(module: ModuleType, path: str) -> object:
    try:
        return attrgetter(path)(module)
    except AttributeError:
        return None


def _location(module: ModuleType, kernel: object) -> str:
    """Return how a SPEC names a module: one in a package by its name, any other by the path of its file."""
    spec = module.__spec__
    if spec is not None and spec.parent and spec.name != "__main__":
        return spec.name
    file = getattr(module, "__file__", None)
    if file is None:
        raise ValueError(f"kernel: got {_shown(kernel)}, {NO_FILE}")
    path, here = Path(file).resolve(), Path.cwd().resolve()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _shown(kernel: object) -> str:
    """Return a kernel as an error message has it: in one line, without its address."""
    if isinstance(kernel, partial):
        return f"a partial of {_shown(kernel.func)}"
    if isinstance(kernel, MethodType):
        return f"the method {kernel.__qualname__} of an object"
    name = getattr(kernel, "__qualname__", None)
    return f"the function {name}" if name else f"an object of type {type(kernel).__qualname__}"


def folder_name(spec: str) -> str:
    """Return the part of a SPEC that a person reads, as the name of a folder: the file or module, and the attribute."""
    location, _, attribute = spec.rpartition(":")
    module = location.removesuffix(".py").replace(os.sep, ".").rpartition(".")[2]
    return ".".join(filter(None, [module, attribute]))


Kernel = str | Callable[..., Any] | object
"""What may be given as a kernel: a SPEC, or an object that ``spec_of`` finds."""
