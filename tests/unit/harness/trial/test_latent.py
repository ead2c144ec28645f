"""Laws keep v in k where they change both alike, reports name the claim, and scripts build v as a view of k."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.contract import AttentionKernel, Capabilities
from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case, Spike
from tests.harness.law import law_named
from tests.harness.trial.trial import Trial
from tests.panel import latent

EAGER, TILED = (("tests.panel.latent:eager", latent.CLAIMS), ("tests.panel.latent:tiled", latent.SERVED))
OF_ONE = ("tests.panel.latent:of_one_buffer", latent.ONE_BUFFER)
KEPT = {
    **dict.fromkeys(("forward", "backward", "additivity", "composition", "memory", "rotary"), EAGER),
    "ragged": TILED,
}
"""Laws that have v in k in every call if it is so in a case, each with a kernel that it is run on."""
BESIDE = ("determinism", "exact", "identities", "invariance", "special")
"""Laws that have v in k in some calls, and may have values of their own in others."""
CASE = Case(
    batch=2,
    heads_kv=2,
    group=2,
    seqlen_q=9,
    seqlen_k=70,
    head_dim=24,
    v_head_dim=16,
    v_in_k=True,
    k_layout="bnhd",
)


def calls_of(law: str, kernel: AttentionKernel, case: Case) -> list[bool]:
    """Return of each call that a law makes on a case whether v was the first columns of k in it."""
    trial = Trial(kernel, case, "cpu", SAFETY)
    law_named(law)(trial)
    return [call.problem.v_in_k for call in trial.calls]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("law", [*KEPT, *BESIDE])
def test_v_stays_in_k(law: str, seed: int) -> None:
    kernel, kinds = (
        load(*KEPT.get(law, EAGER)),
        ("cache", "paged", "append") if law == "ragged" else ("none",),
    )
    found = [x for kind in kinds for x in calls_of(law, kernel, replace(CASE, ragged=kind, seed=seed))]
    assert all(found) if law in KEPT else any(found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("law", ["forward", "composition", "memory", "ragged", *BESIDE])
def test_v_is_in_k_in_every_call_of_a_kernel_of_one_buffer(law: str, causal: bool) -> None:
    hidden = [Spike("k", (0, 0, 0, 20), -math.inf)] if law == "special" else []
    assert all(calls_of(law, load(*OF_ONE), replace(CASE, causal=causal, spikes=tuple(hidden))))


def test_rejection_asks_a_kernel_of_one_buffer_with_v_in_k() -> None:
    def refuse(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    claims = Capabilities(
        head_dims=(24,),
        v_head_dim=(16,),
        v_in_k=(True,),
        backward=False,
        grouped_heads=False,
        unequal_lengths=False,
        min_seqlen=2,
        dtypes=("float32",),
    )
    found = calls_of("rejection", AttentionKernel(name="refuse", forward=refuse, capabilities=claims), CASE)
    assert len(found) > 8
    assert all(found)


def test_a_function_of_one_buffer_looks_at_nothing_of_v_but_its_head_dim() -> None:
    q, k = torch.randn(2, 2, 5, 24), torch.randn(2, 2, 7, 24)
    answers = [
        latent.of_one_buffer(q, k, v, causal=True, sm_scale=0.3)[0]
        for v in (k[..., :16], torch.empty(2, 2, 7, 16, device="meta"))
    ]
    assert torch.equal(*answers)


def test_a_backward_is_asked_for_the_gradients_of_two_arguments() -> None:
    """The sum of dv over keys is that of dout, and in no column is it a part of dk."""
    case = Case(seqlen_q=5, seqlen_k=7, v_in_k=True)
    given = []
    for spec, claims in (EAGER, ("tests.panel.eager:float32", ("v_in_k=true",))):
        trial = Trial(load(spec, claims), case, "cpu", SAFETY)
        law_named("backward")(trial)
        given.append(trial.given[0].named())
    for name in ("dk", "dv"):
        assert (given[0][name] - given[1][name]).abs().max() < 1e-5
    assert (given[0]["dk"] - given[0]["dv"]).abs().max() > 0.1
