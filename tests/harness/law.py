"""Laws as data: the one place where a law is declared, listed and found by its name.

Imports neither pytest nor Hypothesis, which the child process that runs kernels has no use for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from kernels.contract import Capabilities, KnownFailure
from tests.harness.trial import Trial

PROPERTIES = Path(__file__).parents[1] / "properties"
"""The folder of the laws. The law ``forward`` is the function ``forward`` of ``test_forward.py``."""

LAWS = tuple(sorted(path.stem.removeprefix("test_") for path in PROPERTIES.glob("test_*.py")))
"""The names of all laws."""


@dataclass(frozen=True)
class Law:
    """A property that a kernel has to have.

    Attributes:
        name: how reports and the ids of tests call it.
        check: makes calls through a trial, and raises ``LawBroken`` through it where the law does not hold.
        needs: the claim that the law is about, a field of ``Capabilities``; "" if it holds for every kernel.
        draws: options of ``strategies.cases.cases`` for the cases that it is tried on.
    """

    name: str
    check: Callable[[Trial], None]
    needs: str
    draws: Mapping[str, Any]

    def __call__(self, trial: Trial) -> None:
        """Check the law on a trial. Raises LawBroken."""
        self.check(trial)

    def applies_to(self, capabilities: Capabilities) -> bool:
        """Whether a kernel with these claims has to keep the law."""
        return not self.needs or bool(getattr(capabilities, self.needs))

    def fails_by(self, known: KnownFailure) -> bool:
        """Whether a known failure breaks the law, by itself or because it breaks the one that judges what it needs."""
        return known.breaks(self.name) or self.needs in known.laws


def law(*, needs: str = "", **draws: Any) -> Callable[[Callable[[Trial], None]], Law]:
    """Declare the decorated function as the law of its name; see ``Law`` for what is declared with it."""
    return lambda check: Law(check.__name__, check, needs, draws)


def law_named(name: str) -> Law:
    """The law of a name. Raises ModuleNotFoundError where there is none."""
    found: Law = getattr(import_module(f"tests.properties.test_{name}"), name)
    return found
