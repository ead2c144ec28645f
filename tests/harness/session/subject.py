"""One kernel at one dtype: its cases are drawn and run, and the results are returned.

Hypothesis draws a few cases at a time, before any of them is run. So no kernel runs inside a Hypothesis test, which
would take any exception for a failure of that test.
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from kernels.contract import GRADIENTS, Capabilities
from strategies.case import Case
from strategies.cases import Space
from strategies.design import Design, Variants, variants_of
from strategies.features import with_contiguous_inputs
from tests.harness.bugs.attribution import FailingExample
from tests.harness.bugs.avoidance import Avoided, may_show, steer_away
from tests.harness.bugs.bug import Bug
from tests.harness.certificates.probes import probes
from tests.harness.diagnosis.reruns import AGAIN
from tests.harness.diagnosis.triage import Triage
from tests.harness.kernel_record import stored_case
from tests.harness.law import Law, place_among_laws
from tests.harness.report.database import Kept, Near
from tests.harness.run import Run
from tests.harness.running.child import OutOfTime
from tests.harness.running.learned_claims import AnsweredLaws, usual
from tests.harness.running.refusals import is_mostly_refused, was_not_run
from tests.harness.verdict import NUMBERS, Verdict

APART = 4
"""Items of different dtypes that do not share a design begin with levels that are so many apart."""
AT_ONCE = 8
"""How many cases one Hypothesis run draws. Longer runs repeat some of their cases."""


class TimeUp(Exception):
    """The time for examples is over."""


@dataclass(eq=False, repr=False)
class Subject:
    """One kernel at one dtype in one process.

    A broken law raises nothing: the failure is passed to ``triage``, and the search goes on until its time is up.

    Attributes:
        triage: sorts failures.
        answered: which cases the kernel seems to answer, and which to refuse.
        max_seqlen: the largest length to draw, if it is limited.
        replay: a run to repeat: only its case is run, and its ignored tensors are not judged.
        corpus: failing cases of earlier runs, which are run before any case is drawn.
        near: cases that came nearest to a bound in earlier runs, which are run early too.
        strategies: the strategies made so far.
        designs: the covering designs made so far.
        variants: the designs of compiled variants made so far.
    """

    triage: Triage
    answered: AnsweredLaws
    max_seqlen: int | None = None
    replay: Run | None = None
    corpus: Sequence[Kept] = ()
    near: Sequence[Near] = ()
    strategies: dict[tuple[Any, ...], st.SearchStrategy[Case]] = field(default_factory=dict)
    designs: dict[tuple[Any, ...], Design] = field(default_factory=dict)
    variants: dict[tuple[Any, ...], Variants] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runs, self.known = self.triage.runs, self.triage.known
        self.info, self.dtype = self.runs.info, self.known.dtype
        if self.replay is not None:
            self.triage.may_grow = 0  # a replay looks for a leak whatever the size of the process
        self.begin()

    def __repr__(self) -> str:
        """Return what Hypothesis prints."""
        return f"<{self.info.name} {self.dtype}>"

    def cases(self, **options: Any) -> st.SearchStrategy[Case]:
        """Return a strategy of claimed cases at this dtype; ``options`` are those of ``strategies.cases.cases``."""
        # Strategies are kept, because Hypothesis takes longer to validate a new one than to draw an example from it.
        key = (repr(self.claims), *sorted(options.items()))
        if key not in self.strategies:
            self.strategies[key] = self._space(self.dtype, options).strategy()
        return self.strategies[key]

    def _space(self, dtype: str, options: Mapping[str, Any]) -> Space:
        if self.max_seqlen is not None:
            options = {**options, "max_seqlen": self.max_seqlen}
        return Space(
            capabilities=self.claims,
            dtype=dtype,
            device_type=self.runs.device_type,
            **options,
        )

    def design(self, law: Law, number: int, source: str, variants: Sequence[int] = ()) -> Design:
        """Return the covering design of a law's cases; each ``number`` and ``source`` stands for other rows.

        The items of all dtypes share it, but for those of a kernel that is compiled, whose cases have the ``variants``
        of these numbers.
        """
        key = (repr(self.claims), law.name, number, *variants)
        if key not in self.designs:
            all_dtypes = [dtype for dtype in self.claims.dtypes if dtype in law.dtypes]
            dtypes = [self.dtype] if variants else all_dtypes
            at = all_dtypes.index(self.dtype) if variants else 0
            # Each turn has at least one large case of each dtype.
            of_sizes = number * len(all_dtypes) + at, len(all_dtypes) // len(dtypes)
            of_law = place_among_laws(law) * len(dtypes) + APART * at, 1
            first, step = of_sizes if law.draws.get("large") else of_law
            self.designs[key] = Design(
                [self._space(dtype, law.draws) for dtype in dtypes],
                numbers="numbers" not in law.sets,
                seed=f"{source} {law.name} {number}",
                first=first,
                step=step,
                variants=[self._variants(source).row(variant) for variant in variants],
            )
        return self.designs[key]

    def _variants(self, source: str) -> Variants:
        """Return the compiled variants of the kernel, which all of its laws and processes share."""
        key = (repr(self.claims), source)
        if key not in self.variants:
            self.variants[key] = variants_of(self.claims, self.runs.device_type, source)
        return self.variants[key]

    def is_tried(self, run: Run, law: Law) -> bool:
        """Whether a run of an earlier session is repeated: it has this law and dtype, and a claimed case."""
        case = run.case
        return (run.law, case.dtype) == (law.name, self.dtype) and self.info.capabilities.admits(case)

    def begin(
        self, claims: Capabilities | None = None, seconds: float = math.inf, *, is_within: bool = False
    ) -> None:
        """Start a new item: draw from ``claims``, by default all that the kernel has, for so many seconds.

        ``is_within`` says that they leave out claimed cases which the kernel seems to refuse. Bugs that earlier
        items have found stay known.
        """
        self.tally = self.runs.begin()
        self.known.begin()
        self.gone: list[Bug] = []
        self.changed: list[Near] = []
        self.generated = 0
        self.is_within = is_within
        self.claims = claims or self.info.capabilities
        self.deadline = self.triage.deadline = time.perf_counter() + seconds

    def check(self, law: Law, case: Case) -> Verdict | None:
        """Run ``law`` on ``case`` in the child, or on a similar case if ``case`` is known to fail.

        Return the verdict on ``case``; None if another case or none was run. Raises TimeUp if the time is over.
        """
        if self._is_late():
            raise TimeUp
        self.generated += 1
        self.triage.learn()
        passed_over = self._passed_over(law, case)
        open_case = case if self.replay is not None else self._moved(law, case, has_more=bool(passed_over))
        if open_case is None:
            return None
        if open_case is not case:
            passed_over = frozenset()
        ignored = self.known.ignored(law.name, open_case) if self.replay is None else self.replay.ignored
        try:
            verdict, open_case = self._noted_verdict(law, open_case, ignored | passed_over)
            if passed_over and self.info.finding(verdict):
                # All wrong tensors must be known to decide whether a known bug explains the failure.
                again = self.runs.in_time(law.name, open_case, ignored=ignored)
                verdict = again if self.info.finding(again) else verdict
        except OutOfTime:
            if self.runs.clock.left <= 0:
                raise TimeUp from None
            return None  # the case may hang, or be slow to compile: neither passed nor failed
        self.known.blame_beside(law.name, open_case, verdict.beside)
        finding = self.info.finding(verdict)
        if finding is not None and finding.kind == "hung":
            self.known.note_hang()
        is_exception = finding is not None and finding.kind == "exception"
        if is_exception and open_case.way == "inference_mode" and self.runs.has_quick_copies:
            self.runs.go_on_in_copies()  # what the kernel has kept of inference mode fails its later calls as well
        if finding is None:
            self.triage.look_for_leak(law.name, open_case)
        else:
            is_alone = self.runs.in_copies
            broken = FailingExample(law.name, open_case, finding, ignored, tuple(verdict.sizes), is_alone)
            (self.triage.attribute if self.replay is None else self.triage.report)(broken)
        return verdict if open_case is case else None

    def _noted_verdict(self, law: Law, case: Case, ignored: frozenset[str]) -> tuple[Verdict, Case]:
        """Run a case, note whether the kernel answers or refuses it, and return the verdict and the case.

        The case is the one that was run, if a tuner took another configuration than that of ``case``.

        A refused case is run again with contiguous inputs, since many kernels take no others. If that is not refused,
        the contiguous case and its verdict are returned.
        """
        verdict = self._verdict(law, case, ignored)
        case = verdict.case_of(case)
        self._note(law.name, case, verdict, is_within=self.is_within)
        plain = with_contiguous_inputs(case)
        if not self._is_refusal(verdict) or plain == case:
            return verdict, case
        changed = self._verdict(law, plain, ignored, is_changed=True)
        if changed.status == "refused":
            return verdict, case
        plain = changed.case_of(plain)
        self._note(law.name, plain, changed, is_within=True)
        return changed, plain

    def _is_refusal(self, verdict: Verdict) -> bool:
        """Whether the kernel has refused a case, where it is allowed to."""
        is_allowed = self.info.capabilities.may_refuse and self.replay is None
        return is_allowed and verdict.status == "refused"

    def _note(self, law: str, case: Case, verdict: Verdict, *, is_within: bool) -> None:
        """Note whether the kernel has refused or answered a case.

        ``is_within`` says that the case was chosen as one that the kernel seems to answer.
        """
        is_refused = self._is_refusal(verdict)
        if not (is_refused or verdict.tells_answers):
            return
        self.runs.unanswered |= is_refused
        answered = self.answered.under(law)
        answered.note(case, is_refused=is_refused)
        with suppress(OutOfTime):
            answered.ask(self.dtype, partial(self.runs.refuses, answered.law))
        if is_within:
            self.tally.within += 1
            self.tally.refused_within += is_refused

    def _verdict(self, law: Law, case: Case, ignored: frozenset[str], *, is_changed: bool = False) -> Verdict:
        """Return the verdict on a case. In the replay of an intermittent failure it is repeated until it fails."""
        for _ in range(1 if self.replay is None else self.replay.repeats):
            verdict = self.runs.drawn(law.name, case, ignored, hangs=self.known.hangs, is_changed=is_changed)
            if verdict.finding is not None:
                break
        return verdict

    def take_up(self, law: Law, unfinished: Mapping[Path, Case]) -> None:
        """Run a law on cases during which earlier runs were killed, however long that takes, and remove their files.

        Raises TimeUp if the time of the run is over.
        """
        deadline, self.deadline = self.deadline, math.inf
        for path, case in unfinished.items():
            self.check(law, case)
            path.unlink(missing_ok=True)
        self.deadline = deadline

    def uphold_corpus(self, law: Law) -> None:
        """Run ``law`` on failing cases of earlier runs, however long that takes. Raises TimeUp if the run is over.

        If a case passes several times, its bug is gone. An intermittent failure may pass once.
        """
        deadline, self.deadline = self.deadline, math.inf
        for kept in self.corpus:
            if not self.is_tried(kept.run, law):
                continue
            verdict = self.check(law, kept.run.case)
            if verdict and verdict.status == "held" and self._is_gone(kept):
                self.gone.append(kept.bug(self.info.name))
        self.deadline = deadline

    def _is_gone(self, kept: Kept) -> bool:
        """Whether a case that has passed once, perhaps with tensors ignored, passes again with all tensors judged."""
        is_own = kept.is_gone_if_it_holds and self.info.is_called(kept.run.spec)
        return is_own and all(self.runs.holds(kept.run.law, kept.run.case) for _ in range(AGAIN))

    def uphold_near(self, law: Law) -> None:
        """Run ``law`` on the cases that came nearest to a bound in earlier runs. Raises TimeUp if the time is over."""
        cases: dict[Case, list[Near]] = {}
        for near in self.near:
            if self.is_tried(near.run, law):
                cases.setdefault(near.run.case, []).append(near)
        for case, kept in cases.items():
            verdict = self.check(law, case)
            if verdict and verdict.status in ("held", "broken"):
                self.changed += [near for near in kept if verdict.worst.get(near.tensor) != near.ratio]

    def try_ordinary(self, law: Law) -> None:
        """Run a basic law on a call of ordinary numbers. Raises TimeUp if the time is over.

        Most calls show what is grossly wrong. So small a call takes least time to be explained and to be made smaller.
        A kernel that is compiled for it on an accelerator begins with drawn cases, as that takes seconds.
        """
        if not law.is_basic or (self.runs.device_type != "cpu" and self.runs.is_compiled):
            return
        own = islice(usual(self.dtype, self.claims), 1)
        smaller = (
            replace(case, head_dim=x) for case in own for x in (min(self.claims.head_dims), case.head_dim)
        )
        if first := next((call for case in smaller for call in probes(case, self.claims, ())), None):
            self.check(law, first)

    def keep_nearest(self, law: Law) -> None:
        """Keep the cases of the item that came nearest to a bound for later runs."""
        name = self.info.name
        found = [
            Near(Run(name, (), law.name, case), tensor, ratio)
            for tensor, (ratio, case) in self.runs.nearest.items()
        ]
        self.known.finds.keep_nearest(name, found, self.changed)

    def results(self) -> dict[str, Any]:
        """Return the item's results for the summary: its counts, its bugs with their failing examples, and notices."""
        bugs, seen = self.known.bugs, self.known.seen
        return {
            "kernel": self.info.name,
            "dtype": self.dtype,
            "tally": self.tally.to_dict(),
            "bugs": [bugs[key].to_dict() for key in seen if key in bugs],
            "seen": {key: x.to_dict() for key, x in seen.items()},
            "imprecise": self.known.imprecise.to_dict(),
            "gone": [bug.to_dict() for bug in self.gone],
            "notices": self.triage.notices,
        }

    def known_that_hold(self, law: Law) -> list[str]:
        """Return complaints about declared known failures of a law whose stored case passes: they must be removed."""
        return [
            f"{self.info.name}: a known failure is gone: {known.what}\n"
            f"  remove it from known_failures: its case holds: {case!r}"
            for known in self.info.known_failures
            if known.laws[0] == law.name and (case := stored_case(known)) and self.replay is None
            if case.dtype == self.dtype and self.runs.holds(law.name, case)
        ]

    def complaint(self) -> str:
        """Return why the item shows next to nothing about the kernel; "" if it does show something."""
        if self.known.seen:
            return ""
        if was_not_run(self.tally):
            return f"none of the cases of {self.info.name} could be run here"
        return f"{self.info.name} refused nearly all cases" if is_mostly_refused(self.tally) else ""

    def _is_late(self) -> bool:
        """Whether the time for examples is up. An item's first example is run as long as the run has time."""
        return self.runs.clock.left <= 0 or (self.tally.drawn > 0 and time.perf_counter() > self.deadline)

    def _passed_over(self, law: Law, case: Case) -> frozenset[str]:
        """Return the tensors that avoided bugs make wrong in a case, if a basic law judges other tensors there too.

        The case is then run without judging these tensors, rather than avoided. Example: a bug of dq with causal was
        seen often. A bug of dv with causal can be found only if causal cases are run.
        """
        if not law.is_basic or self.replay is not None:
            return frozenset()
        claims = self.info.capabilities
        judged = {"out", *(GRADIENTS if law.takes_gradients else ())}
        judged |= {"lse"} if claims.lse else set()
        judged -= set() if claims.bias_gradient else {"dbias"}
        bugs = [bug for bug in self.known.closed(law.name) if may_show(bug, case)]
        wrong = frozenset(tensor for bug in bugs for tensor in bug.tensors)
        are_numbers = all(bug.failure.finding.kind in NUMBERS for bug in bugs)
        return wrong if are_numbers and judged - wrong else frozenset()

    def _moved(self, law: Law, case: Case, *, has_more: bool) -> Case | None:
        """Return the case, or a similar one that triggers no known failure or avoided bug; None if there is none.

        A case that triggers only bugs of this run stays as it is if it ``has_more`` tensors to judge.
        """
        known = Avoided(tuple(x for x in self.info.known_failures if law.fails_by(x)))
        closed = Avoided(known.known, self.known.closed(law.name))
        if not closed.is_met(case) or (has_more and not known.is_met(case)):
            return case
        found = steer_away(case, closed, self.info.capabilities)
        if known.is_met(case):
            self.tally.known += 1
        else:
            self.tally.set_aside += 1
        self.tally.moved += found is not None
        return found


class Stream(Iterator[Case]):
    """Cases from Hypothesis runs whose seeds are drawn from ``seeds``: at most ``most``, by default without end.

    With a ``design``, the cases have its levels, from the one of this ``number`` on.
    """

    def __init__(
        self,
        strategy: SearchStrategy[Case],
        seeds: Random,
        most: float = math.inf,
        design: Design | None = None,
        number: int = 0,
    ) -> None:
        self.strategy, self.seeds, self.left, self.design, self.number = strategy, seeds, most, design, number
        self.coming: deque[Case] = deque()

    def __next__(self) -> Case:
        self._draw()
        if not self.coming:
            raise StopIteration
        case, place = self.coming.popleft(), self.number
        self.number += 1
        return case if self.design is None else self.design.steered(place, case)

    def draw_ahead(self) -> None:
        """Draw the next cases, if none are left, while a case runs. An exception is raised by ``next`` only."""
        with suppress(Exception):
            self._draw()

    def _draw(self) -> None:
        if not self.coming and self.left:
            found = drawn(self.strategy, self.seeds.getrandbits(64), int(min(AT_ONCE, self.left)))
            self.coming.extend(found)
            self.left = self.left - len(found) if found else 0


def drawn(strategy: SearchStrategy[Case], seed: object, number: int = AT_ONCE) -> list[Case]:
    """Return ``number`` cases drawn by Hypothesis, or fewer if there are no more; the same cases for the same seed."""
    found: list[Case] = []

    @hypothesis.seed(seed)
    @settings(max_examples=number + 1, database=None)
    @given(case=strategy)
    def run(case: Case) -> None:
        found.append(case)

    run()
    return found[1:]  # a Hypothesis run begins with the simplest case, whatever the seed
