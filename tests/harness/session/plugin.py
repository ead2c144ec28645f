"""The pytest plugin of the property tests: it makes items of laws, and passes their results to the summary."""

import io
import json
import math
import os
from collections.abc import Generator, Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from kernels.registry import REGISTERED
from tests.harness.law import PROPERTIES, Law
from tests.harness.machine import processes, this_machine
from tests.harness.programs.delivery import Delivery
from tests.harness.programs.github import comment_of
from tests.harness.programs.sarif import sarif_of
from tests.harness.running.child import MOST_ALIVE
from tests.harness.session.budget import age, budget_of
from tests.harness.session.header import header
from tests.harness.session.item import ORDER, PLAN, LawTurn
from tests.harness.session.plan import asked_for, covers_properties, make_plan, memory_of_gpus
from tests.harness.session.progress import LiveLine
from tests.harness.session.summary import Summary

DELIVERIES = pytest.StashKey[list[Delivery]]()
"""Where the verdict of the run goes, as far as --json, --sarif and --comment ask for it."""
PROCESSES = pytest.StashKey[str]()
"""How many processes the run takes, and why, unless the user says how many."""
OVERRIDE = "PYTEST_XDIST_AUTO_NUM_WORKERS"
"""The variable by which pytest-xdist is told what ``-n auto`` stands for."""
MOST_RESTARTS = 200
"""How many workers of pytest-xdist may be killed before the run is given up, unless --max-worker-restart says it."""


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return what ``-n auto`` stands for in a run of laws: as many processes as the machine bears."""
    if OVERRIDE in os.environ or not covers_properties(config):
        return None
    gpus, seconds = memory_of_gpus(config), math.inf
    if text := config.getoption("--budget"):
        with suppress(ValueError):  # ``make_plan`` refuses it
            seconds = budget_of(text).drawing(age())
    number, config.stash[PROCESSES] = processes(
        this_machine(gpus),
        min(len(asked_for(config) or REGISTERED), MOST_ALIVE.accelerator if gpus else MOST_ALIVE.cpu),
        config.getoption("maxprocesses"),
        seconds,
        age(),
    )
    return number


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Let workers of pytest-xdist be replaced more often than by default, and free stdout for the verdict.

    pytest-xdist has not read yet how often, and pytest has not made its reporter.
    """
    if not covers_properties(config):
        return
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = str(MOST_RESTARTS)
    if hasattr(config, "workerinput"):
        return
    report_dir = Path(config.getoption("--report-dir"))
    capture = config.pluginmanager.get_plugin("capturemanager")
    deliveries = config.stash[DELIVERIES] = []
    if (place := config.getoption("--json")) is not None:
        deliveries.append(Delivery(place, report_dir, capture))
    if (place := config.getoption("--sarif")) is not None:
        deliveries.append(Delivery(place, report_dir, None, "--sarif", sarif_of))
    if (place := config.getoption("--comment")) is not None:
        deliveries.append(Delivery(place, report_dir, None, "--comment", comment_of))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Make the plan, so that a usage error ends the run before anything is collected or written."""
    config = session.config
    if not covers_properties(config):
        return
    deliveries = config.stash.get(DELIVERIES, [])
    try:
        plan = config.stash[PLAN] = make_plan(config)
    except pytest.UsageError as e:
        for delivery in deliveries:
            delivery.error = str(e)
        raise
    if hasattr(config, "workerinput"):
        return
    if config.getoption("dist", "no") != "no":
        plan.children.close()  # the workers of pytest-xdist have their own
    if getattr(config.option, "maxschedchunk", 0) is None:
        config.option.maxschedchunk = 1  # the turns are taken in their order, by all workers of pytest-xdist
    summary = Summary(plan)
    for delivery in deliveries:
        delivery.content = summary.content
    config.pluginmanager.register(summary)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        with suppress(io.UnsupportedOperation):  # stdout is no file: nobody watches
            config.pluginmanager.register(LiveLine(plan, summary, reporter))


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the child processes, close the journal, and deliver the verdict."""
    if PLAN in config.stash:
        config.stash[PLAN].close()
    for delivery in config.stash.get(DELIVERIES, []):
        delivery.deliver()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return the header: device, versions, profile, seed, time, and what the kernels claim beyond the default."""
    if PLAN not in config.stash:
        return []
    told = config.stash.get(PROCESSES, None)
    return [*header(config.stash[PLAN], config), *([f"processes: {told}"] if told else [])]


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Return an item for each turn of a law at each dtype of each kernel; a law that a unit test imports has none.

    A law that a kernel does not claim to keep has one item for each dtype, which is skipped.
    """
    if not isinstance(obj, Law) or collector.path.parent != PROPERTIES:
        return None
    plan = collector.config.stash.get(PLAN, None)
    if plan is None:
        raise pytest.UsageError("the property tests were not given by their path: expected tests/properties")
    if not obj.is_tried_on(plan.device):
        return []
    turns = [turn for turn in (x.of_cost(obj.costs) for x in plan.turns) if turn.examples != 0]
    return [
        LawTurn.from_parent(
            collector,
            name=f"test_{obj.name}[{info.name}-{dtype}"
            + (f"-{turn.number}]" if len(plan.turns) > 1 else "]"),
            law=obj,
            info=info,
            dtype=dtype,
            turn=turn,
        )
        for info in plan.kernels
        for dtype in info.capabilities.dtypes
        for turn in (turns if obj.applies_to(info.capabilities, dtype) else turns[:1])
        if plan.replay is None or plan.replay.case.dtype == dtype
    ]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a replay keep only the law of the report. Sort the turns by their rounds; other items stay where they are."""
    plan = config.stash.get(PLAN, None)
    if plan is None:
        return
    if plan.replay is not None:
        kept = [item for item in items if isinstance(item, LawTurn) and item.law.name == plan.replay.law]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
    in_turn = iter(sorted(turns_among(items), key=lambda item: item.place))
    items[:] = [next(in_turn) if isinstance(item, LawTurn) else item for item in items]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember the order of the turns, because the time is shared out in that order."""
    session.config.stash[ORDER] = turns_among(session.items)


def turns_among(items: Iterable[pytest.Item]) -> list[LawTurn]:
    """Return the items that are turns of laws."""
    return [item for item in items if isinstance(item, LawTurn)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach an item's counts to its report, which xdist passes on to the main process."""
    result = yield
    if call.when == "call" and isinstance(item, LawTurn):
        crash = getattr(result.longrepr, "reprcrash", None)
        if crash is not None:  # pytest's short summary repeats this message, in CI with all of its lines
            crash.message = crash.message.partition("\n")[0]
        results, known = item.subject.results(), item.subject.known
        counts = json.dumps({"law": item.law.name, **results})
        vars(result).update(flashproof=counts, is_told=bool(known.seen or known.imprecise.total))
    return result
