"""What an exception says of the machine and its packages: that a kernel can't run here, which is no bug of it."""

import ast
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from textwrap import shorten

from tests.harness.verdict import PACKAGES

TRITON = "/triton/"
"""A part of the paths of Triton's own files."""

LONGEST_QUOTE = 200
"""The number of characters that are quoted of an exception."""

ON_A_GPU = "verify this kernel on a GPU"
OTHER_VERSIONS = "install the versions that the kernel is for"

NO_DRIVER = r"active drivers \(.*\)\. There should only be one"
"""What Triton says where it compiles for no device, as ``re`` finds it."""

LIMITS = {
    r"inline_asm not supported": "inline assembly (tl.inline_asm_elementwise)",
    r"(libdevice\.\w+) not supported": "{}, a function of a device library that NumPy does not have",
    r"extern_elementwise not supported": "functions of device libraries (extern_elementwise)",
    r"'InterpreterBuilder' object has no attribute '(?:create_)?(\w+)'": "{}, an operation that it lacks",
    r"Did you forget to add @triton\.jit": "functions imported from triton.language by name, such as load: "
    "it knows them as tl.load",
    NO_DRIVER: "a Gluon kernel, or one whose launcher asks what GPU there is",
}
"""What Triton's interpreter can't run, by texts of exceptions, which may contain the name of the function."""

TOOLS = re.compile(
    r"Failed to find C compiler|No working C\+\+ compiler|Ninja is required|CUDA_HOME environment variable is not set"
    r"|Cannot find a working triton installation|No such file or directory: '(?:nvcc|gcc|g\+\+|cc|c\+\+|ninja)'"
    r"|cannot open shared object file",
    re.IGNORECASE,
)
"""What is said where a compiler or a library of the system is missing."""

VERSION_WORDS = re.compile(
    r"\b(?:triton|(?:py)?torch|cuda|python|numpy)\s*(?:version\b|[<>=~]=?\s*v?\d|v?\d+\.\d)", re.IGNORECASE
)
VERSION_SOURCE = re.compile(r"__version__|\b(?:version|Version)\(")
"""How a message names a version of a package, and how a condition asks for one."""


@dataclass(frozen=True)
class Demand:
    """How it is told that a kernel needs another device than there is.

    Attributes:
        texts: what PyTorch, Triton or CUDA say in an exception of any type.
        words: words about devices in the messages of authors.
        source: how a condition asks for the device.
        reason: what is told of the kernel.
        advice: what to do.
    """

    texts: re.Pattern[str]
    words: re.Pattern[str]
    source: re.Pattern[str]
    reason: str
    advice: str


ARCHITECTURES = r"sm_?\d{2,3}a?|hopper|ampere|blackwell|compute capability|rocm|hip"
CAPABILITY = r"\bget_device_(?:capability|name|properties)\b"
DEMANDS = {
    "cpu": Demand(
        texts=re.compile(
            r"Found no NVIDIA driver|No (?:CUDA|HIP) GPUs are available|Torch not compiled with CUDA enabled"
            r"|with arguments from the 'CPU' backend|cannot be accessed from Triton \(cpu tensor\?\)"
        ),
        words=re.compile(rf"(?<![a-z:])(?:cuda|gpus?|nvidia|nvcc|{ARCHITECTURES})(?![a-z])", re.IGNORECASE),
        source=re.compile(
            rf"\bis_(?:cuda|cpu)\b|['\"](?:cuda|cpu)['\"]|\btorch\.cuda\.|\bversion\.(?:hip|cuda)\b|{CAPABILITY}"
        ),
        reason="the kernel asks for a GPU, and there is none",
        advice=ON_A_GPU,
    ),
    "cuda": Demand(
        texts=re.compile(
            r"no kernel image is available|device kernel image is invalid|unsupported toolchain"
            r"|invalid device function|not supported on \.target"
        ),
        words=re.compile(rf"(?<![a-z])(?:{ARCHITECTURES})(?![a-z])", re.IGNORECASE),
        source=re.compile(CAPABILITY),
        reason="the kernel is for another GPU",
        advice="verify it on one that it is for",
    ),
}
"""By the type of the device that there is, how a kernel is known that needs another one."""
OF_OTHERS = Demand(
    texts=re.compile(rf"{DEMANDS['cpu'].texts.pattern}|{NO_DRIVER}"),
    words=re.compile(rf"(?<![a-z:])(?:cuda|nvidia|nvcc|{ARCHITECTURES})(?![a-z])", re.IGNORECASE),
    source=DEMANDS["cpu"].source,
    reason="the kernel is for another type of device",
    advice="verify it on one that it is for",
)
"""The same for accelerators of all other types."""


@dataclass(frozen=True)
class Raised:
    """How an exception came about, as the source of its last frame tells it.

    Attributes:
        error: the exception.
        source: the assertion that failed, or the condition under which a statement raised the exception; "" if it was
            raised without one, by neither of these statements, or as a refusal.
        is_deliberate: whether an ``assert`` or ``raise`` of Python raised it.
        is_translated: whether that ``raise`` stands where another exception is handled, so that it stands for that one.
        is_of_triton: whether that frame is one of Triton, which repeats there what kernels raise.
    """

    error: BaseException
    source: str = ""
    is_deliberate: bool = False
    is_translated: bool = False
    is_of_triton: bool = False

    @property
    def text(self) -> str:
        """Return the message of the exception."""
        return str(self.error)

    @property
    def words(self) -> str:
        """Return the message if an author wrote it: "" of a refusal, and of mistakes that Python itself tells.

        What compiled code of PyTorch and others raises is a RuntimeError or an OSError.
        """
        is_written = self.is_deliberate or isinstance(self.error, RuntimeError | OSError)
        is_repeated = self.is_of_triton or isinstance(self.error, NotImplementedError)
        return self.text if is_written and not is_repeated else ""

    @property
    def quoted(self) -> str:
        """Return the type of the exception and its message in one line, or else what was asserted."""
        said = shorten(self.text or self.source, LONGEST_QUOTE, placeholder=" ...")
        return f"{type(self.error).__name__}: {said}" if said else type(self.error).__name__


def why_not_here(error: BaseException, device_type: str) -> str | None:
    """Say in one line why a kernel can't be run on this machine, and what to do, judging by what it raised.

    Exceptions that it stands for are looked at as well. Of a NotImplementedError, which is how a kernel refuses a case,
    only what PyTorch and Triton say counts.

    Args:
        error: the exception.
        device_type: that of the tensors, such as "cpu" or "cuda".

    Returns:
        None for an exception that may be a bug of the kernel.
    """
    for raised in chain(error):
        for told in (_of_interpreter, _of_device, _of_packages):
            if reason := told(raised, device_type):
                return reason
    return None


def chain(error: BaseException) -> Iterator[Raised]:
    """Yield an exception and those that it stands for: that which caused it, or which was handled as it was raised.

    What is raised while another exception is handled, but by a function that the handler calls, stands for itself: a
    fallback may have a bug.
    """
    each: BaseException | None = error
    while each is not None:
        raised = how_raised(each)
        yield raised
        if isinstance(each, NotImplementedError):
            return
        each = each.__cause__ or (each.__context__ if raised.is_translated else None)


def how_raised(error: BaseException) -> Raised:
    """Return how an exception came about. Where the source can't be read, only an assertion counts as deliberate."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].lineno is None:
        return Raised(error, is_deliberate=isinstance(error, AssertionError))
    nodes = _statements_at(frames[-1].filename, frames[-1].lineno)
    is_raise = any(isinstance(node, ast.Raise) for node in nodes)
    asks = ast.If if is_raise else ast.Assert
    conditions = [ast.unparse(node.test) for node in nodes if isinstance(node, asks)]
    return Raised(
        error,
        source=conditions[-1] if conditions and not isinstance(error, NotImplementedError) else "",
        is_deliberate=is_raise or isinstance(error, AssertionError),
        is_translated=is_raise and any(isinstance(node, ast.ExceptHandler) for node in nodes),
        is_of_triton=TRITON in frames[-1].filename,
    )


def _statements_at(path: str, line: int) -> list[ast.stmt | ast.ExceptHandler]:
    """Return the statements of a file that a line is in, and handlers of exceptions, the innermost last."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return []
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.ExceptHandler) and node.lineno <= line <= (node.end_lineno or 0)
    ]


def _of_interpreter(raised: Raised, device_type: str) -> str | None:
    """Say what Triton's interpreter can't run."""
    if device_type != "cpu":
        return None
    for pattern, what in LIMITS.items():
        if found := re.search(pattern, raised.text):
            return f"Triton's interpreter can't run {what.format(*found.groups())}; {ON_A_GPU}"
    return None


def _of_device(raised: Raised, device_type: str) -> str | None:
    """Say that the kernel is for a GPU where there is none, or for another one."""
    demand = DEMANDS.get(device_type, OF_OTHERS)
    is_told = (
        demand.texts.search(raised.text)
        or demand.words.search(raised.words)
        or demand.source.search(raised.source)
    )
    return f"{demand.reason} ({raised.quoted}); {demand.advice}" if is_told else None


def _of_packages(raised: Raised, device_type: str) -> str | None:
    """Say which package, function of a package, version or tool is missing, whatever the device."""
    for pattern, tell in MISSING.items():
        if found := re.search(pattern, raised.text):
            return tell(*found.groups())
    found = re.search(NO_PARAMETER, raised.text)
    if found and raised.is_of_triton and hasattr(sys.modules["triton.language"], found[1]):
        return _lacks("triton.language", f"{found[1]} with the parameter {found[2]}")
    if isinstance(raised.error, ImportError):
        return f"the kernel needs what can't be imported here ({raised.quoted}); {OTHER_VERSIONS}"
    if TOOLS.search(raised.text):
        return f"the kernel needs what this machine lacks ({raised.quoted}); install it"
    if VERSION_SOURCE.search(raised.source) or (raised.is_deliberate and VERSION_WORDS.search(raised.words)):
        return f"the kernel asks for other versions of packages ({raised.quoted}); {OTHER_VERSIONS}"
    return None


def _lacks(module: str, name: str) -> str | None:
    """Say that a module of an installed package lacks something; None of a module that is the kernel's own."""
    package = module.partition(".")[0]
    path = getattr(sys.modules.get(package), "__file__", None) or ""
    if not any(folder in path for folder in PACKAGES):
        return None
    return f"{_installed(package)} has no {module}.{name}, which the kernel uses; {OTHER_VERSIONS}"


def _installed(package: str) -> str:
    """Return a package's name and its version here."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


MISSING: Mapping[str, Callable[..., str | None]] = {
    r"No module named '([^']+)'": lambda name: (
        f"the kernel needs the package {name}, which is not installed here; install it"
    ),
    r"module '([\w.]+)' has no attribute '(\w+)'": _lacks,
    r"cannot import name '(\w+)' from '([\w.]+)'": lambda name, module: _lacks(module, name),
    r"'_OpNamespace' '(\w+)' object has no attribute '(\w+)'": lambda package, name: (
        f"torch has no operation {package}.{name} here; install the package that has it, and import it in the kernel"
    ),
    r"Block pointers have been removed": lambda: _lacks("triton.language", "make_block_ptr"),
}
"""What says that a module lacks what a kernel uses, by texts of exceptions. Of the kernel's own modules nothing is."""

NO_PARAMETER = r"^(\w+)\(\) got an unexpected keyword argument '(\w+)'"
"""What Python says where a function has no such parameter."""
