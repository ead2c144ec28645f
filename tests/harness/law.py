"""How a law is declared, listed, and found by its name.

This module imports neither pytest nor Hypothesis, because the child process that runs kernels uses neither.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from kernels.contract import DTYPES, Capabilities, KnownFailure
from tests.harness.trial import Trial

PROPERTIES = Path(__file__).parents[1] / "properties"
"""The folder of the laws. The law ``forward`` is the function ``forward`` of ``test_forward.py``."""

LAWS = tuple(sorted(path.stem.removeprefix("test_") for path in PROPERTIES.glob("test_*.py")))
"""The names of all laws."""

NOTHING = (False, (), "none")
"""The values of claims that stand for no claim."""


@dataclass(frozen=True)
class Law:
    """A law that a kernel has to keep, with what its pytest items need to know of it.

    Attributes:
        name: the name in reports and in the ids of tests.
        check: the function that makes calls through a trial, and has it raise ``LawBroken`` if the law does not hold.
        needs: the claim without which the law does not apply, a field of ``Capabilities``; "" if it always applies.
        draws: options of ``strategies.cases.cases``, which draws the cases that the law is tried on.
        on_device: whether what calls return has to stay where the kernel left it, as in a law about memory.
        of_plain_calls: whether its calls have keywords that no call of the claim ``ragged`` has.
        dtypes: the dtypes of cases that it is about.
    """

    name: str
    check: Callable[[Trial], None]
    needs: str
    draws: Mapping[str, Any]
    on_device: bool = False
    dtypes: tuple[str, ...] = DTYPES
    of_plain_calls: bool = False

    def __call__(self, trial: Trial) -> None:
        """Check the law on a trial of a dtype that it is about. Raises LawBroken, Refused, or CannotRun."""
        if trial.case.dtype in self.dtypes:
            self.check(trial)

    def applies_to(self, capabilities: Capabilities, dtype: str) -> bool:
        """Whether a kernel with these claims has to keep the law at a dtype."""
        is_claimed = not self.needs or getattr(capabilities, self.needs) not in NOTHING
        has_calls = capabilities.dense or not self.of_plain_calls
        has_gradients = not self.draws.get("gradients") or bool(capabilities.kinds_with_gradients)
        return dtype in self.dtypes and is_claimed and has_calls and has_gradients

    def fails_by(self, known: KnownFailure) -> bool:
        """Whether a known failure breaks this law, or the law of the same name as the claim that this law needs."""
        return known.breaks(self.name) or self.needs in known.laws


def law(
    *,
    needs: str = "",
    on_device: bool = False,
    dtypes: tuple[str, ...] = DTYPES,
    of_plain_calls: bool = False,
    **draws: Any,
) -> Callable[[Callable[[Trial], None]], Law]:
    """Declare the decorated function as the law of its name; see ``Law`` for what is declared with it."""
    return lambda check: Law(check.__name__, check, needs, draws, on_device, dtypes, of_plain_calls)


def law_named(name: str) -> Law:
    """Return the law of this name. Raises ModuleNotFoundError if there is none."""
    found: Law = getattr(import_module(f"tests.properties.test_{name}"), name)
    return found
