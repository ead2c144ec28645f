"""The pytest plugin of the compile tests: one test item for each setting and target, and the table at the end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels import registry
from tests.compile.items import items, launches_triton
from tests.compile.resources import CompileSummary
from tests.harness.running.child import Child

COMPILE_SECONDS = 300.0
"""The time limit of one compilation."""
QUICK = 4
"""How many items of each kernel a quick profile takes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the compile tests."""
    parser.getgroup("flashproof").addoption(
        "--every-setting",
        action="store_true",
        help="compile: every combination of settings, dtypes, head dimensions and targets; hours "
        "(default: every pair)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """In the main process, register the plugin that collects what the items find."""
    if not hasattr(config, "workerinput") and not config.getoption("--collect-only"):
        folder = Path(config.getoption("--report-dir"))
        folder.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(CompileSummary(folder / "compile.json"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize over the kernels of --kernel, by default over all registered Triton kernels of ours."""
    if "item" not in metafunc.fixturenames:
        return
    config = metafunc.config
    chosen = []
    for spec in config.getoption("--kernel") or registry.REGISTERED:
        if launches_triton(spec):
            capabilities = registry.load(spec).capabilities
            found = items(spec, capabilities, every=config.getoption("--every-setting"))
            quick = config.getoption("--hypothesis-profile") == "quick"
            chosen += found[:: len(found) // QUICK] if quick else found
    metafunc.parametrize("item", [pytest.param(item, id=str(item)) for item in chosen])


@pytest.fixture(scope="session")
def compiler() -> Iterator[Child]:
    """Yield the process that compiles for all items of this process."""
    child = Child("none", run_seconds=COMPILE_SECONDS, worker="tests.compile.worker")
    yield child
    child.close()
