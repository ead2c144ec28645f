"""An lse in another base or order is judged in the contract's form, if that is claimed, and the claim is offered."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.contract import AttentionKernel, Capabilities
from kernels.contract.parsing import PLAIN_FUNCTION, parse_claims
from reference.arithmetic import FP32_ROUNDOFF
from reference.bounds import exact, forward_bounds
from strategies.case import Case
from tests.harness.bugs.suggested_claims import IN_BASE_2, OF_NO_KEYS, ROWS_FIRST, other_answers
from tests.harness.law import law_named
from tests.harness.trial.outputs import in_claimed_form, in_contract_form, shape_of_lse
from tests.harness.trial.trial import LawBroken, Trial
from tests.unit.support.toys import sound

CASE = Case(batch=2, heads_kv=3, seqlen_q=70, seqlen_k=66, causal=True)
FORMS = [
    ("e", "bhn", "-inf"),
    ("2", "bhn", "-inf"),
    ("e", "bnh", "-inf"),
    ("e", "bhn", "inf"),
    ("2", "bnh", "inf"),
]


def claims_of(form: tuple[str, ...]) -> Capabilities:
    """Return the claims of a plain function that returns lse in a form."""
    names = ("lse_base", "lse_layout", "lse_of_no_keys")
    return parse_claims([f"{name}={value}" for name, value in zip(names, form, strict=True)], PLAIN_FUNCTION)


def kernel_of(form: tuple[str, str, str], claimed: Capabilities) -> AttentionKernel:
    """Return a sound kernel that returns lse in a form, and refuses any other form of it in its backward."""
    found: list[torch.Tensor] = []

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        out, lse = sound(q, k, v, **options)
        found[:] = [in_claimed_form(lse.detach(), *form)]
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


@pytest.mark.parametrize("form", FORMS)
def test_the_claimed_form_becomes_that_of_the_contract(form: tuple[str, str, str]) -> None:
    lse = torch.randn(2, 3, 5, dtype=torch.float64)
    lse[0, 1, 2] = -math.inf
    returned = in_claimed_form(lse, *form)
    assert returned.shape == shape_of_lse((2, 3, 5, 64), form[1])
    assert returned[returned.isinf()].tolist() == [float(form[2])]
    # In base 2, a quotient and a product are rounded in float64: four times 2^-53 covers them and the constant twice.
    torch.testing.assert_close(in_contract_form(returned, *form), lse, rtol=2.0**-51, atol=0.0)


@pytest.mark.parametrize("law", ["forward", "backward", "composition", "exact", "identities", "invariance"])
@pytest.mark.parametrize("form", FORMS)
def test_laws_hold_in_the_form_that_is_claimed(form: tuple[str, str, str], law: str) -> None:
    assert found_by(law, kernel_of(form, claims_of(form))) == ""


@pytest.mark.parametrize("form", FORMS[1:])
def test_another_form_than_the_claimed_one_is_wrong(form: tuple[str, str, str]) -> None:
    assert found_by("forward", kernel_of(form, PLAIN_FUNCTION)) == "lse"
    assert found_by("forward", kernel_of(FORMS[0], claims_of(form))) == "lse"


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
    ahead = replace(several, seqlen_k=0)
    assert [*other_answers(["lse"], [ahead], Capabilities())] == [IN_BASE_2, ROWS_FIRST, OF_NO_KEYS]
    assert [*other_answers(["lse"], [ahead, several], Capabilities())] == [IN_BASE_2, ROWS_FIRST]
    assert [*other_answers(["lse"], [several], parse_claims([IN_BASE_2], Capabilities()))] == [ROWS_FIRST]
