"""Options and fixtures of the mutation tests, and the plugin that prints their tables."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from kernels.mutants import CATALOGUE
from kernels.mutants.mutant import KERNEL
from tests.harness.report.folder import report_folder
from tests.harness.running.child import Child
from tests.harness.running.kernel_info import KernelInfo, Unavailable
from tests.harness.session.plan import chosen_device
from tests.mutation.campaign import Campaign
from tests.mutation.schedule import Schedule
from tests.mutation.score import PROPERTY, MutationSummary, Recorder, written


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the mutation tests."""
    group = parser.getgroup("flashproof")
    group.addoption(
        "--seeds",
        type=int,
        metavar="N",
        help="mutation: seeds for each planted bug (default: 2, of a quick profile 1)",
    )
    group.addoption(
        "--shrink",
        action="store_true",
        help="mutation: also look for the smallest case, time that, and check the report",
    )
    group.addoption(
        "--compare",
        action="store_true",
        help="mutation: try the rules of other suites on the planted bugs too",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check the options and, in the main process, register the plugin that collects what the items find."""
    seeds = config.getoption("--seeds")
    if seeds is not None and seeds < 1:
        raise pytest.UsageError(f"--seeds: got {seeds}, expected 1 or more")
    if hasattr(config, "workerinput") or config.getoption("--collect-only"):
        return
    report_dir = Path(config.getoption("--report-dir"))
    with report_folder(report_dir) as folder:
        path = folder / "mutation.jsonl"
        path.unlink(missing_ok=True)
    config.pluginmanager.register(MutationSummary(path))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out planted bugs if the kernels of --kernel have none, and the rules of other suites without --compare."""
    asked = config.getoption("--kernel") or [KERNEL]
    ignored = {
        "test_planted.py": not any(mutant.kernel in asked for mutant in CATALOGUE.values()),
        "test_rules.py": KERNEL not in asked or not config.getoption("--compare"),
    }
    return ignored.get(collection_path.name) or None


@pytest.fixture(scope="session")
def campaigns(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Campaign]]:
    """Yield a function from a SPEC to its campaign. Items of one process share it, with its verdicts on the kernel."""
    config = request.config
    child = Child(chosen_device(config))

    @cache
    def of(spec: str) -> Campaign:
        try:
            info = KernelInfo.ask(child, spec, tuple(config.getoption("--claims")))
        except Unavailable as e:  # a kernel that needs a GPU, where its bugs are tried
            pytest.skip(str(e))
        return Campaign(info, child, Schedule(info.capabilities, child.device.partition(":")[0]))

    yield of
    child.close()


@pytest.fixture(scope="session")
def campaign(campaigns: Callable[[str], Campaign], pytestconfig: pytest.Config) -> Campaign:
    """Return the campaign of the kernel that operators mutate."""
    return campaigns((pytestconfig.getoption("--kernel") or [KERNEL])[0])


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Recorder:
    """Return the function by which an item notes what it found: it sends a record along with the item's report."""
    return lambda found: record_property(PROPERTY, written(found))
