"""A kernel as the property tests see it: draw its cases, uphold a law on one."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from kernels.contract import Capabilities
from reference.bounds.accumulation import SAFETY, SHRINKING_SAFETY
from strategies.case import Case
from strategies.cases import cases
from tests.harness import report
from tests.harness.child import Child, ChildDied
from tests.harness.journal import Journal
from tests.harness.report import Failure
from tests.harness.tally import Tally
from tests.harness.verdict import Finding, Verdict

MOST_REFUSED = 0.9
"""A kernel that may refuse still fails when it refuses more than this share of what it claims."""


SHRINK_SECONDS = {"cpu": 30.0, "cuda": 20.0}
"""How long smaller cases are looked for after a failure: each crash or hang costs the start of a process."""


class TimeUp(BaseException):
    """The deadline of a subject is over. No Exception, which Hypothesis would take for a failure."""


class KernelFailure(AssertionError):
    """A kernel broke a law. ``failure`` is the record of it; the text is the message a user reads."""

    def __init__(self, failure: Failure, text: str) -> None:
        super().__init__(text)
        self.failure = failure


@cache
def failure_type(kind: str, tensor: str) -> type[KernelFailure]:
    """A type for each way to fail: Hypothesis tells bugs apart by type, and shrinks each by itself."""
    return type(f"KernelFailure_{kind}_{tensor}".rstrip("_"), (KernelFailure,), {})


class Unavailable(ValueError):
    """A registered kernel that can't run on a device."""


@dataclass(frozen=True)
class KernelInfo:
    """What the parent knows of a kernel; the kernel itself is only in the child."""

    spec: str
    claims: tuple[str, ...]
    name: str
    capabilities: Capabilities
    printed: dict[str, str]

    @classmethod
    def ask(cls, child: Child, spec: str, claims: tuple[str, ...]) -> "KernelInfo":
        """Describe a kernel by way of the child. Raises ValueError, in one line, if it can't be had."""
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
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in answer["claims"].items()
        }
        values["launch"] = {name: tuple(choices) for name, choices in values["launch"].items()}
        return cls(spec, claims, answer["name"], Capabilities(**values), answer["printed"])

    def finding(self, verdict: Verdict) -> Finding | None:
        """What a verdict holds against the kernel: a refusal, too, where it claims to refuse nothing."""
        if verdict.status == "refused" and not self.capabilities.may_refuse:
            claim = f"a claimed case is not refused, but NotImplementedError was raised: {verdict.reason}"
            return Finding(claim=claim, kind="refused")
        return verdict.finding


class Subject:
    """One kernel at one dtype in one process.

    A case under a law is run in ``child`` after it was noted in ``journal``; a failure's report goes below
    ``report_dir``. With ``replay``, that one case is all that is drawn.
    """

    # No dataclass: Hypothesis prints those field by field.
    def __init__(
        self,
        info: KernelInfo,
        dtype: str,
        *,
        child: Child,
        environment: dict[str, str],
        report_dir: Path,
        journal: Journal,
        max_seqlen: int | None = None,
        replay: Case | None = None,
    ) -> None:
        self.info = info
        self.dtype = dtype
        self.child = child
        self.environment = environment
        self.report_dir = report_dir
        self.journal = journal
        self.max_seqlen = max_seqlen
        self.replay = replay
        self.device_type = child.device.partition(":")[0]
        self.deadline = math.inf
        self.strategies: dict[tuple[Any, ...], st.SearchStrategy[Case]] = {}
        self.begin()

    def __repr__(self) -> str:
        """As Hypothesis prints it."""
        return f"<{self.info.name} {self.dtype}>"

    def cases(self, **options: Any) -> st.SearchStrategy[Case]:
        """Cases that the kernel claims at this dtype; ``options`` as in ``strategies.cases.cases``."""
        if self.replay is not None:
            return st.just(self.replay)
        if self.max_seqlen is not None:
            options["max_seqlen"] = self.max_seqlen
        # Asked for at every example: Hypothesis takes longer to look at a new strategy than to draw from it.
        key = tuple(sorted(options.items()))
        if key not in self.strategies:
            self.strategies[key] = cases(
                self.info.capabilities, dtype=self.dtype, device_type=self.device_type, **options
            )
        return self.strategies[key]

    def requires(self, claim: str) -> None:
        """Skip the test, and say so, where the kernel doesn't claim what it is about."""
        if not getattr(self.info.capabilities, claim):
            pytest.skip(f"{self.info.name} does not claim {claim}")

    def begin(self) -> None:
        """Start a new item: forget its counts and failures."""
        self.tally = Tally()
        self.failures: dict[str, Failure] = {}
        self.begin_search()

    def begin_search(self) -> None:
        """Start a new Hypothesis run: failures of those before are reported, and not shrunk again."""
        self.broken: dict[Case, Finding] = {}
        self.shrink_until = math.inf
        self.reported = set(self.failures)

    def uphold(self, law: Callable[..., None], case: Case) -> None:
        """Run ``law`` on ``case`` in the child. Raises KernelFailure where it is broken, TimeUp when late."""
        if not self.broken and time.perf_counter() > self.deadline:
            raise TimeUp
        if time.perf_counter() > self.shrink_until and case not in self.broken:
            return  # what is smallest so far stays: Hypothesis takes every smaller case as one that holds
        name = law.__module__.rpartition(".test_")[2]
        # Hypothesis runs a failing case again: it must fail again, also by the rule for fresh data.
        finding = self.broken.get(case) or self._run(name, case)
        if finding is None:
            return
        info = self.info
        failure = Failure(info.spec, info.name, info.claims, name, case, finding, self.environment)
        if failure.digest in self.reported:
            return
        if case not in self.broken:
            report.write(failure, self.report_dir)
        self.shrink_until = min(self.shrink_until, time.perf_counter() + SHRINK_SECONDS[self.device_type])
        self.broken[case] = finding
        self.failures[failure.digest] = failure
        raise failure_type(finding.kind, finding.tensor)(failure, report.message(failure, self.report_dir))

    def finish_search(self) -> None:
        """End a Hypothesis run: write the stand-alone scripts of what it found."""
        for digest in self.failures.keys() - self.reported:
            failure = self.failures[digest]
            report.write(failure, self.report_dir, self._script(failure))

    def complaint(self) -> str:
        """What is wrong with the item as a whole: a kernel that refused nearly everything."""
        refused, tried = self.tally.refusals, self.tally.examples + self.tally.refusals
        if self.failures or refused <= MOST_REFUSED * tried:
            return ""
        reasons = ", ".join(list(self.tally.reasons)[:3]) or "no reason given"
        return (
            f"{self.info.name} refused {refused} of {tried} cases that it claims ({reasons}); "
            "claim less with --claims, or mend the kernel"
        )

    def _run(self, law: str, case: Case) -> Finding | None:
        """One new case: journal, launch, count."""
        record = report.record(self.info.spec, self.info.claims, law, case)
        self.journal.note(record)
        # A search for a smaller case climbs err/bound: rule 2 needs a wider margin from the first failure on.
        safety = SHRINKING_SAFETY if self.broken else SAFETY
        compile_key = (self.info.spec, law, case.dtype, case.head_dim, case.causal, case.launch)
        verdict = self.child.run({**record, "safety": safety}, compile_key, self.journal.sync)
        self.tally.add(verdict, case)
        return self.info.finding(verdict)

    def _script(self, failure: Failure) -> str | None:
        """The stand-alone script of a failure; None where its calls could not be made a second time."""
        request = {
            "do": "repro",
            **report.record(failure.spec, failure.claims, failure.law, failure.case),
            "safety": SAFETY,
            "finding": asdict(failure.finding),
            "title": report.headline(failure),
            "seconds": self.child.run_seconds + self.child.compile_seconds,
        }
        try:
            return self.child.ask(request, request["seconds"])["text"]
        except ChildDied:  # a crash that comes and goes; the report stands without a script
            return None
