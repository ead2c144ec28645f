"""Failures of a plain function are explained by claims of less precision where these are the cause."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case, Spike
from tests.harness.designs.explanations import is_plainly_wrong, likeliest_of, with_explanations
from tests.harness.designs.ordinary import asked_whether, left_by
from tests.harness.law import law_named
from tests.harness.run import ALL_DESIGNS
from tests.harness.trial.trial import Trial
from tests.harness.verdict import Finding
from tests.panel import packed
from tests.panel.heads import heads_of
from tests.panel.narrow import truncated
from tests.panel.parts import equal_parts, merged, of_keys
from tests.unit.support import triton_toys
from tests.unit.support.running import TOYS, broken
from tests.unit.support.toys import sound

CASE = Case(group=2, seqlen_q=64, seqlen_k=64, head_dim=64, dtype="bfloat16")


def half_dv(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The gradient of v is half of what it should be."""
    return sound(q, k, 0.5 * v + 0.5 * v.detach(), **options)


def test_a_gradient_of_half_its_size_is_no_matter_of_roundings() -> None:
    finding, trial = broken(f"{__file__}:half_dv", CASE, "backward")
    assert is_plainly_wrong(finding, trial)
    assert not is_plainly_wrong(replace(finding, relative=0.05), trial)
    assert with_explanations(finding, trial, law_named("backward"), ALL_DESIGNS).explained_by == ()


def test_a_tensor_that_a_later_call_changes_is_no_matter_of_roundings() -> None:
    """The same results hold if they are judged once more, so no design has to explain them."""
    finding, trial = broken(f"{TOYS}:pooled", replace(CASE, dtype="float32"), "memory")
    assert with_explanations(finding, trial, law_named("memory"), ALL_DESIGNS).explained_by == ()


def test_larger_scores_may_have_larger_roundings() -> None:
    finding, trial = broken(f"{__file__}:half_dv", replace(CASE, sm_scale=0.25), "backward")
    assert is_plainly_wrong(finding, trial)
    assert not is_plainly_wrong(replace(finding, relative=0.1), trial)
    assert not is_plainly_wrong(replace(finding, tensor="dk"), trial)


def one_key_less(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The last key is left out."""
    return sound(q, k[:, :, :-1], v[:, :, :-1], **options)


def test_to_tell_whether_a_law_holds_no_gradient_is_judged_beside_a_wrong_out() -> None:
    _, trial = broken(f"{__file__}:one_key_less", CASE, "backward")
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
    finding, trial = broken(f"{__file__}:one_key_less", replace(CASE, seqlen_k=97), "backward")
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
    finding, trial = broken(f"{__file__}:stored_parts", case, "forward")
    told = with_explanations(finding, trial, law_named("forward"), ALL_DESIGNS)
    assert "rounded_partials=true" in told.explained_by


@pytest.mark.parametrize(
    "changed",
    [{"seqlen_k": 8}, {"sm_scale": 30.0}, {"v_values": "outliers"}, {"dtype": "float32", "dropout_p": 0.5}],
)
def test_numbers_that_may_cancel_or_grow_are_left_to_bounds(changed: dict[str, Any]) -> None:
    finding, trial = broken(f"{__file__}:half_dv", CASE, "backward")
    trial.case = replace(CASE, **changed)
    assert not is_plainly_wrong(finding, trial)


def packed_in_tf32(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """Sequences end to end, whose values are truncated to tf32."""
    return packed.eager(q, k, v + (truncated(v) - v).detach(), **options)


def test_a_design_explains_calls_with_sequences_of_different_lengths() -> None:
    case = Case(seqlen_q=20, seqlen_k=30, ragged="packed", seed=3)
    finding, trial = broken(f"{__file__}:packed_in_tf32", case, "ragged", ("ragged=packed",))
    told = with_explanations(finding, trial, law_named("ragged"), ALL_DESIGNS)
    assert "precision=tf32" in told.explained_by


def test_rivals_are_not_asked_about_calls_with_arguments_of_a_law() -> None:
    """The keys of such a call may be in pages, which a rival would take for the keys of a batch."""
    case = Case(batch=2, seqlen_q=20, seqlen_k=70, ragged="paged")
    trial = Trial(load("tests.panel.paged:eager", ["ragged=paged"]), case, "cpu", SAFETY)
    law_named("ragged")(trial)
    finding = Finding(claim="out is wrong", kind="error", tensor="out", tensors=("out",))
    claims = ("rounded_scores=true", "k_prescaled=true")
    assert likeliest_of(trial, claims, finding) == claims


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs a Triton kernel in this process, without a GPU")
@pytest.mark.parametrize("claims", [(), ("precision=tf32",)], ids=["unclaimed", "claimed"])
def test_float32_products_of_triton_are_in_tf32_unless_ieee_is_asked_for(
    claims: tuple[str, ...], tmp_path: Path
) -> None:
    """So it is without a GPU too, where Triton's own interpreter would multiply as ``ieee`` does."""
    path = tmp_path / "kernel.py"
    path.write_text(Path(triton_toys.__file__).read_text().replace("MENDED = False", "MENDED = True"))
    case = Case(heads_kv=2, seqlen_q=40, seqlen_k=40, head_dim=16, dtype="float32")
    if claims:
        law_named("forward")(Trial(load(f"{path}:attention", claims), case, "cpu", SAFETY))
        return
    finding, trial = broken(f"{path}:attention", case, "forward")
    explained = with_explanations(finding, trial, law_named("forward"), ALL_DESIGNS).explained_by
    assert "precision=tf32" in explained
