"""The declaration of a claim: all that follows from it, on the command line, in a report and in the documentation."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from kernels.spelling import Spelling

if TYPE_CHECKING:
    from strategies.case import Case


def _admits_every_case(value: Any, case: "Case") -> bool:
    return True


def _adds_no_keyword(value: Any) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Claim:
    """What is declared of a field of ``Capabilities`` beside its type and its default.

    Attributes:
        meaning: what a kernel promises by it, in whole sentences of Markdown.
        spelling: how its values are written on the command line; None where they cannot be.
        admits: whether a kernel with this value of the claim answers a case.
        fields: the names of what the claim admits some values of: fields of a case, or ``lengths``, which says
            whether both lengths are equal.
        less: the value of a kernel that was never meant for more than what most calls need; None where no single
            value says so.
        keywords: the names of what a kernel with this value of the claim is called with, beside ``causal`` and
            ``sm_scale``.
    """

    meaning: str
    spelling: Spelling | None = None
    admits: Callable[[Any, "Case"], bool] = _admits_every_case
    fields: tuple[str, ...] = ()
    less: Any = None
    keywords: Callable[[Any], tuple[str, ...]] = _adds_no_keyword


def claim(default: Any, meaning: str, spelling: Spelling | None = None, **declared: Any) -> Any:
    """A field of a dataclass with this default that is declared as a ``Claim``. A dict is copied."""
    metadata = {"claim": Claim(" ".join(meaning.split()), spelling, **declared)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def claims_of(declared: type) -> dict[str, Claim]:
    """The claims that are declared as fields of a dataclass, by name."""
    return {x.name: x.metadata["claim"] for x in fields(declared)}
