"""Known failures: which cases meet one, and the stored case of each that is run every time."""

from typing import Any

from kernels.contract import KnownFailure
from strategies.case import Case, Spike


def known_failure(fields: dict[str, Any]) -> KnownFailure:
    """Make a known failure from what ``asdict`` returned, also after JSON, which turns tuples into lists."""
    tuples = {name: tuple(fields[name]) for name in ("laws", "kept", "torch")}
    where = {name: tuple(values) for name, values in fields["where"].items()}
    return KnownFailure(**{**fields, **tuples, "where": where})


def meets(case: Case, known: KnownFailure) -> bool:
    """Whether a case, under one of the failure's laws, is one of those that fail."""
    return all(getattr(case, name) in values for name, values in known.where.items())


def stored_case(known: KnownFailure) -> Case | None:
    """Return the case of a known failure that every run tries, or None if there is none."""
    if known.case is None:
        return None
    spikes = (Spike(x["tensor"], tuple(x["index"]), x["value"]) for x in known.case.get("spikes", ()))
    return Case(**{**known.case, "spikes": tuple(spikes)})
