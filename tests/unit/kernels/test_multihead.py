"""Multi-head attention over our kernels gives the results of torch's.

In two steps. With float64 attention in the kernel's place, output and gradients are those of
``torch.nn.MultiheadAttention`` in float64, up to float64's own rounding: the module computes the same
function. With the kernel itself, each stage (projections, attention, output projection, and each of them
backwards) is within its rounding bound of the exact stage, applied to what that stage was given: for the kernel
its own bounds, for a product of n terms in float32, stored with roundoff u,

    |error| <= n 2^-24 (|a| |b|) + stores * u (|a| |b|)                              (Higham, section 3.1)
"""

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kernels.algorithms import multihead
from kernels.algorithms.multihead import KeyValueCache, MultiHeadAttention
from kernels.contract import AttentionKernel, Capabilities
from kernels.mutants.mutant import load_module
from reference.bounds import backward_bounds, exact, forward_bounds
from tests.unit.support.calling import DEVICE, REFERENCE

EMBED, HEADS, BATCH, SEQLEN = 48, 3, 2, 21
ROUNDINGS = 2**10
"""More roundings than there are on the way from an input to a result of these sizes."""


def pair(module: Any = MultiHeadAttention, bias: bool = True, dtype: torch.dtype = torch.float64) -> Any:
    """Return our module with float64 attention, and torch's with the same weights and biases."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(EMBED, HEADS, bias=bias, batch_first=True, dtype=dtype, device=DEVICE)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = module(EMBED, HEADS, bias, dtype=dtype, device=DEVICE)
    ours.load_state_dict(theirs.state_dict())
    ours.kernel = REFERENCE
    return ours, theirs


def inputs(*lengths: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    made = torch.Generator().manual_seed(1)
    return [
        torch.randn(BATCH, length, EMBED, generator=made).to(DEVICE, dtype).requires_grad_()
        for length in lengths
    ]


def close(actual: Tensor, expected: Tensor) -> None:
    error = (actual - expected).abs().max()
    assert error <= ROUNDINGS * 2.0**-53 * expected.abs().max(), f"off by {error:.3g}"


def check_equal(module: Any, lengths: tuple[int, ...], bias: bool, causal: bool) -> None:
    """Assert that the output and every gradient are those of torch."""
    ours, theirs = pair(module, bias)
    given, same = inputs(*lengths), inputs(*lengths)
    triple = {1: same * 3, 2: [*same, same[-1]], 3: same}[len(same)]
    hidden = torch.ones(lengths[0], lengths[-1], dtype=torch.bool, device=DEVICE).triu(1) if causal else None
    expected, _ = theirs(*triple, need_weights=False, attn_mask=hidden)
    actual = ours(*given, causal=causal)
    close(actual, expected)
    dout = torch.randn_like(expected)
    actual.backward(dout)
    expected.backward(dout)
    pairs = [*zip(given, same, strict=True), *zip(ours.parameters(), theirs.parameters(), strict=True)]
    for x, y in pairs:
        close(x.grad, y.grad)


def check_decoding(module: Any, steps: tuple[int, ...]) -> None:
    """Assert that decoding step by step through a cache gives the rows of one call under a causal mask."""
    ours, _ = pair(module.MultiHeadAttention)
    (x,) = inputs(sum(steps))
    cache = module.KeyValueCache(sum(steps) + 3)
    with torch.no_grad():
        rows = [ours(part, causal=True, cache=cache) for part in x.split(steps, 1)]
        close(torch.cat(rows, 1), ours(x, causal=True))


def check_everything(module: Any) -> None:
    check_equal(module.MultiHeadAttention, (5, SEQLEN, SEQLEN), True, False)
    check_decoding(module, (4, 1, 1, 3))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("lengths", "causal"),
    [((SEQLEN,), False), ((SEQLEN,), True), ((5, SEQLEN), False), ((5, SEQLEN, SEQLEN), False)],
)
def test_the_same_function_as_torch(lengths, bias, causal) -> None:
    check_equal(MultiHeadAttention, lengths, bias, causal)


@pytest.mark.parametrize("steps", [(1,) * 9, (4, 1, 1, 3), (9,)])
def test_decoding_equals_the_whole(steps) -> None:
    check_decoding(multihead, steps)


BUGS = {
    "scale of the whole width": ("self.head_dim**-0.5", "self.embed_dim**-0.5"),
    "heads interleaved": ("out.transpose(1, 2).flatten(2)", "out.transpose(1, 2).mT.flatten(2)"),
    "keys for values": ("value = key if value is None else value", "value = key"),
    "weights of another order": (
        "weights = self.in_proj_weight.chunk(3)",
        "weights = self.in_proj_weight.chunk(3)[::-1]",
    ),
    "a cache that forgets": ("cache.length = k.shape[2]", "cache.length = key.shape[1]"),
    "old values": ("values[:, :, self.length : end] = v", "values[:, :, : k.shape[2]] = v"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug) -> None:
    old, new = BUGS[bug]
    source = inspect.getsource(multihead)
    assert source.count(old) == 1
    module = load_module(
        "kernels.algorithms.multihead", {"kernels.algorithms.multihead": source.replace(old, new)}
    )
    with pytest.raises(AssertionError, match="off by"):
        check_everything(module)


class Recording:
    """Wraps a kernel and keeps what was passed to it and what it returned."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self.kernel = replace(kernel, forward=self.forward, backward=self.backward)
        self.inner = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        self.qkv, self.options = (q.detach(), k.detach(), v.detach()), options
        self.out, self.lse = self.inner.forward(q, k, v, **options)
        return self.out, self.lse

    def backward(self, dout: Tensor, *args: Tensor, **options: Any) -> Any:
        self.dout = dout
        assert self.inner.backward is not None
        self.grads = self.inner.backward(dout, *args, **options)
        return self.grads


def flat(x: Tensor) -> Tensor:
    """Return (batch, heads, seqlen, head_dim) as rows of the module's width, in float64."""
    return x.transpose(1, 2).flatten(2).flatten(0, 1).double()


def within_product(
    actual: Tensor, a: Tensor, b: Tensor, roundoff: float, plus: Tensor | float = 0.0, stores: int = 1
) -> None:
    """Assert that ``actual`` is a @ b + plus, within the bound of such a product."""
    a, b = a.detach().double(), b.detach().double()
    plus = plus.detach().double() if isinstance(plus, Tensor) else torch.tensor(plus)
    size = a.abs() @ b.abs() + plus.abs()
    error = (actual.detach().double() - (a @ b + plus)).abs()
    assert (error <= ((a.shape[-1] + 1) * 2.0**-24 + stores * roundoff) * size).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_every_stage_is_within_its_bound(dtype, causal) -> None:
    ours, _ = pair(dtype=dtype)
    recorded = Recording(MultiHeadAttention(EMBED, HEADS).kernel)
    ours.kernel = recorded.kernel
    (x,) = inputs(SEQLEN, dtype=dtype)
    y = ours(x, causal=causal)
    dy = torch.randn_like(y)
    y.backward(dy)

    roundoff = torch.finfo(dtype).eps / 2
    rows, dy_rows = x.flatten(0, 1), dy.flatten(0, 1)
    qkv = torch.cat([flat(part) for part in recorded.qkv], 1)
    within_product(qkv, rows, ours.in_proj_weight.T, roundoff, ours.in_proj_bias)
    within_product(y.flatten(0, 1), flat(recorded.out), ours.out_proj.weight.T, roundoff, ours.out_proj.bias)

    arithmetic = recorded.inner.capabilities.arithmetic(str(dtype).removeprefix("torch."), DEVICE, {})
    e = exact(*recorded.qkv, **recorded.options)
    bounds = forward_bounds(e, arithmetic)
    assert ((recorded.out.double() - e.out).abs() <= bounds.out).all()
    out, lse = recorded.out.double(), recorded.lse.double()
    b = backward_bounds(e, recorded.dout.double(), arithmetic, out=out, lse=lse)
    for actual, expected, bound in zip(
        recorded.grads, (b.dq, b.dk, b.dv), (b.dq_bound, b.dk_bound, b.dv_bound), strict=True
    ):
        assert ((actual.double() - expected).abs() <= bound).all()

    within_product(flat(recorded.dout), dy_rows, ours.out_proj.weight, roundoff)
    within_product(ours.out_proj.weight.grad, dy_rows.T, flat(recorded.out), roundoff)
    ones = torch.ones(1, BATCH * SEQLEN, device=DEVICE)
    within_product(ours.out_proj.bias.grad[None], ones, dy_rows, roundoff)
    grads = torch.cat([flat(grad) for grad in recorded.grads], 1)
    within_product(ours.in_proj_weight.grad, grads.T, rows, roundoff)
    within_product(ours.in_proj_bias.grad[None], ones, grads, roundoff)
    # x was projected three times: three gradients, and two sums of them.
    assert x.grad is not None
    within_product(x.grad.flatten(0, 1), grads, ours.in_proj_weight, roundoff, stores=3)


def test_torch_takes_our_state_and_we_torchs() -> None:
    ours, theirs = pair()
    theirs.load_state_dict(ours.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [x.shape for x in ours.parameters()] == [x.shape for x in theirs.parameters()]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="embed_dim: got 10, expected a positive multiple of num_heads, 3"):
        MultiHeadAttention(10, 3)
    with pytest.raises(NotImplementedError, match="embed_dim: got 257 for each head"):
        MultiHeadAttention(257, 1)
    module = MultiHeadAttention(EMBED, HEADS, device=DEVICE)
    x = torch.zeros(1, 4, EMBED, device=DEVICE)
    with pytest.raises(ValueError, match=r"key: got shape \(4, 48\), expected \(batch, seqlen, 48\)"):
        module(x, x[0])
    with pytest.raises(ValueError, match="capacity: got 0"):
        KeyValueCache(0)
    with pytest.raises(RuntimeError, match="no_grad"):
        module(x, cache=KeyValueCache(4))
    cache = KeyValueCache(5)
    with torch.no_grad():
        module(x, cache=cache)
        with pytest.raises(ValueError, match="got 8 positions, expected at most its capacity, 5"):
            module(x, cache=cache)
        with pytest.raises(ValueError, match=r"k: got shape .*, expected .*, as cache is \(1, 3, 5, 16\)"):
            module(torch.zeros(2, 1, EMBED, device=DEVICE), cache=cache)
        with pytest.raises(ValueError, match=r"v: got shape .*, expected .*, as cache is \(1, 3, 5, 16\)"):
            module(x[:, :1], x[:, :1], x[:, :0], cache=cache)
        with pytest.raises(TypeError, match="causal: got 1"):
            module(x[:, :1], causal=1, cache=cache)
    assert cache.length == 4
    with pytest.raises(ValueError, match=r"capacity: got 2.5"):
        KeyValueCache(2.5)  # type: ignore[arg-type]  # which is what it refuses
    with pytest.raises(TypeError, match=r"bias: got 0.1, expected True or False"):
        MultiHeadAttention(EMBED, HEADS, 0.1)  # type: ignore[arg-type]  # as torch's module takes dropout
    with pytest.raises(TypeError, match=r"dropout: got 0.1, expected of flash_v2: block_m, block_n, "):
        MultiHeadAttention(EMBED, HEADS, dropout=0.1)
    with pytest.raises(NotImplementedError, match="q: it requires grad, and decode has no backward"):
        MultiHeadAttention(EMBED, HEADS, kernel="decode", device=DEVICE)(x)
    module.kernel = replace(module.kernel, capabilities=Capabilities(causal_alignment="top_left"))
    with torch.no_grad(), pytest.raises(NotImplementedError, match="causal: got 1 queries and 5 keys"):
        module(x[:, :1], causal=True, cache=cache)
