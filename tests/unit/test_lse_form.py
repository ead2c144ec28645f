"""An lse in another base or order is judged in the contract's form, if that is claimed, and the claim is offered."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.claims import PLAIN_FUNCTION, parse_claims
from kernels.contract import AttentionKernel, Capabilities
from reference.arithmetic import FP32_ROUNDOFF
from reference.bounds import exact, forward_bounds
from strategies.case import Case
from tests.harness.law import law_named
from tests.harness.lse_form import in_claimed_form, in_contract_form, shape_of_lse
from tests.harness.offers import IN_BASE_2, ROWS_FIRST, other_answers
from tests.harness.trial import LawBroken, Trial
from tests.unit.running import TOYS, pytest_run
from tests.unit.toys import sound

CASE = Case(batch=2, heads_kv=3, seqlen_q=70, seqlen_k=66, causal=True)
FORMS = [("e", "bhn"), ("2", "bhn"), ("e", "bnh"), ("2", "bnh")]
KERNEL = """\
import runpy
sound = runpy.run_path({toys!r})["sound"]
def kernel(q, k, v, *, causal, sm_scale):
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return out, {returned}
"""


def kernel_of(base: str, layout: str, claimed: Capabilities) -> AttentionKernel:
    """Return a sound kernel that returns lse in a form, and refuses any other form of it in its backward."""
    found: list[torch.Tensor] = []

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        out, lse = sound(q, k, v, **options)
        found[:] = [in_claimed_form(lse.detach(), base, layout)]
        return out, found[0]

    def backward(dout: torch.Tensor, *tensors: torch.Tensor, causal: bool, sm_scale: float) -> Any:
        assert tensors[4] is found[0]
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        with torch.enable_grad():
            out, _ = sound(*leaves, causal=causal, sm_scale=sm_scale)
        return torch.autograd.grad(out, leaves, dout, materialize_grads=True)

    return AttentionKernel(name="toy", forward=forward, backward=backward, capabilities=claimed)


def found_by(law: str, kernel: AttentionKernel) -> str:
    """Return the tensor in which a law is broken; "" if it holds."""
    try:
        law_named(law).check(Trial(kernel, CASE, "cpu", 8.0))
    except LawBroken as broken:
        return broken.finding.tensor
    return ""


@pytest.mark.parametrize(("base", "layout"), FORMS)
def test_the_claimed_form_becomes_that_of_the_contract(base: str, layout: str) -> None:
    lse = torch.randn(2, 3, 5, dtype=torch.float64)
    lse[0, 1, 2] = -math.inf
    returned = in_claimed_form(lse, base, layout)
    assert returned.shape == shape_of_lse((2, 3, 5, 64), layout)
    # In base 2, a quotient and a product are rounded in float64: four times 2^-53 covers them and the constant twice.
    torch.testing.assert_close(in_contract_form(returned, base, layout), lse, rtol=2.0**-51, atol=0.0)


@pytest.mark.parametrize("law", ["forward", "backward", "composition", "exact", "identities", "invariance"])
@pytest.mark.parametrize(("base", "layout"), FORMS)
def test_laws_hold_in_the_form_that_is_claimed(base: str, layout: str, law: str) -> None:
    claimed = parse_claims([f"lse_base={base}", f"lse_layout={layout}"], PLAIN_FUNCTION)
    assert found_by(law, kernel_of(base, layout, claimed)) == ""


@pytest.mark.parametrize(("base", "layout"), FORMS[1:])
def test_another_form_than_the_claimed_one_is_wrong(base: str, layout: str) -> None:
    assert found_by("forward", kernel_of(base, layout, PLAIN_FUNCTION)) == "lse"
    claimed = parse_claims([f"lse_base={base}", f"lse_layout={layout}"], PLAIN_FUNCTION)
    assert found_by("forward", kernel_of("e", "bhn", claimed)) == "lse"


def test_the_bound_of_base_2_is_wider_by_one_conversion() -> None:
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    e = exact(q, k, v, causal=False, sm_scale=1.0)
    natural, in_base_2 = (
        forward_bounds(e, replace(Capabilities(), lse_base=base).family("float32", "cpu", {}).envelope)
        for base in ("e", "2")
    )
    torch.testing.assert_close(in_base_2.lse - natural.lse, 1.25 * FP32_ROUNDOFF * e.lse.abs())
    assert torch.equal(in_base_2.out, natural.out)


def test_the_constant_errs_by_less_than_the_bound_allows() -> None:
    log2_e = 1.0 / math.log(2.0)
    assert abs(float(torch.tensor(log2_e)) / log2_e - 1.0) < 0.25 * FP32_ROUNDOFF


def test_claims_of_lse_are_tried_where_lse_alone_is_wrong() -> None:
    several, one_row = Case(heads_kv=2, seqlen_q=2), Case(heads_kv=2, seqlen_q=1)
    assert [*other_answers(["lse"], [several], Capabilities())] == [IN_BASE_2, ROWS_FIRST]
    assert [*other_answers(["lse"], [several, one_row], Capabilities())] == [IN_BASE_2]
    assert [*other_answers(["lse", "out"], [several], Capabilities())] == []
    assert [*other_answers(["lse"], [several], parse_claims([IN_BASE_2], Capabilities()))] == [ROWS_FIRST]


def test_a_run_offers_base_2(tmp_path: Path) -> None:
    kernel = tmp_path / "base_2.py"
    kernel.write_text(KERNEL.format(toys=str(TOYS), returned="lse * 1.4426950408889634"))
    options = [
        "--kernel",
        f"{kernel}:kernel",
        "--examples=10",
        "-k",
        "forward and float32",
        "--hypothesis-seed=1",
        "--shrink-seconds=1",
    ]
    text = pytest_run(tmp_path, *options, status=pytest.ExitCode.TESTS_FAILED).stdout
    assert re.search(r"or claim  --claims lse_base=2: all \d+ failing cases hold", text), text
    pytest_run(tmp_path, *options, "--claims=lse_base=2")


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
