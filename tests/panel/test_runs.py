"""A whole run over a less precise design tells the claim that explains it, and no bug."""

from pathlib import Path

import pytest

from tests.mutation.schedule import is_quick
from tests.panel import LESS_PRECISION, Member
from tests.unit.support.running import pytest_run, summary_in

LAWS = "forward or invariance"
"""One law that judges results and one that compares calls, each of which may be wrong by itself."""


SURE = "narrow.model_file"
"""The member that these examples surely show to be less precise."""


def members() -> list[Member]:
    """Return the members that are run: those that need one claim at every dtype, or in a quick profile one of them."""
    of_each = [member for member in LESS_PRECISION if ":" not in member.claims[0]]
    return [x for x in of_each if x.name == SURE] if is_quick() else of_each


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize over the members."""
    metafunc.parametrize("member", [pytest.param(x, id=x.name) for x in members()])


@pytest.mark.nightly
def test_a_run_tells_the_claim_and_no_bug(member: Member, tmp_path: Path) -> None:
    chosen = f"({LAWS}) and not bfloat16"
    arguments = ("--kernel", member.spec, "-k", chosen, "--examples", "20", "--hypothesis-seed", "3")
    pytest_run(tmp_path, *arguments, status=None)
    summary = summary_in(tmp_path)
    assert not summary["bugs"]
    assert member.name != SURE or summary["less_precise"]
    assert all(member.claims[0].partition("=")[0] in told for told in summary["less_precise"].values())
