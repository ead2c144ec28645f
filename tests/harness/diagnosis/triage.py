"""What becomes of a failure: known bugs explain it, or it waits for another process, or it is investigated."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from strategies.case import Case
from strategies.features import HUGE, LENGTHS, value_of, with_normal_numbers, with_value
from tests.harness.bugs.attribution import FailingExample, Outcome, explain_by_known_bugs, is_same
from tests.harness.bugs.avoidance import Avoided
from tests.harness.bugs.bug import Bug, in_parts, met_again, with_tensors
from tests.harness.bugs.failure import COMES_AND_GOES, HOLDS_ALONE, Explanation, Failure
from tests.harness.bugs.restatement import restate_by_basic_law, restate_by_forward, restate_by_its_calls
from tests.harness.clock import BudgetSpent, ShrinkBudget
from tests.harness.diagnosis.investigation import Investigation
from tests.harness.diagnosis.known_bugs import KnownBugs
from tests.harness.diagnosis.reruns import (
    AFTER_OTHERS,
    GROWN_BYTES,
    REPEATS,
    TOGETHER,
    Watch,
    fails_again,
    fails_anew,
    intermittent,
    is_of_every_run,
    leak_finding,
    left_behind,
    sample,
    smaller_leak,
)
from tests.harness.kernel_record import meets
from tests.harness.law import law_named
from tests.harness.run import ALL_DESIGNS, Run
from tests.harness.running.child import HarnessError, OutOfTime
from tests.harness.running.runs import HANG_SECONDS, Runs, Try
from tests.harness.running.sanitizers import Report, finding
from tests.harness.symptoms import FEWEST_KEYS
from tests.harness.verdict import INTERMITTENT, LEAK, NUMBERS, Finding

WAIT_SECONDS = 3.0
"""Seconds after the time of an item in which it may wait for another process's investigation, and sort failures."""

TRIED_AGAIN = 12
"""How many cases that have failed in an investigation are run once more, each in a process of its own."""

SECONDS_FOR_AGAIN = 3.0
"""Seconds for these runs; where cases take long, the nearest few have to do."""

IN_GENERAL_ALONE = (
    "{} fails only as compiled for any sizes and strides, which no user does: no later case is run so"
)
"""The message on a kernel whose cases hold as users run them."""

MOST_NEEDS = 2
"""If only the drawn case of a bug is known, more needs than these do not tell it from known bugs."""

POLL_SECONDS = 0.2
"""Seconds between looks whether another process has finished its investigation."""


@dataclass
class Triage:
    """Sorts the failures of one kernel at one dtype.

    A failure that ``known`` bugs explain is counted for them, any other is investigated at once, in the time that
    ``shrinking`` and the clock of the run leave. What a run at its end has no time to find out about a failure is left
    out: it is told by what is known of it, or left to the next run if that needs time to be told from a known bug
    (``late``). ``deadline`` is the end of the time of an item, by ``time.perf_counter``.
    ``sanitizers`` watch a few of the cases that hold.
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

    def __post_init__(self) -> None:
        self.watches = [Watch(name, self.runs) for name in self.sanitizers]

    @property
    def notices(self) -> list[str]:
        """Return lines on what could not be done, which the end of a run tells once."""
        return [*self.known.finds.notices, *(line for watch in self.watches for line in watch.told)]

    def learn(self) -> None:
        """Read what other processes have found, and sort failures that waited for that, as far as there is time."""
        self.known.learn()
        waiting, self.waiting = self.waiting, []
        while waiting and time.perf_counter() < self.deadline:
            broken = waiting.pop(0)
            self.others_wait = bool(waiting)
            if self.known.ledger.is_busy(self.known.kernel, broken.finding.part):
                self.waiting.append(broken)
            else:
                self.sort(broken)
        self.others_wait = False
        self.waiting = [*self.waiting, *waiting]

    def finish(self, *, last: bool = True) -> None:
        """End an item: failures that wait for the investigation of another process are sorted when that is over.

        Only in the ``last`` round does this wait as long as it takes; before, later items may sort them. What there is
        no time for then is counted, and left to the next run. Where other kernels share the time, that is soon.
        """
        self._sort_waiting(WAIT_SECONDS, last=last)
        if last:
            # One failure of each kind comes first, as there may be no time to tell apart those of one kind.
            first = _of_each_kind(self.waiting)
            self.waiting = [*first, *(broken for broken in self.waiting if broken not in first)]
            self._sort_waiting(math.inf if math.isinf(self.runs.share) else WAIT_SECONDS, last=True)
            self._leave_out()

    def _sort_waiting(self, seconds: float, *, last: bool) -> None:
        """Sort failures for so many seconds, or fewer at the end of a run.

        In the ``last`` round this also waits until no other process investigates a failure of the kernel.
        """
        self.deadline = time.perf_counter() + self.runs.clock.cut(seconds)
        while self.waiting and self.runs.clock.cut(1.0) > 0 and self._may_wait(last=last):
            self.learn()
            time.sleep(POLL_SECONDS if self.waiting else 0.0)  # what still waits does so for another process

    def _may_wait(self, *, last: bool) -> bool:
        return time.perf_counter() < self.deadline or (last and self.known.ledger.is_busy(self.known.kernel))

    def _leave_out(self) -> None:
        """Count the failures that there was no time for, after one of each kind that no known bug can be to blame for.

        Of others each process that has met them would tell a bug of its own.
        """
        for broken in _of_each_kind(self.waiting):
            self.known.learn()
            if not any(bug.could_break(broken.finding) for bug in self.known.bugs.values()):
                self.waiting.remove(broken)
                self.others_wait = True
                self.sort(broken, patient=False)
        for broken in self.late:
            self.runs.journal.keep(self._record(broken))
        self.runs.tally.unsorted += len(self.waiting) + len(self.late)
        self.waiting, self.late = [], []

    def sort(self, broken: FailingExample, *, patient: bool = True) -> None:
        """Count a failure for the bugs that explain it. What is left is investigated as a new bug, or waits."""
        self.runs.journal.keep(self._record(broken))
        self.runs.forget()
        with self.runs.asked_of_general(broken.law, broken.case, broken.finding, broken.ignored):
            rest = self._unsorted(broken, patient=patient)
        if rest is not None:
            self.runs.journal.keep(self._record(rest))
            self.waiting.append(rest)
        if rest != broken:
            self.runs.journal.drop(self._record(broken))

    def _unsorted(self, broken: FailingExample, *, patient: bool) -> FailingExample | None:
        """Return what of a failure has to wait for another process, after the rest was counted or reported."""
        rest = self._unexplained(broken)
        if rest is not None:
            rest = self._with_ordinary_numbers(rest) or rest
            rest = rest if rest == broken else self._with_all_designs(rest)
            rest = self._without_design_of_strides(rest)
        if rest is None or self._is_less_precise(rest):
            return None
        ledger, about = self.known.ledger, (self.known.kernel, rest.finding.part)
        if not (patient and ledger.is_busy(*about)):
            with ledger.investigating(*about):
                if not (patient and ledger.is_busy(*about)):
                    self._investigate(rest)
                    return None
        return rest

    def look_for_leak(self, law: str, case: Case) -> None:
        """Repeat a case if the process has grown much; report a kernel that leaves memory behind each time.

        The process ends with that, so that it does not fill the machine.
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
        self.known.write(failure, None)  # as it is not lost then, whatever its script does
        failure, script = self._investigation(failure).scripted(failure)
        self.known.write(failure, script)
        self._keep_as_told(Bug(failure, needs=needs), law, case)

    def watch(self, law: str, *, shrink: bool) -> None:
        """Run a few of the cases of a law that held under each sanitizer, and report what these find."""
        cases = sample(self.runs.held, law)
        for watch in self.watches:
            found = watch.first(law, cases)
            if found is not None:
                self._keep_watched(watch, law, *found, shrink=shrink)

    def _keep_watched(
        self, watch: Watch, law: str, case: Case, report: Report, is_alone: bool, *, shrink: bool
    ) -> None:
        """Count what a sanitizer reports of a case for the known bug that is the same, or report it as a new one."""
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
        """Keep a bug whose report is written, and of which nothing else is found out, and count a case for it."""
        self.known.failures[bug.key] = bug.failure
        self.known.add(bug)
        self.known.count(bug, law, case, "")

    def report(self, broken: FailingExample) -> None:
        """Report the failure of a replay as it is, with its explanation."""
        if not self.known.is_less_precise(broken) and not self.known.failures:
            self._investigate(broken, shrink=False)

    def _unexplained(self, broken: FailingExample) -> FailingExample | None:
        """Return what known bugs leave of a failure, which is counted for those that explain a part of it."""
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
            if told.case != broken.case and self._is_known_failure(told):
                return None
            outcome = explain_by_known_bugs(told, known, run, capabilities)
        except OutOfTime:
            alike = [
                bug
                for bug in known
                if bug.may_show_under(broken.law)
                and bug.could_break(broken.finding)
                and bug.is_met(broken.case)
            ]
            outcome = Outcome(None if alike else broken, alike[:1])
        for bug in outcome.blamed:
            if bug != self.known.bugs[bug.key]:  # it makes further tensors wrong
                self.known.add(bug)
            self.known.count(bug, broken.law, broken.case, broken.finding.tensor)
        return outcome.rest

    def _is_known_failure(self, call: FailingExample) -> bool:
        """Whether a call that a comparing law makes meets a known failure, which the case of the law does not meet."""
        known = self.runs.info.known_failures
        return any(each.breaks(call.law) and meets(call.case, each) for each in known)

    def _asked_about(self, finding: Finding, *, explained: bool) -> Try:
        """Return what tells what is wrong in other cases than that of a finding; ``explained`` as in ``Runs.asked``."""
        is_precise = not (finding.explained_by or self.known.precision.claims)
        return self.runs.asked(is_precise=is_precise, explained=explained)

    def _investigate(self, drawn: FailingExample, *, shrink: bool = True) -> None:
        """Investigate a failure that no known bug explains."""
        if shrink and self._fails_in_general_alone(drawn):
            return
        if shrink and not fails_again(drawn, self.runs) and self._keep_intermittent(drawn):
            return
        if shrink and not self._fails_anew(drawn):
            self._keep_intermittent(drawn, AFTER_OTHERS)
            self.runs.go_on_in_copies()
            return
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
                self._keep_intermittent(drawn, AFTER_OTHERS)
            else:
                self._keep_as_drawn(drawn)
        elif investigation.hurried and not self._is_told_apart(bug):
            self.known.withdraw(bug.failure)
            self.late.append(drawn)
        else:
            self._keep(bug, broken, investigation.cases.shrunk)

    def _is_told_apart(self, bug: Bug) -> bool:
        """Whether what a bug needs tells it from all known bugs that make the same tensors wrong.

        It does if it needs few fields, and none that they need. This is asked at the end of a run, when there is no
        time to look for a smaller case than the one that was drawn.
        """
        rivals = [x for x in self.known.bugs.values() if x.could_break(bug.failure.finding)]
        own = bug.fields_needed
        few = 0 < len(bug.needs) <= MOST_NEEDS
        return not rivals or (few and all(own.isdisjoint(x.fields_needed) for x in rivals))

    def _fails_in_general_alone(self, broken: FailingExample) -> bool:
        """Whether a case holds as users run it, and fails as compiled for any values, which is told in a line."""
        with suppress(OutOfTime):
            if self.runs.fails_in_general_alone(broken.law, broken.case, broken.finding, broken.ignored):
                self.known.tell(IN_GENERAL_ALONE.format(self.known.kernel))
                return True
        return False

    def _may_be_misled(self) -> bool:
        """Whether smaller cases may have failed because of what earlier calls have left in the process."""
        return self.runs.device_type == "cpu" and not self.runs.in_copies

    def _is_misled(self, investigation: Investigation) -> bool:
        """Whether cases that have failed in an investigation hold in processes of their own, as all cases run then.

        For each field the case nearest to the smallest one is tried, since it tells that the field does not matter.
        """
        smallest = investigation.failure
        answers = investigation.judged | investigation.answers
        failing = [ran for ran, found in answers.items() if found and not found.ends_process]
        if not self._may_be_misled() or not failing or self.runs.clock.left <= 0:
            return False
        failing.sort(key=lambda ran: len(_differences(ran[1], smallest.case)))
        nearest = {name: ran for ran in reversed(failing) for name in _differences(ran[1], smallest.case)}
        telling = dict.fromkeys([*failing[:1], *nearest.values()])
        spend = self.runs.clock.meter(SECONDS_FOR_AGAIN, TRIED_AGAIN)

        def fails(ran: tuple[str, Case]) -> bool:
            spend()
            return self.runs.wrong(*ran, smallest.ignored) is not None

        self.runs.go_on_in_copies()
        with suppress(BudgetSpent):
            if not all(map(fails, telling)):
                return True
        self.runs.stop_copies()
        return False

    def _fails_anew(self, broken: FailingExample) -> bool:
        """Whether a failure shows in a new process.

        On a GPU, where one takes long to start, this is tried only of a kernel some of whose failures come and go.
        """
        come_and_go = any(x.failure.finding.kind == INTERMITTENT for x in self.known.bugs.values())
        is_tried = self._may_be_misled() or (come_and_go and not self.runs.in_copies)
        return not is_tried or broken.finding.ends_process or not self._holds_anew(broken)

    def _holds_anew(self, broken: FailingExample | Failure) -> bool:
        """Whether a case that has failed holds in a new process, as far as there is time to try."""
        with suppress(OutOfTime):
            return not fails_anew(broken, self.runs)
        return False

    def _found(self, investigation: Investigation, *, shrink: bool) -> Bug:
        """Return what an investigation tells of its bug; after an error of our own, what is known of it by then."""
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
        """Keep a bug, or what more is known of one, with some of its smaller cases that fail."""
        known_as = self._same_as(bug)
        if known_as is None:
            self.known.failures[bug.key] = bug.failure
        else:
            # Another process may have found the same at the same time, and reported it in the same folder.
            if bug.key not in self.known.bugs:
                self.known.withdraw(bug.failure)
            bug = known_as
        self.known.add(bug)
        self.known.count(bug, broken.law, broken.case, broken.finding.tensor)
        self.known.seen[bug.key].keep(shrunk)
        self._show_apart_from(bug)

    def _with_all_designs(self, broken: FailingExample) -> FailingExample:
        """Return what is left of a failure with every less precise design that explains it, not only the first."""
        if broken.finding.explained_by:
            with suppress(OutOfTime):
                asked = broken.law, broken.case, broken.ignored
                finding = self.runs.hard(*asked, explained=True, designs=ALL_DESIGNS)
                return broken if finding is None else replace(broken, finding=finding)
        return broken

    def _without_design_of_strides(self, broken: FailingExample) -> FailingExample:
        """Return the failure as one that no design explains, if the case holds once its tensors lie close together.

        No design rounds more because strides are huge.
        """
        if broken.finding.explained_by and value_of(broken.case, HUGE):
            with suppress(OutOfTime):
                near = with_value(broken.case, HUGE, False)
                if self.runs.hard(broken.law, near, broken.ignored, explained=True) is None:
                    return replace(broken, finding=replace(broken.finding, explained_by=(), likely=()))
        return broken

    def _with_ordinary_numbers(self, broken: FailingExample) -> FailingExample | None:
        """Return the failure that a less precise call shows with ordinary numbers; None if these show no new bug.

        Roundings of large scores may make any error of a gradient, so that they seem to explain wrong numbers as well.
        This is asked at the first such failure in a dtype, which has a sound kernel run one case more.
        """
        if not broken.finding.explained_by or broken.case.dtype in self.known.precision.claims:
            return None
        info, case = self.runs.info, with_value(with_normal_numbers(broken.case), "sm_scale", None)
        for name in LENGTHS:
            case = with_value(case, name, max(getattr(case, name), FEWEST_KEYS))
        if not info.capabilities.admits(case) or Avoided(info.known_failures).is_met(case):
            return None
        law = "forward" if broken.finding.tensor in ("out", "lse") else "backward"
        with suppress(OutOfTime):
            finding = self.runs.hard(law, case, broken.ignored)
            if finding is not None and finding.kind in NUMBERS:
                return self._unexplained(FailingExample(law, case, finding, broken.ignored))
        return None

    def _seconds_for(self, finding: Finding) -> float:
        """Return the seconds for a case that is like a failing one: few, if that one hangs."""
        return HANG_SECONDS[self.runs.device_type] if finding.kind == "hung" else math.inf

    def _is_less_precise(self, broken: FailingExample) -> bool:
        """Whether a failure is a less precise call. The first one is repeated, as a race makes numbers wrong too."""
        is_first = broken.finding.explained_by and not self.known.precision.claims
        return (not is_first or fails_again(broken, self.runs)) and self.known.is_less_precise(broken)

    def _record(self, broken: FailingExample) -> dict[str, Any]:
        """Return the record from which a later run can try a failing case again."""
        info = self.runs.info
        return Run(info.spec, info.claims, broken.law, broken.case, broken.ignored).to_dict()

    def _failure(self, broken: FailingExample) -> Failure:
        """Return the record of a failure of this kernel."""
        info = self.runs.info
        run = info.spec, info.claims, broken.law, broken.case, broken.ignored
        return Failure(*run, kernel=info.name, finding=broken.finding, environment=self.environment)

    def _keep_intermittent(self, broken: FailingExample, *known_of_it: str) -> bool:
        """Count a failure that comes and goes for the kernel's known one, or report it on the case as it was drawn.

        No field of its case is varied, because any other value would seem to mend it. ``known_of_it`` are sentences. If
        there are none and every repeat fails, nothing comes and goes: then nothing is kept, and False is returned.
        """
        failure = self._failure(replace(broken, finding=replace(broken.finding, kind=INTERMITTENT)))
        bug = Bug(replace(failure, repeats=REPEATS))
        known = next((known for known in self.known.bugs.values() if known.is_like(bug)), None)
        if known is None:
            self.known.write(bug.failure, None)  # as it is not lost then, whatever happens during the repeats
            told, script = intermittent(bug.failure, self.runs, known_of_it), None
            if is_of_every_run(told) and not known_of_it:
                self.known.withdraw(bug.failure)
                return False
            if told.finding.actual is not None and AFTER_OTHERS not in known_of_it:
                told, script = self._investigation(told).scripted(told)
            known = replace(bug, failure=told)
            self.known.write(known.failure, script)
            self.known.failures[known.key] = known.failure
            self.known.add(known)
        self.known.count(known, broken.law, broken.case, broken.finding.tensor)
        return True

    def _keep_as_drawn(self, broken: FailingExample) -> None:
        """Keep a failure of every run with what few runs of the drawn case tell, as smaller cases come and go."""
        investigation = replace(self._investigation(self._failure(broken)), hurried=True)
        self._keep(self._found(investigation, shrink=True), broken, ())

    def _by_basic_law(self, broken: FailingExample) -> FailingExample:
        """Return a failure that no known bug explains as a basic law tells it, if that one is not explained either."""
        capabilities, known = self.runs.info.capabilities, tuple(self.known.bugs.values())
        is_explained = bool(broken.finding.explained_by)
        run = self._asked_about(broken.finding, explained=is_explained)
        told = restate_by_its_calls(broken, run, capabilities)
        if told is not broken and explain_by_known_bugs(told, known, run, capabilities).rest is None:
            return broken
        return restate_by_forward(told, partial(self.runs.hard, explained=is_explained))

    def _investigation(self, failure: Failure) -> Investigation:
        hurried = self.others_wait and self.runs.clock.left <= 0
        return Investigation(self.runs, failure, self.known, self.shrinking, hurried)

    def _show_apart_from(self, bug: Bug) -> None:
        """Find other smallest cases for bugs that show everywhere, if theirs meet what a new bug needs."""
        for known in list(self.known.bugs.values()):
            if known.key != bug.key and known.is_everywhere and known.failure.finding.kind in NUMBERS:
                failure = self._investigation(known.failure).shown_apart_from([bug])
                if failure is not known.failure:
                    self.known.add(replace(known, failure=failure))

    def _same_as(self, bug: Bug) -> Bug | None:
        """Return the known bug that this is, with what has been found of it now; None for a new one.

        A bug that every ordinary case shows takes the place of a known one that only showed it with certain numbers.
        """
        f = bug.failure
        run, capabilities = self._asked_about(f.finding, explained=True), self.runs.claims_of(f.law)
        with suppress(OutOfTime):
            all_known = list(self.known.bugs.values())
            for known in all_known:
                if not is_same(known, bug, run, capabilities, all_known):
                    continue
                if bug.is_everywhere and not known.is_everywhere:
                    self.known.forget(known)
                else:
                    by_basic_law = law_named(bug.failure.law).is_never_restated
                    return met_again(known, bug) if by_basic_law else with_tensors(known, bug.tensors)
            return self._blamed_for_smallest(f)
        return None

    def _blamed_for_smallest(self, f: Failure) -> Bug | None:
        """Return the known bug that breaks a call which a comparing law makes for its smallest case, or None."""
        if not self.known.bugs or law_named(f.law).is_never_restated:
            return None
        verdict = self.runs.in_time(f.law, f.case)
        if verdict.finding is None:
            return None
        run, capabilities = self.runs.hard, self.runs.info.capabilities
        told = restate_by_basic_law(
            FailingExample(f.law, f.case, verdict.finding, sizes=tuple(verdict.sizes)), run, capabilities
        )
        if told.law == f.law:
            return None
        outcome = explain_by_known_bugs(told, tuple(self.known.bugs.values()), run, capabilities)
        return outcome.blamed[0] if outcome.rest is None and outcome.blamed else None


def _differences(case: Case, other: Case) -> list[str]:
    """Return the fields in which two cases differ."""
    return [name for name, value in vars(case).items() if value != getattr(other, name)]


def _of_each_kind(waiting: Sequence[FailingExample]) -> list[FailingExample]:
    """Return one failure, the last, of each tensor and kind of error: all of these may be of one bug."""
    found = ((broken.finding, broken) for broken in waiting)
    return list({(x.tensor, x.signature, x.of_nan): broken for x, broken in found}.values())
