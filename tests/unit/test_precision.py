"""Failures of a plain function are explained by claims of less precision where these are the cause."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from reference.family import implied
from strategies.case import Case, Spike
from tests.harness.bugs.imprecise import ImpreciseCall, sentence
from tests.harness.law import law_named
from tests.harness.run import ALL_DESIGNS, NO_DESIGN, ONE_DESIGN, WHOLE_DESIGN
from tests.harness.trial.designs import (
    asked_whether,
    is_plainly_wrong,
    left_by,
    likeliest_of,
    with_explanations,
)
from tests.harness.trial.trial import LawBroken, Trial
from tests.harness.verdict import Finding
from tests.panel import narrow, packed
from tests.panel.heads import heads_of
from tests.panel.narrow import tf32_of_converted, truncated
from tests.panel.parts import equal_parts, merged, of_keys
from tests.unit import triton_toys
from tests.unit.running import TOYS, SubjectOf, finding_of
from tests.unit.toys import sound

NARROW = Path(narrow.__file__)
CASE = Case(group=2, seqlen_q=64, seqlen_k=64, head_dim=64, dtype="bfloat16")


def half_dv(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The gradient of v is half of what it should be."""
    return sound(q, k, 0.5 * v + 0.5 * v.detach(), **options)


def broken(name: str, case: Case, law: str = "backward") -> tuple[Finding, Trial]:
    trial = Trial(load(f"{Path(__file__) if name in globals() else TOYS}:{name}"), case, "cpu", SAFETY)
    with pytest.raises(LawBroken) as failed:
        law_named(law)(trial)
    return failed.value.finding, trial


def test_a_gradient_of_half_its_size_is_no_matter_of_roundings() -> None:
    finding, trial = broken("half_dv", CASE)
    assert is_plainly_wrong(finding, trial)
    assert not is_plainly_wrong(replace(finding, relative=0.05), trial)
    assert with_explanations(finding, trial, law_named("backward"), ALL_DESIGNS).explained_by == ()


def test_a_tensor_that_a_later_call_changes_is_no_matter_of_roundings() -> None:
    """The same results hold if they are judged once more, so no design has to explain them."""
    finding, trial = broken("pooled", replace(CASE, dtype="float32"), "memory")
    assert with_explanations(finding, trial, law_named("memory"), ALL_DESIGNS).explained_by == ()


def test_larger_scores_may_have_larger_roundings() -> None:
    finding, trial = broken("half_dv", replace(CASE, sm_scale=0.25))
    assert is_plainly_wrong(finding, trial)
    assert not is_plainly_wrong(replace(finding, relative=0.1), trial)
    assert not is_plainly_wrong(replace(finding, tensor="dk"), trial)


def one_key_less(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The last key is left out."""
    return sound(q, k[:, :, :-1], v[:, :, :-1], **options)


def test_to_tell_whether_a_law_holds_no_gradient_is_judged_beside_a_wrong_out() -> None:
    _, trial = broken("one_key_less", CASE)
    found = [
        left_by(again, law_named("backward"))
        for again in (trial.replayed(trial.family), asked_whether(trial, trial.family))
    ]
    wrong = [set() if x is None else {*x.tensors} for x in found]
    assert wrong[0] > wrong[1] >= {"out"}
    assert wrong[1] <= {"out", "lse"}


def test_tensors_that_no_single_design_explains_stay_wrong() -> None:
    """Rounded scores would explain lse, and rounded scores, weights and sums together out as well."""
    law = law_named("backward")
    finding, trial = broken("one_key_less", replace(CASE, seqlen_k=97))
    assert finding.tensor == "lse"
    told = with_explanations(finding, trial, law, ALL_DESIGNS)
    assert told.explained_by == ()
    assert "out" in told.tensors


def stored_parts(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Any:
    """Each of 4 parts of the keys is stored in the inputs' dtype; there is no backward."""
    if q.requires_grad:
        raise NotImplementedError("gradients")
    heads = heads_of(q, k, v, causal, sm_scale)
    results = [of_keys(heads, keys) for keys in equal_parts(heads, 4)]
    out, _ = merged([heads.rounded(out) for out, _ in results], [lse for _, lse in results])
    return out.to(q.dtype)


def test_a_design_explains_a_kernel_that_refuses_to_be_differentiated() -> None:
    """The results of the parts are 18.4, 18.4, 18.4 and 19.4 times the smallest number of float16, their mean 18.7.

    Each part's is that of 7 keys of which one has a value. Once they are rounded, their mean is 18.25, and so 18.
    """
    units = (129, 129, 129, 136)
    values = (Spike("v", (0, 0, 7 * part, 8), n * 2.0**-24) for part, n in enumerate(units))
    case = Case(
        seqlen_q=60, seqlen_k=28, dtype="float16", q_values="zeros", v_values="zeros", spikes=(*values,)
    )
    finding, trial = broken("stored_parts", case, "forward")
    told = with_explanations(finding, trial, law_named("forward"), ALL_DESIGNS)
    assert "rounded_partials=true" in told.explained_by


@pytest.mark.parametrize(
    "changed",
    [{"seqlen_k": 8}, {"sm_scale": 30.0}, {"v_values": "outliers"}, {"dtype": "float32", "dropout_p": 0.5}],
)
def test_numbers_that_may_cancel_or_grow_are_left_to_bounds(changed: dict[str, Any]) -> None:
    finding, trial = broken("half_dv", CASE)
    trial.case = replace(CASE, **changed)
    assert not is_plainly_wrong(finding, trial)


def worse_with_mask(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Any:
    """Out is too large, by far under a causal mask, and else by as little as a less precise exp would make it."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return out * (1.01 if causal else 1.0001), lse


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


@pytest.mark.usefixtures("unscripted")
def test_a_bug_of_gradients_is_told_beside_a_less_precise_forward(subject_of: SubjectOf) -> None:
    subject = subject_of("doubled_dk_in_tf32", Path(__file__))
    case = Case(seqlen_q=32, seqlen_k=32, head_dim=32, dtype="float32", seed=1)
    for law in ("forward", "backward"):
        subject.check(law_named(law), case)
    assert subject.known.precision.common[0] == "precision=tf32"
    (bug,) = subject.known.bugs.values()
    assert bug.tensors == ("dk",)


def packed_in_tf32(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Sequences end to end, whose values are truncated to tf32."""
    return packed.eager(q, k, v + (truncated(v) - v).detach(), **options)


def test_a_design_explains_calls_with_sequences_of_different_lengths() -> None:
    kernel = load(f"{Path(__file__)}:packed_in_tf32", ["ragged=packed"])
    case, law = Case(seqlen_q=20, seqlen_k=30, ragged="packed", seed=3), law_named("ragged")
    trial = Trial(kernel, case, "cpu", SAFETY)
    with pytest.raises(LawBroken) as failed:
        law(trial)
    told = with_explanations(failed.value.finding, trial, law, ALL_DESIGNS)
    assert "precision=tf32" in told.explained_by


def test_rivals_are_not_asked_about_calls_with_arguments_of_a_law() -> None:
    """The keys of such a call may be in pages, which a rival would take for the keys of a batch."""
    case = Case(batch=2, seqlen_q=20, seqlen_k=70, ragged="paged")
    trial = Trial(load("tests.panel.paged:eager", ["ragged=paged"]), case, "cpu", SAFETY)
    law_named("ragged")(trial)
    finding = Finding(claim="out is wrong", kind="error", tensor="out", tensors=("out",))
    claims = ("rounded_scores=true", "k_prescaled=true")
    assert likeliest_of(trial, claims, finding) == claims


def test_what_large_scores_would_excuse_is_a_bug_if_ordinary_numbers_show_it(
    subject_of: SubjectOf, unscripted: None
) -> None:
    large = replace(CASE, seqlen_q=16, seqlen_k=16, dtype="float16", sm_scale=2.0, q_values="positive")
    finding, trial = broken("doubled_dk", large)
    all_designs, one, whole, none = (
        with_explanations(finding, trial, law_named("backward"), designs).explained_by
        for designs in (ALL_DESIGNS, ONE_DESIGN, WHOLE_DESIGN, NO_DESIGN)
    )
    assert len(all_designs) > 1
    assert one == whole == tuple(implied(one[:1]))
    assert not none
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


@pytest.mark.parametrize("claims", [(), ("precision=tf32",)], ids=["unclaimed", "claimed"])
def test_float32_products_of_triton_are_in_tf32_unless_ieee_is_asked_for(
    claims: tuple[str, ...], tmp_path: Path
) -> None:
    """So it is without a GPU too, where Triton's own interpreter would multiply as ``ieee`` does."""
    path = tmp_path / "kernel.py"
    path.write_text(Path(triton_toys.__file__).read_text().replace("MENDED = False", "MENDED = True"))
    case = Case(heads_kv=2, seqlen_q=40, seqlen_k=40, head_dim=16, dtype="float32")
    trial = Trial(load(f"{path}:attention", claims), case, "cpu", SAFETY)
    if claims:
        law_named("forward")(trial)
        return
    with pytest.raises(LawBroken) as failed:
        law_named("forward")(trial)
    explained = with_explanations(failed.value.finding, trial, law_named("forward"), ALL_DESIGNS).explained_by
    assert "precision=tf32" in explained
