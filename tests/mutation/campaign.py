"""Mutants against the suite: how many examples it takes to find a law that the mutant breaks and the kernel keeps."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness import report
from tests.harness.child import Child
from tests.harness.kernel_info import KernelInfo
from tests.harness.verdict import Finding, Verdict
from tests.mutation.schedule import Schedule

CANNOT_RUN = 100
"""A mutant that raises on more examples than this, and on more than half of all, is not tried on further ones."""


class FalseAlarm(AssertionError):
    """The kernel without any bug broke a law."""


@dataclass(frozen=True)
class Attempt:
    """One mutant under one seed: the examples and seconds spent, and how it was caught if it was."""

    examples: int
    seconds: float
    law: str = ""
    case: Case | None = None
    finding: Finding | None = None
    raised: int = 0

    @property
    def only_raised(self) -> bool:
        """Whether the mutant differed from the kernel only by raising: the suite reports that, but no law caught it."""
        return self.finding is None and self.raised > 0


@dataclass(eq=False)
class Campaign:
    """Tries mutants of the kernel ``info`` in ``child``; ``sound`` caches the verdicts on the kernel itself."""

    info: KernelInfo
    child: Child
    schedule: Schedule
    sound: dict[tuple[str, Case], Verdict] = field(default_factory=dict)

    def attempt(self, mutant: str, seed: int, limit: int, *, raises: bool = False) -> Attempt:
        """Try the mutant of this SPEC on at most ``limit`` examples of a seed, until it is caught.

        An exception that the mutant raises counts as caught only if ``raises``, because a mutant that can't run at all
        says nothing about the suite. Raises FalseAlarm if the kernel itself fails a case that catches the mutant.
        """
        start, spent_on_sound, examples, raised = time.perf_counter(), 0.0, 0, 0
        for law, case in self.schedule.examples(seed, limit):
            examples += 1
            finding = self.run(mutant, law, case).finding
            if finding is None:
                continue
            if finding.kind == "exception" and not raises:
                raised += 1
                if raised > CANNOT_RUN and raised > 0.5 * examples:
                    break
                continue
            checking = time.perf_counter()
            kept = self.keeps(law, case)
            spent_on_sound += time.perf_counter() - checking
            if not kept:
                continue
            return Attempt(examples, time.perf_counter() - start - spent_on_sound, law, case, finding)
        return Attempt(examples, time.perf_counter() - start, raised=raised)

    def keeps(self, law: str, case: Case) -> bool:
        """Whether the kernel itself keeps the law on the case. False if it is allowed to refuse the case, and does.

        Raises FalseAlarm if it breaks the law, in a new process as well.
        """
        if (law, case) not in self.sound:
            verdict = self.run(self.info.spec, law, case)
            if verdict.finding:  # a mutant may have spoiled the memory of the process
                self.child.close()
                verdict = self.run(self.info.spec, law, case)
            self.sound[law, case] = verdict
        verdict = self.sound[law, case]
        if verdict.finding is not None:
            raise FalseAlarm(f"{self.info.spec} itself breaks {law} on {case}: {verdict.finding}")
        return verdict.status != "refused"

    def run(self, spec: str, law: str, case: Case) -> Verdict:
        """Run one example. Refusing what is claimed is a finding."""
        record: dict[str, Any] = report.record(spec, self.info.claims, law, case)
        verdict = self.child.run({**record, "safety": SAFETY}, lambda: None)
        return replace(verdict, finding=self.info.finding(verdict))
