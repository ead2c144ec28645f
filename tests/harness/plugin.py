"""The pytest plugin of the property tests: parametrization, fuzzing, results on their way to the summary."""

import io
import json
import math
import random
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.kernel_info import KernelInfo
from tests.harness.plan import Plan, covers_properties, header, make_plan
from tests.harness.progress import LiveLine
from tests.harness.subject import Subject, TimeUp
from tests.harness.summary import Summary
from tests.harness.turns import Turn, rank, seconds_for

PLAN = pytest.StashKey[Plan]()
ORDER = pytest.StashKey[list[pytest.Item]]()
"""The property tests in the order in which they are run."""
SUBJECTS = pytest.StashKey[dict[tuple[str, str], Subject]]()
"""By kernel and dtype: what one turn has reported the next does not report again."""

RUN = 8
"""Examples of a Hypothesis run, after the one that it begins with: the same in every run, whatever the seed.

A tenth of a longer run are variants of that one: of 400 cases drawn by twenties 21 had the same values.
"""
FIRST_SECONDS = 4.0
"""A turn of the first round has at least so long: what is imported or compiled first takes longest."""


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Make the plan, so that a usage error ends the run before anything is collected or written."""
    config = session.config
    if not covers_properties(config):
        return
    plan = config.stash[PLAN] = make_plan(config)
    if hasattr(config, "workerinput"):
        return
    if config.getoption("dist", "no") != "no":
        plan.child.close()  # the workers of pytest-xdist have their own
    if getattr(config.option, "maxschedchunk", 0) is None:
        config.option.maxschedchunk = 1  # the turns are taken in their order, by all workers of pytest-xdist
    summary = Summary(plan)
    config.pluginmanager.register(summary)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        with suppress(io.UnsupportedOperation):  # stdout is no file: nobody watches
            config.pluginmanager.register(LiveLine(plan, summary, reporter))


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the child."""
    if PLAN in config.stash:
        config.stash[PLAN].close()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Device, versions, profile, seed, kernels and their claims."""
    return header(config.stash[PLAN], config) if PLAN in config.stash else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item for each kernel, dtype and turn."""
    if "subject" not in metafunc.fixturenames:
        return
    plan = metafunc.config.stash.get(PLAN, None)
    if plan is None:
        raise pytest.UsageError("the property tests were not given by their path: expected tests/properties")
    choices = [
        pytest.param(
            (info, dtype, turn),
            id=f"{info.name}-{dtype}" + (f"-{turn.number}" if len(plan.turns) > 1 else ""),
        )
        for info in plan.kernels
        for dtype in info.capabilities.dtypes
        for turn in plan.turns
        if plan.replay is None or plan.replay.case.dtype == dtype
    ]
    metafunc.parametrize("subject", choices, indirect=True, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the law of a replayed report; else sort the property tests by their rounds."""
    plan = config.stash.get(PLAN, None)
    if plan is None:
        return
    if plan.replay is not None:
        name = f"test_{plan.replay.law}"
        config.hook.pytest_deselected(items=[item for item in items if item.path.stem != name])
        items[:] = [item for item in items if item.path.stem == name]
    in_turn = iter(sorted(filter(is_property, items), key=place_in_run))
    items[:] = [next(in_turn) if is_property(item) else item for item in items]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember the order of the property tests, by which they share the time."""
    session.config.stash[ORDER] = list(filter(is_property, session.items))


def is_property(item: pytest.Item) -> bool:
    """Whether an item is a turn of a law."""
    return "subject" in getattr(item, "fixturenames", ())


def turn_of(item: Any) -> Turn:
    """The turn that an item is."""
    turn: Turn = item.callspec.params["subject"][2]
    return turn


def law_of(item: pytest.Item) -> str:
    """The name of the law that an item is about."""
    return item.path.stem.removeprefix("test_")


def place_in_run(item: pytest.Item) -> tuple[int, int]:
    """Round by round, cheap laws first; dtypes and kernels stay in their order, turns of one round together.

    Processes that take neighbours then compile different variants of a kernel.
    """
    return turn_of(item).round, rank(law_of(item))


def seconds_of(item: pytest.Item, plan: Plan) -> float:
    """How long an item may take. An early turn by examples may take longer, as later ones make good for it."""
    items = item.config.stash[ORDER]
    plan.clock.start()
    if math.isinf(plan.clock.seconds):
        return math.inf
    turn = turn_of(item)
    patience = 1.0 if plan.minutes else plan.turns[-1].round + 1.0 - turn.round
    weights = [turn_of(other).weight for other in items]
    seconds = seconds_for(items.index(item), weights, plan.clock.left, plan.workers, patience)
    return max(seconds, min(FIRST_SECONDS, plan.clock.left)) if turn.round == 0 else seconds


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Subject:
    """The kernel and dtype of an item. Session-wide, for Hypothesis runs an item's body many times."""
    info, dtype, _ = request.param
    subjects = request.config.stash.setdefault(SUBJECTS, {})
    if (info.name, dtype) not in subjects:
        subjects[info.name, dtype] = make_subject(request.config.stash[PLAN], info, dtype)
    return subjects[info.name, dtype]


def make_subject(plan: Plan, info: KernelInfo, dtype: str) -> Subject:
    """The subject of all turns of a kernel at a dtype in this process."""
    replay = plan.replay.case if plan.replay else None
    return Subject(
        info,
        dtype,
        child=plan.child,
        environment=plan.environment,
        report_dir=plan.report_dir,
        journal=plan.journal,
        max_seqlen=plan.max_seqlen,
        replay=replay,
        corpus=plan.corpus,
        shrinking=plan.shrinking,
        clock=plan.clock,
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an item's body for its turn."""
    subject = pyfuncitem.funcargs.get("subject")
    if not isinstance(subject, Subject):
        return None
    plan = pyfuncitem.config.stash[PLAN]
    start, turn, law = time.perf_counter(), turn_of(pyfuncitem), pyfuncitem.module.law
    focus = turn.focus(subject.info.capabilities, subject.device_type, f"{plan.seed} {subject}")
    subject.begin(focus, seconds_of(pyfuncitem, plan))
    try:
        failures = once(subject, law) if turn.number == 0 else []
        failures += take_turn(pyfuncitem, subject)
        subject.finish(last=turn.last)
        failures += subject.messages()
    finally:
        subject.tally.add_seconds({"total": time.perf_counter() - start})
    # Only what the user needs to read: no frame of ours, nor of Hypothesis.
    if failures:
        pytest.fail("\n\n".join(failures), pytrace=False)
    if complaint := subject.complaint():
        pytest.skip(complaint)  # the run fails: see ``Summary.pytest_sessionfinish``
    if not subject.tally.drawn:
        pytest.skip("the time of the run was up")
    return True


def once(subject: Subject, law: Callable[..., None]) -> list[str]:
    """What a law's first turn begins with: known failures, and the cases of the corpus."""
    failures = subject.known_that_hold(law)
    for case in subject.corpus_cases(law):
        failures += search(partial(Subject.uphold, law=law, case=case), subject)
    return failures


def search(test: Callable[..., None], subject: Subject, *, without_simplest: bool = False) -> list[str]:
    """Run a property test, which is one Hypothesis run; what it finds that is new, as a user reads it.

    Raises TimeUp when late; what was found by then is told after the item.
    """
    subject.begin_search(without_simplest=without_simplest)
    test(subject)
    return subject.messages()


def take_turn(item: pytest.Function, subject: Subject) -> list[str]:
    """Hypothesis runs with fresh seeds: as many examples as the turn has, unless the time is up before.

    What fails is kept, and the search goes on. It ends as well where nothing else can be drawn, as in a replay.
    """
    examples, failures, seeds = turn_of(item).examples, list[str](), seeds_of(item)
    before = -1
    try:
        while before < subject.generated < (math.inf if examples is None else examples):
            before = subject.generated
            missing = RUN if examples is None else min(RUN, examples - before)
            # Hypothesis begins with its simplest case, the same in every run.
            others = subject.replay is None
            test = hypothesis.seed(seeds.getrandbits(64))(of_examples(item.obj, missing + others))
            failures += search(test, subject, without_simplest=others)
    except TimeUp:
        subject.tally.undrawn += 0 if examples is None else examples - subject.generated
    return failures


def of_examples(test: Callable[..., None], number: int) -> Callable[..., None]:
    """A property test with another number of examples."""
    inner = test.hypothesis.inner_test  # type: ignore[attr-defined]  # given has made it
    return settings(max_examples=number)(given(data=st.data())(inner))


def seeds_of(item: pytest.Function) -> random.Random:
    """The seeds of an item's Hypothesis runs: the same in each session where --hypothesis-seed is given."""
    seed = item.config.getoption("--hypothesis-seed")
    return random.Random(None if seed is None else f"{seed} {item.nodeid}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Send an item's counts along with its report, which xdist carries to the main process."""
    result = yield
    subject = getattr(item, "funcargs", {}).get("subject")
    if call.when == "call" and isinstance(subject, Subject):
        crash = getattr(result.longrepr, "reprcrash", None)
        if crash is not None:  # what pytest's short summary repeats, in CI to its last line
            crash.message = crash.message.partition("\n")[0]
        result.flashproof = json.dumps(  # type: ignore[attr-defined]  # TestReport carries extra fields
            {"law": law_of(item), **subject.results()}
        )
    return result
