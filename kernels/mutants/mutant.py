"""A planted bug: a named edit of a kernel's source, as data, and how the edited kernel is made of it."""

import ast
import atexit
import hashlib
import importlib
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from kernels.contract import AttentionKernel
from kernels.registry import REGISTERED, first_on_path, locate

KERNEL = "flash_v2"
"""The registered kernel that most bugs are planted in."""


@dataclass(frozen=True)
class Edit:
    """``old``, which stands once in the function ``module:name``, becomes ``new``."""

    where: str
    old: str
    new: str

    @property
    def module(self) -> str:
        """The module that is edited."""
        return self.where.partition(":")[0]

    def apply(self, source: str) -> str:
        """The module's source after the edit. Raises ValueError where ``old`` does not stand there once."""
        function = self.where.partition(":")[2]
        lines = source.splitlines(keepends=True)
        node = next(x for x in ast.parse(source).body if getattr(x, "name", None) == function)
        assert node.end_lineno is not None
        before, within, after = (
            "".join(lines[a:b])
            for a, b in ((0, node.lineno - 1), (node.lineno - 1, node.end_lineno), (node.end_lineno, None))
        )
        if within.count(self.old) != 1:
            raise ValueError(
                f"{self.where}: expected once, found {within.count(self.old)} times: {self.old!r}"
            )
        return before + within.replace(self.old, self.new) + after


@dataclass(frozen=True)
class Mutant:
    """A kernel with one planted bug.

    Attributes:
        name: unique, an identifier.
        what: the bug in words.
        edits: what is changed.
        source: the real bug that it re-enacts, where there is one.
        subtle: wrong in a single row, tile or lane, or by less than 1 % of the output's size.
        device: "cuda" where it shows compiled only; "" where it shows interpreted too.
        raises: the bug is that a claimed call raises.
        shown_by: the registered kernel that shows it, if that is not the one whose source is edited first.
    """

    name: str
    what: str
    edits: tuple[Edit, ...]
    source: str = ""
    subtle: bool = False
    device: str = ""
    raises: bool = False
    shown_by: str = ""

    @property
    def kernel(self) -> str:
        """The registered kernel that it is a bug of; ``KERNEL`` where it is in what several kernels share."""
        registered = {locate(name)[0]: name for name in REGISTERED}
        return self.shown_by or registered.get(self.edits[0].module, KERNEL)

    def sources(self) -> dict[str, str]:
        """The edited modules, whole."""
        texts: dict[str, str] = {}
        for edit in self.edits:
            texts[edit.module] = edit.apply(texts.get(edit.module) or source_of(edit.module))
        return texts

    def load(self) -> AttentionKernel:
        """The kernel with the bug, called ``name``."""
        entry, attribute = locate(self.kernel)
        kernel: AttentionKernel = getattr(load_module(entry, self.sources()), attribute)
        return replace(kernel, name=self.name)


def source_of(module: str) -> str:
    """The text of a module (by name) or of a .py file (by path)."""
    return _path_of(module).read_text()


def modules_of(module: str) -> tuple[str, ...]:
    """Return a module and, if it is a package, the modules in it."""
    path = _path_of(module)
    is_package = path.stem == "__init__" and not module.endswith(".py")
    inside = sorted(path.parent.glob("*.py")) if is_package else []
    return module, *(f"{module}.{x.stem}" for x in inside if x != path)


def load_module(entry: str, edited: Mapping[str, str]) -> ModuleType:
    """Import ``entry`` anew, with the texts in ``edited`` in place of those modules.

    Modules are names ("kernels.common.tiles") or paths of .py files. Only ``entry``, the modules in it if it is a
    package, and what is edited are imported anew, as soon as one of them imports them. The texts become files, for
    Triton reads a kernel's source through ``inspect``.
    """
    for name in (name for name in (*edited, entry) if not name.endswith(".py")):
        # A module between those that are edited must not be imported for the first time beside them, and be kept.
        importlib.import_module(name)
    texts = {name: edited.get(name) or source_of(name) for name in (*edited, *modules_of(entry))}
    beside = first_on_path(_path_of(entry).parent) if entry.endswith(".py") else nullcontext()
    with _imported_anew({_imported_as(name): text for name, text in texts.items()}), beside:
        return importlib.import_module(_imported_as(entry))


def _path_of(module: str) -> Path:
    if module.endswith(".py"):
        return Path(module).resolve()
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def _imported_as(module: str) -> str:
    return Path(module).stem if module.endswith(".py") else module


@contextmanager
def _imported_anew(texts: Mapping[str, str]) -> Iterator[None]:
    """Let the modules of these names be imported from these texts, and afterwards be what they were before."""
    before = {name: sys.modules.pop(name, None) for name in texts}
    parents = {name: sys.modules.get(name.rpartition(".")[0]) for name in texts}
    for name, parent in parents.items():
        if parent is not None:  # or ``from package import name`` would find the module there
            vars(parent).pop(name.rpartition(".")[2], None)
    finder = _Texts(texts)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
                if (parent := parents[name]) is not None:
                    setattr(parent, name.rpartition(".")[2], module)


class _Texts(MetaPathFinder, Loader):
    """Finds modules by their names in texts, and loads them under names of their own, by which inspect finds them."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        self.digest = hashlib.sha256(repr(texts).encode()).hexdigest()[:12]
        self.folder = Path(tempfile.mkdtemp(dir=_scratch()))

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return how a module is loaded if there is an edited text for its name, else None."""
        if name not in self.texts:
            return None
        file = self.folder / f"{name.rpartition('.')[2]}.py"
        file.write_text(self.texts[name])
        within: list[str] | None = [] if any(other.startswith(f"{name}.") for other in self.texts) else None
        return spec_from_file_location(name, file, loader=self, submodule_search_locations=within)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module with a name of its own."""
        assert spec.origin is not None
        module = ModuleType(f"{Path(spec.origin).stem}_{self.digest}")
        sys.modules[module.__name__] = module
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run the text of a module."""
        assert module.__file__ is not None
        exec(compile(Path(module.__file__).read_text(), module.__file__, "exec"), vars(module))


@cache
def _scratch() -> str:
    folder = tempfile.mkdtemp(prefix="flashproof-mutants-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
