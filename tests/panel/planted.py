"""Bugs planted in functions of the panel that take what models add to attention: each a named edit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kernels.mutants.mutant import Edit, load_module, source_of
from strategies.case import SIMPLEST, Case


@dataclass(frozen=True)
class Planted:
    """A bug of one function.

    Attributes:
        name: an identifier; the claim that it is a bug of stands before the first two underscores.
        what: the bug in words.
        edit: what it changes.
        function: the function that shows it, in the module that is edited.
        also: another claim that shows it, by its name.
    """

    name: str
    what: str
    edit: Edit
    function: str = "eager"
    also: str = ""

    @property
    def part(self) -> str:
        """The claim that it is a bug of, by its name."""
        return self.name.partition("__")[0]

    def can_show(self, case: Case) -> bool:
        """Whether a case has what the claim is about; every case has what is no field of a case."""
        names = [name for name in (self.part, self.also) if name in SIMPLEST]
        return not names or any(getattr(case, name) != SIMPLEST[name] for name in names)

    def load(self) -> Callable[..., Any]:
        """Return the function with the bug."""
        module = self.edit.module
        return getattr(load_module(module, {module: self.edit.apply(source_of(module))}), self.function)


def loaded(name: str, bugs: Sequence[Planted]) -> Callable[..., Any]:
    """Return the function with the bug of this name, one of ``bugs``. Raises AttributeError if there is none."""
    for bug in bugs:
        if bug.name == name:
            return bug.load()
    raise AttributeError(f"no planted bug is called {name!r}")
