"""Kernels with several planted bugs, as data: a sound function of the panel, and edits of its source for each bug."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kernels.mutants.mutant import Edit, load_module, source_of
from strategies.case import Case


@dataclass(frozen=True, kw_only=True)
class PlantedBug:
    """One bug of a kernel, independent of its others.

    Attributes:
        name: an identifier that is unique within the kernel.
        what: the bug in words.
        edits: what it changes in the sound function's source.
        tensors: the outputs of a call that it makes wrong; none if it ends the process. Laws that compute one tensor
            from another may report that other one as wrong.
        law: the law that shows it on ``case``.
        case: a small case on which this bug shows, and none of the kernel's others makes the same tensors wrong.
        fields: the fields of a case that decide whether it shows.
        can_show: returns False for a case only if the bug never shows on it.
        kind: the kind of finding, if that is not always "error" or "nonfinite".
    """

    name: str
    what: str
    edits: tuple[Edit, ...]
    tensors: tuple[str, ...] = ()
    law: str
    case: Case
    fields: tuple[str, ...]
    can_show: Callable[[Case], bool]
    kind: str = ""

    @property
    def ends_process(self) -> bool:
        """Whether the bug ends the process that it shows in, so that nothing more can be asked of it."""
        return self.kind == "died"


@dataclass(frozen=True)
class Several:
    """A kernel with several bugs.

    Attributes:
        name: an identifier that no other kernel has.
        base: the sound function, as ``--kernel`` takes it.
        bugs: what is planted in it.
    """

    name: str
    base: str
    bugs: tuple[PlantedBug, ...]

    @property
    def spec(self) -> str:
        """The kernel with all of its bugs, as ``--kernel`` takes it."""
        return f"tests.several:{self.name}"

    def only(self, bug: PlantedBug) -> str:
        """Return the kernel with one of its bugs alone, as ``--kernel`` takes it."""
        return f"{self.spec}__only__{bug.name}"

    def without(self, bug: PlantedBug) -> str:
        """Return the kernel with all of its bugs but one, as ``--kernel`` takes it."""
        return f"{self.spec}__without__{bug.name}"

    def chosen(self, which: str, bug: str) -> tuple[PlantedBug, ...]:
        """Return the bugs that ``only`` or ``without`` asks for, and all of them for any other word."""
        kept = {"only": lambda name: name == bug, "without": lambda name: name != bug}.get(which)
        return self.bugs if kept is None else tuple(b for b in self.bugs if kept(b.name))

    def load(self, bugs: Iterable[PlantedBug]) -> Callable[..., Any]:
        """Return the plain function with these bugs."""
        texts: dict[str, str] = {}
        for edit in (edit for bug in bugs for edit in bug.edits):
            texts[edit.module] = edit.apply(texts.get(edit.module) or source_of(edit.module))
        entry, _, function = self.base.partition(":")
        return getattr(load_module(entry, texts), function)


HEADS, FLASH, EAGER, PARTS = (f"tests.panel.{name}" for name in ("heads", "flash", "eager", "parts"))
TUTORIAL, SPLIT, V2 = (f"tests.panel.triton_{name}" for name in ("tutorial", "split", "v2"))
DEMANDING = "tests.several.demanding"
