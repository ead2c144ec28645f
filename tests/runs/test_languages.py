"""Each kernel in ``docs/adapters`` holds with the claims of the command that it begins with, and a mistake is found.

A kernel is skipped where the package of its language, or the GPU that it needs, is missing.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.harness.files import ROOT
from tests.harness.running.child import Child
from tests.harness.running.kernel_info import KernelInfo
from tests.mutation.campaign import Campaign
from tests.mutation.schedule import Schedule

FILES = {path.stem.removesuffix("_attention"): path for path in sorted((ROOT / "docs/adapters").glob("*.py"))}
"""The file of each language, by the language."""
PACKAGES = {"cuda": "torch", "cute": "cutlass", "pallas": "jax"}
"""The packages that are not named as the languages are."""
NEED_A_GPU = ("cuda", "cute")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMMAND = re.compile(r"# (?:(\w+)=(\w+) )?flashproof verify (\w+\.py):attention((?: --claims \S+)*)")
"""The first line of a file. The variable of the environment, if there is one, is for a CPU alone."""
MOST_LINES = 30
"""Lines of a file without the command and empty lines."""
EXAMPLES = 20
MOST_EXAMPLES = 200
"""Within so many examples a mistake is found."""

MISTAKES = {
    "cuda": ("total * expf(before - top)", "total"),
    "cute": ("h // (q.shape[1] // k.shape[1])", "h % k.shape[1]"),
    "helion": ("<= i.index", "< i.index"),
    "numba": ("i + 1 + keys - q.shape[2]", "i + 1"),
    "pallas": ("(j < keys) & ", ""),
    "tilelang": ("total * shrink", "total"),
}
"""By the language, what is right and what stands there by mistake."""


def command_of(language: str) -> re.Match[str]:
    """Return the command that a file begins with, by its parts."""
    found = COMMAND.fullmatch(FILES[language].read_text().partition("\n")[0])
    assert found
    return found


@pytest.fixture(scope="module")
def campaign_of() -> Iterator[Callable[[str], Campaign]]:
    """Yield a function from a language to the campaign of its kernel. Campaigns share a child."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value, *_ in (command_of(language).groups() for language in FILES):
            if name and DEVICE == "cpu":
                patch.setenv(name, value)
        child = Child(DEVICE)

        @cache
        def of(language: str) -> Campaign:
            claims = tuple(command_of(language)[4].split(" --claims ")[1:])
            info = KernelInfo.ask(child, f"{FILES[language]}:attention", claims)
            info.check_returned(child)
            return Campaign(info, child, Schedule(info.capabilities, DEVICE))

        yield of
        child.close()


@pytest.fixture(params=FILES)
def language(request: pytest.FixtureRequest) -> str:
    """Return a language whose kernel can be run here."""
    pytest.importorskip(PACKAGES.get(request.param, request.param))
    if request.param in NEED_A_GPU and DEVICE == "cpu":
        pytest.skip(f"{request.param} needs a CUDA GPU")
    return str(request.param)


@pytest.mark.parametrize("name", FILES)
def test_a_file_begins_with_its_command_and_is_short(name: str) -> None:
    assert command_of(name)[3] == FILES[name].name
    assert len([line for line in FILES[name].read_text().splitlines()[1:] if line.strip()]) <= MOST_LINES
    assert FILES[name].read_text().count(MISTAKES[name][0]) == 1


def test_a_kernel_holds(language: str, campaign_of: Callable[[str], Campaign]) -> None:
    campaign, statuses = campaign_of(language), []
    for law, case in campaign.schedule.examples(1, EXAMPLES):
        verdict = campaign.run(campaign.info.spec, law, case)
        assert verdict.finding is None, (law, case, verdict.finding)
        statuses.append(verdict.status)
    assert statuses.count("held") > EXAMPLES / 2


def test_a_mistake_is_found(language: str, campaign_of: Callable[[str], Campaign], tmp_path: Path) -> None:
    copy = tmp_path / FILES[language].name
    copy.write_text(FILES[language].read_text().replace(*MISTAKES[language]))
    attempt = campaign_of(language).attempt(f"{copy}:attention", 1, MOST_EXAMPLES)
    assert attempt.finding is not None
