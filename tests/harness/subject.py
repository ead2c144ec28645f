"""A kernel as the property tests see it: draw its cases, uphold a law on one."""

import math
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from reference.bounds.accumulation import SAFETY, SHRINKING_SAFETY
from strategies.case import Case
from strategies.cases import cases, is_claimed
from strategies.focus import Focus
from tests.harness import report
from tests.harness.budget import (
    EXPLAIN_SECONDS,
    LEAST_SECONDS,
    SECONDS,
    BudgetSpent,
    Clock,
    ShrinkBudget,
    meter,
)
from tests.harness.child import Child, ChildDied, DeviceLost
from tests.harness.explain import HOLDS_ALONE, Seen, explain
from tests.harness.journal import Journal
from tests.harness.kernel_info import KernelInfo
from tests.harness.known import meets, stored_case
from tests.harness.reduce import reduced
from tests.harness.refusals import is_mostly_refused, was_not_run
from tests.harness.report import Failure, Replay
from tests.harness.standalone import exit_status
from tests.harness.tally import Tally
from tests.harness.verdict import Finding, Verdict


class TimeUp(BaseException):
    """The time for a Hypothesis run is over. No Exception, which Hypothesis would take for a failure."""


class KernelFailure(AssertionError):
    """A kernel broke a law. ``failure`` is the record of it; what a user reads is made of the smallest one."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(report.headline(failure))
        self.failure = failure


@cache
def failure_type(kind: str, tensor: str) -> type[KernelFailure]:
    """A type for each way to fail: Hypothesis tells bugs apart by type, and shrinks each by itself."""
    return type(f"KernelFailure_{kind}_{tensor}".rstrip("_"), (KernelFailure,), {})


def name_of(law: Callable[..., None]) -> str:
    """The name of a law, by its module."""
    return law.__module__.rpartition(".test_")[2]


class Subject:
    """One kernel at one dtype in one process.

    A case under a law is run in ``child`` after it was noted in ``journal``; a failure's report goes below
    ``report_dir``. With ``replay``, that one case is all that is drawn; of ``corpus``, cases are run before any is.
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
        corpus: Sequence[Replay] = (),
        shrinking: ShrinkBudget | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.info = info
        self.dtype = dtype
        self.child = child
        self.environment = environment
        self.report_dir = report_dir
        self.journal = journal
        self.max_seqlen = max_seqlen
        self.replay = replay
        self.corpus = corpus
        self.device_type = child.device.partition(":")[0]
        self.shrinking = shrinking or ShrinkBudget(SECONDS[self.device_type])
        self.clock = clock or Clock()
        self.strategies: dict[tuple[Any, ...], st.SearchStrategy[Case]] = {}
        self.failures: dict[str, Failure] = {}
        self.told: set[str] = set()
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
        key = (repr(self.focus), *sorted(options.items()))
        if key not in self.strategies:
            self.strategies[key] = cases(
                self.focus.capabilities,
                heads=self.focus.heads,
                dtype=self.dtype,
                device_type=self.device_type,
                **options,
            )
        return self.strategies[key]

    def corpus_cases(self, law: Callable[..., None]) -> list[Case]:
        """Those of the corpus, of a law and this dtype, that the kernel claims."""
        return [
            kept.case
            for kept in self.corpus
            if (kept.law, kept.case.dtype) == (name_of(law), self.dtype)
            and is_claimed(kept.case, self.info.capabilities)
        ]

    def requires(self, claim: str) -> None:
        """Skip the test, and say so, where the kernel doesn't claim what it is about."""
        if not getattr(self.info.capabilities, claim):
            pytest.skip(f"{self.info.name} does not claim {claim}")

    def begin(self, focus: Focus | None = None, seconds: float = math.inf) -> None:
        """Start a new item: draw from ``focus``, by default all that the kernel claims, for so many seconds.

        Failures of the items before are reported, and neither shrunk nor told again.
        """
        self.tally = Tally()
        self.generated = 0
        self.focus = focus or Focus(self.info.capabilities)
        self.deadline = time.perf_counter() + seconds
        self.told |= set(self.failures)
        self.failures = {}
        self.begin_search()

    def begin_search(self, *, without_simplest: bool = False) -> None:
        """Start a new Hypothesis run: failures of those before are reported, and not shrunk again.

        ``without_simplest`` leaves out its first case, which is the simplest of all that can be drawn.
        """
        self.leaves_out_next = without_simplest
        self.broken: dict[Case, Finding] = {}
        self.unwritten: list[str] = []
        self.shrink_until = math.inf
        self.reported = self.told | set(self.failures)

    def uphold(self, law: Callable[..., None], case: Case) -> None:
        """Run ``law`` on ``case`` in the child. Raises KernelFailure where it is broken, TimeUp when late."""
        if case not in self.broken and self._is_late():
            raise TimeUp  # what is smallest so far stays
        if self.leaves_out_next:
            self.leaves_out_next = False
            return
        self.generated += not self.broken
        name = name_of(law)
        if self.replay is None and any(
            name in known.laws and meets(case, known) for known in self.info.known_failures
        ):
            self.tally.known += 1
            return
        # Hypothesis runs a failing case again: it must fail again, also by the rule for fresh data.
        finding = self.broken.get(case) or self._run(name, case)
        if finding is None:
            return
        info = self.info
        failure = Failure(info.spec, info.name, info.claims, name, case, finding, self.environment)
        if failure.digest in self.reported:
            return
        if case not in self.broken:
            self._write(failure)
        until = time.perf_counter() + self.shrinking.within(self.clock).drawing_seconds
        self.shrink_until = min(self.shrink_until, until)
        self.broken[case] = finding
        self.failures[failure.digest] = failure
        raise failure_type(finding.kind, finding.tensor)(failure)

    def finish_search(self) -> None:
        """End a Hypothesis run: shrink what it found further, and write the stand-alone scripts."""
        smallest: list[Case] = []
        for digest in [digest for digest in self.failures if digest not in self.reported]:
            if self.replay is None:
                smallest.append(self._reduce(digest, smallest))
            failure, script = self._scripted(self._explained(self.failures[digest]))
            self.failures[digest] = failure
            self._write(failure, script)

    def messages(self) -> list[str]:
        """The failures of this Hypothesis run, as a user reads them."""
        new = (failure for digest, failure in self.failures.items() if digest not in self.reported)
        return [report.message(failure, self.report_dir) for failure in new] + self.unwritten

    def known_that_hold(self, law: Callable[..., None]) -> list[str]:
        """Complaints about known failures of a law whose stored case holds by now."""
        stored = [
            (known, stored_case(known)) for known in self.info.known_failures if known.laws[0] == name_of(law)
        ]
        return [
            f"{self.info.name}: a known failure is gone: {known.what}\n"
            f"  remove it from known_failures: its case holds: {case!r}"
            for known, case in stored
            if self.replay is None
            and case is not None
            and case.dtype == self.dtype
            and self._holds(known.laws[0], case)
        ]

    def complaint(self) -> str:
        """Why the item shows nothing, or nearly nothing; what the run says of it is told once for the kernel."""
        if self.failures:
            return ""
        if was_not_run(self.tally):
            return f"none of the cases of {self.info.name} could be run here"
        return f"{self.info.name} refused nearly all cases" if is_mostly_refused(self.tally) else ""

    def _is_late(self) -> bool:
        """Whether the time is up: for smaller cases, or for examples, of which the first needs only the run's time."""
        if self.broken:
            return time.perf_counter() > self.shrink_until
        return self.clock.left <= 0 or (self.tally.drawn > 0 and time.perf_counter() > self.deadline)

    def _reduce(self, digest: str, smallest: Sequence[Case]) -> Case:
        """Look for smaller cases that fail in the same way; each that is found replaces the report.

        One of ``smallest``, of other failures, comes first: a bug often shows in several tensors of a case.
        """
        budget = self.shrinking.within(self.clock)
        spend = meter(budget.reducing_seconds, budget.calls)

        def fails(case: Case) -> bool:
            spend()
            smaller = self._alike(self.failures[digest], case)
            if smaller is None:
                return False
            self._write(smaller)
            self.failures[digest] = smaller
            return True

        with suppress(BudgetSpent):
            any(map(fails, smallest))
            reduced(self.failures[digest].case, fails, self.info.capabilities)
        return self.failures[digest].case

    def _explained(self, failure: Failure) -> Failure:
        """The failure with what can be told of it."""
        spend = meter(self.clock.share(EXPLAIN_SECONDS))

        def fails(case: Case) -> bool:
            # In any way: a field does not matter where the same bug makes another tensor wrong without it.
            spend()
            return self._run(failure.law, case) is not None

        def look(case: Case) -> Seen | None:
            spend()
            if self._alike(failure, case) is None:
                return None
            request = report.record(failure.spec, failure.claims, failure.law, case)
            answer = self.child.ask({"do": "look", **request, "safety": SAFETY}, self.child.run_seconds)
            return Seen(tuple(answer["sentences"]), tuple(answer["pictures"]))

        # Where no number is wrong there is nothing to look at; the process may end with each run, and take seconds.
        looks = None if failure.finding.actual is None else look
        with suppress(ChildDied):
            told = explain(
                failure.case, fails, looks, self.info.capabilities, lengths_tell=failure.law != "ragged"
            )
            return replace(failure, explanation=told)
        return failure

    def _alike(self, failure: Failure, case: Case) -> Failure | None:
        """The same failure on another case; None where that holds, or fails in another way."""
        finding = self._run(failure.law, case)
        if finding is None or (finding.tensor, finding.kind) != (
            failure.finding.tensor,
            failure.finding.kind,
        ):
            return None
        return replace(failure, case=case, finding=finding)

    def _write(self, failure: Failure, script: str | None = None) -> None:
        """Write the report; where that can't be done the run goes on, and says so beside the failure."""
        try:
            report.write(failure, self.report_dir, script)
        except OSError as e:
            self.unwritten = [f"report not written: {self.report_dir / failure.folder}: {e.strerror}"]

    def _run(self, law: str, case: Case) -> Finding | None:
        """One new case: run and count it."""
        verdict = self._try(law, case)
        self.tally.add(verdict, case)
        return self.info.finding(verdict)

    def _try(self, law: str, case: Case) -> Verdict:
        """Journal and launch."""
        record = report.record(self.info.spec, self.info.claims, law, case)
        self.journal.note(record)
        # A search for a smaller case climbs err/bound: rule 2 needs a wider margin from the first failure on.
        safety = SHRINKING_SAFETY if self.broken else SAFETY
        return self.child.run({**record, "safety": safety}, self.journal.sync)

    def _holds(self, law: str, case: Case) -> bool:
        """Whether a case could be run, which a device with too little memory left does not, and did not fail."""
        verdict = self._try(law, case)
        return verdict.status != "skipped" and self.info.finding(verdict) is None

    def _scripted(self, failure: Failure) -> tuple[Failure, str | None]:
        """The failure with its stand-alone script, or with why there is none: one that exits 0 would call it mended."""
        script = self._script(failure)
        # A script that hangs as the kernel does shows it; waiting for that again shows nothing more.
        if script is not None and failure.finding.kind != "hung":
            with suppress(OSError, subprocess.TimeoutExpired):  # then it goes as it is
                if exit_status(script, self._script_seconds()) == 0:
                    known = failure.explanation
                    told = replace(known, sentences=(*known.sentences, HOLDS_ALONE))
                    return replace(failure, explanation=told), None
        return failure, script

    def _script(self, failure: Failure) -> str | None:
        """The stand-alone script of a failure; None where its calls could not be made a second time."""
        seconds = self._script_seconds()
        request = {
            "do": "repro",
            **report.record(failure.spec, failure.claims, failure.law, failure.case),
            "safety": SAFETY,
            "title": report.headline(failure),
            "seconds": seconds,
        }
        for kind in (failure.finding.kind, "died"):  # where a crash comes and goes, as if it had come
            with suppress(ChildDied, DeviceLost):
                finding = asdict(replace(failure.finding, kind=kind))
                return self.child.ask({**request, "finding": finding}, seconds)["text"]
        return None

    def _script_seconds(self) -> float:
        """How long a script may take: who waits for one has not the patience that a new kernel's compilation gets."""
        return max(LEAST_SECONDS, self.clock.cut(min(self.child.run_seconds, self.child.start_seconds)))
