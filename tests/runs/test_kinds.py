"""Bugs of different kinds of calls are told apart, each with the kind that it needs."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.panel import latent
from tests.unit.support.running import pytest_run, summary_in

CLAIMS = ("ragged=cache,paged", "backward=false", "dtypes=float16", "layouts=contiguous")


def of_two_bugs(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """A sound function but for two bugs: lse has 1 too much in a cache, and out is 0 in pages."""
    out, lse = latent.tiled(q, k, v, **options)
    if "block_table" in options:
        return 0 * out, lse
    return out, (lse + 1 if "cache_seqlens" in options else lse)


def of_one_bug(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """A sound function, but out is half of what it should be if sequences have lengths of their own."""
    out, lse = latent.tiled(q, k, v, **options)
    return (0.5 * out if "cache_seqlens" in options else out), lse


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        pytest.param("of_two_bugs", {"ragged cache", "ragged paged"}, marks=pytest.mark.nightly),
        ("of_one_bug", {"ragged cache or paged"}),
    ],
)
def test_a_bug_is_told_with_its_kinds_of_calls(name: str, needs: set[str], tmp_path: Path) -> None:
    options = ["--kernel", f"{__file__}:{name}", "-k", "test_ragged or test_forward", "--examples=60"]
    claims = [f"--claims={claim}" for claim in CLAIMS]
    pytest_run(tmp_path, *options, *claims, "--hypothesis-seed=1", status=pytest.ExitCode.TESTS_FAILED)
    told = {bug["facts"]["needs"] for bug in summary_in(tmp_path)["bugs"]}
    assert told == {f"only with {need}" for need in needs}
