"""What a run covers: kernels, device, seeds and times, decided once before anything is collected."""

import math
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

from kernels.registry import EVERY_PUBLIC, PUBLIC, REGISTERED, package_version
from strategies.lengths import shortest_lengths
from tests.harness.accelerators.interface import Accelerator
from tests.harness.accelerators.lookup import accelerator_of, available
from tests.harness.clock import CALLS, SECONDS, Clock, ShrinkBudget
from tests.harness.device.gpus import gpus
from tests.harness.files import JOURNALS, SUMMARY, VERDICT
from tests.harness.law import LAWS, PROPERTIES, law_named
from tests.harness.report.database import Finds, Kept, finds_at, read_report
from tests.harness.report.folder import report_folder
from tests.harness.report.ledger import LEDGER
from tests.harness.run import Run, read
from tests.harness.running.child import Children
from tests.harness.running.journal import Journal, set_aside_unfinished, unfinished_in
from tests.harness.running.kernel_info import KernelInfo, Unavailable
from tests.harness.running.sanitizers import sanitizers, why_not
from tests.harness.session.budget import LEAST_SECONDS, Budget, age, budget_of
from tests.harness.session.turns import TURNS, Turn, turns_of_examples, turns_of_seconds
from tests.harness.shard import Shard, shard_of

MINUTES_PER_KERNEL = 4.0
"""Minutes for each kernel that a run takes at most, unless told otherwise."""
UNTIL = "flashproof_until"
"""The input by which a worker of pytest-xdist that replaces another one knows when the run ends."""


@dataclass(frozen=True)
class Plan:
    """One run of the property suite in one process: the main one, or a worker of pytest-xdist."""

    kernels: tuple[KernelInfo, ...]
    unavailable: tuple[str, ...]
    sanitizers: tuple[str, ...]
    device: str
    left_out: tuple[str, ...]
    environment: dict[str, str]
    children: Children
    has_general: bool
    report_dir: Path
    journal: Journal
    unfinished: Mapping[Path, Run]
    replay: Run | None
    corpus: tuple[Kept, ...]
    finds: Finds
    minutes: float | None
    budget: Budget | None
    clock: Clock
    turns: tuple[Turn, ...]
    seed: int | None
    shard: Shard | None
    max_seqlen: int | None
    shrinking: ShrinkBudget
    workers: int

    @property
    def source(self) -> str:
        """What the choices of the run derive from, apart from chance: its seed, and its shard if it is one."""
        return f"{self.seed} {self.shard}" if self.shard else f"{self.seed}"

    @property
    def shares_time(self) -> bool:
        """Whether several kernels share the time of a run that ends by the clock."""
        return self.minutes is not None and len(self.kernels) > 1

    @property
    def share(self) -> float:
        """The seconds of each kernel among all workers together, infinite if it shares them with no other."""
        return self.clock.seconds * self.workers / len(self.kernels) if self.shares_time else math.inf

    def close(self) -> None:
        """End the children and the journal."""
        self.children.close()
        self.journal.close()


def covers_properties(config: pytest.Config) -> bool:
    """Whether the property tests are among what is collected."""
    paths = [Path(str(arg).partition("::")[0]).resolve() for arg in config.args]
    return any(PROPERTIES.is_relative_to(path) or path.is_relative_to(PROPERTIES) for path in paths)


def make_plan(config: pytest.Config) -> Plan:
    """Check every option and ask children what the kernels claim. Raises pytest.UsageError, in one line."""
    worker = getattr(config, "workerinput", {"workerid": "main", "workercount": 1})
    device = chosen_device(config)
    for option in ("examples", "minutes", "time_limit", "max_seqlen", "shrink_seconds", "shrink_calls"):
        value = config.getoption(option)
        if value is not None and not value > 0:
            raise pytest.UsageError(f"--{option.replace('_', '-')}: got {value}, expected a positive number")
    if (number := config.getoption("numprocesses", None) or 0) < 0:
        raise pytest.UsageError(f"-n: got {number}, expected auto, 0 or a positive number")
    if config.getoption("minutes") and (limit := config.getoption("time_limit")):
        raise pytest.UsageError(f"--time-limit: got {limit}, expected none with --minutes")
    budget = _budget(config)
    replay, corpus, shard = _replay(config), _corpus(config), _shard(config)
    children = Children(device)
    usable, unusable = _sanitizers(config, replay, device)
    kernels, unavailable = _kernels(config, children, replay)
    finds = Finds() if replay else _finds(config, check=worker["workerid"] == "main")
    report_dir = Path(config.getoption("--report-dir"))
    with report_folder(report_dir, JOURNALS) as journals:
        if worker["workerid"] == "main":
            set_aside_unfinished(journals)
            for file in (LEDGER, TURNS):
                (journals / file).unlink(missing_ok=True)
        journal = Journal(journals / f"{worker['workerid']}.json")
    minutes = None if replay else budget.seconds / 60 if budget else config.getoption("--minutes")
    limit = minutes or (None if replay else _time_limit(config, len(kernels)))
    combinations = sum(
        law_named(law).applies_to(info.capabilities, dtype)
        for info in kernels
        for dtype in info.capabilities.dtypes
        for law in LAWS
        if law_named(law).is_tried_on(device)
    )
    return Plan(
        kernels=kernels,
        unavailable=(*unavailable, *unusable),
        sanitizers=usable,
        device=device,
        left_out=_left_out(children, kernels[-1]),
        environment={**children.of(kernels[-1].spec).environment(), **_packages(kernels)},
        children=children,
        has_general=device != "cpu" and replay is None,
        report_dir=report_dir,
        journal=journal,
        unfinished={} if replay else _unfinished(report_dir),
        replay=replay,
        corpus=corpus,
        finds=finds,
        minutes=minutes,
        budget=budget,
        clock=_clock(60 * limit if limit else math.inf, worker.get(UNTIL, math.nan), budget),
        turns=_turns(minutes, replay, worker["workercount"], combinations),
        seed=config.getoption("--hypothesis-seed"),
        shard=shard,
        max_seqlen=config.getoption("--max-seqlen"),
        shrinking=ShrinkBudget(
            config.getoption("--shrink-seconds") or SECONDS,
            config.getoption("--shrink-calls") or CALLS,
        ),
        workers=worker["workercount"],
    )


def _time_limit(config: pytest.Config, kernels: int) -> float | None:
    """Return the minutes that a run by examples may take; None without a limit."""
    if config.getoption("--time-limit"):
        return float(config.getoption("--time-limit"))
    asked = any(config.getoption(option) for option in ("--examples", "--hypothesis-profile"))
    return None if asked else MINUTES_PER_KERNEL * kernels


def _budget(config: pytest.Config) -> Budget | None:
    text = config.getoption("--budget")
    if text is None:
        return None
    try:
        budget = budget_of(text)
    except ValueError as e:
        raise pytest.UsageError(f"--budget: {e}") from None
    for option in ("minutes", "time_limit", "examples"):
        if (value := config.getoption(option)) is not None:
            raise pytest.UsageError(f"--{option.replace('_', '-')}: got {value}, expected none with --budget")
    return budget


def _clock(seconds: float, until: float, budget: Budget | None) -> Clock:
    """Return the clock of a run; one with a budget runs from the start of the process, others from the first item."""
    if budget is None:
        return Clock(seconds, until)
    now, seconds = time.perf_counter(), budget.drawing(age())
    # A worker of pytest-xdist may have begun when the time is nearly over.
    until = now + seconds if math.isnan(until) else max(until, now + LEAST_SECONDS)
    return Clock(seconds, until, budget.grace)


def _turns(minutes: float | None, replay: Run | None, workers: int, combinations: int) -> tuple[Turn, ...]:
    """Return the turns that each law has at each dtype of each kernel."""
    if replay is not None:
        return (Turn(0, 0, weight=1, last=True, examples=1),)
    if minutes is not None:
        return turns_of_seconds(60 * minutes, workers, combinations)
    return turns_of_examples(settings().max_examples)


def chosen_device(config: pytest.Config) -> str:
    """Return the CPU, or this worker's device: workers take them in turn. Raises pytest.UsageError."""
    worker = getattr(config, "workerinput", {}).get("workerid", "main")
    asked, there = config.getoption("--device"), available()
    if asked not in ("auto", *there):
        expected = f"{', '.join(reversed(there))} or auto"
        raise pytest.UsageError(
            f"--device: got {asked}, expected {expected}: torch finds no other device here"
        )
    chosen = there[0] if asked == "auto" else asked
    if chosen == "cpu":
        return chosen
    number = int(worker.removeprefix("gw")) if worker.startswith("gw") else 0
    return f"{chosen}:{number % _shared(accelerator_of(chosen))}"


def _shared(accelerator: Accelerator) -> int:
    """Return how many devices of a type processes can have one each of; 0 if there are none."""
    seen = accelerator.device_count()
    return gpus(os.environ.get(accelerator.visible), seen) if seen else 0


def _left_out(children: Children, kernel: KernelInfo) -> tuple[str, ...]:
    """Return what a run leaves out, as PyTorch does not have it on the device, in words."""
    if children.device == "cpu":
        return ()
    return tuple(children.of(kernel.spec).ask({"do": "left_out"})["left_out"])


def memory_of_gpus(config: pytest.Config) -> tuple[int, ...]:
    """Return the bytes of each device that processes of the run share; none on the CPU, or where it is not known."""
    asked, there = config.getoption("--device"), available()
    if asked not in ("auto", *there):
        return ()
    accelerator = accelerator_of(there[0] if asked == "auto" else asked)
    last = accelerator.device_count() - 1
    sizes = (accelerator.total_memory(min(number, last)) for number in range(_shared(accelerator)))
    return tuple(filter(None, sizes))


def asked_for(config: pytest.Config) -> list[str]:
    """Return the SPECs of all kernels that ``--kernel`` names; none without it."""
    asked = config.getoption("--kernel") or ()
    return [spec for each in asked for spec in (PUBLIC if each == EVERY_PUBLIC else (each,))]


def _replay(config: pytest.Config) -> Run | None:
    path = config.getoption("--replay")
    try:
        return None if path is None else read(Path(path))
    except ValueError as e:
        raise pytest.UsageError(f"--replay {e}") from None


def _finds(config: pytest.Config, *, check: bool) -> Finds:
    place = config.getoption("--database")
    if place is None and config.getoption("--hypothesis-seed") is not None:
        return Finds()  # what is repeated must not begin with what was found the first time
    try:
        return finds_at(place, check=check)
    except ValueError as e:
        raise pytest.UsageError(f"--database: {e}") from None


def _sanitizers(
    config: pytest.Config, replay: Run | None, device: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the sanitizers asked for that can be used here, and why the others can't."""
    text, kept = config.getoption("--sanitize"), replay.sanitizer if replay else ""
    try:
        asked = sanitizers(kept if text is None else text) if kept or text is not None else ()
    except ValueError as e:
        raise pytest.UsageError(f"--sanitize: {e}") from None
    reasons = {name: why_not(name, device) for name in asked}
    return tuple(name for name in asked if reasons[name] is None), tuple(filter(None, reasons.values()))


def _shard(config: pytest.Config) -> Shard | None:
    text = config.getoption("--shard")
    try:
        return None if text is None else shard_of(text)
    except ValueError as e:
        raise pytest.UsageError(f"--shard: {e}") from None


def _corpus(config: pytest.Config) -> tuple[Kept, ...]:
    """Read the cases of a folder, such as that of reports. One that can't be read ends the run: a bug may come back."""
    folder = config.getoption("--corpus")
    if folder is None:
        return ()
    found = sorted(Path(folder).rglob("*.json")) if folder else []
    paths = [path for path in found if path.name not in (SUMMARY, VERDICT) and path.parent.name != JOURNALS]
    if not paths:
        raise pytest.UsageError(f"--corpus: got {folder!r}, expected a folder with the case.json of reports")
    try:
        return tuple(read_report(path) for path in paths)
    except ValueError as e:
        raise pytest.UsageError(f"--corpus {e}") from None


def _unfinished(report_dir: Path) -> dict[Path, Run]:
    """Return the cases in which earlier runs were cut off, by file, but for files that no run of today would write."""
    found = {}
    for path in unfinished_in(report_dir):
        with suppress(ValueError):
            found[path] = read(path)
    return found


def _packages(kernels: Iterable[KernelInfo]) -> dict[str, str]:
    """Return the versions of the packages that public kernels are from."""
    found = {PUBLIC[info.spec]: package_version(info.spec) for info in kernels if info.spec in PUBLIC}
    return {package: version for package, version in found.items() if version is not None}


def _kernels(
    config: pytest.Config, children: Children, replay: Run | None
) -> tuple[tuple[KernelInfo, ...], tuple[str, ...]]:
    """Return the kernels named, or all registered ones that run on the device, and why the others don't.

    Of public kernels, which only ``EVERY_PUBLIC`` names all at once, those that run are returned as well.
    """
    claims = tuple(config.getoption("--claims"))
    specs, asked = asked_for(config), config.getoption("--kernel") or ()
    if replay is not None and not specs:
        specs, claims = [replay.spec], (*replay.claims, *claims)
    kernels: dict[str, KernelInfo] = {}
    unavailable = []
    for spec in specs or REGISTERED:
        try:
            info = KernelInfo.ask(child := children.of(spec), spec, claims)
            if replay is None and not hasattr(config, "workerinput"):
                info.check_returned(child)
        except Unavailable as e:
            if specs and not (spec in PUBLIC and EVERY_PUBLIC in asked):
                raise pytest.UsageError(str(e)) from None
            unavailable.append(str(e))
            continue
        except ValueError as e:
            raise pytest.UsageError(str(e)) from None
        if replay is not None and not info.capabilities.admits(replay.case):
            printed = "; ".join(f"{key}={value}" for key, value in info.printed.items())
            raise pytest.UsageError(f"--replay: got {replay.case!r}, but {spec} claims {printed}")
        least, most = max(shortest_lengths(info.capabilities)), config.getoption("--max-seqlen")
        if most is not None and most < least:
            raise pytest.UsageError(
                f"--max-seqlen: got {most}, expected at least {least}, the shortest length that {spec} claims"
            )
        if info.name in kernels:
            raise pytest.UsageError(
                f"--kernel {spec}: got a second kernel called {info.name}, expected another name"
            )
        kernels[info.name] = info
    if not kernels:
        raise pytest.UsageError(
            f"--device: got {children.device}, expected one where a registered kernel runs"
        )
    return tuple(kernels.values()), tuple(unavailable)
