"""The adapters of PyTorch's kernels on the CPU are right within their roundings, and claim what the kernels do."""

import itertools
import warnings

import pytest
import torch
from torch import Tensor

from kernels.contract import DTYPES, LAYOUTS, AttentionKernel
from kernels.registry import REGISTERED, load

ADAPTERS = [name for name in REGISTERED if name.startswith(("sdpa_", "flex_"))]

# (batch, heads_kv, group, seqlen_q, seqlen_k, head_dim)
Shape = tuple[int, int, int, int, int, int]
EQUAL: Shape = (2, 2, 1, 17, 17, 16)
GROUPED: Shape = (1, 2, 3, 9, 9, 32)
FEWER_QUERIES: Shape = (1, 2, 1, 5, 23, 16)
MORE_QUERIES: Shape = (1, 1, 2, 23, 5, 64)
SHAPES = (EQUAL, GROUPED, FEWER_QUERIES, MORE_QUERIES)


def draw(shape: Shape, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads_kv, group, seqlen_q, seqlen_k, head_dim = shape
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, seqlen: int) -> Tensor:
        return torch.randn(batch, heads, seqlen, head_dim, generator=generator).to(getattr(torch, dtype))

    return normal(heads_kv * group, seqlen_q), normal(heads_kv, seqlen_k), normal(heads_kv, seqlen_k)


def claimed(*names: str) -> list[tuple[str, str, Shape, bool]]:
    """Return (kernel, dtype, shape, causal) for each of the shapes above that the kernel claims."""
    return [
        (name, dtype, shape, causal)
        for name in names
        for dtype, shape, causal in itertools.product(load(name).capabilities.dtypes, SHAPES, (False, True))
        if load(name).capabilities.causal_unequal_lengths or not causal or shape[3] == shape[4]
    ]


def scores_and_sizes(
    q: Tensor, k: Tensor, causal: bool, sm_scale: float, alignment: str
) -> tuple[Tensor, Tensor]:
    """Return masked scores and |sm_scale| |q| |k|^T for float64 q and k."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores, sizes = q @ k.mT * sm_scale, q.abs() @ k.abs().mT * abs(sm_scale)
    if causal:
        diagonal = k.shape[2] - q.shape[2] if alignment == "bottom_right" else 0
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(diagonal)
        scores, sizes = scores.masked_fill(~seen, -torch.inf), sizes.masked_fill(~seen, 0.0)
    return scores, sizes


def expected(
    kernel: AttentionKernel, q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return out with its allowed error, and lse with its own, all in float64.

    To first order and doubled: scores err by head_dim + 4 roundings and those of both operands, relative to
    |q| |k|^T; the weights, and apart from them their sum, by that and by the error of exp; the casts of P and
    of out, and seqlen_k additions for each of the two sums, are relative to P |v|.
    """
    dtype = str(q.dtype).removeprefix("torch.")
    arithmetic = kernel.capabilities.arithmetic(dtype, "cpu", {})
    unit = arithmetic.accumulate
    q, k, v = q.double(), k.double(), v.double()
    scores, sizes = scores_and_sizes(q, k, causal, sm_scale, kernel.capabilities.causal_alignment)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)  # a row that sees no key has 0 / 0
    score_error = sizes.amax(-1) * ((q.shape[-1] + 4) * unit + 2 * arithmetic.operand_rounding)
    sum_error = score_error + arithmetic.exp_error + (k.shape[2] + 4) * unit
    casts = arithmetic.weights.roundoff + arithmetic.output.roundoff
    out_error = 2 * (2 * sum_error[..., None] + casts) * (weights @ v.abs()) + arithmetic.output.underflow
    lse = scores.logsumexp(-1)
    return (weights @ v, out_error), (lse, 2 * sum_error + 4 * unit * lse.abs())


def assert_within(actual: Tensor, exact: Tensor, error: Tensor) -> None:
    """Assert that each element is within its error; infinities must be the same ones."""
    assert actual.shape == exact.shape
    assert ((actual.double() == exact) | ((actual.double() - exact).abs() <= error)).all()


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "causal"), claimed("sdpa_math", "sdpa_flash", "flex_attention")
)
@pytest.mark.parametrize("sm_scale", [0.25, 0.3])
def test_forward_is_right(name: str, dtype: str, shape: Shape, causal: bool, sm_scale: float) -> None:
    kernel = load(name)
    q, k, v = draw(shape, dtype)
    out, lse = kernel.forward(q, k, v, causal=causal, sm_scale=sm_scale)
    exact_out, exact_lse = expected(kernel, q, k, v, causal, sm_scale)
    assert out.dtype == q.dtype
    assert_within(out, *exact_out)
    assert (lse is not None) == kernel.capabilities.lse
    if lse is not None:
        assert lse.dtype == torch.float32
        assert_within(lse, *exact_lse)


# sdpa_flash is left out under a causal mask: PyTorch 2.13 multiplies the mask's -inf by the scale, which is NaN.
@pytest.mark.parametrize(
    ("name", "causal"), [("sdpa_math", True), ("sdpa_flash", False), ("flex_attention", True)]
)
@pytest.mark.parametrize("sm_scale", [0.0, -0.3])
def test_scales_that_are_not_positive(name: str, causal: bool, sm_scale: float) -> None:
    q, k, v = draw(EQUAL, "float16")
    out, _ = load(name).forward(q, k, v, causal=causal, sm_scale=sm_scale)
    assert_within(out, *expected(load(name), q, k, v, causal, sm_scale)[0])


@pytest.mark.parametrize(("name", "dtype", "shape", "causal"), claimed("sdpa_math", "sdpa_flash"))
def test_gradients_come_from_autograd(name: str, dtype: str, shape: Shape, causal: bool) -> None:
    kernel = load(name)
    assert kernel.capabilities.backward
    assert kernel.backward is None
    leaves = [x.requires_grad_() for x in draw(shape, dtype)]
    dout = draw(shape, dtype)[0].flip(-1)
    out, _ = kernel.forward(*leaves, causal=causal, sm_scale=0.3)
    gradients = torch.autograd.grad(out, leaves, dout)

    q, k, v = (x.detach().double().requires_grad_() for x in leaves)
    scores, _ = scores_and_sizes(q, k, causal, 0.3, "top_left")
    exact_out = torch.softmax(scores, -1) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)
    exact_gradients = torch.autograd.grad(exact_out, (q, k, v), dout.double())
    # By norm, which averages: a unit each for the casts of P, dS, out and the result, times 4 because terms
    # of dS = P (dP - delta) cancel. The unit of float32 is 16 of its own, for sums of at most 64 terms.
    unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 16 * 2.0**-24}[dtype]
    for gradient, exact in zip(gradients, exact_gradients, strict=True):
        assert gradient.shape == exact.shape
        assert (gradient.double() - exact).norm() <= 4 * 4 * unit * exact.norm()


def test_causal_masks_are_anchored_where_claimed() -> None:
    q, k, v = draw(FEWER_QUERIES, "float32")
    seen_by_the_first_query = {"top_left": 1, "bottom_right": 23 - 5 + 1}
    for name in ("sdpa_math", "flex_attention"):
        kernel = load(name)
        seen = seen_by_the_first_query[kernel.capabilities.causal_alignment]
        out, _ = kernel.forward(q, k, v, causal=True, sm_scale=0.3)
        alone = kernel.forward(q[:, :, :1], k[:, :, :seen], v[:, :, :seen], causal=False, sm_scale=0.3)[0]
        # Both are means of the same unit normals, differing by a few float32 roundings.
        torch.testing.assert_close(out[:, :, :1], alone, rtol=0, atol=1e-5)


def test_flex_rows_that_see_no_key() -> None:
    q, k, v = draw(MORE_QUERIES, "float32")
    out, lse = load("flex_attention").forward(q, k, v, causal=True, sm_scale=0.3)
    unseen = 23 - 5
    assert (out[:, :, :unseen] == 0).all()
    assert (lse[:, :, :unseen] == -torch.inf).all()
    assert lse[:, :, unseen:].isfinite().all()


@pytest.mark.parametrize("name", ["sdpa_math", "sdpa_flash", "flex_attention"])
def test_smallest_claimed_length_is_answered(name: str) -> None:
    claims = load(name).capabilities
    q, k, v = draw((1, 1, 1, claims.min_seqlen, claims.min_seqlen, 16), claims.dtypes[0])
    out, _ = load(name).forward(q, k, v, causal=False, sm_scale=0.3)
    assert torch.equal(out, v), "over one key or none, out is v"


def test_math_over_no_keys_is_zero_with_zero_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in draw((1, 2, 1, 3, 0, 16), "float32"))
    out, _ = load("sdpa_math").forward(q, k, v, causal=False, sm_scale=0.3)
    assert (out == 0).all()
    assert (torch.autograd.grad(out.sum(), q)[0] == 0).all()


@pytest.mark.parametrize("head_dim", [1, 13, 100, 256])
@pytest.mark.parametrize("name", ["sdpa_math", "sdpa_flash"])
def test_head_dims_need_not_be_powers_of_two(name: str, head_dim: int) -> None:
    kernel = load(name)
    assert head_dim in kernel.capabilities.head_dims
    q, k, v = draw((1, 1, 1, 7, 7, head_dim), "float16")
    out, _ = kernel.forward(q, k, v, causal=True, sm_scale=0.1)
    assert_within(out, *expected(kernel, q, k, v, True, 0.1)[0])


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
        q, k, v = draw((1, heads, 1, 3, 3, 16), "float32")
        out, _ = load("flex_attention").forward(q, k, v, causal=False, sm_scale=0.3)
        assert_within(out, *expected(load("flex_attention"), q, k, v, False, 0.3)[0])
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
