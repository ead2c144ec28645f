"""Which kernels there are, and how a SPEC typed on a command line becomes one.

A SPEC is a registered name, ``package.module:attribute`` or ``path/to/file.py:attribute``, where the attribute may be
that of another one, as in ``mine.py:model.attend``. Registered kernels are imported when asked for: one whose
dependencies are missing hurts nobody else. ``PUBLIC`` names the kernels of other people's packages; most of them are
tried only if they are asked for.
"""

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from kernels.contract import AttentionKernel, Capabilities
from kernels.contract.parsing import PLAIN_FUNCTION, parse_claims
from kernels.contract.signature import expected, keywords, mismatch
from kernels.tuners import settings_of, tuners_of

KNOWN_DEVICES = ("cpu", "cuda")
"""The types of devices that the ``UNAVAILABLE`` of a kernel's module is about."""

REGISTERED: Mapping[str, str] = {
    "flash_v1": "kernels.algorithms.flash_v1:KERNEL",
    "flash_v2": "kernels.algorithms.flash_v2:KERNEL",
    "flash_v2_atomic": "kernels.algorithms.flash_v2_atomic:KERNEL",
    "flash_v2_staged": "kernels.algorithms.flash_v2_staged:KERNEL",
    "flash_v2_persistent": "kernels.algorithms.flash_v2_persistent:KERNEL",
    "flash_v2_lazy": "kernels.algorithms.flash_v2_lazy:KERNEL",
    "decode": "kernels.algorithms.decode:KERNEL",
    "flash_v3": "kernels.algorithms.flash_v3.tma:KERNEL",
    "flash_v3_gluon": "kernels.algorithms.flash_v3.gluon:KERNEL",
    "flash_v3_gluon_atomic": "kernels.algorithms.flash_v3.gluon_atomic:KERNEL",
    "varlen": "kernels.algorithms.varlen:KERNEL",
    "ring": "kernels.algorithms.ring:KERNEL",
    "fp8": "kernels.algorithms.fp8:KERNEL",
    "fp8_gluon": "kernels.algorithms.flash_v3.gluon_fp8:KERNEL",
    "sdpa_math": "kernels.adapters.pytorch.sdpa:MATH",
    "sdpa_flash": "kernels.adapters.pytorch.sdpa:FLASH",
    "sdpa_efficient": "kernels.adapters.pytorch.sdpa:EFFICIENT",
    "sdpa_cudnn": "kernels.adapters.pytorch.sdpa:CUDNN",
    "flex_attention": "kernels.adapters.pytorch.flex_attention:KERNEL",
}

PUBLIC: Mapping[str, str] = {
    "sdpa_math": "torch",
    "sdpa_flash": "torch",
    "sdpa_efficient": "torch",
    "sdpa_cudnn": "torch",
    "flex_attention": "torch",
    "torch_varlen": "torch",
    "torch_nested": "torch",
    "torch_mha": "torch",
    "torch_flex_compiled": "torch",
    "transformers_eager": "transformers",
    "transformers_sdpa": "transformers",
    "transformers_flex": "transformers",
    "jax_xla": "jax",
    "jax_cudnn": "jax",
    "jax_pallas": "jax",
    "keras": "keras",
    "onnxruntime": "onnxruntime",
    "onnxruntime_cache": "onnxruntime",
    "openvino": "openvino",
    "fla": "flash-linear-attention",
    "flag_gems": "flag_gems",
    "sageattention": "sageattention",
    "xformers": "xformers",
    "flash_attn": "flash-attn",
    "flashinfer": "flashinfer-python",
    "vllm": "vllm",
    "sglang": "sglang",
}
"""The package that each kernel of other people needs, by the name of the kernel.

Those that are not in ``REGISTERED`` too are in packages of ``kernels/adapters``, each in the module of its name.
"""

EVERY_PUBLIC = "public"
"""This SPEC stands for all kernels in ``PUBLIC`` that run on the device."""


class SpecError(ValueError):
    """A SPEC that names no kernel: one line with the SPEC and what was expected."""


def load(spec: str, claims: Iterable[str] = ()) -> AttentionKernel:
    """Return the kernel that ``spec`` names, its capabilities overridden by ``claims`` (``key=value`` each).

    The attribute is an AttentionKernel, any object with ``name``, ``forward``, ``capabilities`` and perhaps
    ``backward`` and ``known_failures``, or a plain function ``f(q, k, v, *, causal, sm_scale)`` returning ``out``
    or ``(out, lse)``. The configurations of tuners that it uses are added to the claimed launch settings.
    A plain function is wrapped, with the claims of ``PLAIN_FUNCTION``: its forward always returns a pair.

    Raises:
        SpecError: unknown name, no such module, file or attribute, an import that fails, not a kernel, or a plain
            function that cannot be called by the contract.
        ClaimError: a claim that cannot be read.
    """
    location, attribute = locate(spec)
    module = _import(spec, location)
    if (found := _attribute(spec, module, attribute, location)) is _ABSENT:
        raise SpecError(f"kernel {spec!r}: no {attribute!r} in {location}; {_what_it_has(module)}")
    module_name = location.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    kernel = _with_tuners(_as_kernel(spec, found, f"{module_name}.{attribute}"))
    kernel = replace(kernel, capabilities=parse_claims(claims, kernel.capabilities))
    if isinstance(kernel.forward, PlainFunction):
        _check_signature(spec, kernel.forward.function, kernel.capabilities)
    return kernel


def locate(spec: str) -> tuple[str, str]:
    """Return the module or .py file that ``spec`` names, and the attribute in it. Raises SpecError."""
    location, _, attribute = _registered(spec).rpartition(":")
    if not location or not attribute:
        raise SpecError(f"kernel {spec!r}: {_no_such_name(spec)}")
    return location, attribute


def _registered(spec: str) -> str:
    """Return the module and the attribute of a registered kernel; any other SPEC as it is."""
    if spec in REGISTERED or spec not in PUBLIC:
        return REGISTERED.get(spec, spec)
    (path,) = Path(__file__).parent.glob(f"adapters/*/{spec}.py")
    return f"kernels.adapters.{path.parent.name}.{spec}:KERNEL"


def module_of(spec: str) -> ModuleType:
    """Import and return the module that ``spec`` names. Raises SpecError."""
    return _import(spec, locate(spec)[0])


def unavailable_reason(kernel_name: str, device_type: str) -> str | None:
    """Return why a registered kernel cannot run on ``device_type``, such as ``cpu`` or ``cuda``, or None where it can.

    A kernel's module says so in ``UNAVAILABLE``, a mapping from (name, device type) to the reason, for ``cpu`` and
    ``cuda``. What runs on only one of these is not known to run on any other accelerator. A kernel whose module cannot
    be imported here is unavailable everywhere. Of other SPECs nothing is known: None.
    """
    if kernel_name not in {**REGISTERED, **PUBLIC}:
        return None
    if kernel_name in PUBLIC and package_version(kernel_name) is None:
        return f"needs {PUBLIC[kernel_name]}"
    try:
        module = importlib.import_module(_registered(kernel_name).partition(":")[0])
    except Exception as error:
        # Packages of other people raise whatever they like where, say, they find no GPU.
        if kernel_name not in PUBLIC and not isinstance(error, ImportError):
            raise
        return f"cannot be imported: {_one_line(error)}"
    table: Mapping[tuple[str, str], str] = getattr(module, "UNAVAILABLE", {})
    reasons = {of: reason for (name, of), reason in table.items() if name == kernel_name}
    return reasons.get(device_type) if device_type in KNOWN_DEVICES else next(iter(reasons.values()), None)


def package_version(public_kernel: str) -> str | None:
    """Return the version of the package that a kernel of ``PUBLIC`` needs, or None where it is not installed."""
    try:
        return version(PUBLIC[public_kernel])
    except PackageNotFoundError:
        return None


_ABSENT = object()
"""Stands for an attribute that a module lacks."""


def _attribute(spec: str, module: ModuleType, attribute: str, location: str) -> Any:
    """Return an attribute of a module, or ``_ABSENT``; ``model.attend`` is the attribute ``attend`` of ``model``.

    A module may raise any error, as it may import its attributes lazily.
    """
    try:
        found: Any = module
        for name in attribute.split("."):
            found = getattr(found, name, _ABSENT)
        return found
    except Exception as error:
        raise SpecError(
            f"kernel {spec!r}: looking up {attribute!r} in {location} raised {_one_line(error)}"
        ) from error


def _check_signature(spec: str, function: Callable[..., Any], capabilities: Capabilities) -> None:
    names = keywords(capabilities)
    if (found := mismatch(function, names)) is not None:
        raise SpecError(f"kernel {spec!r}: expected a function {expected(names)}, got {found}")


def _no_such_name(name: str) -> str:
    registered = {**REGISTERED, **PUBLIC}
    close = difflib.get_close_matches(name, registered)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}expected {', '.join(registered)}, package.module:attribute or path/to/file.py:attribute"


def _what_it_has(module: ModuleType) -> str:
    public = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (isinstance(value, AttentionKernel) or _is_defined_in(module, value))
    ]
    return f"it has {', '.join(public[:5])}" if public else "it has no public function"


def _is_defined_in(module: ModuleType, value: Any) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _import(spec: str, location: str) -> ModuleType:
    is_file = location.endswith(".py")
    if is_file and not Path(location).is_file():
        raise SpecError(f"kernel {spec!r}: no file {location!r}")
    if not is_file and not all(part.isidentifier() for part in location.split(".")):
        raise SpecError(f"kernel {spec!r}: expected a module or the path of a .py file, got {location!r}")
    try:
        return _import_file(Path(location).resolve()) if is_file else importlib.import_module(location)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{location}.".startswith(f"{error.name}."):
            raise SpecError(f"kernel {spec!r}: no module {error.name!r}") from None
        raise SpecError(f"kernel {spec!r}: importing {location} raised {_one_line(error)}") from error


def _import_file(path: Path) -> ModuleType:
    # Named after its whole path: two files may share a name. In sys.modules, where inspect looks for sources.
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None  # of every path that ends in .py
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module
    try:
        with first_on_path(path.parent):
            module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def first_on_path(folder: Path) -> Iterator[None]:
    """Let modules be imported from a folder, as Python does for the folder of a script."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the file may have changed sys.path itself
            sys.path.remove(str(folder))


def _one_line(error: BaseException) -> str:
    message = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _as_kernel(spec: str, found: Any, function_name: str) -> AttentionKernel:
    is_instance = not isinstance(found, type)
    if is_instance and all(hasattr(found, field) for field in ("name", "forward", "capabilities")):
        if not isinstance(found.capabilities, Capabilities):
            raise SpecError(
                f"kernel {spec!r}: expected capabilities of type Capabilities, "
                f"got {type(found.capabilities).__name__}"
            )
        backward = getattr(found, "backward", None)
        return AttentionKernel(
            name=found.name,
            forward=found.forward,
            backward=backward,
            capabilities=replace(found.capabilities, by_autograd=backward is None),
            known_failures=getattr(found, "known_failures", ()),
        )
    if not callable(found):
        raise SpecError(
            f"kernel {spec!r}: expected an AttentionKernel or a function {expected()}, "
            f"got {type(found).__name__}"
        )
    return AttentionKernel(name=function_name, forward=PlainFunction(found), capabilities=PLAIN_FUNCTION)


def _with_tuners(kernel: AttentionKernel) -> AttentionKernel:
    """Return a kernel that claims each configuration of its tuners, by launch settings beside those it declares."""
    tuners = tuners_of(kernel.forward, kernel.backward)
    launch = {**kernel.capabilities.launch, **settings_of(tuners)}
    claims = replace(kernel.capabilities, launch=launch) if tuners else kernel.capabilities
    return replace(kernel, capabilities=claims, tuners=tuners)


class PlainFunction:
    """A plain function in the role of a kernel's ``forward``: ``out`` alone becomes ``(out, None)``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, ...]:
        """Call the function. A tuple, of whatever length, is returned as it is."""
        result = self.function(q, k, v, **options)
        return result if isinstance(result, tuple) else (result, None)
