"""Families of designs: their members, their envelope, and how a call is judged by them."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.common.autograd import attention
from kernels.contract import DTYPES, AttentionKernel, Capabilities, flash_arithmetic
from kernels.contract.parsing import PLAIN_FUNCTION
from kernels.registry import load
from reference.arithmetic import FLOAT16, FLOAT32, Arithmetic
from reference.bounds import Exact, backward_bounds, exact, forward_bounds
from reference.family import LESS_PRECISE, Family, full_precision, less_precise, widest
from reference.heads import fold
from strategies.case import Case, Spike
from tests.harness.trial.judge import judge, sources
from tests.harness.trial.trial import LawBroken, Trial
from tests.unit.support.calling import make
from tests.unit.support.emulator import Emulator


def plain(dtype: str) -> Family:
    return PLAIN_FUNCTION.family(dtype, "cuda", {})


def problem(dtype: str, sm_scale: float, seqlen_k: int = 33) -> tuple[Exact, Tensor]:
    """Return the exact quantities of a causal problem, and its folded dout in float64."""
    made = make(9, seqlen_k, heads_kv=2, group=2, dtype=getattr(torch, dtype))
    q, k, v, dout = (x.cpu() for x in made)
    return exact(q, 3 * k, 3 * v, causal=True, sm_scale=sm_scale), fold(dout, 2).double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sm_scale", [0.125, 1e-4, 30.0, -1.0])
def test_envelope_is_at_least_as_wide_as_every_member(dtype: str, sm_scale: float) -> None:
    e, dout = problem(dtype, sm_scale)
    family = plain(dtype)
    widest_of_all = bounds(e, dout, family.envelope)
    for base, forward, backward in itertools.product(family.bases, family.forward, family.backward):
        member = bounds(e, dout, replace(base, **forward, **backward))
        for name, bound in member.items():
            assert bool((bound <= widest_of_all[name] * (1 + 1e-12)).all()), (name, forward, backward)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [{}, {"safety": 4.0}, {"safety": 4.0, "clustered": False}])
@pytest.mark.parametrize(
    "read", sorted({sources(replace(plain("float16").bases[0], **way)) for way in plain("float16").backward})
)
def test_ways_that_read_the_same_results_have_widest_bounds(
    dtype: str, rule: dict[str, Any], read: tuple[bool, str]
) -> None:
    """Gradients are judged at the kernel's own out and lse, so the right ones follow from these alone."""
    e, dout = problem(dtype, 0.125)
    family = plain(dtype)
    own: dict[str, Any] = {"out": 1.1 * e.out}
    own |= {"forward": forward_bounds(e, family.envelope)} if read[0] else {"lse": e.lse + 0.1}
    for base in family.bases:
        ways = [replace(base, **way) for way in family.backward]
        alike = [way for way in ways if sources(way) == read]
        if not alike:
            continue  # float32 has no cast of P
        largest = backward_bounds(e, dout, widest(alike), **own, **rule)
        for way in alike:
            member = backward_bounds(e, dout, way, **own, **rule)
            for name in ("dq", "dk", "dv"):
                assert torch.equal(getattr(member, name), getattr(largest, name)), (name, way)
                bound, most = (getattr(b, f"{name}_bound") for b in (member, largest))
                assert bool((bound <= most * (1 + 1e-12)).all()), (name, way)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("wrong", [1.0, 1.001, 1.1, -3.0])
def test_what_any_delta_explains_the_widest_bounds_explain(dtype: str, saved: bool, wrong: float) -> None:
    """However wrong the kernel's own out is, gradients within a member's bounds are within those of all by rule 1."""
    e, dout = problem(dtype, 0.125)
    family = plain(dtype)
    own: dict[str, Any] = {"out": wrong * e.out}
    own |= {"forward": forward_bounds(e, family.envelope)} if saved else {"lse": e.lse + 0.01 * (wrong - 1)}
    for base in family.bases:
        alike = [x for way in family.backward if (x := replace(base, **way)).saved_weights == saved]
        most = backward_bounds(e, dout, widest(alike), **own)
        for way in alike:
            member = backward_bounds(e, dout, way, **own)
            for name in ("dq", "dk", "dv"):
                distance = (getattr(member, name) - getattr(most, name)).abs()
                reach = distance + getattr(member, f"{name}_bound")
                assert bool((reach <= getattr(most, f"{name}_bound") * (1 + 1e-12)).all()), (name, way)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [{}, {"safety": 4.0}, {"safety": 4.0, "clustered": False}])
@pytest.mark.parametrize("seqlen_k", [33, 300])
def test_ways_of_a_forward_have_widest_bounds(dtype: str, rule: dict[str, Any], seqlen_k: int) -> None:
    e, _ = problem(dtype, 0.125, seqlen_k)
    family = plain(dtype)
    for base in family.bases:
        ways = [replace(base, **way) for way in family.forward]
        largest = forward_bounds(e, widest(ways), **rule)
        for way in ways:
            member = forward_bounds(e, way, **rule)
            assert bool((member.out <= largest.out * (1 + 1e-12)).all()), way
            assert bool((member.lse <= largest.lse * (1 + 1e-12)).all()), way


def bounds(e: Exact, dout: Tensor, a: Arithmetic) -> dict[str, Tensor]:
    f = forward_bounds(e, a)
    b = backward_bounds(e, dout, a, forward=f)
    return {"out": f.out, "lse": f.lse, "dq": b.dq_bound, "dk": b.dk_bound, "dv": b.dv_bound}


def test_widest_of_one_is_itself() -> None:
    a = flash_arithmetic("float16", "cuda", {})
    assert widest([a]) == a


def test_widest_takes_the_larger_error_of_each_field() -> None:
    a = Arithmetic(weights=FLOAT16, output=FLOAT16, tile_min=32, dq_keys=64, delta="out")
    b = Arithmetic(weights=FLOAT32, output=FLOAT16, tile_min=16, exp_error=1e-3, delta="probabilities")
    both = widest([a, b])
    assert (both.weights.roundoff, both.tile_min, both.dq_keys) == (FLOAT16.roundoff, 16, 64)
    assert (both.exp_error, both.delta) == (1e-3, "any")


@pytest.mark.parametrize("dtype", DTYPES)
def test_less_precise_members_keep_the_other_factors(dtype: str) -> None:
    family = plain(dtype)
    found = dict(less_precise(family))
    assert found
    assert found.keys() <= LESS_PRECISE.keys()
    assert all((x.forward, x.backward) == (family.forward, family.backward) for x in found.values())


# What follows are the false alarms of the first audit of strangers' kernels, as directed cases.


def kernel(arithmetic: Arithmetic | None = None, **roundings: Any) -> AttentionKernel:
    """A plain function of some design, or one that declares its arithmetic and has a backward of its own."""
    design = Design(roundings)
    if arithmetic is None:
        return AttentionKernel(name="plain", forward=design.by_autograd, capabilities=PLAIN_FUNCTION)
    claims = Capabilities(arithmetic=lambda dtype, device, launch: arithmetic)
    return replace(design.kernel, capabilities=claims)


class Design:
    """A kernel with the roundings of ``flash_arithmetic``, in which some fields are changed."""

    def __init__(self, roundings: dict[str, Any]) -> None:
        self.roundings = roundings
        self.kernel = AttentionKernel(
            name="declared", forward=self.forward, backward=self.backward, capabilities=Capabilities()
        )

    def emulator(self, q: Tensor, options: dict[str, Any]) -> Emulator:
        usual = flash_arithmetic(str(q.dtype).removeprefix("torch."), "cpu", {})
        return Emulator(arithmetic=replace(usual, **self.roundings), **options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = self.emulator(q, options).forward(q.float(), k.float(), v.float())
        return out.to(q.dtype), lse

    def backward(self, *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        gradients = self.emulator(tensors[0], options).backward(*(x.float() for x in tensors))
        return tuple(x.to(tensors[0].dtype) for x in gradients)

    def by_autograd(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Any:
        return attention(self.kernel, q, k, v, causal=causal, sm_scale=sm_scale)


ZEROS: dict[str, Any] = dict.fromkeys(("q_values", "k_values", "v_values", "dout_values"), "zeros")

OVERFLOWING_DS = Case(
    **ZEROS,
    seqlen_k=2,
    dtype="float16",
    sm_scale=0.25,
    spikes=(Spike("v", (0, 0, 0, 0), 1000.0), Spike("dout", (0, 0, 0, 0), 1000.0)),
)
OVERFLOWING_HEADS = Case(
    **ZEROS,
    group=2,
    dtype="float16",
    spikes=tuple(
        Spike("dout", (0, head, 0, column), value)
        for head, column, value in ((0, 0, 50304.0), (0, 1, 32768.0), (1, 0, 0.0), (1, 1, -32768.0))
    ),
)
"""Heads whose dv are (50304, 32768) and (0, -32768): their parts are finite here, and infinite when doubled."""


def judged(k: AttentionKernel, case: Case) -> Trial:
    trial = Trial(k, case, "cpu", 4.0)
    judge(trial, trial.problem, trial.gradients())
    return trial


@pytest.mark.parametrize("ds_scaled", [False, True])
def test_ds_that_overflows_before_or_after_it_is_scaled(ds_scaled: bool) -> None:
    judged(kernel(ds_scaled=ds_scaled), OVERFLOWING_DS)


def test_heads_that_overflow_where_their_sum_does_not() -> None:
    doubled = replace(
        OVERFLOWING_HEADS,
        seqlen_q=2,
        spikes=tuple(
            Spike(s.tensor, (0, s.index[1], row, s.index[3]), s.value)
            for s in OVERFLOWING_HEADS.spikes
            for row in (0, 1)
        ),
    )
    judged(kernel(dk_dv_per_head=True), doubled)
    with pytest.raises(LawBroken, match="dv"):
        judged(kernel(flash_arithmetic("float16", "cpu", {}), dk_dv_per_head=True), doubled)
    declared = replace(flash_arithmetic("float16", "cpu", {}), dk_dv_per_head=True)
    judged(kernel(declared, dk_dv_per_head=True), doubled)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "design", [{"delta": "probabilities"}, {"ds_scaled": True}, {"dk_dv_per_head": True}]
)
def test_plain_functions_of_other_designs_hold(seed: int, dtype: str, design: dict[str, Any]) -> None:
    judged(kernel(**design), Case(group=2, seqlen_q=40, seqlen_k=90, head_dim=32, dtype=dtype, seed=seed))


@pytest.mark.parametrize("seed", range(8))
def test_declared_delta_is_that_of_the_judgement(seed: int) -> None:
    case = Case(seqlen_q=70, seqlen_k=130, head_dim=64, dtype="bfloat16", seed=seed, q_values="wide")
    usual = flash_arithmetic("bfloat16", "cuda", {})
    judged(kernel(replace(usual, delta="probabilities"), delta="probabilities"), case)
    with pytest.raises(LawBroken, match=r"dq|dk"):
        judged(kernel(usual, delta="probabilities"), case)


def test_a_wrong_forward_does_not_hide_wrong_gradients() -> None:
    design = Design({})

    def forward(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = design.forward(*tensors, **options)
        return out, lse + 1.0

    def backward(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
        dq, dk, dv = design.backward(*tensors, **options)
        return dq, dk, 2 * dv

    wrong = AttentionKernel(name="wrong", forward=forward, backward=backward, capabilities=Capabilities())
    with pytest.raises(LawBroken) as broken:
        judged(wrong, Case(seqlen_q=9, seqlen_k=33, dtype="float16"))
    assert broken.value.finding.tensor == "lse"
    assert set(broken.value.finding.tensors) == {"lse", "dv"}


@pytest.mark.parametrize("group", [2, 5])
def test_where_one_gradient_is_wrong_a_wrong_lse_makes_no_other_seem_wrong(group: int) -> None:
    kernel = load("tests.several:parts")  # its lse is in base 2, and its dv that of the first head of a group
    trial = Trial(kernel, Case(group=group, seqlen_q=33, seqlen_k=8), "cpu", 4.0)
    with pytest.raises(LawBroken) as broken:
        judge(trial, trial.problem, trial.gradients())
    assert broken.value.finding.tensors == ("lse", "dv")
    assert {c.tensor for c in trial.compared} == {"out", "lse"}


def test_a_gradient_that_follows_from_the_right_lse_is_not_told_beside_a_wrong_one() -> None:
    """By the lse that is returned dk may be any number, and dq is wrong; by the right one dk alone is wrong."""

    def results(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
        out, lse = attention(Design({}).kernel, q, k, v, causal=causal, sm_scale=sm_scale)
        if k.requires_grad:
            out = out + (k - k.detach()).sum()
        return out, lse + torch.tensor([-800.0, 1.0])

    wrong = AttentionKernel(name="plain", forward=results, capabilities=PLAIN_FUNCTION)
    with pytest.raises(LawBroken) as broken:
        judged(wrong, Case(seqlen_q=2, seqlen_k=8))
    assert broken.value.finding.tensors == ("lse", "dk")


def test_a_call_is_broken_where_no_single_member_explains_all_of_it() -> None:
    """Each of two bases explains one tensor, and neither explains both."""
    usual = flash_arithmetic("float32", "cpu", {})
    loose_out = replace(usual, output=FLOAT16)
    family = Family((loose_out, replace(usual, log_error=1.0)))

    claims = replace(PLAIN_FUNCTION, backward=False, designs=lambda dtype, device, launch: family)

    def off_by(of_out: float, of_lse: float) -> AttentionKernel:
        def forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
            out, lse = Design({}).forward(q, k, v, **options)
            return out * (1 + of_out), lse + of_lse

        return AttentionKernel(name="both", forward=forward, capabilities=claims)

    case = Case(seqlen_q=5, seqlen_k=40)
    judged(off_by(1e-4, 0.0), case)
    judged(off_by(0.0, 1e-2), case)
    with pytest.raises(LawBroken):
        judged(off_by(1e-4, 1e-2), case)


def test_what_explained_the_calls_is_told() -> None:
    case = Case(seqlen_q=70, seqlen_k=130, head_dim=64, dtype="float16", sm_scale=1e-4)
    trial = judged(kernel(ds_scaled=True), case)
    assert any("dS scaled at its cast" in words for words in trial.designs)
    assert "P cast before the division" in trial.designs


def test_family_of_float32_has_no_casts_to_differ_in() -> None:
    family = full_precision(flash_arithmetic("float32", "cuda", {}))
    assert not any("ds_from_rounded_p" in way for way in family.backward)
    assert [base.weights.name for base in family.bases] == ["float32", "tf32x3"]
