"""Try mutants of a kernel on examples, until one shows a law that the mutant breaks and the kernel itself keeps."""

import time
from dataclasses import dataclass, field, replace

from strategies.case import Case
from tests.harness.run import Run
from tests.harness.running.child import Child
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.verdict import Finding, Verdict
from tests.mutation.schedule import Schedule

CANNOT_RUN = 100
"""A mutant that raises on more than this many examples, and on more than half of all, is not tried any further."""


class FalseAlarm(AssertionError):
    """The kernel itself broke a law, so that the suite cannot be trusted with its mutants."""


@dataclass(frozen=True)
class Attempt:
    """The outcome of one mutant under one seed.

    ``examples`` and ``seconds`` were spent on it, without those spent on the kernel itself. ``law``, ``case`` and
    ``finding`` say how it was caught; ``finding`` is None if it was not. ``raised`` counts exceptions that were passed
    over.
    """

    examples: int
    seconds: float
    law: str = ""
    case: Case | None = None
    finding: Finding | None = None
    raised: int = 0

    @property
    def only_raised(self) -> bool:
        """Whether nothing but exceptions tells the mutant from the kernel: a run reports them, but no law caught it."""
        return self.finding is None and self.raised > 0


@dataclass(eq=False)
class Campaign:
    """Tries mutants of the kernel ``info`` in ``child``; ``sound`` keeps the verdicts on the kernel itself.

    All mutants run in one process, because hundreds of them would otherwise each wait for a new one.
    """

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
        """Whether the kernel itself keeps the law on the case; False if it refuses the case, and is allowed to.

        Raises FalseAlarm if it breaks the law, and breaks it again in a new process.
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
        """Return the verdict on one example. A refusal is a finding if the kernel claims to refuse nothing."""
        run = Run(spec, self.info.claims, law, case)
        verdict = self.child.run(run, lambda: None)
        if verdict.finding is not None and verdict.finding.kind == "died":
            # The process may have ended by memory that an earlier mutant has spoiled; the next one is new.
            verdict = self.child.run(run, lambda: None)
        return replace(verdict, finding=self.info.finding(verdict))
