"""The tuners that a kernel uses: objects of ``triton.autotune`` that its functions reach by the names in their code.

Nothing is called to find them, so that a tuner of long sequences alone is found as well, and every process finds the
same ones in the same order.
"""

import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import CodeType, ModuleType
from typing import Any

from kernels.contract.tuners import AT_WORK, setting_of, texts

TUNERS = "triton.runtime.autotuner"
"""The module of tuners. If nobody has imported it, there is no tuner."""

NOT_OF_USERS = {*sys.stdlib_module_names, "torch", "triton", "numpy"} - {"__main__"}
"""Packages whose functions and classes are not looked into."""

MOST_ITEMS = 1000
"""Lists, tuples and dictionaries with more items are not looked into."""


def tuners_of(*functions: Any) -> dict[str, Any]:
    """Return the tuners that functions may use and that have several configurations, by the names of their settings.

    A tuner of another class whose ``run`` is its own is left out: nobody knows how it takes a configuration.
    """
    if TUNERS not in sys.modules:
        return {}
    tuner = sys.modules[TUNERS].Autotuner
    found: dict[str, Any] = {}
    for x in _reached(functions, tuner):
        if len(x.configs) > 1 and type(x).run is tuner.run:
            name = x.base_fn.__name__
            names = (name, *(f"{name}_{number}" for number in range(2, 2 + len(found))))
            found[next(each for each in map(setting_of, names) if each not in found)] = x
    return found


def _reached(functions: tuple[Any, ...], tuner: type) -> Iterator[Any]:
    """Yield each tuner that is reached from functions, those that are nearest first."""
    waiting, seen = [*functions], set[int]()
    kept = []  # an object that is gone could leave its identity to another one
    while waiting:
        x = waiting.pop(0)
        if id(x) in seen or x is None:
            continue
        seen.add(id(x))
        kept.append(x)
        if isinstance(x, tuner):
            yield x
        with suppress(Exception):  # objects of other packages may raise anything as they are looked at
            waiting += _next(x)


def _next(x: Any) -> list[Any]:
    """Return what an object may call, as far as it is written by users."""
    if isinstance(x, dict | list | tuple):
        items = [*x.values()] if isinstance(x, dict) else [*x]
        return items if len(items) <= MOST_ITEMS else []
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if inspect.ismethod(x):
        return [x.__func__, x.__self__]
    if isinstance(x, staticmethod | classmethod):
        return [x.__func__]
    if isinstance(x, property):
        return [x.fget]
    if any(kind.__module__.startswith("triton.") for kind in type(x).__mro__):
        # A wrapper leads to what it wraps. What is compiled for a device launches nothing.
        return [] if hasattr(x, "params") else [getattr(x, "fn", None)]
    package = str(getattr(x, "__module__", None) or "").partition(".")[0]
    if inspect.isfunction(x):
        return [*_named_in(x), *vars(x).values()] if package not in NOT_OF_USERS else []
    if inspect.isclass(x):
        return [*vars(x).values(), *x.__bases__] if package not in NOT_OF_USERS else []
    if isinstance(x, ModuleType | str | bytes | int | float | complex | CodeType):
        return []
    # Operators of PyTorch and objects of users hold functions as attributes.
    attributes = getattr(x, "__dict__", None)
    found = [*attributes.values()] if isinstance(attributes, dict) else []
    return [*found, type(x)]


def _named_in(function: Any) -> Iterator[Any]:
    """Yield what the names in a function's code stand for: globals, attributes of modules, and what it encloses."""
    cells = (cell for cell in function.__closure__ or () if _is_filled(cell))
    yield from (cell.cell_contents for cell in cells)
    yield from function.__defaults__ or ()
    names, known = [*_names(function.__code__)], function.__globals__
    package = known.get("__package__") or ""
    for name in names:
        x = known.get(name)
        # A name that is imported within the function is that of a module, or of one in its own package.
        modules = [x, sys.modules.get(name), sys.modules.get(f"{package}.{name}")]
        yield x
        for module in modules:
            if isinstance(module, ModuleType) and module.__name__.partition(".")[0] not in NOT_OF_USERS:
                yield from _attributes(module, names)


def _attributes(module: ModuleType, names: list[str]) -> Iterator[Any]:
    """Yield those attributes of a module that are among the names, and those of modules in it."""
    for name in names:
        x = vars(module).get(name)
        yield x
        if isinstance(x, ModuleType) and x is not module and x.__name__.startswith(f"{module.__name__}."):
            yield from _attributes(x, names)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in a function's code, and in that of functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def settings_of(tuners: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the launch settings of tuners: each with the names of its configurations, and at last ``AT_WORK``."""
    return {name: (*texts(tuner.configs), AT_WORK) for name, tuner in tuners.items()}
