"""The pytest plugin of the mutation tests: options, one campaign for each process, the tables at the end."""

from collections.abc import Iterator

import pytest

from kernels.mutants.mutant import KERNEL
from tests.harness.child import Child
from tests.harness.plan import chosen_device
from tests.harness.subject import KernelInfo
from tests.mutation.campaign import Campaign
from tests.mutation.schedule import Schedule
from tests.mutation.summary import MutationSummary, Recorder


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the mutation tests."""
    group = parser.getgroup("flashproof")
    group.addoption(
        "--seeds", type=int, default=1, metavar="N", help="mutation: seeds for each planted bug (default: 1)"
    )
    group.addoption(
        "--shrink", action="store_true", help="mutation: also time the search for the smallest case"
    )
    group.addoption(
        "--compare",
        action="store_true",
        help="mutation: try the rules of other suites on the planted bugs too",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check the options and collect, in the main process, what the items found."""
    if config.getoption("--seeds") < 1:
        raise pytest.UsageError(f"--seeds: got {config.getoption('--seeds')}, expected 1 or more")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(MutationSummary())


@pytest.fixture(scope="session")
def campaign(request: pytest.FixtureRequest) -> Iterator[Campaign]:
    """One child, one schedule and one memory of what the kernel itself keeps, for all items of a process."""
    config = request.config
    child = Child(chosen_device(config, getattr(config, "workerinput", {"workerid": "main"})["workerid"]))
    spec = (config.getoption("--kernel") or [KERNEL])[0]
    info = KernelInfo.ask(child, spec, tuple(config.getoption("--claims")))
    yield Campaign(info, child, Schedule(info.capabilities, child.device.partition(":")[0]))
    child.close()


@pytest.fixture
def recorder(request: pytest.FixtureRequest) -> Recorder:
    """Where an item notes what it found."""
    return Recorder(request.node)
