"""Failures of a plain function are explained by claims of less precision where these are the cause."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strategies.case import Case
from tests.harness.bugs.imprecise import ImpreciseCall, sentence
from tests.harness.designs.explanations import with_explanations
from tests.harness.law import law_named
from tests.harness.run import ALL_DESIGNS, NO_DESIGN, ONE_DESIGN, WHOLE_DESIGN
from tests.panel import narrow
from tests.panel.narrow import tf32_of_converted
from tests.unit.support.running import SubjectOf, broken, finding_of
from tests.unit.support.toys import sound

NARROW = Path(narrow.__file__)
CASE = Case(group=2, seqlen_q=64, seqlen_k=64, head_dim=64, dtype="bfloat16")


def worse_with_mask(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Any:
    """Out is 1 % too large under a causal mask. All calls have errors of the size of a less precise exponential's."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    columns, rows = (
        5e-5 * (-1.0) ** torch.arange(n, device=q.device) for n in (out.shape[-1], lse.shape[-1])
    )
    return out * (1.01 if causal else 1.0) * (1.0 + columns), lse + rows


@pytest.mark.usefixtures("unscripted")
@pytest.mark.parametrize("known", [(), ("exp_error=1e-4",)])
def test_an_error_that_a_less_precise_design_explains_is_no_case_that_holds(
    known: tuple[str, ...], subject_of: SubjectOf
) -> None:
    """Unless the kernel is known to have that design."""
    subject = subject_of("worse_with_mask", toys=Path(__file__))
    case = Case(seqlen_q=20, seqlen_k=20, head_dim=16, dtype="float32", causal=True)
    for claim in known:
        subject.known.precision.add(ImpreciseCall("forward", case, "out", (claim,), 1.0, 1.0))
    subject.check(law_named("forward"), case)
    (bug,) = subject.known.bugs.values()
    fields = {field.name: field for field in bug.failure.explanation.fields}
    assert ("causal" in fields) == bool(known)
    assert ("causal" in {need.name for need in bug.needs}) == bool(known)


class _Doubled(torch.autograd.Function):
    """A function that returns its input, and doubles the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return 2.0 * dx


def doubled_dk(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The gradient of k is twice what it should be."""
    return sound(q, _Doubled.apply(k), v, **options)


def doubled_dk_in_tf32(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """All products are in tf32, and the gradient of k is twice what it should be."""
    return tf32_of_converted(q, _Doubled.apply(k), v, **options)


@pytest.mark.nightly
@pytest.mark.usefixtures("unscripted")
def test_a_bug_of_gradients_is_told_beside_a_less_precise_forward(subject_of: SubjectOf) -> None:
    subject = subject_of("doubled_dk_in_tf32", Path(__file__))
    case = Case(seqlen_q=32, seqlen_k=32, head_dim=32, dtype="float32", seed=1)
    for law in ("forward", "backward"):
        subject.check(law_named(law), case)
    assert subject.known.precision.common[0] == "precision=tf32"
    (bug,) = subject.known.bugs.values()
    assert bug.tensors == ("dk",)


def test_what_large_scores_would_excuse_is_a_bug_if_ordinary_numbers_show_it(
    subject_of: SubjectOf, unscripted: None
) -> None:
    large = replace(CASE, seqlen_q=16, seqlen_k=16, dtype="float16", sm_scale=2.0, q_values="positive")
    finding, trial = broken(f"{__file__}:doubled_dk", large, "backward")
    all_designs, one, whole, none = (
        with_explanations(finding, trial, law_named("backward"), designs).explained_by
        for designs in (ALL_DESIGNS, ONE_DESIGN, WHOLE_DESIGN, NO_DESIGN)
    )
    assert not any((all_designs, one, whole, none))  # ordinary numbers show it at once
    subject = subject_of("doubled_dk", Path(__file__), shrink=False)
    assert finding_of(subject, "backward", large).explained_by == ()


def test_a_less_precise_kernel_has_no_bug_that_ordinary_numbers_would_show(subject_of: SubjectOf) -> None:
    large = replace(CASE, dtype="float16", sm_scale=1.9, q_values="positive")
    subject = subject_of("scaled_first", Path(__file__))
    subject.known.dtype = large.dtype
    subject.check(law_named("backward"), large)
    assert not subject.known.failures
    assert "q_prescaled=true" in subject.known.precision.common


def scaled_first(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Any:
    """The scale is multiplied to q, and the product rounded to its dtype."""
    return sound(q * sm_scale, k, v, causal=causal, sm_scale=1.0)


@pytest.mark.usefixtures("unscripted")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_over_a_large_group_are_told_by_their_claim_alone(subject_of: SubjectOf, dtype: str) -> None:
    """Bounds of scores that are rounded would explain the gradients as well, and so would those of stored parts."""
    case = Case(group=128, seqlen_q=16, seqlen_k=16, head_dim=16, dtype=dtype, dout_values="positive")
    subject = subject_of("head_by_head", NARROW, shrink=False)
    subject.known.dtype = dtype
    subject.check(law_named("backward"), case)
    assert not subject.known.failures
    told = sentence(subject.known.precision, [dtype])
    assert told.startswith("consistent with `rounded_group_sums`: less precise")
    assert told.endswith("`--claims rounded_group_sums=true`")
