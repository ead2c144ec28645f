"""Call a function again and again: the program of the process that ``script_process`` starts, as a text.

It imports torch and the standard library, and what the function itself imports. Messages come and go as pickles.
"""

import importlib
import importlib.util
import os
import pickle
import sys
import time
import traceback
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

WATCHED: dict[Any, tuple[str, ...]] = {
    torch: ("allclose", "isclose", "equal", "eq", "ne", "isnan", "isfinite", "abs", "max", "all", "any"),
    torch.Tensor: (
        *(
            "allclose",
            "isclose",
            "equal",
            "eq",
            "ne",
            "__eq__",
            "__ne__",
            "isnan",
            "isfinite",
            "abs",
            "max",
            "all",
        ),
        *("any", "item", "tolist", "cpu", "double", "float", "clone", "detach"),
    ),
    torch.testing: ("assert_close", "assert_allclose"),
    **{
        module: ("synchronize", "Event")
        for module in vars(torch).values()
        if isinstance(module, ModuleType) and hasattr(module, "synchronize")
    },
    time: ("time", "perf_counter", "perf_counter_ns", "monotonic"),
}
"""Functions by which a caller compares results and measures time: a kernel has no reason to replace them."""

MOST_KEPT = 2**30
"""If torch keeps more bytes than this, they go back to the device after a call, as other processes may need them."""


def watched() -> dict[str, Any]:
    """Return these functions by their names."""
    return {
        f"{owner.__module__ + '.' if isinstance(owner, type) else ''}{owner.__name__}.{name}": getattr(
            owner, name
        )
        for owner, names in WATCHED.items()
        for name in names
        if hasattr(owner, name)
    }


def imported(location: str, attribute: str) -> Any:
    """Import a function from a file or a module."""
    if not location.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return attrgetter(attribute)(importlib.import_module(location))
    path = Path(location).resolve()
    sys.path.insert(0, str(path.parent))
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return attrgetter(attribute)(module)


def received(x: Any, device: str) -> Any:
    """Return a tensor that was sent as its elements, shape and strides; anything else as it is."""
    if not isinstance(x, tuple) or len(x) != 3 or not isinstance(x[0], torch.Tensor):
        return x
    flat, shape, strides = x
    return flat.to(device).as_strided(shape, strides)


def answered(function: Any, call: dict[str, Any], device: str) -> dict[str, torch.Tensor]:
    """Call the function, with gradients by autograd if these are asked for."""
    inputs = {name: received(call[name], device) for name in ("q", "k", "v")}
    options = {name: received(x, device) for name, x in call["options"].items()}
    if call["backward"]:
        inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    returned = function(*inputs.values(), **options)
    out, lse = returned if isinstance(returned, tuple) else (returned, None)
    found = {"out": out} if lse is None else {"out": out, "lse": lse}
    if call["backward"] and out.requires_grad:
        dout = received(call["dout"], device)
        gradients = torch.autograd.grad(out, list(inputs.values()), dout, materialize_grads=True)
        found |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    return {name: x.detach().cpu().clone().contiguous() for name, x in found.items()}


def kept(device: str) -> int:
    """Return the bytes of a device that torch keeps, 0 if it does not tell."""
    found: int = getattr(torch.get_device_module(device), "memory_reserved", int)()
    return found


def serve() -> None:
    """Answer calls until there are no more."""
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the function prints is no answer
    sys.argv[:] = [""]
    start, before = pickle.load(calls), watched()
    if torch.device(start["device"]).index:
        torch.accelerator.set_device_index(start["device"])
    try:
        function, missing = imported(*start["location"]), ""
    except BaseException as error:
        function, missing = None, f"the kernel can't be imported: {type(error).__name__}: {error}"
    if start["device"] == "cpu" and "triton" in sys.modules:
        missing = missing or "Triton's own interpreter would run the kernel"
    while True:
        try:
            call = pickle.load(calls)
        except EOFError:
            return
        answer: dict[str, Any] = {"missing": missing} if missing else {}
        if not missing:
            try:
                answer["tensors"] = answered(function, call, start["device"])
                now = watched()
                answer["replaced"] = [name for name, x in before.items() if now.get(name) is not x]
            except Exception as error:
                said = "".join(traceback.format_exception(error, limit=0))  # by those that it came of as well
                answer = {"raised": f"{type(error).__name__}: {error}", "said": said}
        if start["device"] != "cpu" and kept(start["device"]) > MOST_KEPT:
            torch.get_device_module(start["device"]).empty_cache()
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
