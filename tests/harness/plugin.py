"""The pytest plugin of the property tests: parametrization, fuzzing, results on their way to the summary."""

import io
import json
import random
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import asdict
from functools import partial

import hypothesis
import pytest

from tests.harness.bugs import Bug
from tests.harness.plan import Plan, covers_properties, header, make_plan
from tests.harness.progress import LiveLine
from tests.harness.subject import KernelFailure, Subject, TimeUp
from tests.harness.summary import Summary

PLAN = pytest.StashKey[Plan]()


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
    config.pluginmanager.register(Summary(plan))
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        with suppress(io.UnsupportedOperation):  # stdout is no file: nobody watches
            config.pluginmanager.register(LiveLine(plan, reporter))


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the child."""
    if PLAN in config.stash:
        config.stash[PLAN].close()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Device, versions, profile, seed, kernels and their claims."""
    return header(config.stash[PLAN], config) if PLAN in config.stash else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item for each kernel and dtype; when fuzzing, as many shards of it as there are workers."""
    if "subject" not in metafunc.fixturenames:
        return
    plan = metafunc.config.stash.get(PLAN, None)
    if plan is None:
        raise pytest.UsageError("the property tests were not given by their path: expected tests/properties")
    shards = plan.workers if plan.minutes else 1
    choices = [
        pytest.param((info, dtype), id=f"{info.name}-{dtype}" + (f"-{shard}" if shards > 1 else ""))
        for info in plan.kernels
        for dtype in info.capabilities.dtypes
        for shard in range(shards)
        if plan.replay is None or plan.replay.case.dtype == dtype
    ]
    metafunc.parametrize("subject", choices, indirect=True, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the law of a replayed report."""
    plan = config.stash.get(PLAN, None)
    if plan is not None and plan.replay is not None:
        name = f"test_{plan.replay.law}"
        config.hook.pytest_deselected(items=[item for item in items if item.path.stem != name])
        items[:] = [item for item in items if item.path.stem == name]


@pytest.fixture(scope="session")
def subject(request: pytest.FixtureRequest) -> Subject:
    """The kernel and dtype of an item. Session-wide, for Hypothesis runs an item's body many times."""
    plan = request.config.stash[PLAN]
    info, dtype = request.param
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
    )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an item's body once; when fuzzing, again and again until its share of the time is up."""
    subject = pyfuncitem.funcargs.get("subject")
    if not isinstance(subject, Subject):
        return None
    plan = pyfuncitem.config.stash[PLAN]
    start = time.perf_counter()
    subject.begin()
    try:
        failures = subject.known_that_hold(pyfuncitem.module.law)
        for case in subject.corpus_cases(pyfuncitem.module.law):
            failures += search(partial(Subject.uphold, law=pyfuncitem.module.law, case=case), subject)
        if plan.minutes is None:
            failures += search(pyfuncitem.obj, subject)
        else:
            items = sum("subject" in getattr(item, "fixturenames", ()) for item in pyfuncitem.session.items)
            share = plan.minutes * 60 * plan.workers / items
            failures += fuzz(pyfuncitem, subject, start + share)
    finally:
        subject.tally.add_seconds({"total": time.perf_counter() - start})
    # Only what the user needs to read: no frame of ours, nor of Hypothesis.
    if failures:
        pytest.fail("\n\n".join(failures), pytrace=False)
    if complaint := subject.complaint():
        pytest.skip(complaint)  # the run fails: see ``Summary.pytest_sessionfinish``
    return True


def search(test: Callable[..., None], subject: Subject) -> list[str]:
    """Run a property test, which is one Hypothesis run; its distinct failures, shrunk, as a user reads them."""
    subject.begin_search()
    try:
        test(subject)
    except (KernelFailure, TimeUp, BaseExceptionGroup) as e:
        if not subject.broken:
            raise
        reraise_ours(e)
    finally:
        subject.finish_search()
    return subject.messages()


def fuzz(item: pytest.Function, subject: Subject, deadline: float) -> list[str]:
    """Hypothesis runs with fresh seeds until the deadline; what fails is kept, and the run goes on."""
    seed = item.config.getoption("--hypothesis-seed")
    seeds = random.Random(None if seed is None else f"{seed} {item.nodeid}")
    failures: list[str] = []
    subject.deadline = deadline
    try:
        while True:
            hypothesis.seed(seeds.getrandbits(64))(item.obj)
            failures += search(item.obj, subject)
    except TimeUp:
        return failures


def reraise_ours(e: BaseException) -> None:
    """Let go of kernel failures, which the subject keeps, and of their time; anything else is ours, and raised."""
    if isinstance(e, BaseExceptionGroup):
        for part in e.exceptions:
            reraise_ours(part)
    elif not isinstance(e, KernelFailure | TimeUp):
        raise e


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
            {
                "kernel": subject.info.name,
                "law": item.path.stem.removeprefix("test_"),
                "dtype": subject.dtype,
                "tally": subject.tally.to_dict(),
                "bugs": [asdict(Bug.of(failure)) for failure in subject.failures.values()],
            }
        )
    return result
