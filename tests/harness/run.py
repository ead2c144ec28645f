"""One run of a case: the record that files hold, that the child process is sent, and that both are read by."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference.bounds.accumulation import SAFETY
from strategies.case import Case, from_record, to_record
from strategies.tensors import check_case
from tests.harness.law import LAWS

FORMAT = 1
"""The version of the record's format. The case in it has a version of its own."""

NO_DESIGN, WHOLE_DESIGN, ONE_DESIGN, ALL_DESIGNS = DESIGNS = ("none", "whole", "one", "all")
"""How many of the less precise designs that would explain a failure are looked for.

"whole" stands for one that explains all that is wrong; "one" and "all" also look for what explains a part, so that only
the rest is told. To look for all of them takes several times as long as to find the failure.
"""


@dataclass(frozen=True)
class Run:
    """A law tried on one case of the kernel of a SPEC, with ``claims`` stated beside it, each as ``key=value``.

    Tensors in ``ignored`` are not judged. ``safety`` is how many standard deviations rule 2 of the bounds allows.
    ``repeats`` is how often a replay tries the case at most, as its failure comes and goes. ``sanitizer`` is the tool
    that watches the kernel, if that is what reports the failure. ``designs`` is one of ``DESIGNS``. ``alternatives``
    are what the kernel is taken to compute, each as a record of ``reference.alternatives`` in JSON.
    """

    spec: str
    claims: tuple[str, ...]
    law: str
    case: Case
    ignored: frozenset[str] = frozenset()
    safety: float = SAFETY
    repeats: int = 1
    sanitizer: str = ""
    designs: str = ALL_DESIGNS
    alternatives: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the record that files hold: the run without ``safety``, ``designs`` and what has its default."""
        kept: dict[str, Any] = {"kernel": self.spec, "claims": list(self.claims), "law": self.law}
        ignored = {"ignored": sorted(self.ignored)} if self.ignored else {}
        repeats = {"repeats": self.repeats} if self.repeats > 1 else {}
        sanitizer = {"sanitizer": self.sanitizer} if self.sanitizer else {}
        alternatives = {"alternatives": list(self.alternatives)} if self.alternatives else {}
        kept |= {**ignored, **repeats, **sanitizer, **alternatives}
        return {"flashproof": FORMAT, **kept, "case": to_record(self.case)}

    def request(self, do: str, **more: Any) -> dict[str, Any]:
        """Return the request by which the child process does something with this run."""
        return {"do": do, **self.to_dict(), "safety": self.safety, "designs": self.designs, **more}


def run_of(record: dict[str, Any]) -> Run:
    """Return the run of a record or a request. Raises ValueError, in one line, for what neither would hold."""

    def value(key: str, expected: str, accepts: Callable[[Any], bool], default: Any = None) -> Any:
        found = record.get(key, default)
        if not accepts(found):
            raise ValueError(f"{key}: got {found!r:.80}, expected {expected}")
        return found

    value("flashproof", f"format {FORMAT}", lambda x: x == FORMAT)
    return Run(
        value("kernel", "a string", lambda x: isinstance(x, str)),
        tuple(value("claims", "a list of key=value strings", _are_strings)),
        value("law", f"one of {', '.join(LAWS)}", lambda x: x in LAWS),
        from_record(record.get("case")),
        frozenset(value("ignored", "a list of tensors", _are_strings, [])),
        value("safety", "a number above 0", lambda x: isinstance(x, float) and x > 0, SAFETY),
        value("repeats", "an integer above 0", lambda x: type(x) is int and x > 0, 1),
        value("sanitizer", f"one of {', '.join(SANITIZERS)}", lambda x: x in ("", *SANITIZERS), ""),
        value("designs", f"one of {', '.join(DESIGNS)}", lambda x: x in DESIGNS, ALL_DESIGNS),
        tuple(value("alternatives", "a list of strings", _are_strings, [])),
    )


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, str) for x in value)


def read(path: Path) -> Run:
    """Read the case.json of a report, or a journal. Raises ValueError, in one line, for anything else."""
    expected = "expected the case.json of a report"
    try:
        record: Any = json.loads(path.read_text())
    except OSError as e:
        raise ValueError(f"{path}: can't be read ({e.strerror}), {expected}") from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path}: is not JSON ({e}), {expected}") from e
    if not isinstance(record, dict) or "flashproof" not in record:
        raise ValueError(f"{path}: {expected}, got other JSON")
    try:
        run = run_of(record)
        check_case(run.case)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    return run


COMPUTE: Mapping[str, tuple[str, ...]] = {
    # Behind each allocation lies memory that nobody may touch; otherwise the next allocation may begin there.
    "memcheck": ("--padding", str(2**20), "--report-api-errors", "no"),
    "racecheck": (),
    "initcheck": (),
}
"""Tools of compute-sanitizer, each with its own options."""


TRITON: Mapping[str, Mapping[str, str]] = {
    "triton": {"TRITON_DEBUG": "1"},
    "consan": {"TRITON_INSTRUMENTATION_MODE": "consan"},
}
"""Checks of Triton's compiler, each with the environment that asks for it."""


SANITIZERS = (*COMPUTE, *TRITON)
