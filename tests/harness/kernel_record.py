"""What is known of a kernel before it runs: its claims, and its known failures with the cases that meet them."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from kernels.contract import Capabilities, KnownFailure
from strategies.case import Case, Spike


def described(
    name: str, claims: Capabilities, printed: Mapping[str, str], failures: Iterable[KnownFailure]
) -> dict[str, Any]:
    """Return what is known of a kernel as a record for JSON, without what only the child process needs of its claims.

    ``printed`` are its claims as ``--claims`` takes them, and ``failures`` those that are known on the device.
    """
    kept = {x: y for x, y in vars(claims).items() if x not in ("arithmetic", "designs")}
    return {
        "name": name,
        "claims": {**kept, "launch": dict(claims.launch)},
        "printed": printed,
        "known_failures": [asdict(known) for known in failures],
    }


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
