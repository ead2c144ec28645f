"""Each adapter of ``docs/adapters.md`` holds as it stands on the page, and mistakes that are easily made are found.

The adapters are run beside stand-ins for the packages that they import, ``tests/unit/support/conventions``.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
MOST_LINES = 30
EXAMPLES = 60
"""Examples for each sound adapter."""
MOST_EXAMPLES = 600
"""Within so many examples a mistake is found."""


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


@dataclass(frozen=True)
class Mistake:
    """A mistake in an adapter: ``wrong`` stands where ``right`` should."""

    file: str
    what: str
    right: str
    wrong: str


ADAPTERS = {
    name: Adapter(source, tuple(shlex.split(command.replace("\\\n", " "))))
    for source, name, command in SECTION.findall(PAGE.read_text())
}

MISTAKES = (
    Mistake(
        "rows_first_adapter.py", "heads are taken for rows", "(x.transpose(1, 2) for x in", "(x for x in"
    ),
    Mistake("rows_first_adapter.py", "the scale is left out", "softmax_scale=sm_scale, ", ""),
    Mistake(
        "mask_adapter.py",
        "the mask shows what it should hide",
        "_k - seqlen_q) if causal",
        "_k - seqlen_q).logical_not() if causal",
    ),
    Mistake("mask_adapter.py", "the mask leaves out the diagonal", "triu(1 + ", "triu("),
    Mistake("mask_adapter.py", "the mask is anchored at the top left", "1 + seqlen_k - seqlen_q", "1"),
    Mistake(
        "mask_adapter.py",
        "head_dim is taken to come before heads",
        ".unflatten(2, (heads, -1))",
        ".unflatten(2, (-1, heads)).mT",
    ),
    Mistake("window_adapter.py", "the window to the left counts the query", "(window - 1,", "(window,"),
    Mistake("window_adapter.py", "the window to the right counts it", "right - 1)", "right or -1)"),
    Mistake("window_adapter.py", "no limit is 0", "(window - 1,", "(max(window - 1, 0),"),
    Mistake(
        "varlen_adapter.py", "offsets of packed calls are those of equal lengths", "options |= packed", ""
    ),
    Mistake(
        "varlen_adapter.py",
        "a sequence is taken to fill its pages",
        '"seqused_k": cache_seqlens',
        '"seqused_k": (cache_seqlens + seqlen_k - 1) // seqlen_k * seqlen_k',
    ),
    Mistake(
        "varlen_adapter.py",
        "the most keys of a sequence are those of one page",
        "block_table.shape[1] * seqlen_k",
        "seqlen_k",
    ),
    Mistake(
        "varlen_adapter.py",
        "lse has its heads before the batch",
        ".transpose(0, 1)",
        ".view(batch, -1, seqlen_q)",
    ),
    Mistake(
        "kvcache_adapter.py",
        "the kernel writes to a copy",
        "(x.transpose(1, 2) for x in (q, k, v))",
        "(x.transpose(1, 2).clone() for x in (q, k, v))",
    ),
    Mistake(
        "kvcache_adapter.py",
        "lengths count the new keys already",
        "cache_seqlens=cache_seqlens",
        "cache_seqlens=cache_seqlens if k_new is None else cache_seqlens + k_new.shape[1]",
    ),
    Mistake(
        "plan_run_adapter.py",
        "the pages of a sequence are those of its whole row of the table",
        "[used]",
        ".flatten()",
    ),
    Mistake(
        "plan_run_adapter.py",
        "a full last page is empty",
        "(cache_seqlens - 1) % page_size + 1",
        "cache_seqlens % page_size",
    ),
    Mistake("plan_run_adapter.py", "the window counts the query", "window - 1", "window or -1"),
    Mistake(
        "lse_adapter.py",
        "lse is converted, although it is claimed in base 2",
        "return out.transpose(1, 2), lse",
        "return out.transpose(1, 2), lse * 0.6931472",
    ),
    Mistake(
        "out_adapter.py", "rows that the kernel skips have what was there", "torch.zeros(", "torch.empty("
    ),
    Mistake(
        "out_adapter.py",
        "lse of such rows is 0",
        "torch.full(q.shape[:3], -torch.inf,",
        "torch.zeros(q.shape[:3],",
    ),
    Mistake("apply_adapter.py", "two arguments are exchanged", "causal, sm_scale)\n", "sm_scale, causal)\n"),
    Mistake("module_adapter.py", "the module drops weights", ".eval()", ""),
    Mistake(
        "module_adapter.py",
        "the scale is made of the length",
        "head_dim=q.shape[3]",
        "head_dim=q.shape[2] + 1",
    ),
    Mistake(
        "dlpack_adapter.py",
        "memory is read without its strides",
        "x.detach()",
        "x.detach().as_strided(x.shape, x.contiguous().stride())",
    ),
)


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


def test_every_block_of_python_is_an_adapter_with_its_command_and_a_mistake() -> None:
    assert len(ADAPTERS) == PAGE.read_text().count("```python")
    assert {adapter.command[:2] for adapter in ADAPTERS.values()} == {("flashproof", "verify")}
    assert [adapter.spec for adapter in ADAPTERS.values()] == [f"{name}:attention" for name in ADAPTERS]
    assert {mistake.file for mistake in MISTAKES} == set(ADAPTERS)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_short(name: str) -> None:
    assert len(ADAPTERS[name].source.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.file[:-3]}: {mistake.what}")
def test_a_mistake_is_found(
    mistake: Mistake, campaign_of: Callable[[str], Campaign], folder: Path, tmp_path: Path
) -> None:
    source = ADAPTERS[mistake.file].source
    assert source.count(mistake.right) == 1
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / mistake.file).write_text(source.replace(mistake.right, mistake.wrong))
    attempt = campaign_of(mistake.file).attempt(
        f"{tmp_path}/{ADAPTERS[mistake.file].spec}", 1, MOST_EXAMPLES, raises=True
    )
    assert attempt.finding is not None


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("lse_adapter.py", "lse_base=2"),
        ("lse_adapter.py", "lse_layout=bnh"),
        ("plan_run_adapter.py", "lse_base=2"),
        ("varlen_adapter.py", "lse_of_no_keys=inf"),
    ],
)
def test_a_claim_on_lse_that_is_left_out_is_missed(
    name: str, claim: str, campaign_of: Callable[[str], Campaign]
) -> None:
    campaign = campaign_of(name)
    left = tuple(x for x in campaign.info.claims if x != claim)
    careless = replace(campaign, info=replace(campaign.info, claims=left))
    runs = (careless.run(campaign.info.spec, *each) for each in campaign.schedule.examples(1, EXAMPLES))
    assert any(run.finding for run in runs)


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
