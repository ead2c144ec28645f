"""A kernel's name, claims and known failures, as the child process reports them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kernels.contract import Capabilities, KnownFailure
from kernels.registry import PUBLIC, REGISTERED
from strategies.coverage import Coverage
from tests.harness.kernel_record import described, known_failure
from tests.harness.running.child import Child, ChildDied
from tests.harness.running.tally import coverage_of
from tests.harness.verdict import Finding, Verdict

PROBE_SECONDS = 60.0
"""Time limit of the first calls of a kernel, compilation included."""


class Unavailable(ValueError):
    """A registered kernel that can't run on a device."""


@dataclass(frozen=True)
class KernelInfo:
    """What the parent knows of a kernel, which exists only in the child."""

    spec: str
    claims: tuple[str, ...]
    name: str
    capabilities: Capabilities
    printed: dict[str, str]
    known_failures: tuple[KnownFailure, ...] = ()
    device_type: str = "cpu"

    @classmethod
    def ask(cls, child: Child, spec: str, claims: tuple[str, ...]) -> "KernelInfo":
        """Ask the child to describe a kernel. Raises ValueError, with a message of one line, if it can't be loaded."""
        try:
            answer = child.ask({"do": "describe", "kernel": spec, "claims": claims})
        except ChildDied as death:
            raise ValueError(
                f"kernel {spec!r}: expected a kernel that can be imported, but {death}"
            ) from death
        if "unavailable" in answer:
            raise Unavailable(f"kernel {spec!r}: {answer['unavailable']}")
        if "error" in answer:
            raise ValueError(answer["error"])
        device_type = child.device.partition(":")[0]
        return cls.from_dict({"spec": spec, "stated": claims, "device_type": device_type, **answer})

    @cached_property
    def coverage(self) -> Coverage:
        """What tells how much was tried of what the kernel claims."""
        return coverage_of(self.capabilities, self.device_type)

    def to_dict(self) -> dict[str, Any]:
        """Return a record for JSON."""
        return {
            "spec": self.spec,
            "stated": self.claims,
            "device_type": self.device_type,
            **described(self.name, self.capabilities, self.printed, self.known_failures),
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "KernelInfo":
        """Make the record again from what ``to_dict`` returned, also after JSON, which turns tuples into lists."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields["claims"].items()
        }
        values["launch"] = {name: tuple(choices) for name, choices in values["launch"].items()}
        known = tuple(known_failure(each) for each in fields["known_failures"])
        stated = tuple(fields["stated"])
        claims, device_type = Capabilities(**values), fields.get("device_type", "cpu")
        return cls(fields["spec"], stated, fields["name"], claims, fields["printed"], known, device_type)

    def check_returned(self, child: Child) -> None:
        """Call the kernel in the child. Raises ValueError, in one line, if it can't be run here or returns no answer.

        Registered kernels say themselves where they can't be run. If a call ends the process or takes too long, that is
        left to the laws, which report it with a case.
        """
        if self.spec in {*REGISTERED, *PUBLIC}:
            return
        request = {"do": "probe", "kernel": self.spec, "claims": self.claims}
        try:
            told = child.ask(request, PROBE_SECONDS)["told"]
        except ChildDied:
            return
        if told is not None:
            raise ValueError(f"kernel {self.spec!r}: {told}")

    def is_called(self, spec: str) -> bool:
        """Whether a SPEC, perhaps of another machine, or a name is that of the kernel, whatever folder it is in."""
        return Path(spec).name in (self.name, Path(self.spec).name)

    def finding(self, verdict: Verdict) -> Finding | None:
        """Return what a verdict says against the kernel, which includes a refusal if it claims to refuse nothing."""
        if verdict.status == "refused" and not self.capabilities.may_refuse:
            claim = f"a claimed case is not refused, but NotImplementedError was raised: {verdict.reason}"
            return Finding(claim=claim, kind="refused")
        return verdict.finding
