"""How a law is declared, listed, and found by its name.

This module imports neither pytest nor Hypothesis, because the child process that runs kernels uses neither.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from kernels.contract import DTYPES, Capabilities, KnownFailure
from strategies.case import Case

PROPERTIES = Path(__file__).parents[1] / "properties"
"""The folder of the laws. The law ``forward`` is the function ``forward`` of ``test_forward.py``."""

LAWS = tuple(sorted(path.stem.removeprefix("test_") for path in PROPERTIES.glob("test_*.py")))
"""The names of all laws."""

MATTERS_MOST = "forward"
"""The law without which no kernel is said to hold, unless the user has left it out."""

NOTHING = (False, (), "none")
"""The values of claims that stand for no claim."""


class OnCase(Protocol):
    """What a law is checked on, as far as it decides whether the law is about it: a ``Trial``."""

    @property
    def case(self) -> Case:
        """The case that calls are made on."""

    @property
    def device(self) -> str:
        """The device on which they are made."""


@dataclass(frozen=True)
class Law:
    """A law that a kernel has to keep, with what other code needs to know of it.

    Each attribute from ``needs`` on is an argument of ``law``. One that is not given has its default, which suits a law
    about calls on the cases that are drawn for it.

    Attributes:
        name: the name in reports and in the ids of tests.
        check: the function that makes calls through a trial, and has it raise ``LawBroken`` if the law does not hold.
        draws: options of ``strategies.cases.cases``, which draws the cases that the law is tried on.
        needs: the claim without which the law does not apply, a field of ``Capabilities``; "" if it always applies.
        dtypes: the dtypes of cases that it is about.
        on_device: whether what calls return has to stay where the kernel left it, as in a law about memory.
        is_basic: whether it compares what one call on its case returns with the reference. A bug that breaks several
            laws is reported by a basic one, which says in the fewest words what is wrong.
        stands_alone: whether its failures are always reported as its own. Those of other laws are reported as failures
            of a basic law where one of the calls is wrong by itself.
        takes_gradients: whether it reads gradients, if the kernel has any; else nothing reads the dout of its cases.
        expects_refusal: whether the kernel has to refuse each call that the law judges, as its cases are not claimed.
        sets: what its calls have whatever its cases say: "numbers" in the tensors, "scores" that are large, "lengths".
        compares: which calls it compares with each other: "repeats" of one call, calls for a "batch" element with those
            for all, or any "calls". If repeats of a call differ, it fails.
        adds_arguments: whether its calls are those of a basic law with further arguments, as tables of angles, which no
            call of the claim ``ragged`` takes.
        only_on: where alone it is tried, on the "cpu" or on "accelerators"; "" for both. Elsewhere it has no test.
        costs: how many times as long as those of other laws its cases take: in a run by examples it has so many times
            fewer of them.
        place: where it stands among the laws of a round, the lowest first; laws that find much in little time should
            come early. Laws of the same place come in the order of their names.
    """

    name: str
    check: Callable[[Any], None]
    draws: Mapping[str, Any]
    needs: str = ""
    dtypes: tuple[str, ...] = DTYPES
    on_device: bool = False
    is_basic: bool = False
    stands_alone: bool = False
    takes_gradients: bool = True
    expects_refusal: bool = False
    sets: tuple[str, ...] = ()
    compares: tuple[str, ...] = ()
    adds_arguments: bool = False
    only_on: str = ""
    costs: int = 1
    place: float = math.inf

    def __call__(self, trial: OnCase) -> None:
        """Check the law on a trial of what it is about. Raises LawBroken, Refused, or CannotRun."""
        if trial.case.dtype in self.dtypes and self.is_tried_on(trial.device):
            self.check(trial)

    def is_tried_on(self, device: str) -> bool:
        """Whether it is tried on a device, such as ``cpu`` or ``cuda:1``."""
        return self.only_on in ("", "cpu" if device == "cpu" else "accelerators")

    @property
    def judges_gradients(self) -> bool:
        """Whether it is the basic law that compares gradients with the reference."""
        return self.is_basic and self.takes_gradients

    @property
    def is_never_restated(self) -> bool:
        """Whether its failures are always reported as its own, as those of a basic law are."""
        return self.is_basic or self.stands_alone

    @property
    def has_own_calls(self) -> bool:
        """Whether its calls have arguments that those of no basic law have, so that it alone shows what is wrong."""
        return bool(self.draws.get("calls"))

    @property
    def has_earlier_calls(self) -> bool:
        """Whether its cases say which calls come before the judged one."""
        return bool(self.draws.get("earlier"))

    @property
    def shares_cases(self) -> bool:
        """Whether the basic laws judge its cases as well: they are about plain calls of finite numbers."""
        return not (self.stands_alone or self.has_own_calls or self.draws.get("nonfinite"))

    def applies_to(self, capabilities: Capabilities, dtype: str) -> bool:
        """Whether a kernel with these claims has to keep the law at a dtype."""
        is_claimed = not self.needs or getattr(capabilities, self.needs) not in NOTHING
        has_calls = capabilities.dense or not self.adds_arguments
        has_gradients = not self.draws.get("gradients") or bool(capabilities.kinds_with_gradients)
        return dtype in self.dtypes and is_claimed and has_calls and has_gradients

    def fails_by(self, known: KnownFailure) -> bool:
        """Whether a known failure breaks this law, or the law of the same name as the claim that this law needs."""
        is_named = self.name in known.laws or self.needs in known.laws
        return is_named or (known.breaks(self.name) and not self.expects_refusal)


def law(**declared: Any) -> Callable[[Callable[[Any], None]], Law]:
    """Declare the decorated function as the law of its name.

    Arguments that are no attributes of ``Law`` are options of the strategy that draws its cases.
    """
    attributes = {name: declared.pop(name) for name in Law.__dataclass_fields__ if name in declared}
    return lambda check: Law(check.__name__, check, declared, **attributes)


def law_named(name: str) -> Law:
    """Return the law of this name. Raises ModuleNotFoundError if there is none."""
    found: Law = getattr(import_module(f"tests.properties.test_{name}"), name)
    return found


@cache
def basic_laws(*, gradients: bool = True) -> tuple[str, ...]:
    """Return the names of the basic laws by their places; without ``gradients`` of those that take no gradients."""
    laws = map(law_named, sorted(LAWS, key=by_place))
    return tuple(x.name for x in laws if x.is_basic and (gradients or not x.takes_gradients))


@cache
def law_of_sequences() -> Law:
    """Return the law whose cases have earlier calls."""
    return next(law for law in map(law_named, LAWS) if law.has_earlier_calls)


def place_among_laws(law: Law) -> int:
    """Return the number of a law in the order in which a round has all laws."""
    return sorted(LAWS, key=by_place).index(law.name)


def by_place(name: str) -> tuple[float, str]:
    """Return a key that sorts names of laws by the order in which a round has them."""
    return law_named(name).place, name
