"""One kernel at one dtype: draw its cases, run a law on a case, and tell apart the bugs that break it."""

import math
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from strategies.case import Case
from strategies.cases import cases, is_claimed
from strategies.focus import Focus
from tests.harness import report
from tests.harness.attribute import Broken, attribute, is_same
from tests.harness.budget import SECONDS, Clock, ShrinkBudget
from tests.harness.bugs import Bug, Sightings, in_parts, met_again, told, with_tensors
from tests.harness.child import Child, HarnessError, OutOfTime
from tests.harness.elsewhere import Closed, elsewhere
from tests.harness.imprecise import Imprecise, ImpreciseCall
from tests.harness.investigate import Investigation
from tests.harness.journal import Journal
from tests.harness.kernel_info import KernelInfo
from tests.harness.known import stored_case
from tests.harness.law import Law
from tests.harness.ledger import LEDGER, Ledger
from tests.harness.plainly import is_plain, plainly
from tests.harness.plan import JOURNALS
from tests.harness.refusals import is_mostly_refused, was_not_run
from tests.harness.report import Failure
from tests.harness.run import Run
from tests.harness.runs import Runs
from tests.harness.tally import Tally
from tests.harness.verdict import NUMBERS, Finding

MOST_BLAMED = 5
"""After this many failures of one bug, cases that it would break are changed so that they lack something it needs."""

MOST_ENDED = 3
"""After a bug that needs no field has ended the process this often, no further case is run."""

MOST_HELD = 200
"""The most cases that held which are remembered: a claim that excludes all of them is not offered."""

WAIT_SECONDS = 3.0
"""Seconds that an item waits at its end for another process's investigation, if other items follow."""

POLL_SECONDS = 0.2
"""Seconds between looks whether another process has finished its investigation."""


class TimeUp(BaseException):
    """The time for a Hypothesis run is over. This is no Exception, which Hypothesis would take for a failure."""


class Subject:
    """One kernel at one dtype in one process.

    A case under a law is noted in ``journal`` and then run in ``child``. A failure's report goes below
    ``report_dir``, and what is known of its bug to the ledger there, from which all processes of a run learn.
    A law that is broken raises nothing: a failure that a known bug explains is counted for that bug, any other is
    investigated at once, and the search goes on. With ``replay``, that one case is all that is drawn. The cases of
    ``corpus`` are run before any is drawn.

    ``clock`` ends the search, and soon after it all investigations. With ``verbose``, the text of an item that fails
    has all that is known of a new bug; else it has a line for each bug, since the summary tells the rest.
    """

    # This is no dataclass, because Hypothesis prints dataclasses field by field.
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
        corpus: Sequence[Run] = (),
        shrinking: ShrinkBudget | None = None,
        clock: Clock | None = None,
        verbose: bool = False,
    ) -> None:
        self.info = info
        self.dtype = dtype
        self.bugs: dict[str, Bug] = {}
        self.runs = Runs(info, child, journal, self.bugs)
        self.environment = environment
        self.report_dir = report_dir
        self.ledger = Ledger(report_dir / JOURNALS / LEDGER)
        self.max_seqlen = max_seqlen
        self.replay = replay
        self.corpus = corpus
        self.shrinking = shrinking or ShrinkBudget(SECONDS[self.runs.device_type])
        self.clock = clock or Clock()
        self.verbose = verbose
        self.failures: dict[str, Failure] = {}
        self.told: set[tuple[str, str]] = set()
        self.blamed: dict[str, int] = {}
        self.waiting: list[Broken] = []
        self.strategies: dict[tuple[Any, ...], st.SearchStrategy[Case]] = {}
        self.ordinary: dict[tuple[str, Case], Finding | None] = {}
        self.precision = Imprecise()
        self.begin()

    def __repr__(self) -> str:
        """Return what Hypothesis prints."""
        return f"<{self.info.name} {self.dtype}>"

    def cases(self, **options: Any) -> st.SearchStrategy[Case]:
        """Return a strategy of claimed cases at this dtype; ``options`` are those of ``strategies.cases.cases``."""
        if self.replay is not None:
            return st.just(self.replay)
        if self.max_seqlen is not None:
            options["max_seqlen"] = self.max_seqlen
        # Strategies are kept, because Hypothesis takes longer to look at a new one than to draw an example from it.
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

    def corpus_cases(self, law: Law) -> list[Case]:
        """Return the cases of the corpus of a law and this dtype that the kernel claims."""
        return [
            kept.case
            for kept in self.corpus
            if (kept.law, kept.case.dtype) == (law.name, self.dtype)
            and is_claimed(kept.case, self.info.capabilities)
        ]

    def begin(self, focus: Focus | None = None, seconds: float = math.inf) -> None:
        """Start a new item: draw from ``focus``, by default all that the kernel claims, for so many seconds.

        What earlier items have found stays known.
        """
        self.runs.begin()
        self.generated = 0
        self.focus = focus or Focus(self.info.capabilities)
        self.deadline = time.perf_counter() + seconds
        self.begin_search()
        self.seen: dict[str, Sightings] = {}
        self.imprecise = Imprecise()
        self.held: deque[tuple[str, Case]] = deque(maxlen=MOST_HELD)
        self.unread: list[str] = []

    def begin_search(self, *, without_simplest: bool = False) -> None:
        """Start a new Hypothesis run.

        ``without_simplest`` leaves out its first case, which is the simplest of all that can be drawn.
        """
        self.leaves_out_next = without_simplest

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.runs.device_type

    @property
    def tally(self) -> Tally:
        """The counts of this item."""
        return self.runs.tally

    def uphold(self, law: Law, case: Case) -> None:
        """Run ``law`` on ``case`` in the child, or on a case near it if this one is known to fail.

        Raises TimeUp if the time is over.
        """
        if self._is_late():
            raise TimeUp
        if self.leaves_out_next:
            self.leaves_out_next = False
            return
        self.generated += 1
        self.learn()
        open_case = case if self.replay is not None else self._moved(law, case)
        if open_case is None:
            return
        ignored = self._ignored()
        try:
            verdict = self.runs.drawn(law.name, open_case, ignored, self.clock.cut(math.inf))
        except OutOfTime:
            raise TimeUp from None
        self._blame_beside(law.name, open_case, verdict.beside)
        finding = self.info.finding(verdict)
        if finding is not None:
            self._sort(Broken(law.name, open_case, finding, ignored, tuple(verdict.sizes)))
        elif verdict.status == "held":
            self.held.append((law.name, open_case))

    def learn(self) -> None:
        """Read what other processes have found, and sort the failures that waited for that."""
        for record in self.ledger.news():
            if record.get("kernel") == self.info.name:
                bug = Bug.from_dict(record)
                self.bugs[bug.key] = with_tensors(bug, self.bugs.get(bug.key, bug).tensors)
            elif record.get("imprecise") == self.info.name:
                self.precision.merge(Imprecise.from_dict(record))
        if self.waiting and not self.ledger.is_busy(self.info.name):
            waiting, self.waiting = self.waiting, []
            for broken in waiting:
                self._sort(broken)

    def finish(self, *, last: bool = True) -> None:
        """End an item: failures that wait for the investigation of another process are sorted when that is over.

        Only in the ``last`` round does this wait as long as it takes; before, later items may sort them.
        """
        patient = time.perf_counter() + (math.inf if last else WAIT_SECONDS)
        while self.waiting and self.clock.cut(1.0) > 0 and time.perf_counter() < patient:
            self.learn()
            time.sleep(POLL_SECONDS if self.waiting else 0.0)
        if not last:
            return
        # Only one failure of each kind is investigated, as there is no time left to tell them apart.
        found = ((broken.finding, broken) for broken in self.waiting)
        kinds = {(x.tensor, x.signature, x.of_nan): broken for x, broken in found}
        self.waiting = []
        for broken in kinds.values():
            self._sort(broken, patient=False)

    def messages(self) -> list[str]:
        """Return what was found since the last call, as a user reads it."""
        told, self.unread = self.unread, []
        return told

    def results(self) -> dict[str, Any]:
        """Return the results of the item for the summary: its counts, its bugs, and where these showed."""
        return {
            "kernel": self.info.name,
            "dtype": self.dtype,
            "tally": self.tally.to_dict(),
            "bugs": [self.bugs[key].to_dict() for key in self.seen if key in self.bugs],
            "seen": {key: seen.to_dict() for key, seen in self.seen.items()},
            "imprecise": self.imprecise.to_dict(),
        }

    def known_that_hold(self, law: Law) -> list[str]:
        """Return complaints about known failures of a law whose stored case holds, so that their entries must go."""
        stored = [
            (known, stored_case(known)) for known in self.info.known_failures if known.laws[0] == law.name
        ]
        return [
            f"{self.info.name}: a known failure is gone: {known.what}\n"
            f"  remove it from known_failures: its case holds: {case!r}"
            for known, case in stored
            if self.replay is None
            and case is not None
            and case.dtype == self.dtype
            and self.runs.holds(known.laws[0], case)
        ]

    def complaint(self) -> str:
        """Say why the item shows nothing, or nearly nothing; the summary says more, once for the kernel."""
        if self.seen:
            return ""
        if was_not_run(self.tally):
            return f"none of the cases of {self.info.name} could be run here"
        return f"{self.info.name} refused nearly all cases" if is_mostly_refused(self.tally) else ""

    def _is_late(self) -> bool:
        """Whether the time for examples is up. The first example of an item needs only the run's time."""
        return self.clock.left <= 0 or (self.tally.drawn > 0 and time.perf_counter() > self.deadline)

    def _moved(self, law: Law, case: Case) -> Case | None:
        """Return the case, or one near it that meets nothing known to fail; None if there is none."""
        known = Closed(tuple(x for x in self.info.known_failures if law.fails_by(x)))
        bugs = filter(self._is_closed, self.bugs.values())
        closed = Closed(known.known, tuple(bugs if is_plain(law.name) else map(in_parts, bugs)))
        if not closed.is_met(case):
            return case
        found = elsewhere(case, closed, self.info.capabilities)
        if known.is_met(case):
            self.tally.known += 1
        else:
            self.tally.set_aside += 1
        self.tally.moved += found is not None
        return found

    def _is_closed(self, bug: Bug) -> bool:
        """Whether cases that meet a bug are run elsewhere, because it ends processes or was seen often enough."""
        if bug.failure.finding.ends_process:
            return bool(bug.needs) or self.blamed.get(bug.key, 0) >= MOST_ENDED
        # If a bug needs only lengths or numbers, or nothing, no other case can stand for those that meet it.
        is_named = any(not need.is_numeric for need in bug.needs)
        return is_named and self.blamed.get(bug.key, 0) >= MOST_BLAMED

    def _ignored(self) -> frozenset[str]:
        """Return the tensors that are wrong in every case: if they are not judged, other errors can be seen."""
        always = [
            bug for bug in self.bugs.values() if bug.is_everywhere and bug.failure.finding.kind in NUMBERS
        ]
        return frozenset(tensor for bug in always for tensor in bug.tensors)

    def _blame_beside(self, law: str, case: Case, beside: Sequence[str]) -> None:
        """Count a case for the bugs that always make some of these tensors wrong."""
        for bug in list(self.bugs.values()):
            shared = [tensor for tensor in beside if tensor in bug.tensors]
            if shared and not bug.needs:
                self._blame(bug, law, case, shared[0])

    def _sort(self, broken: Broken, *, patient: bool = True) -> None:
        """Count a failure for the bugs that explain it. What is left is investigated as a new bug, or waits."""
        known = () if self.replay is not None else tuple(self.bugs.values())
        if not is_plain(broken.law) and broken.finding.ends_process:
            for bug in known:
                if in_parts(bug).end_of(broken.case):
                    self._blame(bug, broken.law, broken.case, "")
                    return
        run = partial(self.runs.hard, explained=bool(broken.finding.explained_by))
        told = broken if self.replay is not None else plainly(broken, run, self.info.capabilities)
        outcome = attribute(told, known, run, self.info.capabilities)
        for bug in outcome.blamed:
            self._blame(bug, broken.law, broken.case, broken.finding.tensor)
        rest = outcome.rest
        if rest is None:
            return
        if rest.finding.explained_by and self._is_less_precise(rest):
            return
        if self.replay is not None:
            if not self.failures:
                self._found(rest)
            return
        if not (patient and self.ledger.is_busy(self.info.name)):
            with self.ledger.investigating(self.info.name):
                if not (patient and self.ledger.is_busy(self.info.name)):
                    self._found(rest)
                    return
        self.waiting.append(rest)

    def _is_less_precise(self, broken: Broken) -> bool:
        """Remember a call that is less precise than claimed, if one claim explains it and all such calls so far."""
        call = ImpreciseCall.of(broken.law, broken.case, broken.finding)
        if not self.precision.explains_also(call):
            return False
        before = self.precision.claims.get(self.dtype)
        self.precision.add(call)
        if not self.imprecise.total:
            self.unread.append(
                f"{self.info.name}: law `{broken.law}`: {call.tensor} is less precise than FlashAttention-2 "
                f"({self.dtype}), as {' or '.join(call.explained_by)} would have it; the summary tells of all calls"
            )
        self.imprecise.add(call)
        if self.precision.claims[self.dtype] != before:
            one = Imprecise()
            one.add(call)
            told = {"counts": {self.dtype: 0}, "calls": []}
            self.ledger.append({"imprecise": self.info.name, **one.to_dict(), **told})
        return True

    def _found(self, broken: Broken) -> None:
        """Investigate a failure that no known bug explains."""
        info, law, case = self.info, broken.law, broken.case
        failure = Failure(
            *(info.spec, info.claims, law, case, broken.ignored),
            kernel=info.name,
            finding=broken.finding,
            environment=self.environment,
        )
        investigation = Investigation(
            self.runs,
            failure,
            tuple(self.bugs.values()),
            self.shrinking,
            self._write,
            self._number,
            clock=self.clock,
            ordinary=self.ordinary,
            held=tuple(self.held),
            less_precise=self.precision.common,
        )
        try:
            bug = investigation.bug(shrink=self.replay is None)
        except HarnessError as e:  # the bug is kept as far as it is known
            self.unread.append(f"Flashproof itself failed as it looked into a failure of {info.name}: {e}")
            bug = investigation.as_it_is
        bug = self._known_as(bug)
        self.bugs[bug.key] = bug
        self.ledger.append(bug.to_dict())
        self._blame(bug, law, case, broken.finding.tensor)
        self.seen[bug.key].keep(investigation.cases.shrunk)

    def _known_as(self, bug: Bug) -> Bug:
        """Return the known bug if this is the same, with the tensors of both; else the bug itself, as a new one."""
        for known in self.bugs.values():
            if is_same(known, bug, partial(self.runs.hard, explained=True), self.info.capabilities):
                report.remove(bug.failure, self.report_dir)
                if is_plain(bug.failure.law):
                    return met_again(known, bug)
                return with_tensors(known, bug.tensors)
        blamed = self._blamed_for_smallest(bug.failure)
        if blamed is not None:
            report.remove(bug.failure, self.report_dir)
            return blamed
        self.failures[bug.key] = bug.failure
        return bug

    def _blamed_for_smallest(self, f: Failure) -> Bug | None:
        """Return the known bug that breaks a call which a comparing law makes for its smallest case, or None."""
        if not self.bugs or is_plain(f.law):
            return None
        verdict = self.runs.verdict(f.law, f.case)
        if verdict.finding is None:
            return None
        run, capabilities = self.runs.hard, self.info.capabilities
        told = plainly(Broken(f.law, f.case, verdict.finding, sizes=tuple(verdict.sizes)), run, capabilities)
        if told.law == f.law:
            return None
        outcome = attribute(told, tuple(self.bugs.values()), run, capabilities)
        return outcome.blamed[0] if outcome.rest is None and outcome.blamed else None

    def _number(self, failure: Failure) -> int:
        """Return how many known bugs would have the same folder."""
        return sum(known.failure.kin == failure.kin for known in self.bugs.values())

    def _blame(self, bug: Bug, law: str, case: Case, tensor: str) -> None:
        """Count one failing example for a bug, and report the bug when it shows for the first time."""
        if (bug.key, law) not in self.told:
            self.told.add((bug.key, law))
            self.unread.append(self._told(bug, law))
        self.blamed[bug.key] = self.blamed.get(bug.key, 0) + 1
        self.seen.setdefault(bug.key, Sightings()).add(law, case, tensor)

    def _told(self, bug: Bug, law: str) -> str:
        """Return the text for a bug in a failing item: one line or, with ``verbose``, all that is known of it."""
        path = self.report_dir / bug.failure.folder / "report.md"
        if sum(key == bug.key for key, _ in self.told) > 1 or bug.key not in self.failures:
            what = f"{self.info.name}: law `{law}` is broken ({self.dtype}) by a bug that is reported already"
            return f"{what}: {path}"
        if not self.verbose:
            return f"{report.headline(bug.failure)}: {path}"
        more = (f"    {line}" for _, line in told(bug, Sightings()))
        return "\n".join([report.message(bug.failure, self.report_dir), *more])

    def _write(self, failure: Failure, script: str | None) -> None:
        """Write the report. If that is not possible, the run goes on, and a message says so."""
        try:
            report.write(failure, self.report_dir, script)
        except OSError as e:
            line = f"report not written: {self.report_dir / failure.folder}: {e.strerror}"
            if line not in self.unread:
                self.unread.append(line)
