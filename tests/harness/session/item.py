"""The pytest item of the property tests: one turn of a law at one dtype of one kernel."""

import math
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis.statistics import collector, describe_statistics

from kernels.contract import DTYPES
from strategies.case import Case
from tests.harness.diagnosis.known_bugs import KnownBugs
from tests.harness.diagnosis.triage import Triage
from tests.harness.files import JOURNALS
from tests.harness.law import LAWS, PROPERTIES, Law, by_place, place_among_laws
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.running.learned_claims import AnsweredLaws
from tests.harness.running.runs import Runs
from tests.harness.session.plan import Plan
from tests.harness.session.subject import Stream, Subject, TimeUp, drawn
from tests.harness.session.turns import TURNS, Shares, Turn, fair_seconds, seconds_for

PLAN = pytest.StashKey[Plan]()
ORDER = pytest.StashKey[list["LawTurn"]]()
"""The turns in the order in which they are run."""
SUBJECTS = pytest.StashKey[dict[tuple[str, str], Subject]]()
"""Subjects by kernel and dtype. Turns share them, so that what one turn has reported is not reported again."""
ANSWERED = pytest.StashKey[dict[str, AnsweredLaws]]()
"""What each kernel seems to answer, which the subjects of all its dtypes share."""
SHARES = pytest.StashKey[Shares]()
"""The time that each kernel has had, in this process and in others."""

LAWS_ALIKE = 4
"""So many laws use the same compiled variants. With fewer, more values were tried in the first round, and later."""

AN_EXAMPLE = 1e-3
"""A turn with so few seconds draws one example: the first example of a turn is cut off only by the end of the run."""
FIRST_SECONDS = 4.0
"""In a run by examples, a turn of the first round has at least this many seconds.

The first import and compilation take longest. A run by the clock gets to all laws early instead.
"""


OF_LAW = re.compile(rf"{PROPERTIES.name}/test_\w+\.py::test_(\w+)\[(.+)-({'|'.join(DTYPES)})(?:-\d+)?\]$")
"""The ids of turns: the names of a law, a kernel and a dtype, and the number of the turn if there are several."""


def names_of(nodeid: str) -> tuple[str, str, str] | None:
    """Return the names of the kernel, the law and the dtype that an id is of; None if it is of no turn of a law."""
    found = OF_LAW.search(nodeid)
    return (found[2], found[1], found[3]) if found else None


class LawTurn(pytest.Item):
    """One turn of a law at one dtype of one kernel, as a pytest item."""

    def __init__(self, *, law: Law, info: KernelInfo, dtype: str, turn: Turn, **node: Any) -> None:
        super().__init__(**node)
        self.law, self.info, self.dtype, self.turn = law, info, dtype, turn

    @property
    def plan(self) -> Plan:
        """Return the plan of the run."""
        return self.config.stash[PLAN]

    @property
    def place(self) -> tuple[int, bool, float, str, int, int]:
        """Return the sort key of the item: first the round, then the law, by the place that it declares.

        What has a case in which an earlier run was cut off comes before all others of its round. Neighbours are turns
        of different kernels, or of one with different dtypes and series, so that processes that take them compile
        different things, and a kernel that hangs holds up one of them alone.
        """
        dtype = self.info.capabilities.dtypes.index(self.dtype)
        return self.turn.round, not self.unfinished, *by_place(self.law.name), self.turn.number, dtype

    @property
    def variants(self) -> list[int]:
        """Return the numbers of the compiled variants that the item draws from, which ``LAWS_ALIKE`` laws share."""
        dtypes, shares = self.info.capabilities.dtypes, -(-len(LAWS) // LAWS_ALIKE)
        share = place_among_laws(self.law) // LAWS_ALIKE
        numbers = self.turn.variants(self.subject.runs.device_type)
        return [(number * shares + share) * len(dtypes) + dtypes.index(self.dtype) for number in numbers]

    @property
    def unfinished(self) -> dict[Path, Case]:
        """Return the cases of this item in which an earlier run was cut off, by file."""
        info = self.info
        return {
            path: run.case
            for path, run in self.plan.unfinished.items()
            if (run.spec, run.law, run.case.dtype, 0)
            == (info.spec, self.law.name, self.dtype, self.turn.number)
            and info.capabilities.admits(run.case)
        }

    @property
    def subject(self) -> Subject:
        """Return the subject of this kernel and dtype, which all their turns in this process share."""
        subjects = self.config.stash.setdefault(SUBJECTS, {})
        key = self.info.name, self.dtype
        if key not in subjects:
            subjects[key] = make_subject(self)
        return subjects[key]

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return the file of the law, no line, and the heading of a failure."""
        return self.path, None, self.name

    def runtest(self) -> None:
        """Run the turn. The item fails if the turn finds something that is new."""
        subject, start = self.subject, time.perf_counter()
        claims = subject.answered.under(self.law.name).of_turn(self.turn.number)
        seconds = seconds_of(self)
        subject.begin(self.turn.claims(claims), seconds, is_within=claims is not self.info.capabilities)
        if not self.law.applies_to(self.info.capabilities, self.dtype):
            pytest.skip(f"{self.info.name} does not claim {self.law.needs} of {self.dtype}")
        try:
            with shares_of(self).turn(self.info.name, seconds):
                failures = found_in_turn(self, subject, seconds)
        finally:
            subject.tally.add_seconds({"total": time.perf_counter() - start})
        # The text of a failure has no traceback, as all frames would be ours or those of Hypothesis.
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)
        if complaint := subject.complaint():
            pytest.skip(complaint)  # the whole run fails instead: see ``Summary.pytest_sessionfinish``
        if not subject.tally.drawn:
            # A turn without an example has tested nothing, so it must not count as passed.
            pytest.skip(f"the time of the {'kernel' if self.plan.clock.left > 0 else 'run'} was up")


def make_subject(item: LawTurn) -> Subject:
    """Make the subject that all turns of an item's kernel and dtype share in this process."""
    plan, info = item.plan, item.info
    verbose = item.config.get_verbosity() > 0
    known = KnownBugs(info.name, item.dtype, plan.report_dir, verbose, plan.finds)
    runs = Runs(
        info,
        plan.children.of(info.spec),
        plan.journal,
        known.bugs,
        plan.clock,
        plan.share,
        has_general=plan.has_general,
    )
    triage = Triage(runs, known, plan.environment, plan.shrinking, sanitizers=plan.sanitizers)
    corpus = (*plan.corpus, *plan.finds.of(info.name))
    answered = item.config.stash.setdefault(ANSWERED, {}).setdefault(
        info.name, AnsweredLaws(info.capabilities)
    )
    return Subject(triage, answered, plan.max_seqlen, plan.replay, corpus, plan.finds.near(info.name))


def seconds_of(item: LawTurn) -> float:
    """Return how many seconds an item may take. In a run by examples, early turns may take more than their share."""
    items, plan, turn = item.config.stash[ORDER], item.plan, item.turn
    plan.clock.start()
    if math.isinf(plan.clock.seconds):
        return math.inf
    if plan.shares_time:
        return share_of(item)
    patience = 1.0 if plan.minutes else plan.turns[-1].round + 1.0 - turn.round
    fewest = 0.0 if plan.minutes or turn.round > 0 else min(FIRST_SECONDS, plan.clock.left)
    weights = [other.turn.weight for other in items]
    return max(fewest, seconds_for(items.index(item), weights, plan.clock.left, plan.workers, patience))


def shares_of(item: LawTurn) -> Shares:
    """Return what is known of the time that each kernel has had."""
    stash = item.config.stash
    if SHARES not in stash:
        stash[SHARES] = Shares(item.plan.report_dir / JOURNALS / TURNS)
    return stash[SHARES]


def share_of(item: LawTurn) -> float:
    """Return how many seconds an item may take of the time that several kernels share, each as much as any other.

    A kernel that holds up another process, as by a hang or the report of a failure, waits until that is over, or until
    the others have had as much. Otherwise each turn of the first round has an example, so that no law is left out.
    """
    items, plan, name, shares = item.config.stash[ORDER], item.plan, item.info.name, shares_of(item)
    weights: dict[str, float] = defaultdict(float)
    for other in items:
        weights[other.info.name] += other.turn.weight
    had = shares.had()
    is_ahead = had[name] / weights[name] > min(had[x] / weights[x] for x in weights)
    if is_ahead and name in shares.held_up():
        return 0.0
    to_come = [other.turn.weight for other in items[items.index(item) :] if other.info.name == name]
    part, left = item.turn.weight / sum(to_come), plan.workers * plan.clock.left
    fewest = AN_EXAMPLE if item.turn.round == 0 else 0.0
    return min(plan.clock.left, max(fewest, fair_seconds(name, part, weights, had, left)))


def found_in_turn(item: LawTurn, subject: Subject, seconds: float) -> list[str]:
    """Run the turn for so many seconds, and return what it finds that is new, as a user reads it.

    If there are none, no example is drawn, but what is left from earlier runs and turns is seen to.
    """
    gone = subject.known_that_hold(item.law) if item.turn.number == 0 else []
    try:
        subject.take_up(item.law, item.unfinished)
        if item.turn.number == 0:
            subject.uphold_corpus(item.law)
            subject.uphold_near(item.law)
            if item.plan.budget:
                subject.try_ordinary(item.law)
        if seconds <= 0:
            raise TimeUp
        draw_examples(item, subject)
    except TimeUp:
        examples = item.turn.examples
        subject.tally.undrawn += 0 if examples is None else max(0, examples - subject.generated)
    subject.keep_nearest(item.law)
    if item.turn.number == 0:
        subject.triage.watch(item.law.name, shrink=item.plan.replay is None)
    subject.triage.finish(last=item.turn.last)
    return gone + subject.known.messages()


def draw_examples(item: LawTurn, subject: Subject) -> None:
    """Draw as many examples as the turn has, by fresh seeds, and run the law on each; in a replay on its case alone.

    A failure does not end the search. Raises TimeUp if the time is over.
    """
    if item.plan.clock.left <= 0:  # to learn this by drawing takes long, where hundreds of items are left
        raise TimeUp

    def note(statistics: Any) -> None:
        """Keep what --hypothesis-show-statistics prints of an item."""
        told = describe_statistics({**statistics, "nodeid": item.nodeid})
        item.hypothesis_statistics = told  # type: ignore[attr-defined]  # read by Hypothesis's plugin

    noting = collector.with_value(note)  # type: ignore[arg-type]  # typed as if it held None alone
    with noting, subject.runs.in_turns():
        examples = item.turn.examples
        missing = math.inf if examples is None else max(0, examples - subject.generated)
        for case in cases_of(item, subject, missing):
            subject.check(item.law, case)


def cases_of(item: LawTurn, subject: Subject, most: float) -> Iterator[Case]:
    """Yield the cases of a turn, so many as ``most``; in a replay the one case that is replayed."""
    if subject.replay is not None:
        yield subject.replay.case
        return
    seeds = seeds_of(item)
    if most and item.turn.begins_far(subject.claims, subject.runs.device_type):
        yield from drawn(subject.cases(**item.law.draws, far=True), seeds.getrandbits(64), 1)
        most -= 1
    turn = item.turn
    variants = item.variants if subject.runs.is_compiled else ()
    design = subject.design(item.law, 0 if turn.before else turn.number, item.plan.source, variants)
    stream = Stream(subject.cases(**item.law.draws), seeds, most, design, turn.before)
    subject.runs.ahead = stream.draw_ahead
    yield from stream


def seeds_of(item: LawTurn) -> random.Random:
    """Return the seeds of an item's Hypothesis runs: if --hypothesis-seed is given, the same in each run of a shard."""
    plan = item.plan
    return random.Random(None if plan.seed is None else f"{plan.source} {item.nodeid}")
