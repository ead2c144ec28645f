"""Runs of one kernel in one child: each case is journaled before it is launched, and counted.

A kernel in Triton takes turns: compiled for any sizes and strides, or for those of each case.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from kernels.contract import Capabilities
from reference.bounds.accumulation import SAFETY, SHRINKING_SAFETY
from strategies.by_device import ByDevice
from strategies.case import Case, to_record
from strategies.cases import with_gradients
from strategies.features import NAN, value_of
from strategies.scales import scale_of
from tests.harness.clock import Clock
from tests.harness.law import Law, law_named
from tests.harness.run import ALL_DESIGNS, NO_DESIGN, ONE_DESIGN, WHOLE_DESIGN, Run
from tests.harness.running.child import Child, ChildDied, HarnessError, OutOfTime
from tests.harness.running.journal import Journal
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.running.learned_claims import Asked
from tests.harness.running.tally import Tally
from tests.harness.symptoms import is_in_common
from tests.harness.verdict import NUMBERS, Finding, Verdict

LEAST_CASE = 30.0
"""A case may take half of the run's seconds, and at least so many, before the run goes on with others."""
MOST_SHARES = 2.0
"""A case may take so many times the seconds of its kernel, where several kernels share the time of a run."""
HANG_SECONDS = ByDevice(cpu=15.0, accelerator=180.0)
"""Seconds for a case, by device type, of a kernel that is known to hang."""
MOST_SECONDS = 20.0
"""A large case for which a kernel would take longer is not run."""
SLOWED = 5.0
"""What takes some seconds of a processor may take so many times as many on a machine that does other work."""
SMALL = ByDevice(cpu=(128, 512), accelerator=(2048, 2048))
"""The largest (seqlen_q, seqlen_k), by device type, for which a kernel's seconds are measured."""
SEVERAL = 16
"""Several short sequences of such a case have at most so many times the work of one with these lengths.

With fewer, what is measured would be the time to launch a kernel, whatever it is launched for.
"""
TILE = 64
"""A sequence that is shorter takes a kernel as long as one of so many rows."""
MOST_HELD = 200
"""The most cases that held which are remembered: a claim that excludes all of them is not offered."""


OTHER = "other"
"""The status of a case in which a tuner took another configuration than the one that the case names."""

Try = Callable[[str, Case, frozenset[str]], Finding | None]
"""Runs a law on a case without judging some tensors, and returns what it finds, or None."""

BY_VALUE = 1 / 4
"""The share of the time for drawn cases in which a kernel in Triton is compiled for each case's own sizes and strides.

In the rest of the time it is compiled for any.
"""


@dataclass(frozen=True)
class Seen:
    """What the wrong elements of a failing case look like."""

    sentences: tuple[str, ...]
    pictures: tuple[dict[str, Any], ...]


class Crash(Protocol):
    """A known bug, as far as it may end a process."""

    def end_of(self, case: Case) -> Finding | None:
        """Return the finding with which a case would end its process because of this bug, or None."""


@dataclass
class Compiling:
    """What the kernel of a run is compiled for: any sizes and strides, or those of each case, as users run it.

    Compiled for any, it hardly ever has to be compiled for one more case. ``is_general`` says whether it is compiled
    for any while a failure is looked into, and ``takes_turns`` whether it is for most drawn cases. It is for none if it
    ``is_apart``: then it was seen to fail only as compiled for any. ``seconds`` has the time of the drawn cases that
    were run with the kernel compiled for any sizes and strides (True), and for their own (False).
    """

    is_general: bool = False
    takes_turns: bool = False
    is_apart: bool = False
    seconds: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    @property
    def is_turn_of_general(self) -> bool:
        """Whether the next drawn case is run with the kernel compiled for any values."""
        has_had_share = BY_VALUE * self.seconds[True] > (1 - BY_VALUE) * self.seconds[False]
        return self.takes_turns and not self.is_apart and not has_had_share

    @contextmanager
    def timed(self, *, general: bool) -> Iterator[None]:
        """Count the time of a drawn case."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[general] += time.perf_counter() - start


def nothing() -> None:
    """Do nothing."""


@dataclass
class Runs:
    """Everything that can be asked of a kernel.

    ``tally`` counts the cases of an item, ``held`` are the last of them that held, and ``nearest`` has for each tensor
    the largest error over bound among them, with its case. ``ordinary`` remembers what was found in ordinary cases,
    which every investigation asks for, and ``answers`` what was found outside the search since ``forget`` was called,
    as questions about one failure often meet the same case, and ``statuses`` those of the verdicts on these cases.
    ``bugs`` are the known ones: a case that would end the process by one of them is not run just to find out about
    something else. ``clock`` has the time that the whole run may take, ``share`` the seconds of this kernel among all
    workers, and ``patience`` the seconds for one case after the end, until a case takes longer. Once a kernel has
    left some case ``unanswered`` (see ``has_no_answer``), it is asked whether it answers each case that is tried.
    ``ahead`` is called while a case runs, or nothing. What is asked is judged against what the kernel is ``assumed`` to
    compute (see ``assuming``).

    If it ``has_general``, kernels can be compiled for any values, so that hardly any case has to be compiled for
    itself. Drawn cases are run so most of the time (see ``in_turns``), and so is what is asked about a failure that
    shows so as well (see ``asked_of_general``). ``compiling`` says which of the two is in use.
    """

    info: KernelInfo
    child: Child
    journal: Journal
    bugs: Mapping[str, Crash] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    share: float = math.inf
    has_general: bool = False
    compiling: Compiling = field(default_factory=Compiling)
    unanswered: bool = False
    assumed: tuple[str, ...] = ()
    ahead: Callable[[], None] = nothing
    ordinary: dict[tuple[str, Case], Finding | None] = field(default_factory=dict)
    answers: dict[tuple[Any, ...], Verdict] = field(default_factory=dict)
    statuses: dict[tuple[str, Case, tuple[str, ...], tuple[str, ...]], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.patience = self.clock.least
        self.begin()

    def begin(self) -> Tally:
        """Start counting anew, and return the counts."""
        self.tally, self.ahead = Tally(), nothing
        self.held: deque[tuple[str, Case]] = deque(maxlen=MOST_HELD)
        self.nearest: dict[str, tuple[float, Case]] = {}
        return self.tally

    def verdict(
        self,
        law: str,
        case: Case,
        *,
        ignored: frozenset[str] = frozenset(),
        claims: tuple[str, ...] = (),
        safety: float = SAFETY,
        seconds: float = math.inf,
        general: bool = False,
        designs: str = ALL_DESIGNS,
        alternatives: tuple[str, ...] = (),
    ) -> Verdict:
        """Run a law on a case without judging tensors in ``ignored``, with ``claims`` added to those of the kernel.

        If it is ``general``, the kernel is compiled for any values. ``alternatives`` are what the kernel is taken to
        compute, as in ``Run``, in place of what is ``assumed``. Raises OutOfTime if it takes longer than ``seconds``.
        """
        all_claims = (*self.info.claims, *claims)
        run = Run(
            *(self.info.spec, all_claims, law, case, ignored, safety),
            designs=designs,
            alternatives=alternatives or self.assumed,
        )
        self.journal.note(run.to_dict())
        return self.child.run(run, self._while_it_runs, seconds, general=general)

    def _while_it_runs(self) -> None:
        """Do what has to be done by the end of a case that runs."""
        self.journal.sync()
        self.ahead()

    def in_time(self, law: str, case: Case, most: float = math.inf, **options: Any) -> Verdict:
        """Run as ``verdict`` does. Raises OutOfTime if it takes longer than ``most``, or than the run may be busy.

        After the end of that time a case may still take ``patience``, so that quick ones can tell which failures are
        one bug.
        """
        seconds = max(self.patience, self.clock.cut(most))
        if not seconds:
            raise OutOfTime
        try:
            return self.verdict(law, case, **options, seconds=seconds)
        except OutOfTime:
            self.patience *= self.clock.left > 0
            raise

    def _would_take(self, law: str, case: Case) -> float:
        """Return how many seconds a kernel would take for a large case, in proportion to a small one of the same kind.

        That is run twice, since a kernel may be compiled for the first call. Nothing is known of a small case that is
        not answered.
        """
        rows, keys = map(min, SMALL[self.device_type], (case.seqlen_q, case.seqlen_k))
        one = replace(case, batch=1, seqlen_q=rows, seqlen_k=keys)
        most = SEVERAL * math.prod(SMALL[self.device_type]) // _work(one)
        small = replace(one, batch=max(1, min(case.batch, most)))
        verdicts = [self.in_time(law, small, MOST_SECONDS) for _ in range(2)]
        return min(x.seconds.get("kernel", 0.0) for x in verdicts) * _work(case) / _work(small)

    def drawn(
        self, law: str, case: Case, ignored: frozenset[str], *, hangs: bool = False, is_changed: bool = False
    ) -> Verdict:
        """Run a case that the search has drawn, and count it; ``hangs`` says whether the kernel is known to hang.

        ``is_changed`` says that the case was made of one that the kernel has refused: if it refuses this one as well,
        that does not count twice. Raises OutOfTime if the run has no time for the case, which tells nothing then.
        """
        self.journal.examples += not is_changed
        start = time.perf_counter()
        most = max(LEAST_CASE, min(self.clock.seconds / 2, MOST_SHARES * self.share))
        if hangs:
            most = min(most, HANG_SECONDS[self.device_type])
        try:
            if law_named(law).draws.get("large") and self._would_take(law, case) > MOST_SECONDS:
                reason = f"{scale_of(case)} would take more than {MOST_SECONDS:.0f} s"
                self.tally.add(Verdict(status="skipped", reason=reason), case)
                return Verdict(status="skipped", reason=reason)
            verdict = self._verdict_in_turns(law, case, most, ignored)
        except OutOfTime:
            self.tally.note_slow(time.perf_counter() - start, case, cut_off=True)
            raise
        if is_changed and verdict.status == "refused":
            return verdict
        self.unanswered |= verdict.case_of(case) is not case or verdict.status == "skipped"
        case, counted = verdict.case_of(case), verdict.counted(case)
        self.tally.add(verdict, counted)
        if verdict.status in ("held", "broken"):
            self._note_levels(law_named(law), counted)
        if verdict.status == "held":
            self.held.append((law, case))
            for tensor, ratio in verdict.worst.items():
                if ratio > self.nearest.get(tensor, (0.0, case))[0]:
                    self.nearest[tensor] = ratio, case
        return verdict

    def _note_levels(self, law: Law, case: Case) -> None:
        """Count the levels of a case whose calls were judged, if some of them were not together in a case before."""
        levels = self.info.coverage.levels_of(case, law.sets)
        if not law.expects_refusal and self.info.coverage.is_new(levels):
            self.tally.levels[" ".join(map(str, levels))] += 1

    @contextmanager
    def in_turns(self) -> Iterator[None]:
        """Meanwhile, drawn cases are run most of the time with their kernel compiled for any values.

        In the rest of it (``compiling.BY_VALUE``) most have to be compiled for their own values, for seconds, so that
        far fewer are tried. What fails as compiled for any values is reported only if it fails as compiled for its own
        too.
        """
        self.compiling.takes_turns = self.may_be_general
        try:
            yield
        finally:
            self.compiling.takes_turns = False

    def _verdict_in_turns(self, law: str, case: Case, most: float, ignored: frozenset[str]) -> Verdict:
        """Return the verdict on a drawn case, with its kernel compiled for any values unless that has had its share."""
        general = self.compiling.is_turn_of_general
        with self.compiling.timed(general=general):
            return self.in_time(law, case, most, ignored=ignored, general=general)

    def fails_in_general_alone(self, law: str, case: Case, finding: Finding, ignored: frozenset[str]) -> bool:
        """Whether a case holds as compiled for its values, and fails in the same way as compiled for any.

        As users never run it so, later cases are all run as compiled for their own values.
        """
        if not self.compiling.seconds[True] or self.in_time(law, case, ignored=ignored).status != "held":
            return False
        again = self.info.finding(self.in_time(law, case, ignored=ignored, general=True))
        self.compiling.is_apart = again is not None and is_in_common(finding, again)
        return self.compiling.is_apart

    def judged(
        self,
        law: str,
        case: Case,
        ignored: frozenset[str] = frozenset(),
        claims: tuple[str, ...] = (),
        safety: float = SAFETY,
        *,
        explained: bool = False,
        designs: str = ONE_DESIGN,
    ) -> Finding | None:
        """Return what is found in a run outside the search. With ``explained``, less precise results count as well.

        ``designs`` says how many designs are looked for that would explain them: see ``DESIGNS``. Raises OutOfTime if
        the run has no time for it.
        """
        options: dict[str, Any] = {"ignored": ignored, "safety": safety, "designs": designs}
        finding = self.info.finding(self._outside_search(law, case, claims, **options))
        return finding if finding and (explained or not finding.explained_by) else None

    def judged_raw(
        self,
        law: str,
        case: Case,
        ignored: frozenset[str] = frozenset(),
        safety: float = SAFETY,
        claims: tuple[str, ...] = (),
    ) -> Finding | None:
        """Return what is wrong in a run outside the search, whether or not a less precise design would explain it.

        ``claims`` are those of designs that the kernel may have all the same. Raises OutOfTime if the run has no time.
        """
        options: dict[str, Any] = {"ignored": ignored, "safety": safety, "designs": NO_DESIGN}
        return self.info.finding(self._outside_search(law, case, claims, **options))

    def holds_as(self, law: str, case: Case, ignored: frozenset[str], alternatives: tuple[str, ...]) -> bool:
        """Whether a case holds if the kernel is taken to compute these alternatives. Raises OutOfTime."""
        told: dict[str, Any] = {"ignored": ignored, "safety": SHRINKING_SAFETY, "designs": NO_DESIGN}
        return self._outside_search(law, case, **told, alternatives=alternatives).status == "held"

    def oracle(self, *, is_precise: bool, explained: bool = True) -> Try:
        """Return what tells what is wrong in a case; with ``explained``, less precise results count as well.

        Of a kernel that ``is_precise`` as far as known, no design is asked whether it would explain a part of what is
        wrong. One may happen to do so, and then the rest would be all that is told.
        """
        if not is_precise:
            return partial(self.judged, explained=explained)
        return self.judged_raw if explained else partial(self.judged, designs=WHOLE_DESIGN)

    def _outside_search(self, law: str, case: Case, claims: tuple[str, ...] = (), **options: Any) -> Verdict:
        """Return the verdict on a case. If a known bug would end the process in it, that is told without a run."""
        ends = next(filter(None, (bug.end_of(case) for bug in self.bugs.values())), None)
        if ends is not None and not claims:
            return Verdict(status="broken", finding=ends)
        alternatives = options.setdefault("alternatives", self.assumed)
        asked = law, case, claims, *options.values(), self.compiling.is_general, self.in_copies
        if asked not in self.answers:
            verdict = self.in_time(law, case, claims=claims, general=self.compiling.is_general, **options)
            self.tally.add_seconds(verdict.seconds)
            self.unanswered |= verdict.status == "skipped"
            is_other = verdict.case_of(case) is not case
            self.statuses[law, case, claims, alternatives] = OTHER if is_other else verdict.status
            self.answers[asked] = verdict
        return self.answers[asked]

    def claims_of(self, law: str) -> Capabilities:
        """Return the claims of the kernel, less what tells nothing of a bug that a law has found.

        These are dtypes that the law is not about, calls without gradients if it judges these, and cases from which
        nothing is learned (see ``has_no_answer``).
        """
        claims, dtypes = self.info.capabilities, law_named(law).dtypes
        if law_named(law).draws.get("gradients"):
            claims = with_gradients(claims)
        if not {*claims.dtypes} <= {*dtypes}:
            claims = replace(claims, dtypes=tuple(x for x in claims.dtypes if x in dtypes))
        return Asked(**vars(claims), refuses=partial(self.has_no_answer, law)) if self.unanswered else claims

    def refuses(self, law: str, case: Case) -> bool:
        """Whether the kernel refuses a case under a law. Raises OutOfTime if the run has no time to ask it."""
        return self.status(law, case) == "refused"

    def has_no_answer(self, law: str, case: Case) -> bool:
        """Whether nothing is learned from a case under a law. Raises OutOfTime as ``refuses`` does.

        It may be refused, the device may lack memory for it, or a tuner runs another configuration in its place.
        """
        return self.status(law, case) in ("refused", "skipped", OTHER)

    def status(self, law: str, case: Case, claims: tuple[str, ...] = ()) -> str:
        """Return the status of the verdict on a case under a law, with ``claims`` added to those of the kernel.

        It is ``OTHER`` if a tuner took another configuration than that of the case, and "broken" if a known bug would
        end the process. Raises OutOfTime if the run has no time to ask the kernel.
        """
        asked = law, case, claims, self.assumed
        if asked not in self.statuses:
            self.judged(law, case, claims=claims, safety=SHRINKING_SAFETY)
        return self.statuses.get(asked, "broken")

    def forget(self) -> None:
        """Run cases outside the search anew, although they were run before."""
        self.answers.clear()
        self.statuses.clear()

    @contextmanager
    def assuming(self, alternatives: tuple[str, ...]) -> Iterator[None]:
        """Meanwhile, judge against what the kernel computes by these alternatives, as known bugs of it have it.

        So what else is wrong is told, in the same calls and the same tensors.
        """
        before, ordinary = self.assumed, self.ordinary
        self.assumed = alternatives
        self.ordinary = ordinary if alternatives == before else {}
        try:
            yield
        finally:
            self.assumed, self.ordinary = before, ordinary

    @contextmanager
    def asked_of_general(
        self, law: str, case: Case, finding: Finding, ignored: frozenset[str]
    ) -> Iterator[None]:
        """Meanwhile, ask about a failure with its kernel compiled for any values, if it shows so too."""
        with suppress(OutOfTime, HarnessError):
            if finding.kind in NUMBERS and self.may_be_general:
                verdict = self.in_time(law, case, ignored=ignored, general=True)
                again = self.info.finding(verdict)
                self.compiling.is_general = again is not None and is_in_common(finding, again)
        try:
            yield
        finally:
            self.compiling.is_general = False

    @property
    def may_be_general(self) -> bool:
        """Whether the kernel is one in Triton that is compiled by values, and can be compiled for any instead."""
        return self.has_general and self._is_compiled("by_value")

    @property
    def is_compiled(self) -> bool:
        """Whether the kernel may have to be compiled for what a case asks for. An interpreted one has not."""
        return self._is_compiled("at_all")

    def _is_compiled(self, how: str) -> bool:
        """Return what the child says of how the kernel is compiled."""
        request = {"do": "compiled", "kernel": self.info.spec, "claims": self.info.claims}
        with suppress(ChildDied, HarnessError):  # a process that can't be started says so when it gets a case
            return bool(self.child.ask(request)[how])
        return False

    def holds(self, law: str, case: Case) -> bool:
        """Whether a case did not fail and could be run at all, for which a device may have too little memory."""
        verdict = self.verdict(law, case)
        return verdict.status != "skipped" and self.info.finding(verdict) is None

    @property
    def in_copies(self) -> bool:
        """Whether each case is run in a process of its own, because the kernel keeps something from call to call."""
        return self.info.spec in self.child.stateful

    @property
    def has_quick_copies(self) -> bool:
        """Whether a process of its own costs a case next to nothing, as on the CPU, where it is a copy of another."""
        return self.device_type == "cpu"

    @property
    def is_slow(self) -> bool:
        """Whether each case takes seconds, as a process of its own has to be started for it."""
        return self.in_copies and not self.has_quick_copies

    def go_on_in_copies(self) -> None:
        """Run each later case in a process of its own."""
        self.child.stateful.add(self.info.spec)

    def end_slow_copies(self) -> None:
        """Run later cases in one process again, unless processes of their own cost next to nothing."""
        if not self.has_quick_copies:
            self.stop_copies()

    def stop_copies(self) -> None:
        """Run later cases in one process again."""
        self.child.stateful.discard(self.info.spec)

    def certificate(
        self, run: Run, tensor: str, kinds: Sequence[tuple[list[Case], list[Case]]], seconds: float
    ) -> tuple[str, tuple[str, ...], bool]:
        """Return what the kernel computes in place of attention, in words and as records; nothing if that is not known.

        It explains a tensor, beside the alternatives of the run; what explains others is another bug, and left out.
        With it comes whether it is known of some of the calls alone: see ``widening.certificate``.

        Raises ChildDied, DeviceLost.
        """
        told = {
            "kinds": [[[*map(to_record, cases)] for cases in kind] for kind in kinds],
            "tensor": tensor,
            "seconds": seconds,
        }
        answer = self.child.ask(run.request("certificate", **told), SLOWED * seconds + self.clock.least)
        return "; ".join(answer["words"]), tuple(answer["alternatives"]), bool(answer["of_some"])

    def read_outside(self, law: str, case: Case, finding: Finding) -> tuple[str, ...]:
        """Return the places around the inputs, such as "behind k", from which NaN comes into a tensor of a result.

        They are asked for where a law finds NaN that no input has. None are returned if the kernel gives no answer.
        """
        is_made = finding.kind == "nonfinite" and "made" in finding.of_nan
        if not is_made or value_of(case, NAN):
            return ()
        with suppress(ChildDied, HarnessError):
            run = Run(self.info.spec, self.info.claims, law, case)
            return tuple(self.child.ask(run.request("outside", tensor=finding.tensor))["places"])
        return ()

    def written(self, run: Run, tensor: str, cases: Sequence[Case]) -> str:
        """Return what the kernel writes over an input in these cases, in words; "" if that is not known."""
        with suppress(ChildDied, HarnessError):
            told = {"tensor": tensor, "cases": [*map(to_record, cases)]}
            return " or ".join(self.child.ask(run.request("written", **told))["words"])
        return ""

    def look(self, run: Run) -> Seen:
        """Say what the wrong elements of a case look like. Raises ChildDied."""
        seconds = max(self.clock.least, self.clock.cut(self.child.run_seconds))
        answer = self.child.ask(run.request("look"), seconds)
        return Seen(tuple(answer["sentences"]), tuple(answer["pictures"]))

    def script(self, run: Run, finding: Finding, title: str, seconds: float) -> tuple[str | None, bool]:
        """Return a stand-alone script, or None if the calls can't be made again. Raises ChildDied, DeviceLost.

        With it comes whether the wrong tensor is right if fresh memory is full of zeros. No tensor is ignored, as the
        reader of a script knows of no other bugs.
        """
        told = {"finding": asdict(finding), "title": title, "seconds": seconds}
        request = replace(run, ignored=frozenset()).request("repro", **told)
        answer = self.child.ask(request, seconds)
        return answer["text"], bool(answer["depends"])

    def holds_in_turn(self, run: Run, seconds: float) -> bool:
        """Whether a case holds on the CPU if the programs of each launch run one after the other.

        Raises ChildDied, DeviceLost.
        """
        on_cpu = self.device_type == "cpu"
        return on_cpu and bool(self.child.ask(run.request("in_turn"), seconds)["holds"])

    @property
    def device_type(self) -> str:
        """The type of the device: ``cpu``, or that of an accelerator such as ``cuda``."""
        return self.child.device.partition(":")[0]


def _work(case: Case) -> int:
    """Return what a kernel's time for a case follows: its scores, counted in whole tiles."""
    return case.batch * case.heads_q * max(TILE, case.seqlen_q) * max(TILE, case.seqlen_k)
