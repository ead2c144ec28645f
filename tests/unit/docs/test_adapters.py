"""The adapters of PyTorch's kernels on the CPU are right within their roundings, and claim what the kernels do."""

import itertools
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.contract import BIASES, DTYPES, LAYOUTS
from kernels.registry import REGISTERED, load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from strategies.padding import FAMILIES as PADDINGS
from strategies.tensors import tensors
from tests.harness.trial.judge import judge
from tests.harness.trial.trial import Trial, run_kernel

ADAPTERS = [name for name in REGISTERED if name.startswith(("sdpa_", "flex_"))]

EQUAL = Case(batch=2, heads_kv=2, seqlen_q=17, seqlen_k=17)
GROUPED = Case(heads_kv=2, group=3, seqlen_q=9, seqlen_k=9, head_dim=32)
FEWER_QUERIES = Case(heads_kv=2, seqlen_q=5, seqlen_k=23)
MORE_QUERIES = Case(group=2, seqlen_q=23, seqlen_k=5, head_dim=64)
SHAPES = (EQUAL, GROUPED, FEWER_QUERIES, MORE_QUERIES)


def draw(case: Case, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of a case in another dtype."""
    found = tensors(replace(case, dtype=dtype), "cpu")
    return found.q.tensor, found.k.tensor, found.v.tensor


def claimed(*names: str) -> list[tuple[str, Case]]:
    """Return (kernel, case) for each of the shapes above, in each dtype and with each mask of the kernel."""
    return [
        (name, replace(case, dtype=dtype, causal=causal))
        for name in names
        for dtype, case, causal in itertools.product(load(name).capabilities.dtypes, SHAPES, (False, True))
        if load(name).capabilities.causal_unequal_lengths or not causal or case.seqlen_q == case.seqlen_k
    ]


def assert_right(name: str, case: Case, *, gradients: bool = False) -> None:
    """Assert that the results are within the bounds, without a law, under which no kernel is compiled by torch."""
    kernel = load(name)
    trial = Trial(kernel, case, "cpu", SAFETY)
    results = run_kernel(kernel, trial.problem, {}, backward=gradients)
    assert (results.lse is not None) == kernel.capabilities.lse
    assert results.out.dtype == trial.problem.q.dtype
    judge(trial, trial.problem, results)
    assert {"out", *(("dq", "dk", "dv") if gradients else ())} <= trial.worst.keys()


@pytest.mark.parametrize(("name", "case"), claimed("sdpa_math", "sdpa_flash", "flex_attention"))
@pytest.mark.parametrize("sm_scale", [0.25, 0.3])
def test_forward_is_right(name: str, case: Case, sm_scale: float) -> None:
    assert_right(name, replace(case, sm_scale=sm_scale))


OPTIONS: tuple[dict[str, Any], ...] = (
    *({"bias": shape} for shape in BIASES),
    *({"key_padding": family, "seed": 1} for family in PADDINGS),  # masked keys hold NaN for odd seeds
    {"window": 33, "window_right": 9, "first_keys": 1},
    {"chunk": 16, "prefix": 5},
    {"bias": "full", "key_padding": "gap", "window": 33},
)
"""What ``attn_mask`` can say."""

CHANGES: tuple[dict[str, Any], ...] = (
    {"softcap": 1.5},
    {"alibi_slopes": True},
    {"sinks": True},
    {"softcap": 20.0, "alibi_slopes": True, "bias": "full", "sinks": True},
    {"sinks": True, "bias": "of_keys", "key_padding": "gap", "chunk": 16},
)
"""What only ``score_mod`` can say, and together with masks."""


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("sdpa_math", options) for options in OPTIONS),
        *(("flex_attention", options) for options in (*OPTIONS, *CHANGES)),
    ],
)
def test_masks_and_changes_of_scores(name: str, options: dict[str, Any], causal: bool) -> None:
    claims = load(name).capabilities
    for seqlen_q, seqlen_k in ((23, 37), (37, 23)):
        case = Case(batch=2, heads_kv=2, group=2, head_dim=64, causal=causal)
        case = replace(case, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **options)
        assert claims.admits(case)
        assert_right(name, case, gradients=name != "flex_attention")


def test_one_compilation_answers_all_values_of_options() -> None:
    """A captured number would be a constant of the compiled function, and another one would compile anew."""
    torch._dynamo.reset()
    case = Case(heads_kv=2, seqlen_q=5, seqlen_k=9, head_dim=64, alibi_slopes=True, softcap=1.5, window=33)
    for bias in ("full", "shared"):  # The first compilation is for a length, the second one for any.
        assert_right("flex_attention", replace(case, bias=bias))
    torch._dynamo.utils.counters.clear()
    for softcap, window, bias in ((50.0, 100, "of_heads"), (0.0, 1, "full"), (20.0, 33, "of_keys")):
        assert_right("flex_attention", replace(case, softcap=softcap, window=window, bias=bias))
    assert not torch._dynamo.utils.counters["stats"]


def test_one_compilation_answers_all_documents() -> None:
    """Whether batch elements have their documents in common or not is data to the compiled function."""
    torch._dynamo.reset()
    forward = load("flex_attention").forward
    options: dict[str, Any] = {"causal": True, "sm_scale": 0.3, "alibi_slopes": torch.tensor([0.5, 0.25])}
    compiled = []
    for seqlen, ends in ((7, (3, 5)), (9, (1, 8)), (12, (12, 4)), (11, (6, 6))):
        q, k, v = torch.randn(3, 2, 2, seqlen, 64)
        ids = torch.full((2, seqlen), 8, dtype=torch.int32)
        for b, end in enumerate(ends):
            ids[b, end:] = b
        torch._dynamo.utils.counters.clear()
        out, lse = forward(q, k, v, document_ids=ids, **options)
        compiled.append(bool(torch._dynamo.utils.counters["stats"]))
        for b, end in enumerate(ends):
            for place in (slice(end), slice(end, None))[: 1 + (end < seqlen)]:
                alone = forward(*(x[b : b + 1, :, place] for x in (q, k, v)), **options)
                torch.testing.assert_close(out[b : b + 1, :, place], alone[0])
                torch.testing.assert_close(lse[b : b + 1, :, place], alone[1])
    assert compiled == [True, True, False, False]  # for a length, then for any


# sdpa_flash is left out under a causal mask: PyTorch 2.13 multiplies the mask's -inf by the scale, which is NaN.
@pytest.mark.parametrize(
    ("name", "causal"), [("sdpa_math", True), ("sdpa_flash", False), ("flex_attention", True)]
)
@pytest.mark.parametrize("sm_scale", [0.0, -0.3])
def test_scales_that_are_not_positive(name: str, causal: bool, sm_scale: float) -> None:
    assert_right(name, replace(EQUAL, dtype="float16", causal=causal, sm_scale=sm_scale))


@pytest.mark.parametrize(("name", "case"), claimed("sdpa_math", "sdpa_flash"))
def test_gradients_come_from_autograd(name: str, case: Case) -> None:
    kernel = load(name)
    assert kernel.capabilities.backward
    assert kernel.backward is None
    assert_right(name, replace(case, sm_scale=0.3), gradients=True)


@pytest.mark.parametrize("name", ["sdpa_math", "sdpa_flash", "flex_attention"])
def test_smallest_claimed_length_is_answered(name: str) -> None:
    claims = load(name).capabilities
    shortest = Case(seqlen_q=claims.min_seqlen, seqlen_k=claims.min_seqlen)
    q, k, v = draw(shortest, claims.dtypes[0])
    out, _ = load(name).forward(q, k, v, causal=False, sm_scale=0.3)
    assert torch.equal(out, v), "over one key or none, out is v"


def test_math_over_no_keys_is_zero_with_zero_gradients() -> None:
    assert_right("sdpa_math", Case(heads_kv=2, seqlen_q=3, seqlen_k=0), gradients=True)


@pytest.mark.parametrize("head_dim", [1, 13, 100, 256])
@pytest.mark.parametrize("name", ["sdpa_math", "sdpa_flash"])
def test_head_dims_need_not_be_powers_of_two(name: str, head_dim: int) -> None:
    assert head_dim in load(name).capabilities.head_dims
    case = Case(seqlen_q=7, seqlen_k=7, head_dim=head_dim, dtype="float16", causal=True, sm_scale=0.1)
    assert_right(name, case)


@pytest.mark.parametrize("name", ["sdpa_efficient", "sdpa_cudnn"])
def test_refusal_is_not_implemented_from_the_original(name: str) -> None:
    q, k, v = draw(EQUAL, "float16")
    with pytest.raises(NotImplementedError, match=r"No viable backend|No available kernel") as refused:
        load(name).forward(q, k, v, causal=False, sm_scale=0.3)
    assert type(refused.value.__cause__) is RuntimeError


def test_refusal_of_inputs_that_the_backend_does_not_take() -> None:
    q, k, v = (x.mT.contiguous().mT for x in draw(EQUAL, "float16"))  # the last stride is 17
    with (
        pytest.raises(NotImplementedError, match="FLASH_ATTENTION: No available kernel"),
        warnings.catch_warnings(action="ignore"),
    ):
        load("sdpa_flash").forward(q, k, v, causal=False, sm_scale=0.3)


def test_other_errors_are_no_refusals() -> None:
    q, k, v = draw(EQUAL, "float16")
    with pytest.raises(RuntimeError) as raised:
        load("sdpa_math").forward(q, k[..., :8], v, causal=False, sm_scale=0.3)
    assert not isinstance(raised.value, NotImplementedError)


def test_flex_refuses_gradients_on_the_cpu() -> None:
    q, k, v = (x.requires_grad_() for x in draw(EQUAL, "float32"))
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        load("flex_attention").forward(q, k, v, causal=False, sm_scale=0.3)


def test_flex_survives_more_compilations_than_dynamo_allows() -> None:
    limit = torch._dynamo.config.recompile_limit
    for heads in range(1, limit + 3):  # each number of heads is a compilation
        assert_right("flex_attention", Case(heads_kv=heads, seqlen_q=3, seqlen_k=3))
    assert torch._dynamo.config.recompile_limit == limit


def test_choice_of_backends_is_left_as_it_was() -> None:
    q, k, v = draw(EQUAL, "float32")
    load("sdpa_math").forward(q, k, v, causal=False, sm_scale=0.3)
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("name", ADAPTERS)
def test_claims_are_in_the_terms_of_the_contract(name: str) -> None:
    claims = load(name).capabilities
    assert set(claims.dtypes) <= set(DTYPES)
    assert set(claims.layouts) <= set(LAYOUTS)
    assert list(claims.head_dims) == sorted(set(claims.head_dims))
    for dtype, device in itertools.product(claims.dtypes, ("cpu", "cuda")):
        arithmetic = claims.arithmetic(dtype, device, {})
        assert arithmetic.output.name == dtype, "PyTorch rounds to nearest on every device"
        assert arithmetic.tile_min <= arithmetic.tile_max


def test_math_keeps_float32_inside() -> None:
    # bfloat16 rounds the weights 1/2041 to 1/2048, and 2041/2048 does not round to 1.
    q, k = (torch.zeros(1, 1, seqlen, 16, dtype=torch.bfloat16) for seqlen in (1, 2041))
    v = torch.full_like(k, 1.0)
    out, _ = load("sdpa_math").forward(q, k, v, causal=False, sm_scale=1.0)
    assert (out == 1).all()


def test_exp_of_the_cpu_flash_kernel_errs_as_little_as_claimed() -> None:
    # Column c of out is v_c / (1 + 63 exp(-0.3)), near the worst of the approximation. The roundings of out
    # average over 256 columns: of standard deviation 2^-11 / sqrt(3) at most, 2^-13.7 is 4 standard errors.
    q = torch.ones(1, 1, 1, 256, dtype=torch.float16)
    k = torch.zeros(1, 1, 64, 256, dtype=torch.float16)
    k[..., 1:, 0] = -0.3
    v = torch.zeros_like(k)
    v[..., 0, :] = torch.linspace(1, 2, 256)
    out, _ = load("sdpa_flash").forward(q, k, v, causal=False, sm_scale=1.0)
    total = 1 + k[0, 0, 1:, 0].double().exp().sum()
    relative_error = out[0, 0, 0].double() * total / v[0, 0, 0].double() - 1
    claimed_error = load("sdpa_flash").capabilities.arithmetic("float16", "cpu", {}).exp_error
    assert relative_error.mean().abs() <= claimed_error + 2.0**-13.7
