"""The declaration of a claim: all that follows from it, on the command line, in a report and in the documentation."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from kernels.contract.spelling import Spelling


def _admits_every_case(value: Any, case: Any) -> bool:
    return True


def _adds_no_keyword(value: Any) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Claim:
    """What is declared of a field of ``Capabilities`` beside its type and its default.

    Attributes:
        meaning: what a kernel promises by it, in whole sentences of Markdown.
        spelling: how its values are written on the command line; None where they cannot be.
        admits: a function of the claim's value and a case, which says whether a kernel with this value answers the
            case.
        fields: the names of the fields of a case that the claim restricts; ``lengths`` stands for whether both
            lengths are equal.
        less: the value that a report suggests to the author of a kernel that fails only in cases which this value
            excludes, such as False for ``grouped_heads``; None where no single value excludes them.
        beside: another claim, as it is written on the command line, without which other values contradict the default
            claims; "" for nearly all.
        keywords: a function of the claim's value that returns the names of the keywords which a kernel with this value
            takes, beside ``causal`` and ``sm_scale``.
    """

    meaning: str
    spelling: Spelling | None = None
    admits: Callable[[Any, Any], bool] = _admits_every_case
    fields: tuple[str, ...] = ()
    less: Any = None
    beside: str = ""
    keywords: Callable[[Any], tuple[str, ...]] = _adds_no_keyword


def claim(default: Any, meaning: str, spelling: Spelling | None = None, **declared: Any) -> Any:
    """Return a dataclass field with this default and a ``Claim`` in its metadata. A dict as default is copied."""
    metadata = {"claim": Claim(" ".join(meaning.split()), spelling, **declared)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def claims_of(declared: type) -> dict[str, Claim]:
    """Return the ``Claim`` of each field of a dataclass, by the field's name."""
    return {x.name: x.metadata["claim"] for x in fields(declared)}
