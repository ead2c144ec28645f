"""An lse in another base or order is judged in the contract's form, if that is claimed, and the claim is offered."""

import re
from pathlib import Path

import pytest

from tests.unit.support.running import TOYS, pytest_run

KERNEL = """\
import runpy
sound = runpy.run_path({toys!r})["sound"]
def kernel(q, k, v, *, causal, sm_scale):
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return out, {returned}
"""


@pytest.mark.parametrize(
    ("claim", "returned"),
    [
        pytest.param("lse_base=2", "lse * 1.4426950408889634", marks=pytest.mark.nightly),
        ("lse_of_no_keys=inf", "lse.masked_fill(lse == -float('inf'), float('inf'))"),
    ],
)
def test_a_run_offers_the_form(claim: str, returned: str, tmp_path: Path) -> None:
    kernel = tmp_path / "other_form.py"
    kernel.write_text(KERNEL.format(toys=str(TOYS), returned=returned))
    options = [
        "--kernel",
        f"{kernel}:kernel",
        "--examples=40",
        "-k",
        "forward and float32",
        "--hypothesis-seed=1",
        "--shrink-seconds=1",
    ]
    text = pytest_run(tmp_path, *options, status=pytest.ExitCode.TESTS_FAILED).stdout
    assert re.search(rf"or claim  --claims {claim}: all \d+ failing cases hold", text), text
    assert "bugs, the worst first: 1" in text
    pytest_run(tmp_path, *options, f"--claims={claim}")


@pytest.mark.nightly
def test_base_2_is_not_offered_where_only_some_calls_return_it(tmp_path: Path) -> None:
    kernel = tmp_path / "base_2_of_masked_calls.py"
    kernel.write_text(KERNEL.format(toys=str(TOYS), returned="lse * 1.4426950408889634 if causal else lse"))
    options = ["--kernel", f"{kernel}:kernel", "--examples=20", "-k", "forward and float32"]
    text = pytest_run(
        tmp_path, *options, "--hypothesis-seed=1", "--shrink-seconds=1", status=pytest.ExitCode.TESTS_FAILED
    ).stdout
    assert "only with causal True" in text
    assert "lse_base=2" not in text


def test_a_run_names_the_layout_that_fits(tmp_path: Path) -> None:
    kernel = tmp_path / "rows_first.py"
    kernel.write_text(KERNEL.format(toys=str(TOYS), returned="lse.transpose(1, 2)"))
    options = ["--kernel", f"{kernel}:kernel", "--examples=2", "-k", "forward and float32"]
    run = pytest_run(tmp_path, *options, status=pytest.ExitCode.USAGE_ERROR)
    assert "--claims lse_layout=bnh fits it" in run.stdout + run.stderr
    pytest_run(tmp_path, *options, "--claims=lse_layout=bnh")
