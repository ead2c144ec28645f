"""The pytest item of a law: one turn at one dtype of one kernel."""

import math
import random
import time
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis.statistics import collector, describe_statistics

from strategies.case import Case
from tests.harness.kernel_info import KernelInfo
from tests.harness.law import Law
from tests.harness.plan import Plan
from tests.harness.subject import Subject, TimeUp
from tests.harness.turns import Turn, rank, seconds_for

PLAN = pytest.StashKey[Plan]()
ORDER = pytest.StashKey[list["LawTurn"]]()
"""The turns in the order in which they are run."""
SUBJECTS = pytest.StashKey[dict[tuple[str, str], Subject]]()
"""Subjects by kernel and dtype. Turns share them, so that what one turn has reported is not reported again."""

RUN = 8
"""Examples of a Hypothesis run, without its first one, which is the same in every run, whatever the seed.

A tenth of a longer run are variants of that one: of 400 cases drawn by twenties 21 had the same values.
"""
FIRST_SECONDS = 4.0
"""In a run by examples, a turn of the first round has at least this many seconds.

The first import and compilation take longest. A run by the clock gets to all laws early instead.
"""


class LawTurn(pytest.Item):
    """A law tried on one kernel at one dtype, for one of its turns."""

    def __init__(self, *, law: Law, info: KernelInfo, dtype: str, turn: Turn, **node: Any) -> None:
        super().__init__(**node)
        self.law, self.info, self.dtype, self.turn = law, info, dtype, turn

    @property
    def plan(self) -> Plan:
        """What the run covers."""
        return self.config.stash[PLAN]

    @property
    def place(self) -> tuple[int, int]:
        """Sort key of the turns of a run: round by round, and in each the cheap laws first.

        Dtypes and kernels stay in their order, and turns of one round are together, so that processes that take
        neighbours compile different variants of a kernel.
        """
        return self.turn.round, rank(self.law.name)

    @property
    def subject(self) -> Subject:
        """The kernel at the dtype, the same object for all turns in this process."""
        subjects = self.config.stash.setdefault(SUBJECTS, {})
        key = self.info.name, self.dtype
        if key not in subjects:
            subjects[key] = make_subject(self)
        return subjects[key]

    def reportinfo(self) -> tuple[Path, None, str]:
        """The file of the law, and the heading of a failure."""
        return self.path, None, self.name

    def runtest(self) -> None:
        """Take the turn. What it finds that is new fails the item."""
        subject, start = self.subject, time.perf_counter()
        focus = self.turn.focus(self.info.capabilities, subject.device_type, f"{self.plan.seed} {subject}")
        subject.begin(focus, seconds_of(self))
        if not self.law.applies_to(self.info.capabilities):
            pytest.skip(f"{self.info.name} does not claim {self.law.needs}")
        try:
            failures = found_in_turn(self, subject)
        finally:
            subject.tally.add_seconds({"total": time.perf_counter() - start})
        # A failure shows only what the user needs to read: no frame of ours, nor of Hypothesis.
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)
        if complaint := subject.complaint():
            pytest.skip(complaint)  # the run fails: see ``Summary.pytest_sessionfinish``
        if not subject.tally.drawn:
            pytest.skip("the time of the run was up")


def make_subject(item: LawTurn) -> Subject:
    """The subject of all turns of the kernel of an item at its dtype in this process."""
    plan = item.plan
    return Subject(
        item.info,
        item.dtype,
        child=plan.child,
        environment=plan.environment,
        report_dir=plan.report_dir,
        journal=plan.journal,
        max_seqlen=plan.max_seqlen,
        replay=plan.replay.case if plan.replay else None,
        corpus=plan.corpus,
        shrinking=plan.shrinking,
        clock=plan.clock,
        verbose=item.config.get_verbosity() > 0,
    )


def seconds_of(item: LawTurn) -> float:
    """Return how long an item may take. Early turns by examples may take longer, as later ones make up for it."""
    items, plan, turn = item.config.stash[ORDER], item.plan, item.turn
    plan.clock.start()
    if math.isinf(plan.clock.seconds):
        return math.inf
    patience = 1.0 if plan.minutes else plan.turns[-1].round + 1.0 - turn.round
    fewest = 0.0 if plan.minutes or turn.round > 0 else min(FIRST_SECONDS, plan.clock.left)
    weights = [other.turn.weight for other in items]
    return max(fewest, seconds_for(items.index(item), weights, plan.clock.left, plan.workers, patience))


def found_in_turn(item: LawTurn, subject: Subject) -> list[str]:
    """Return what a turn finds that is new, as a user reads it."""
    gone = subject.known_that_hold(item.law) if item.turn.number == 0 else []
    try:
        if item.turn.number == 0:
            for case in subject.corpus_cases(item.law):
                subject.begin_search()
                subject.uphold(item.law, case)
        draw_examples(item, subject)
    except TimeUp:
        examples = item.turn.examples
        subject.tally.undrawn += 0 if examples is None else examples - subject.generated
    subject.finish(last=item.turn.last)
    return gone + subject.messages()


def draw_examples(item: LawTurn, subject: Subject) -> None:
    """Run Hypothesis with fresh seeds for as many examples as the turn has. Raises TimeUp when late.

    Failures are kept, and the search goes on. It also ends if nothing else can be drawn, as in a replay.
    """
    examples, seeds, before = item.turn.examples, seeds_of(item), -1

    def note(statistics: Any) -> None:
        """Keep what --hypothesis-show-statistics prints of an item."""
        told = describe_statistics({**statistics, "nodeid": item.nodeid})
        item.hypothesis_statistics = told  # type: ignore[attr-defined]  # read by Hypothesis's plugin

    with collector.with_value(note):  # type: ignore[arg-type]  # typed as if it held None alone
        while before < subject.generated < (math.inf if examples is None else examples):
            before = subject.generated
            missing = RUN if examples is None else min(RUN, examples - before)
            # Hypothesis begins with its simplest case, the same in every run.
            others = subject.replay is None
            search(item.law, subject, missing + others, seeds.getrandbits(64), without_simplest=others)


def search(law: Law, subject: Subject, examples: int, seed: int, *, without_simplest: bool = False) -> None:
    """Try a law on ``examples`` cases in one Hypothesis run. Raises TimeUp when late."""
    subject.begin_search(without_simplest=without_simplest)

    @hypothesis.seed(seed)
    @settings(max_examples=examples, database=None)
    @given(case=subject.cases(**law.draws))
    def run(case: Case) -> None:
        subject.uphold(law, case)

    run()


def seeds_of(item: LawTurn) -> random.Random:
    """Return the seeds of an item's Hypothesis runs: the same in each session if --hypothesis-seed is given."""
    seed = item.config.getoption("--hypothesis-seed")
    return random.Random(None if seed is None else f"{seed} {item.nodeid}")
