"""The references agree with each other, with 50-digit arithmetic and with numerical differentiation."""

import itertools
import math
import weakref
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.common.autograd import attention
from reference import flash_v1, flash_v2, safe_softmax
from reference.mask_pattern import NO_PATTERN, MaskPattern
from reference.masks import visible
from reference.score_rule import PLAIN, ScoreRule
from tests.unit.support.calling import REFERENCE

ROUNDOFF = 2.0**-53
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")
Results = tuple[Tensor, ...]
"""Out, lse, dq, dk, dv and, if the rule has a bias, dbias."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """One attention problem."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool
    sm_scale: float
    alignment: str
    dropout_p: float = 0.0
    dropout_seed: int = 7
    pattern: MaskPattern = NO_PATTERN
    rule: ScoreRule = PLAIN

    @property
    def options(self) -> dict[str, Any]:
        """Return the keywords that every reference takes."""
        names = ("causal", "sm_scale", "alignment", "dropout_p", "dropout_seed", "pattern", "rule")
        return {name: getattr(self, name) for name in names}

    @property
    def of_bias(self) -> dict[str, Any]:
        """Return the keyword with which a backward gives dbias too, if there is a bias."""
        return {} if self.rule.bias is None else {"bias_gradient": True}


def inputs(
    *,
    batch: int = 1,
    heads_kv: int = 1,
    group: int = 1,
    seqlen_q: int = 4,
    seqlen_k: int = 4,
    head_dim: int = 3,
    causal: bool = False,
    sm_scale: float = 0.6,
    alignment: str = "bottom_right",
    dtype: torch.dtype = torch.float64,
    spread: float = 1.0,
    seed: int = 0,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int, seqlen: int, size: float = 1.0) -> Tensor:
        # Tensors are drawn as (batch, seqlen, heads, head_dim), so that none is contiguous.
        x = torch.randn(batch, seqlen, heads, head_dim, generator=generator, dtype=torch.float64)
        return (size * x).to(dtype).transpose(1, 2)

    return Inputs(
        q=normal(heads_kv * group, seqlen_q, spread),
        k=normal(heads_kv, seqlen_k),
        v=normal(heads_kv, seqlen_k),
        dout=normal(heads_kv * group, seqlen_q),
        causal=causal,
        sm_scale=sm_scale,
        alignment=alignment,
    )


CASES = st.builds(
    inputs,
    batch=st.integers(1, 2),
    heads_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    seqlen_q=st.integers(0, 40),
    seqlen_k=st.integers(0, 40),
    head_dim=st.integers(1, 9),
    causal=st.booleans(),
    sm_scale=st.sampled_from((0.6, 0.0, -0.6, 3.0)),
    alignment=st.sampled_from(("bottom_right", "top_left")),
    dtype=st.sampled_from((torch.float64, torch.float32, torch.float16, torch.bfloat16)),
    spread=st.sampled_from((1.0, 30.0)),
    seed=st.integers(0, 2**16),
)
SIZE = st.one_of(st.just(0), st.integers(1, 12))
PATTERNS = st.builds(MaskPattern, window=SIZE, window_right=SIZE, chunk=SIZE, first_keys=SIZE, prefix=SIZE)
HEAVY = settings(deadline=None, database=None, max_examples=150)
GRID = [
    inputs(group=2, seqlen_q=n, seqlen_k=m, causal=causal, alignment=alignment, sm_scale=scale, spread=2.0)
    for n, m in ((3, 3), (2, 5), (5, 2), (3, 0), (0, 3))
    for causal, alignment in ((False, "bottom_right"), (True, "bottom_right"), (True, "top_left"))
    for scale in (0.6, -0.6, 0.0)
]


def by_softmax(x: Inputs, chunk: int | None = None) -> Results:
    forward = safe_softmax.forward(x.q, x.k, x.v, **x.options, chunk=chunk)
    return *forward, *safe_softmax.backward(x.dout, x.q, x.k, x.v, **x.options, **x.of_bias, chunk=chunk)


def by_softmax_forced(x: Inputs, chunk: int | None = None) -> Results:
    out, lse = safe_softmax.forward(x.q, x.k, x.v, **x.options, chunk=chunk)
    forced: dict[str, Any] = {"out": out, "lse": lse, "chunk": chunk}
    grads = safe_softmax.backward(x.dout, x.q, x.k, x.v, **x.options, **x.of_bias, **forced)
    return out, lse, *grads


def by_v1(x: Inputs, block_q: int = 2, block_k: int = 2) -> Results:
    options = {**x.options, "block_q": block_q, "block_k": block_k}
    out, m, l = flash_v1.forward(x.q, x.k, x.v, **options)
    grads = flash_v1.backward(x.dout, x.q, x.k, x.v, out, m, l, **options, **x.of_bias)
    return out, flash_v1.logsumexp(m, l), *grads


def by_v2(x: Inputs, block_q: int = 2, block_k: int = 2) -> Results:
    options = {**x.options, "block_q": block_q, "block_k": block_k}
    out, lse = flash_v2.forward(x.q, x.k, x.v, **options)
    return out, lse, *flash_v2.backward(x.dout, x.q, x.k, x.v, out, lse, **options, **x.of_bias)


ALL = (by_softmax, by_softmax_forced, by_v1, by_v2)


def tolerances(x: Inputs) -> Results:
    """Return how far two float64 evaluations in any order may be apart, to first order.

    A = |sm_scale| |q||k|^T, u = 2^-53. A score is off by (head_dim + 2) u A, the argument of its exponential
    and the rescalings (which telescope) by 4 u max A + 4 u, each of the at most seqlen_k blocks by 4 u, a sum
    of n terms by n u. So weights are off by t = u (4 n + (head_dim + 8)(max A + 1)), n the longer axis;
    lse by t, and its own rounding; out by 2 t P|v|, numerator and denominator. dS = P (dP - delta) has terms
    of size P (|dout||v|^T + |dout| P|v|), each off by 4 t of that at most. Two evaluations: 8 t, for all.
    Weights below 2^-1022 have no relative accuracy: 1e-290 more. Dropout multiplies by 1 / (1 - dropout_p) at most.
    A soft-cap, a bias and a sink add their own sizes to max A.
    """
    group = x.q.shape[1] // x.k.shape[1]
    q, dout = x.q.double(), x.dout.double()
    k, v = (t.double().repeat_interleave(group, 1) for t in (x.k, x.v))
    seen = visible(q.shape[2], k.shape[2], x.causal, x.alignment, q.device, pattern=x.pattern)
    size = abs(x.sm_scale) * (q.abs() @ k.abs().mT)
    bias, sink = x.rule.added(x.q, k, x.alignment), x.rule.sink(x.q, k)
    scores = x.rule.applied(x.sm_scale * (q @ k.mT), bias)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    p = torch.softmax(scores, -1).nan_to_num(0.0)
    largest = size.max().item() if size.numel() else 0.0
    if x.rule:
        largest += x.rule.softcap + bias.abs().max().item() + sink.nan_to_num(neginf=0.0).abs().max().item()
    terms = max(group * q.shape[2], k.shape[2])
    t = 8 * ROUNDOFF * (4 * terms + (q.shape[3] + 8) * (largest + 1)) / (1 - x.dropout_p)
    out = p @ v.abs()
    ds = p * (dout.abs() @ v.abs().mT + (dout.abs() * out).sum(-1, keepdim=True)) * abs(x.sm_scale)
    dq, dk, dv = ds @ k.abs(), ds.mT @ q.abs(), p.mT @ dout.abs()
    dk, dv = (g.unflatten(1, (-1, group)).sum(2) for g in (dk, dv))
    lse = torch.full(q.shape[:3], 1 + largest + math.log(max(terms, 1)), dtype=torch.float64)
    sizes = [out, lse, dq, dk, dv]
    if x.rule.bias is not None:
        sizes.append(ds.sum_to_size(x.rule.bias.shape) / abs(x.sm_scale))
    return tuple(t * s + 1e-290 for s in sizes)


def assert_close(actual: Results, expected: Results, allowed: Results, label: str = "") -> None:
    for name, a, e, tolerance in zip(NAMES[: len(expected)], actual, expected, allowed, strict=True):
        assert a.dtype == torch.float64
        assert a.shape == e.shape, f"{label} {name}: shape"
        fine = (a == e) | ((a - e).abs() <= tolerance) | (a.isnan() & e.isnan())
        assert fine.all(), f"{label} {name}: off by {(a - e).abs().max()}"


@HEAVY
@given(
    *(CASES, st.one_of(st.just(NO_PATTERN), PATTERNS), st.sampled_from((0.0, 0.3))),
    *(st.integers(1, 17), st.integers(1, 17), st.integers(1, 17)),
)
def test_all_references_agree(
    x: Inputs, pattern: MaskPattern, dropout_p: float, block_q: int, block_k: int, chunk: int
) -> None:
    x = replace(x, dropout_p=dropout_p, pattern=pattern)
    expected, allowed = by_softmax(x), tolerances(x)
    others = {
        "chunked": by_softmax(x, chunk),
        "teacher-forced": by_softmax_forced(x, chunk),
        "v1": by_v1(x, block_q, block_k),
        "v2": by_v2(x, block_q, block_k),
    }
    for label, actual in others.items():
        assert_close(actual, expected, allowed, label)


def sees(diagonal: int, key: int, *, causal: bool, pattern: MaskPattern) -> bool:
    """Whether a row sees a key, one clause for each sentence of the definition."""
    if key < pattern.prefix:
        return True
    if causal and key > diagonal:
        return False
    if key < pattern.first_keys:
        return True
    if pattern.window and diagonal - key >= pattern.window:
        return False
    if pattern.window_right and key - diagonal >= pattern.window_right:
        return False
    return not pattern.chunk or diagonal // pattern.chunk == key // pattern.chunk


def with_50_digits(x: Inputs) -> Results:
    """Return out by its definition, and gradients by their closed form, entry by entry."""
    group = x.q.shape[1] // x.k.shape[1]
    out, dq, dk, dv = (torch.zeros_like(t) for t in (x.q, x.q, x.k, x.k))
    grad_s = torch.zeros(*x.q.shape[:3], x.k.shape[2], dtype=torch.float64)
    lse = torch.full(x.q.shape[:3], -math.inf, dtype=torch.float64)
    seqlen_q, seqlen_k = x.q.shape[2], x.k.shape[2]
    offset = seqlen_k - seqlen_q if x.alignment == "bottom_right" else 0
    with mpmath.workdps(50):
        scale = mpmath.mpf(x.sm_scale)
        for b, h in itertools.product(range(x.q.shape[0]), range(x.q.shape[1])):
            heads = (x.q[b, h], x.dout[b, h], x.k[b, h // group], x.v[b, h // group])
            q, dout, k, v = ([[mpmath.mpf(e) for e in row] for row in head.tolist()] for head in heads)
            for i in range(seqlen_q):
                keys = [j for j in range(seqlen_k) if sees(i + offset, j, causal=x.causal, pattern=x.pattern)]
                if not keys:
                    continue
                products = [scale * mpmath.fdot(q[i], k[j]) for j in keys]
                cap, slopes, sinks = x.rule.softcap, x.rule.alibi_slopes, x.rule.sinks
                tanh = [mpmath.tanh(s / cap) if cap else 0 for s in products]
                capped = [cap * t for t in tanh] if cap else products
                falls = [0 if slopes is None else slopes[h].item() * abs(i + offset - j) for j in keys]
                added = torch.zeros(()) if x.rule.bias is None else x.rule.bias
                bias = added.expand(*x.q.shape[:3], seqlen_k)[b, h, i]
                weights = [
                    mpmath.exp(s - fall + bias[j].item())
                    for s, fall, j in zip(capped, falls, keys, strict=True)
                ]
                total = mpmath.fsum(weights) + (0 if sinks is None else mpmath.exp(sinks[h].item()))
                p = [w / total for w in weights]
                dp = [mpmath.fdot(dout[i], v[j]) for j in keys]
                delta = mpmath.fdot(p, dp)
                lse[b, h, i] = float(mpmath.log(total))
                for n, j in enumerate(keys):
                    grad_s[b, h, i, j] = float(p[n] * (dp[n] - delta))
                for d in range(x.q.shape[3]):
                    out[b, h, i, d] = float(mpmath.fdot(p, [v[j][d] for j in keys]))
                    ds = [scale * w * (g - delta) * (1 - t * t) for w, g, t in zip(p, dp, tanh, strict=True)]
                    dq[b, h, i, d] = float(mpmath.fdot(ds, [k[j][d] for j in keys]))
                    for n, j in enumerate(keys):
                        dk[b, h // group, j, d] += float(ds[n] * q[i][d])
                        dv[b, h // group, j, d] += float(p[n] * dout[i][d])
    dbias = () if x.rule.bias is None else (grad_s.sum_to_size(x.rule.bias.shape),)
    return out, lse, dq, dk, dv, *dbias


@pytest.mark.parametrize("reference", ALL)
def test_agrees_with_50_digits(reference: Any) -> None:
    for x in GRID:
        assert_close(reference(x), with_50_digits(x), tolerances(x))


@pytest.mark.parametrize("reference", ALL)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        MaskPattern(window=2, first_keys=1),
        MaskPattern(window=1, window_right=2),
        MaskPattern(chunk=2, prefix=1),
        MaskPattern(chunk=2, first_keys=1, window=1),
    ],
)
def test_patterns_agree_with_50_digits(reference: Any, causal: bool, pattern: MaskPattern) -> None:
    for (seqlen_q, seqlen_k), alignment in itertools.product(((4, 6), (6, 4)), ("bottom_right", "top_left")):
        made = inputs(group=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, alignment=alignment)
        x = replace(made, pattern=pattern)
        assert_close(reference(x), with_50_digits(x), tolerances(x))


@pytest.mark.parametrize("reference", ALL)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "rule",
    [
        ScoreRule(softcap=0.5),
        ScoreRule(alibi_slopes=torch.tensor([0.5, 0.125])),
        ScoreRule(sinks=torch.tensor([-1.0, 3.0])),
        ScoreRule(bias=torch.linspace(-3, 3, 12).reshape(1, 2, 1, 6)),
        ScoreRule(bias=torch.linspace(-3, 3, 48).reshape(1, 2, 4, 6), softcap=1.0),
        ScoreRule(bias=torch.linspace(-3, 3, 24).reshape(1, 1, 4, 6), softcap=1.0),
        ScoreRule(bias=torch.linspace(-3, 3, 6).reshape(1, 1, 1, 6)),
        ScoreRule(softcap=2.0, alibi_slopes=torch.tensor([0.1, 1.0]), sinks=torch.tensor([30.0, 0.0])),
    ],
    ids=lambda rule: ",".join(rule.options),
)
def test_changes_of_scores_agree_with_50_digits(reference: Any, causal: bool, rule: ScoreRule) -> None:
    for alignment in ("bottom_right", "top_left"):
        made = inputs(group=2, seqlen_q=4, seqlen_k=6, causal=causal, alignment=alignment)
        x = replace(made, rule=rule)
        assert_close(reference(x), with_50_digits(x), tolerances(x))


@pytest.mark.parametrize("reference", ALL)
def test_large_logits(reference: Any) -> None:
    """With logits up to 1e4, of both signs or of one, nothing overflows and the results are right."""
    mixed = inputs(seqlen_q=3, seqlen_k=5, spread=1e4)
    negative = inputs(seqlen_q=3, seqlen_k=5, spread=1e4)
    negative.q.abs_()
    negative.k.abs_().neg_()
    for x in (mixed, negative):
        results = reference(x)
        assert all(r.isfinite().all() for r in results)
        assert_close(results, with_50_digits(x), tolerances(x))


@pytest.mark.parametrize(("causal", "seqlen_q", "seqlen_k"), [(False, 3, 4), (True, 3, 4), (True, 4, 3)])
@pytest.mark.parametrize("sm_scale", [0.6, -0.6, 0.0])
def test_gradients_by_finite_differences(causal: bool, seqlen_q: int, seqlen_k: int, sm_scale: float) -> None:
    x = inputs(group=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, sm_scale=sm_scale)
    tensors = [t.contiguous().requires_grad_() for t in (x.q, x.k, x.v)]
    # Central differences with a step of 1e-6 err by 1e-12 (the third derivative, of order 1) and by
    # 2^-53 / 1e-6 = 1e-10 (rounding), times the few terms of an output: 1e-8 leaves room.
    assert torch.autograd.gradcheck(
        lambda *qkv: attention(REFERENCE, *qkv, **x.options)[0], tensors, eps=1e-6, atol=1e-8, rtol=0.0
    )


@pytest.mark.parametrize("reference", ALL)
def test_an_infinite_score_of_either_sign(reference: Any) -> None:
    """A score of -inf gives its key no weight, one of +inf makes the row NaN, and a row of -inf sees nothing."""
    x = inputs(seqlen_q=2, seqlen_k=3)
    x.q[0, 0, :, 0] = torch.tensor([1.0, -1.0])
    x.k[0, 0, 1, 0] = -math.inf
    out, lse = reference(x)[:2]
    without = Inputs(x.q, x.k[:, :, ::2], x.v[:, :, ::2], x.dout, **x.options)
    expected_out, expected_lse = reference(without)[:2]
    # A key of weight 0 changes the order of sums of two terms, by a unit in the last place each.
    torch.testing.assert_close(out[:, :, 0], expected_out[:, :, 0], rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(lse[:, :, 0], expected_lse[:, :, 0], rtol=1e-14, atol=1e-15)
    assert out[:, :, 1].isnan().all()
    assert lse[:, :, 1].isnan().all()
    x.k[0, 0, :, 0] = -math.inf
    blind = Inputs(x.q[:, :, :1], x.k, x.v, x.dout[:, :, :1], **x.options)
    out, lse, _, _, dv = reference(blind)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert (dv == 0).all()


@pytest.mark.parametrize("reference", ALL)
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tensor", ["q", "k", "v", "dout"])
def test_what_is_not_seen_has_no_effect(reference: Any, alignment: str, value: float, tensor: str) -> None:
    """A bad entry in a key spoils only rows that see it; one in a row spoils only gradients of keys that it sees."""
    x = inputs(batch=2, group=2, seqlen_q=6, seqlen_k=8, causal=True, alignment=alignment)
    clean = reference(x)
    at = 3
    getattr(x, tensor)[1, :, at, 1] = value
    dirty = reference(x)
    seen = visible(6, 8, True, alignment, "cpu")
    assert seen is not None
    spoiled_rows = seen[:, at] if tensor in ("k", "v") else torch.arange(6) == at
    spoiled_keys = seen[spoiled_rows].any(0)
    allowed = tolerances(inputs(batch=2, group=2, seqlen_q=6, seqlen_k=8, causal=True, alignment=alignment))
    for name, a, e, tolerance in zip(NAMES[:5], dirty, clean, allowed, strict=True):
        spoiled = spoiled_keys if name in ("dk", "dv") else spoiled_rows
        assert ((a - e).abs() <= tolerance)[1][:, ~spoiled].all(), f"{name}: reached what does not see it"
        assert ((a - e).abs() <= tolerance)[0].all(), f"{name}: reached another batch"
    if math.isnan(value):
        out, lse, dq, dk, dv = (t[1] for t in dirty)
        assert dq[:, spoiled_rows].isnan().all()
        assert dk[:, spoiled_keys].isnan().all()
        if tensor in ("q", "k"):
            assert out[:, spoiled_rows].isnan().all()
            assert lse[:, spoiled_rows].isnan().all()
            assert dv[:, spoiled_keys].isnan().all()
        if tensor == "v":
            assert out[:, spoiled_rows, 1].isnan().all()
            assert out[:, :, 0].isfinite().all()
            assert lse.isfinite().all()
            assert dv.isfinite().all()
    elif tensor == "v":
        assert (dirty[0][1, :, spoiled_rows, 1] == value).all()


def test_teacher_forcing_uses_the_given_out_and_lse() -> None:
    x = inputs(group=2, seqlen_q=3, seqlen_k=4)
    out, lse, _, _, dv = by_softmax(x)
    # P = exp(S - lse), so lse + log 2 halves dv.
    halved = safe_softmax.backward(x.dout, x.q, x.k, x.v, **x.options, out=out, lse=lse + math.log(2.0))
    # Two roundings of lse, of about one unit each, against the exact half.
    torch.testing.assert_close(halved[2], dv / 2, rtol=1e-14, atol=1e-15)
    # delta = rowsum(dout * out), so out = 0 leaves dS = P dP.
    dq = safe_softmax.backward(x.dout, x.q, x.k, x.v, **x.options, out=torch.zeros_like(out), lse=lse)[0]
    k, v = (t.repeat_interleave(2, 1) for t in (x.k, x.v))
    p = torch.exp(x.sm_scale * (x.q @ k.mT) - lse[..., None])
    expected = x.sm_scale * (p * (x.dout @ v.mT)) @ k
    torch.testing.assert_close(dq, expected, rtol=1e-14, atol=1e-15)


class PeakBytes(TorchDispatchMode):
    """Bytes of all tensors made inside and still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


def test_memory_at_2048_tokens() -> None:
    """Forward and backward of 32 heads of 2048 tokens fit in 4 GiB; meta tensors show that without computing."""
    q, k, v, dout = (torch.empty(4, 8, 2048, 64, dtype=torch.bfloat16, device="meta") for _ in range(4))
    with PeakBytes() as memory:
        out, lse = safe_softmax.forward(q, k, v, causal=False, sm_scale=0.125)
        safe_softmax.backward(dout, q, k, v, causal=False, sm_scale=0.125, out=out, lse=lse)
    assert safe_softmax.BLOCK_BYTES < memory.peak < 4 * 2**30


@pytest.mark.parametrize("causal", [False, True])
def test_memory_grows_with_the_chunk_not_with_the_square(causal: bool) -> None:
    """A reference may have eight float64 blocks of chunk x seqlen_k and sixteen tensors of the inputs' size at once."""
    seqlen, chunk = 512, 16
    x = inputs(seqlen_q=seqlen, seqlen_k=seqlen, head_dim=1, causal=causal)
    with PeakBytes() as memory:
        by_softmax_forced(x, chunk)
    assert 8 * chunk * seqlen < memory.peak < 8 * 8 * chunk * seqlen + 16 * 8 * seqlen


def test_default_chunk() -> None:
    assert safe_softmax.default_chunk(1, 32, 2048) == 128
    assert safe_softmax.default_chunk(4, 8, 2048) * 8 * 32 * 2048 == safe_softmax.BLOCK_BYTES
    assert safe_softmax.default_chunk(64, 64, 2**20) == 1
    assert safe_softmax.default_chunk(1, 1, 0) > 0


def test_expanded_inputs_and_gradients_required_change_nothing() -> None:
    x = inputs(seqlen_q=3, seqlen_k=4, batch=2)
    k = x.k[:1, :, :1].expand_as(x.k)
    expanded = Inputs(x.q.clone().requires_grad_(), k, x.v, x.dout, **x.options)
    plain = Inputs(x.q, k.clone(), x.v, x.dout, **x.options)
    results = by_softmax(expanded)
    assert not any(r.requires_grad for r in results)
    assert_close(results, by_softmax(plain), tolerances(plain))


@pytest.mark.parametrize("module", [flash_v1, flash_v2, safe_softmax])
def test_bad_arguments(module: ModuleType) -> None:
    x = inputs()
    tiles = {} if module is safe_softmax else {"block_q": 2, "block_k": 2}
    with pytest.raises(ValueError, match="alignment: got 'middle'"):
        module.forward(x.q, x.k, x.v, **{**x.options, "alignment": "middle"}, **tiles)
    with pytest.raises(ValueError, match="got 3 heads, expected a multiple of k's 2"):
        module.forward(
            x.q.repeat(1, 3, 1, 1), *(t.repeat(1, 2, 1, 1) for t in (x.k, x.v)), **x.options, **tiles
        )
    empty_blocks = {"chunk": 0} if module is safe_softmax else {"block_q": 0, "block_k": 2}
    with pytest.raises(ValueError, match="size: got 0, expected 1 or more"):
        module.forward(x.q, x.k, x.v, **x.options, **empty_blocks)


def test_teacher_forcing_needs_both_out_and_lse() -> None:
    x = inputs()
    with pytest.raises(ValueError, match="lse: got None"):
        safe_softmax.backward(x.dout, x.q, x.k, x.v, **x.options, out=x.q)
