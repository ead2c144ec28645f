"""Cases that outlast a run: those that showed a bug, and those that came nearest to a bound."""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from strategies.tensors import check_case
from tests.harness.bugs.bug import Bug, Need
from tests.harness.bugs.failure import Failure
from tests.harness.run import Run, read, run_of
from tests.harness.symptoms import wrong_tensors
from tests.harness.verdict import INTERMITTENT, LEAK, SANITIZER, Finding

Record = TypeVar("Record", "Kept", "Near")


@dataclass(frozen=True)
class Kept:
    """A case that has failed, with what was found on it and what the bug needs, as far as these are known."""

    run: Run
    finding: Finding | None = None
    needs: tuple[Need, ...] = ()

    @classmethod
    def of(cls, bug: Bug) -> Self:
        """Return what is kept of a bug, without what differs from machine to machine."""
        f = bug.failure
        return cls(Run(f.kernel, (), f.law, f.case), f.finding, bug.needs)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return what a case.json or a database holds. What another version has found counts as not known.

        Raises ValueError, in one line, if the record is none of a run.
        """
        run = run_of(dict(fields))
        with suppress(LookupError, TypeError):
            needs = (Need(x["name"], tuple(x["fails"]), tuple(x["holds"])) for x in fields.get("needs", ()))
            return cls(run, Finding(**fields["finding"]), tuple(needs))
        return cls(run)

    @property
    def value(self) -> bytes:
        """Return the record that a database holds."""
        found = asdict(self.finding) if self.finding else None
        needs = [asdict(need) for need in self.needs]
        return _packed({**self.run.to_dict(), "finding": found, "needs": needs})

    @property
    def is_gone_if_it_holds(self) -> bool:
        """Whether the bug is known to be gone once its case holds.

        One that comes and goes, leaks memory, or is reported by a sanitizer is not.
        """
        return self.finding is not None and self.finding.kind not in (INTERMITTENT, LEAK, SANITIZER)

    def bug(self, kernel: str) -> Bug:
        """Return the bug of a kernel that the case has shown. Raises ValueError if nothing is known of it."""
        if self.finding is None:
            raise ValueError("got a case without a finding, expected one that has failed")
        failure = Failure(**vars(self.run), kernel=kernel, finding=self.finding, environment={})
        return Bug(failure, tuple(sorted(wrong_tensors(self.finding))), self.needs)


@dataclass(frozen=True)
class Near:
    """A case that held, and the largest ``ratio`` of error to bound that it had in ``tensor``."""

    run: Run
    tensor: str
    ratio: float

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Return what a database holds. Raises ValueError, LookupError or TypeError for anything else."""
        near = fields["near"]
        return cls(run_of(dict(fields)), str(near["tensor"]), float(near["ratio"]))

    @property
    def place(self) -> tuple[str, str, str]:
        """Return law, dtype and tensor: of each place one case is kept."""
        return self.run.law, self.run.case.dtype, self.tensor

    @property
    def value(self) -> bytes:
        """Return the record that a database holds."""
        return _packed({**self.run.to_dict(), "near": {"tensor": self.tensor, "ratio": self.ratio}})


def nearest(values: Iterable[Near]) -> dict[tuple[str, str, str], Near]:
    """Return the case of each place that is nearest to its bound: the same one in every process."""
    return {near.place: near for near in sorted(values, key=lambda near: (near.ratio, near.value))}


def read_as(make: Callable[[Any], Record], value: bytes) -> Record | None:
    """Return what a database holds as a value; None for one that a newer version of Flashproof has written."""
    with suppress(ValueError, AttributeError, LookupError, TypeError):
        record = make(json.loads(value))
        check_case(record.run.case)
        return record
    return None


def read_report(path: Path) -> Kept:
    """Read the case.json of a report, or a journal. Raises ValueError, in one line, for anything else."""
    read(path)
    return Kept.from_dict(json.loads(path.read_text()))


def _packed(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()
