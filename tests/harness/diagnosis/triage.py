"""What is done with a failure: known bugs explain it, or it waits for another process, or it is investigated."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from strategies.case import Case
from tests.harness.bugs.attribution import FailingExample, Outcome, explain_by_known_bugs, of_each_kind
from tests.harness.bugs.bug import Bug, in_parts, with_tensors
from tests.harness.bugs.duplicates import met_again, tells_more
from tests.harness.bugs.failure import COMES_AND_GOES, HOLDS_ALONE, Explanation, Failure
from tests.harness.bugs.restatement import restate_by_basic_law, restate_by_forward, restate_by_its_calls
from tests.harness.certificates.certified import beside_certified, explained_by, without_designs
from tests.harness.certificates.same import certified_as, why_duplicates
from tests.harness.clock import ShrinkBudget
from tests.harness.diagnosis.investigation import Investigation
from tests.harness.diagnosis.known_bugs import KnownBugs
from tests.harness.diagnosis.reruns import (
    GROWN_BYTES,
    REPEATS,
    TOGETHER,
    Watch,
    as_sequence,
    blamed_for_smallest,
    fails_again,
    fails_anew,
    intermittent,
    is_misled,
    is_of_every_run,
    leak_finding,
    left_behind,
    makes_several_calls,
    right_alone,
    sample,
    smaller_leak,
    with_all_designs,
    with_ordinary_numbers,
    without_design_of_strides,
    without_earlier_calls,
)
from tests.harness.kernel_record import meets
from tests.harness.law import law_named
from tests.harness.running.child import HarnessError, OutOfTime
from tests.harness.running.runs import HANG_SECONDS, Runs, Try
from tests.harness.running.sanitizers import Report, finding
from tests.harness.symptoms import is_small, wrong_tensors
from tests.harness.verdict import INTERMITTENT, LEAK, NUMBERS, Finding

WAIT_SECONDS = 3.0
"""Seconds after an item's time has run out in which it may wait for other processes, and sort the last failures."""

IN_GENERAL_ALONE = (
    "{} fails only as compiled for any sizes and strides, which no user does: no later case is run so"
)
"""The message about a failure that shows only if the kernel is compiled for any sizes and strides."""

POLL_SECONDS = 0.2
"""Seconds after which it is checked again whether another process has finished its investigation."""


@dataclass
class Triage:
    """Sorts the failures of one kernel at one dtype.

    A failure that known bugs explain is counted for them. Any other is investigated at once, unless another process
    investigates a failure of the kernel, also of its forward or also of its gradients. Then it waits, since it may be
    the same bug. A failure met at the end of a run is reported with what is known, or left to the next run if it can't
    be distinguished from a known bug.

    Attributes:
        runs: runs cases of the kernel.
        known: the kernel's known bugs.
        environment: versions and devices, for reports.
        shrinking: the time and the calls for one investigation.
        waiting: failures that wait for the investigation of another process.
        late: failures left to the next run.
        others_wait: whether further failures wait, for which an investigation must leave time.
        deadline: the end of the item's time, by ``time.perf_counter``.
        may_grow: how many bytes the child may grow before a case is repeated to look for a leak.
        spoilt: for each law and kind of failures that a bug which keeps state may have made, how many there were, and
            whether the last that was tried in a new process held there.
        sanitizers: the sanitizers under which a few of the passing cases are run.
    """

    runs: Runs
    known: KnownBugs
    environment: dict[str, str]
    shrinking: ShrinkBudget
    waiting: list[FailingExample] = field(default_factory=list)
    late: list[FailingExample] = field(default_factory=list)
    others_wait: bool = False
    deadline: float = math.inf
    may_grow: int = GROWN_BYTES
    sanitizers: tuple[str, ...] = ()
    spoilt: dict[tuple[Any, ...], tuple[int, bool]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.watches = [Watch(name, self.runs) for name in self.sanitizers]

    @property
    def notices(self) -> list[str]:
        """Return lines about what could not be done, which are printed once at the end of the run."""
        return [*self.known.finds.notices, *(line for watch in self.watches for line in watch.told)]

    def learn(self) -> None:
        """Read what other processes have found, and sort the failures that waited for it, as far as there is time."""
        self.known.learn()
        if any(bug.needs_other_calls for bug in self.known.bugs.values()) and self.runs.has_quick_copies:
            self.runs.go_on_in_copies()
        waiting, self.waiting = self.waiting, []
        while waiting and time.perf_counter() < self.deadline:
            broken = waiting.pop(0)
            self.others_wait = bool(waiting)
            if self.known.ledger.is_busy(self.known.kernel, broken.finding.part):
                self.waiting.append(broken)
            else:
                self.attribute(broken)
        self.others_wait = False
        self.waiting = [*self.waiting, *waiting]

    def finish(self, *, last: bool = True) -> None:
        """End an item: sort failures that wait for the investigation of another process.

        Before the ``last`` round this takes ``WAIT_SECONDS`` at most, since later items may sort what is left. In the
        last round it waits until the investigation is over, or for ``WAIT_SECONDS`` if several kernels share the time
        of the run. Failures that are left even then are counted, and left to the next run.
        """
        self._sort_waiting(WAIT_SECONDS, last=last)
        if last:
            # One failure of each kind comes first: several of one kind may be the same bug, and time may run out.
            first = of_each_kind(self.waiting)
            self.waiting = [*first, *(broken for broken in self.waiting if broken not in first)]
            self._sort_waiting(math.inf if math.isinf(self.runs.share) else WAIT_SECONDS, last=True)
            self._leave_out()

    def _sort_waiting(self, seconds: float, *, last: bool) -> None:
        """Sort waiting failures for so many seconds, or fewer at the end of a run.

        In the ``last`` round this goes on as long as another process investigates a failure of the kernel.
        """
        self.deadline = time.perf_counter() + self.runs.clock.cut(seconds)
        while self.waiting and self.runs.clock.cut(1.0) > 0 and self._may_wait(last=last):
            self.learn()
            time.sleep(POLL_SECONDS if self.waiting else 0.0)  # the rest waits for another process

    def _may_wait(self, *, last: bool) -> bool:
        return time.perf_counter() < self.deadline or (last and self.known.ledger.is_busy(self.known.kernel))

    def _leave_out(self) -> None:
        """Report one failure of each kind for which no known bug can be to blame, and count all other waiting failures.

        A failure for which a known bug may be to blame is not reported, because each process that has met one would
        report a bug of its own.
        """
        for broken in of_each_kind(self.waiting):
            self.known.learn()
            told, known = broken.finding, self.known.bugs.values()
            if not any(bug.could_break(told) or bug.may_spoil_later(told) for bug in known):
                self.waiting.remove(broken)
                self.others_wait = True
                self.attribute(broken, patient=False)
        for broken in self.late:
            self.runs.journal.keep(self._record(broken))
        self.runs.tally.unsorted += len(self.waiting) + len(self.late)
        self.waiting, self.late = [], []

    def attribute(self, broken: FailingExample, *, patient: bool = True) -> None:
        """Count a failure for the known bugs that explain it. A rest of it is investigated as a new bug, or waits.

        Until that is done the journal keeps the failure, so that it is not lost if this process is killed.
        """
        self.runs.journal.keep(self._record(broken))
        self.runs.forget()
        with self.runs.asked_of_general(broken.law, broken.case, broken.finding, broken.ignored):
            try:
                rest = None if self._is_spoilt(broken) else self._unsorted(broken, patient=patient)
            finally:
                self.runs.end_slow_copies()
        if rest is not None:
            self.runs.journal.keep(self._record(rest))
            self.waiting.append(rest)
        if rest != broken:
            self.runs.journal.drop(self._record(broken))

    def _unsorted(self, broken: FailingExample, *, patient: bool) -> FailingExample | None:
        """Return the part of a failure that has to wait for another process, or None if all is counted or reported.

        1. Known bugs are tried (``_unexplained``).
        2. If a less precise design explains the rest, normal numbers may show a real bug behind it, other designs may
           explain it too, it may come of huge strides, or it may be just what another computation gives.
        3. If it still is a less precise call, it is counted as such.
        4. Else it is investigated, unless ``patient`` is true and another process investigates such a failure.
        """
        rest = self._unexplained(broken)
        if rest is None:
            return None
        with self.runs.assuming(rest.alternatives):
            return self._left(broken, rest, patient=patient)

    def _left(self, broken: FailingExample, rest: FailingExample, *, patient: bool) -> FailingExample | None:
        """Do the steps of ``_unsorted`` from the second on with the ``rest`` of a failure, and return what is left."""
        rest = self._with_ordinary_numbers(rest) or rest
        rest = rest if rest == broken else with_all_designs(rest, self.runs)
        rest = without_design_of_strides(rest, self.runs)
        if rest.case.dtype not in self.known.precision.claims:
            rest = without_designs(rest, self._failure(rest), self.runs)
        if self._is_less_precise(rest):
            return None
        ledger, about = self.known.ledger, (self.known.kernel, rest.finding.part)
        if not (patient and ledger.is_busy(*about)):
            with ledger.investigating(*about):
                if not (patient and ledger.is_busy(*about)):
                    self._investigate(rest)
                    return None
        return rest

    def _is_spoilt(self, broken: FailingExample) -> bool:
        """Whether a bug that keeps state is known, and a failure that it may have made holds in a new process.

        If so, the failure is counted for that bug. A new process takes seconds on a GPU, and is asked at the 1st, 2nd,
        4th, 8th failure of a law and a kind, and so on; each other one is taken to be what the last of these was.
        """
        if broken.is_alone or self.known.keeping(broken.finding) is None:
            return False
        kind = broken.law, *broken.finding.symptom
        before, holds = self.spoilt.get(kind, (0, False))
        if (before + 1).bit_count() == 1:
            holds = self._holds_anew(without_earlier_calls(broken), otherwise=True)
        self.spoilt[kind] = before + 1, holds
        return holds and self.known.blame_keeping(broken)

    def look_for_leak(self, law: str, case: Case) -> None:
        """Repeat a case if the child process has grown much, and report a leak if it grows at each repeat.

        The child is closed then, so that it does not fill the machine's memory.
        """
        if self.runs.child.grown < self.may_grow or self.runs.clock.left <= 0:
            return
        is_known = any(bug.failure.finding.kind == LEAK for bug in self.known.bugs.values())
        left = 0.0 if is_known else left_behind(law, case, self.runs)
        self.runs.child.close()
        if left:
            self._keep_leak(law, case, leak_finding(left))
        elif not is_known:
            self.may_grow *= 2

    def _keep_leak(self, law: str, case: Case, finding: Finding) -> None:
        smaller, needs = smaller_leak(law, case, self.runs)
        failure = self._failure(FailingExample(law, smaller, finding))
        self.known.write(failure, None)  # the report is there even if running the script ends this process
        failure, script = self._investigation(failure).scripted(failure)
        self.known.write(failure, script)
        self._keep_as_told(Bug(failure, needs=needs), law, case)

    def watch(self, law: str, *, shrink: bool) -> None:
        """Run a few passing cases of a law under each sanitizer, and report the errors that it finds."""
        cases = sample(self.runs.held, law)
        for watch in self.watches:
            found = watch.first(law, cases)
            if found is not None:
                self._keep_watched(watch, law, *found, shrink=shrink)

    def _keep_watched(
        self, watch: Watch, law: str, case: Case, report: Report, is_alone: bool, *, shrink: bool
    ) -> None:
        """Count a sanitizer's report for the known bug of the same origin, or report a new bug."""
        self.known.learn()
        told = finding(watch.sanitizer, report)
        known = next((x for x in self.known.bugs.values() if x.failure.finding.origin == told.origin), None)
        if known is not None:
            self.known.count(known, law, case, "")
            return
        smaller, needs = watch.reduced(law, case, report) if shrink and is_alone else (case, ())
        explanation = Explanation(() if is_alone else (TOGETHER,))
        failure = self._failure(FailingExample(law, smaller, told))
        failure = replace(failure, sanitizer=watch.sanitizer, explanation=explanation)
        self.known.write(failure, None)
        self._keep_as_told(Bug(failure, needs=needs), law, case)

    def _keep_as_told(self, bug: Bug, law: str, case: Case) -> None:
        """Keep a bug whose report is complete, and count a case for it."""
        self.known.failures[bug.key] = bug.failure
        self.known.add(bug)
        self.known.count(bug, law, case, "")

    def report(self, broken: FailingExample) -> None:
        """Report the failure of a replayed case without shrinking it, but with its explanation."""
        if not self.known.is_less_precise(broken) and not self.known.failures:
            self._investigate(broken, shrink=False)

    def _unexplained(self, broken: FailingExample) -> FailingExample | None:
        """Return what known bugs leave unexplained of a failure, or None; it is counted for those that explain a part.

        1. A process that ended in a law that calls the kernel with parts of a case is counted for a known bug that
           would end such a part, without a further run.
        2. A failure of a law that compares calls is restated by a basic law on one of the calls. If that call meets a
           known failure of the kernel, nothing is left. If none is wrong by itself, a bug that keeps state explains the
           failure, if it may have made these tensors wrong; bugs with certificates that explain it come before that.
        3. ``explain_by_known_bugs`` decides the rest, judged against certificates if these explain a part of it. Their
           bugs may make what ordinary numbers do not show, as where an intermediate result overflows. If time runs
           out, the first bug decides whose conditions the case meets and that makes the same tensors wrong.
        """
        known = tuple(self.known.bugs.values())
        if not law_named(broken.law).is_never_restated and broken.finding.ends_process:
            for bug in known:
                if in_parts(bug).end_of(broken.case) or bug.ends_parts(broken.finding):
                    self.known.count(bug, broken.law, broken.case, "")
                    return None
        run = self._asked_about(broken.finding, explained=bool(broken.finding.explained_by))
        capabilities = self.runs.claims_of(broken.law)
        try:
            told = restate_by_basic_law(broken, run, capabilities)
            failures = self.runs.info.known_failures if told.case != broken.case else ()
            if any(each.breaks(told.law) and meets(told.case, each) for each in failures):
                return None
            certified = explained_by(told, known, self.runs)
            may_be_kept = told.law == broken.law and makes_several_calls(told) and not is_small(told.finding)
            if not certified and may_be_kept and self.known.blame_keeping(told):
                return None
            told = told if certified else beside_certified(told, known, self.runs)
            with self.runs.assuming(told.alternatives):
                is_beside = told.alternatives and with_ordinary_numbers(told, self.runs)
                others = [bug for bug in known if not (is_beside and bug.is_certified_exactly)]
                explained = explain_by_known_bugs(told, others, run, capabilities) if not certified else None
            outcome = explained or Outcome(None, certified)
            if outcome.rest is not None:
                outcome.rest = replace(outcome.rest, alternatives=told.alternatives)
        except OutOfTime:
            able = (bug for bug in known if bug.may_show_under(broken.law) and bug.is_met(broken.case))
            alike = [bug for bug in able if bug.could_break(broken.finding)]
            outcome = Outcome(None if alike else broken, alike[:1])
        for bug in outcome.blamed:
            if bug != self.known.bugs[bug.key]:  # further tensors are known that it makes wrong
                self.known.add(bug)
            self.known.count(bug, broken.law, broken.case, broken.finding.tensor)
        return outcome.rest

    def _asked_about(self, finding: Finding, *, explained: bool) -> Try:
        """Return the function that runs a law on other cases, to answer questions about a finding.

        ``explained`` is that of ``Runs.oracle``.
        """
        is_precise = not (finding.explained_by or self.known.precision.claims)
        return self.runs.oracle(is_precise=is_precise, explained=explained)

    def _investigate(self, drawn: FailingExample, *, shrink: bool = True) -> None:
        """Investigate a failure that no known bug explains, and keep the bug.

        With ``shrink``, in this order:

        1. A failure that shows only if the kernel is compiled for any sizes and strides is no bug for users.
        2. If several calls may be needed, and earlier ones that a case can have show it, these are investigated.
        3. If the case passes when it is repeated, the failure is intermittent.
        4. If the case passes in a new process, it fails only after other calls. Later cases then run in processes of
           their own, where these are copies of a process that has called no kernel.
        5. Otherwise it is restated by a basic law and investigated, on a GPU in processes of their own if a bug that
           keeps state may be behind it. The result is withdrawn if the smallest case comes and goes, if earlier calls
           or the compilation misled the search, or if it passes in a new process. Then the drawn case is investigated
           again, or reported as it is.
        6. A hurried investigation whose bug can't be distinguished from known bugs is left to the next run.
        """
        if shrink and self._fails_in_general_alone(drawn):
            return
        again = not shrink or fails_again(drawn, self.runs)
        anew = again and (not shrink or self._fails_anew(drawn))
        if shrink and not (anew and law_named(drawn.law).is_basic) and self._is_told_as_sequence(drawn):
            return
        if not again and self._keep_intermittent(drawn):
            return
        if not (anew if again else self._fails_anew(drawn)):
            self._keep_after_others(drawn)
            return
        if self.known.keeping(drawn.finding):
            self.runs.go_on_in_copies()
        broken = drawn
        with suppress(OutOfTime):
            broken = self._by_basic_law(drawn) if shrink else drawn
        investigation = self._investigation(self._failure(broken))
        bug = self._found(investigation, shrink=shrink)
        told = bug.failure.explanation.sentences if shrink else ()
        if COMES_AND_GOES in told:
            self.known.withdraw(bug.failure)
            if not self._keep_intermittent(drawn):
                self._keep_as_drawn(drawn)
        elif shrink and (investigation.is_misled or self._is_misled(investigation)):
            self.known.withdraw(bug.failure)
            self.runs.compiling.is_general = False
            self._investigate(drawn)
        elif HOLDS_ALONE in told and self._holds_anew(bug.failure):
            self.known.withdraw(bug.failure)
            if self._holds_anew(drawn):
                if not self._is_told_as_sequence(drawn):
                    self._keep_after_others(drawn)
            elif self.runs.in_copies:
                self._keep_as_drawn(drawn)
            else:
                self.runs.go_on_in_copies()
                self._investigate(drawn)
        elif investigation.hurried and not self.known.tells_apart(bug):
            self.known.withdraw(bug.failure)
            self.late.append(drawn)
        else:
            self._keep(bug, broken, investigation.cases.shrunk)

    def _is_told_as_sequence(self, drawn: FailingExample) -> bool:
        """Whether a failure needs earlier calls, and was counted for a bug that does, or reported with other ones."""
        with suppress(OutOfTime):
            sequence = as_sequence(drawn, self.runs)
            keeping = sequence and self.known.keeping(sequence.finding)
            if sequence and keeping and keeping.needs_earlier_calls:
                return self.known.blame_keeping(replace(drawn, finding=sequence.finding))
            if sequence and sequence.case != drawn.case:
                if (rest := self._unexplained(sequence)) is not None:
                    self._investigate(rest)
                return True
        return False

    def _fails_in_general_alone(self, broken: FailingExample) -> bool:
        """Whether a case passes as users run it, and fails as compiled for any values. If so, a message says so."""
        with suppress(OutOfTime):
            if self.runs.fails_in_general_alone(broken.law, broken.case, broken.finding, broken.ignored):
                self.known.tell(IN_GENERAL_ALONE.format(self.known.kernel))
                return True
        return False

    def _is_misled(self, investigation: Investigation) -> bool:
        """Whether earlier calls have left something in the process that made smaller cases fail."""
        answers = investigation.judged | investigation.answers
        may_be = self.runs.has_quick_copies and not self.runs.in_copies
        return may_be and is_misled(investigation.failure, answers, self.runs)

    def _fails_anew(self, broken: FailingExample) -> bool:
        """Whether a failure shows in a new process, or is taken to, as where it was found in one.

        It is not tried if the failure ends its process.
        """
        is_known = broken.is_alone or self.runs.in_copies or broken.finding.ends_process
        return is_known or not self._holds_anew(broken)

    def _holds_anew(self, broken: FailingExample | Failure, *, otherwise: bool = False) -> bool:
        """Whether a case that failed passes in a new process; ``otherwise`` if there is no time to try."""
        with suppress(OutOfTime):
            return not fails_anew(broken, self.runs)
        return otherwise

    def _found(self, investigation: Investigation, *, shrink: bool) -> Bug:
        """Return the bug that an investigation finds; after an error of Flashproof itself, as far as it is known."""
        finding = investigation.failure.finding
        try:
            with self.runs.child.limited(self._seconds_for(finding)):
                return investigation.bug(shrink=shrink)
        except HarnessError as e:
            self.known.tell(
                f"Flashproof itself failed as it looked into a failure of {self.known.kernel}: {e}"
            )
            return investigation.as_it_is

    def _keep(self, bug: Bug, broken: FailingExample, shrunk: Sequence[tuple[str, Case]]) -> None:
        """Keep a new bug, or add to the known bug that it duplicates; ``shrunk`` are failing cases met in shrinking."""
        known_as = self._same_as(bug)
        if known_as is None:
            self.known.failures[bug.key] = bug.failure
        else:
            # If another process has found the same bug at the same time, its report is in the same folder, and stays.
            if bug.key not in self.known.bugs:
                self.known.withdraw(bug.failure)
            bug = known_as
        self.known.add(bug)
        self.known.count(bug, broken.law, broken.case, broken.finding.tensor)
        self.known.seen[bug.key].keep(shrunk)
        self._show_apart_from(bug)

    def _with_ordinary_numbers(self, broken: FailingExample) -> FailingExample | None:
        """Re-run an imprecise-looking failure on normal numbers; return the real bug if one shows, else None.

        Only the first such failure in a dtype is re-run, so that a sound kernel runs two more cases.
        """
        if not broken.finding.explained_by or broken.case.dtype in self.known.precision.claims:
            return None
        with suppress(OutOfTime):
            shown = with_ordinary_numbers(broken, self.runs)
            return self._unexplained(shown) if shown else None
        return None

    def _seconds_for(self, finding: Finding) -> float:
        """Return the seconds for a case in the investigation of this finding: few, if it is a hang."""
        return HANG_SECONDS[self.runs.device_type] if finding.kind == "hung" else math.inf

    def _is_less_precise(self, broken: FailingExample) -> bool:
        """Whether a failure is a less precise call. The first one must fail again, and in a new process too.

        Else it may be a race, or come of earlier calls, also of those that its law makes.
        """
        if broken.finding.explained_by and not self.known.precision.claims:
            shows = fails_again(broken, self.runs) and self._fails_anew(broken)
            if not shows or (makes_several_calls(broken) and as_sequence(broken, self.runs)):
                return False
        return self.known.is_less_precise(broken)

    def _record(self, broken: FailingExample) -> dict[str, Any]:
        """Return the record by which a later run repeats a failing case."""
        return replace(self._failure(broken), alternatives=broken.alternatives).to_dict()

    def _failure(self, broken: FailingExample) -> Failure:
        """Return the failing example as a failure of this kernel, for a report."""
        info = self.runs.info
        run = info.spec, info.claims, broken.law, broken.case, broken.ignored
        told = Failure(*run, kernel=info.name, finding=broken.finding, environment=self.environment)
        return replace(told, alternatives=self.runs.assumed)

    def _keep_after_others(self, broken: FailingExample) -> None:
        """Keep a failure that other calls before it make, for which no sequence of them is found, on the drawn case.

        No field of the case is varied, because what its process was called with before is what matters.
        """
        failure = self._failure(replace(broken, finding=right_alone(broken.finding)))
        self.known.write(failure, None)
        self._keep(Bug(failure, tuple(sorted(wrong_tensors(failure.finding)))), broken, ())
        if self.runs.has_quick_copies:
            self.runs.go_on_in_copies()

    def _keep_intermittent(self, broken: FailingExample) -> bool:
        """Count an intermittent failure for the kernel's known intermittent bug, or report it on the drawn case.

        No field of the case is varied, because any change might seem to fix it. A failure that shows in every repeat
        is not intermittent: nothing is kept, and False is returned.
        """
        failure = self._failure(replace(broken, finding=replace(broken.finding, kind=INTERMITTENT)))
        bug = Bug(replace(failure, repeats=REPEATS))
        known = next((known for known in self.known.bugs.values() if known.is_like(bug)), None)
        if known is None:
            self.known.write(bug.failure, None)  # the report is there even if the repeats end this process
            told, script = intermittent(bug.failure, self.runs), None
            if is_of_every_run(told):
                self.known.withdraw(bug.failure)
                return False
            if told.finding.actual is not None:
                told, script = self._investigation(told).scripted(told)
            known = replace(bug, failure=told)
            self.known.write(known.failure, script)
            self.known.failures[known.key] = known.failure
            self.known.add(known)
        self.known.count(known, broken.law, broken.case, broken.finding.tensor)
        return True

    def _keep_as_drawn(self, broken: FailingExample) -> None:
        """Keep a failure on the drawn case, with conditions found in few runs: smaller cases fail only now and then."""
        hurried = replace(self._investigation(self._failure(broken)), hurried=True)
        self._keep(self._found(hurried, shrink=True), broken, ())

    def _by_basic_law(self, broken: FailingExample) -> FailingExample:
        """Restate a failure by a basic law, or return it unchanged if known bugs explain the restated failure.

        Example: the law that compares elements of a batch fails, and so does ``forward`` on one of its calls.
        """
        capabilities, known = self.runs.info.capabilities, tuple(self.known.bugs.values())
        is_explained = bool(broken.finding.explained_by)
        run = self._asked_about(broken.finding, explained=is_explained)
        told = restate_by_its_calls(broken, run, capabilities)
        if told is not broken and explain_by_known_bugs(told, known, run, capabilities).rest is None:
            return broken
        return restate_by_forward(told, partial(self.runs.judged, explained=is_explained))

    def _investigation(self, failure: Failure) -> Investigation:
        hurried = self.others_wait and self.runs.clock.left <= 0
        return Investigation(self.runs, failure, self.known, self.shrinking, hurried)

    def _show_apart_from(self, bug: Bug) -> None:
        """If a new bug could also explain the smallest case of an unconditional bug, find that bug a cleaner case."""
        for known in list(self.known.bugs.values()):
            if known.key != bug.key and known.is_everywhere and known.failure.finding.kind in NUMBERS:
                failure = self._investigation(known.failure).shown_apart_from([bug])
                if failure is not known.failure:
                    self.known.add(replace(known, failure=failure))

    def _same_as(self, bug: Bug) -> Bug | None:
        """Return the known bug that this bug duplicates, with what was found in addition; None if there is none.

        If every ordinary case shows the bug but not the known duplicate, the known bug is replaced: failures are no
        longer attributed to it, and the search goes on. It stays as well if this bug tells more (``tells_more``).
        """
        f = bug.failure
        run = self._asked_about(f.finding, explained=True)
        with suppress(OutOfTime):
            all_known = list(self.known.bugs.values())
            for known in all_known:
                if tells_more(bug, known) or not why_duplicates(known, bug, run, self.runs, all_known):
                    continue
                if bug.is_everywhere and not known.is_everywhere:
                    self.known.forget(known)
                else:
                    by_basic_law = law_named(bug.failure.law).is_never_restated
                    met = met_again(known, bug) if by_basic_law else with_tensors(known, bug.tensors)
                    return certified_as(met, bug, self.runs)
            return blamed_for_smallest(f, list(self.known.bugs.values()), self.runs)
        return None
