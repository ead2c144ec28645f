"""Each adapter of ``docs/adapters.md`` holds as it stands on the page, and mistakes that are easily made are found.

The adapters are run beside stand-ins for the packages that they import, ``tests/unit/support/conventions``.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.harness.files import ROOT
from tests.harness.running.child import Child
from tests.harness.running.kernel_info import KernelInfo
from tests.mutation.campaign import Campaign
from tests.mutation.schedule import Schedule
from tests.unit.support import conventions

PAGE = ROOT / "docs/adapters.md"
STAND_INS = Path(conventions.__file__).parent
SECTION = re.compile(
    r"^```python\n(# (\w+\.py)\n.*?)^```\n\n```console\n(flashproof verify .*?)^```$",
    re.MULTILINE | re.DOTALL,
)
"""An adapter's block, and the block with its command, which follows."""
EXAMPLES = 60
"""Examples for each sound adapter."""


@dataclass(frozen=True)
class Adapter:
    """An adapter of the page: its text, and the command below it."""

    source: str
    command: tuple[str, ...]

    @property
    def spec(self) -> str:
        """The SPEC, from the folder that the file is in."""
        return self.command[2]

    @property
    def claims(self) -> tuple[str, ...]:
        """The claims of the command."""
        return tuple(value for option, value in zip(self.command[3::2], self.command[4::2], strict=True))


ADAPTERS = {
    name: Adapter(source, tuple(shlex.split(command.replace("\\\n", " "))))
    for source, name, command in SECTION.findall(PAGE.read_text())
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the stand-ins and the adapters as they are on the page."""
    folder = tmp_path_factory.mktemp("adapters")
    shutil.copytree(STAND_INS, folder, dirs_exist_ok=True)
    for name, adapter in ADAPTERS.items():
        (folder / name).write_text(adapter.source)
    return folder


@pytest.fixture(scope="module")
def campaign_of(folder: Path) -> Iterator[Callable[[str], Campaign]]:
    """Yield a function from the name of an adapter to its campaign. Campaigns share a child."""
    child = Child("cpu")

    @cache
    def of(name: str) -> Campaign:
        adapter = ADAPTERS[name]
        info = KernelInfo.ask(child, f"{folder}/{adapter.spec}", adapter.claims)
        info.check_returned(child)
        return Campaign(info, child, Schedule(info.capabilities, "cpu"))

    yield of
    child.close()


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_holds(name: str, campaign_of: Callable[[str], Campaign]) -> None:
    campaign = campaign_of(name)
    for law, case in campaign.schedule.examples(1, EXAMPLES):
        verdict = campaign.run(campaign.info.spec, law, case)
        assert verdict.finding is None, (law, case, verdict.finding)
        assert verdict.status != "refused", (law, case)


def test_a_command_of_the_page_runs_in_a_folder_of_the_user(folder: Path) -> None:
    """As ``flashproof`` does; other tests run the same claims, but not by the command."""
    _, *words = ADAPTERS["varlen_adapter.py"].command
    short = ("-k", "(forward or ragged) and float16", "--examples", "3", "--device", "cpu")
    run = subprocess.run(
        [sys.executable, "-m", "tests.harness.commands.command", *words, *short],
        cwd=folder,
        env={"PATH": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "varlen_adapter.attention" in run.stdout
