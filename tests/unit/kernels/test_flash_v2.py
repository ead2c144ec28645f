"""``flash_v2`` at the edges of what it claims, where laws drawn at random seldom look, and its argument checks."""

import math
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from kernels.algorithms.flash_v2 import KERNEL, LAUNCH, backward, flash_v2, forward, forward_pass, settings
from kernels.common import tiles
from kernels.contract import DTYPES
from reference.arithmetic import FLOAT32, TF32_TRUNCATED
from strategies.case import TENSORS, Case
from tests.unit.support.calling import DEVICE, make, uphold


def laid_out(case: Case, layout: str, tensors: Iterable[str] = TENSORS) -> Case:
    """Return the case with the layout for some of its tensors."""
    changes: dict[str, Any] = {f"{tensor}_layout": layout for tensor in tensors}
    return replace(case, **changes)


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    causal: bool = False,
    sm_scale: float = 0.3,
    **launch: Any,
) -> dict[str, Tensor]:
    """Return all five outputs by name."""
    settings: dict[str, Any] = {"causal": causal, "sm_scale": sm_scale, **launch}
    out, lse = forward(q, k, v, **settings)
    gradients = backward(dout, q, k, v, out, lse, **settings)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "head_dim", "group", "sm_scale"),
    [
        (1, 1, 1, 1, 1.0),
        (0, 5, 16, 1, 0.3),
        (5, 0, 16, 2, 0.3),
        (64, 128, 64, 1, 0.125),  # whole tiles only
        (130, 70, 16, 1, -0.7),  # causal: rows, and a whole tile of rows, that see no key; their bounds are 0
        (70, 200, 40, 3, 0.3),
        (129, 129, 16, 2, 0.0),
        (33, 65, 200, 1, 0.07),
    ],
)
def test_matches_float64(
    seqlen_q: int, seqlen_k: int, head_dim: int, group: int, sm_scale: float, causal: bool, dtype: str
) -> None:
    case = Case(heads_kv=2, group=group, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim)
    options: dict[str, Any] = {"causal": causal, "sm_scale": sm_scale, "launch": (("block_m", 64),)}
    uphold("backward", KERNEL, replace(case, dtype=dtype, **options))


@pytest.mark.parametrize("block_m", LAUNCH["block_m"])
@pytest.mark.parametrize("block_n", LAUNCH["block_n"])
@pytest.mark.parametrize("precision", LAUNCH["precision"])
def test_every_launch_setting_matches_float64(block_m: int, block_n: int, precision: str) -> None:
    launch = (("block_m", block_m), ("block_n", block_n), ("precision", precision))
    uphold("backward", KERNEL, Case(seqlen_q=150, seqlen_k=170, causal=True, sm_scale=0.3, launch=launch))


GROUPED = Case(batch=2, heads_kv=2, group=2, seqlen_q=33, seqlen_k=70, dtype="float16")
WIDE = Case(heads_kv=2, seqlen_q=70, seqlen_k=45, head_dim=40, dtype="float16")
HUGE = Case(group=3, seqlen_q=3, seqlen_k=3, dtype="float16")
"""With a huge stride, an offset passes 32 bits; that of heads of a single row fits them, and its multiples do not."""


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("law", "case"),
    [
        ("memory", GROUPED),
        ("memory", WIDE),
        ("invariance", laid_out(GROUPED, "gap")),
        ("invariance", laid_out(WIDE, "offset")),
        ("invariance", laid_out(replace(GROUPED, dtype="float32"), "expanded")),
        ("invariance", replace(GROUPED, dout_layout="expanded_rows")),
        *(("invariance", laid_out(HUGE, "huge", [tensor])) for tensor in TENSORS),
        ("invariance", replace(HUGE, seqlen_q=1, seqlen_k=1, dout_layout="huge")),
    ],
)
def test_laws_hold_in_every_layout(law: str, case: Case, causal: bool) -> None:
    uphold(law, KERNEL, replace(case, causal=causal))


def test_no_heads() -> None:
    assert run(*make(3, 3, heads_kv=0))["out"].shape == (1, 0, 3, 16)


def test_huge_scores_pick_one_key() -> None:
    # Scores up to 1e11, whose float32 neighbours are 8192 apart: any slip in the exponent overflows.
    q, k, v, dout = make(70, 90, dtype=torch.float16)
    q, k = (t.sign() * 60000.0 * (1 + t.abs() / 100).clamp(max=1.05) for t in (q, k))
    actual = run(q, k, v, dout, sm_scale=1.7)
    winner = (q.double() @ k.double().mT).argmax(-1)
    top = (q.double() @ k.double().mT).topk(2).values
    clear = top[..., 0] - top[..., 1] > 1e7
    assert clear.float().mean() > 0.5
    rows = torch.gather(v, 2, winner[..., None].expand(*winner.shape, 16))
    assert torch.equal(actual["out"][clear], rows[clear])
    assert all(t.isfinite().all() for t in actual.values())


def test_nan_in_q_stays_in_its_row() -> None:
    q, k, v, dout = make(70, 40)
    clean = run(q, k, v, dout)
    q[0, 0, 66, 3] = math.nan
    actual = run(q, k, v, dout)
    others = torch.arange(70, device=DEVICE) != 66
    for name in ("out", "lse", "dq"):
        assert actual[name][:, :, 66].isnan().all(), name
        assert torch.equal(actual[name][:, :, others], clean[name][:, :, others]), name
    assert actual["dk"].isnan().all()
    assert actual["dv"].isnan().all()


def test_infinite_value_stays_in_its_column() -> None:
    q, k, v, dout = make(70, 40)
    v[0, 0, 39, 3] = math.inf
    actual = run(q, k, v, dout)
    assert (actual["out"][..., 3] == math.inf).all()
    assert actual["out"][..., :3].isfinite().all()
    # Rows past seqlen_q multiply the infinity by zeros, and this must not reach a result.
    assert actual["dv"].isfinite().all()


def test_scores_of_minus_infinity_weigh_nothing() -> None:
    q, k, v, dout = make(70, 40)
    q = q.abs()
    k[0, 0, :, 0] = -math.inf
    actual = run(q, k, v, dout)
    assert (actual["out"] == 0).all()
    assert (actual["lse"] == -math.inf).all()
    assert (actual["dv"] == 0).all()


def test_overflow_behind_the_mask_does_not_show() -> None:
    q, k, v, dout = make(4, 4)
    # dout . v overflows where row 0 meets key 1, which it does not see.
    dout[0, 0, 0] = 1e30
    v[0, 0, 1] = 1e30
    actual = run(q, k, v, dout, causal=True)
    assert actual["dq"].isfinite().all()
    assert actual["dk"].isfinite().all()


def test_autograd() -> None:
    q, k, v, dout = make(20, 30, group=2)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = flash_v2(q, k, v, causal=True, block_m=64)
    assert not lse.requires_grad
    # The gradient of a sum is one element with strides 0.
    gradients = torch.autograd.grad(out.sum(), leaves)
    expected = run(q.detach(), k.detach(), v.detach(), torch.ones_like(dout), causal=True, sm_scale=0.25)
    assert torch.equal(out, expected["out"])
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        assert torch.equal(gradient, expected[name]), name


Q, K, V, DOUT = make(5, 7, group=2, heads_kv=2)
OUT, LSE = torch.zeros_like(Q), torch.zeros(Q.shape[:3], device=DEVICE)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": None}, TypeError, "q: got NoneType"),
        ({"k": K[0]}, ValueError, r"k: got shape \(2, 7, 16\)"),
        (
            {"k": K[..., :8].contiguous()},
            ValueError,
            r"k: got shape \(1, 2, 7, 8\), expected \(1, 2, 7, 16\)",
        ),
        ({"k": K.expand(2, -1, -1, -1)}, ValueError, r"k: got shape \(2, 2, 7, 16\)"),
        ({"v": V[:, :, :6]}, ValueError, r"v: got shape \(1, 2, 6, 16\), expected \(1, 2, 7, 16\)"),
        ({"k": K.half()}, ValueError, r"k: got dtype torch.float16, expected torch.float32"),
        ({"v": V.to("meta")}, ValueError, "v: got device meta"),
        ({"q": Q[:, :3]}, ValueError, "q: got 3 heads, expected a multiple of k's 2"),
        ({"k": K[:, :0], "v": V[:, :0]}, ValueError, "q: got 4 heads, expected a multiple of k's 0"),
        ({"q": Q.mT.contiguous().mT}, ValueError, "q: got strides .*, expected the last"),
        ({"v": V.mT.contiguous().mT}, ValueError, "v: got strides .*, expected the last"),
        ({"causal": 1}, TypeError, "causal: got 1"),
        ({"sm_scale": "1"}, TypeError, "sm_scale: got '1'"),
        ({"sm_scale": math.nan}, ValueError, "sm_scale: got nan"),
        ({"sm_scale": math.inf}, ValueError, "sm_scale: got inf"),
        ({"sm_scale": -1e300}, ValueError, "sm_scale: got -1e[+]300"),
        ({"sm_scale": 10**400}, ValueError, "sm_scale: got 1000"),
        ({"sm_scale": Fraction(1, 4)}, TypeError, r"sm_scale: got Fraction\(1, 4\), expected a float"),
        ({"dropout_p": Fraction(1, 4)}, TypeError, r"dropout_p: got Fraction\(1, 4\), expected a float"),
        ({"window": -1}, ValueError, "window: got -1"),
        ({"window": 1.0}, TypeError, "window: got 1.0"),
        ({"window": None}, TypeError, "window: got None"),
        ({"softcap": -1.0}, ValueError, "softcap: got -1.0, expected a finite number of at least 0"),
        ({"softcap": math.inf}, ValueError, "softcap: got inf"),
        ({"softcap": "30"}, TypeError, "softcap: got '30', expected a float"),
        ({"alibi_slopes": torch.ones(2)}, ValueError, r"alibi_slopes: got shape \(2,\), expected \(4,\)"),
        ({"alibi_slopes": [0.5] * 4}, TypeError, "alibi_slopes: got list, expected a torch.Tensor"),
        (
            {"sinks": torch.ones(4).half()},
            ValueError,
            "sinks: got dtype torch.float16, expected torch.float32",
        ),
        (
            {"sinks": torch.ones(8, device=DEVICE)[::2]},
            ValueError,
            r"sinks: got strides \(2,\), expected it to be contiguous",
        ),
        ({"bias": 0.5}, TypeError, "bias: got float, expected a torch.Tensor"),
        ({"bias": torch.zeros(1, 2, 5, 7)}, ValueError, r"bias: got shape \(1, 2, 5, 7\), expected"),
        ({"bias": torch.zeros(1, 4, 5, 1)}, ValueError, r"bias: got shape \(1, 4, 5, 1\), expected"),
        ({"bias": torch.zeros(5, 7)}, ValueError, r"bias: got shape \(5, 7\), expected"),
        ({"bias": torch.zeros(1, 1, 5, 7).half()}, ValueError, "bias: got dtype torch.float16"),
        ({"bias": torch.zeros(1, 1, 7, 5, device=DEVICE).mT}, ValueError, "bias: got strides"),
        ({"block_m": 48}, ValueError, "block_m: got 48, expected one of"),
        ({"block_m": 64.0}, ValueError, "block_m: got 64.0, expected one of"),
        ({"block_n": 0}, ValueError, "block_n: got 0"),
        ({"num_stages": 9}, ValueError, "num_stages: got 9"),
        ({"precision": "tf64"}, ValueError, "precision: got 'tf64'"),
        ({"num_threads": 4}, TypeError, "num_threads"),
        (
            {t: torch.zeros(1, 1, 2, 2, dtype=torch.float64) for t in "qkv"},
            NotImplementedError,
            "torch.float64",
        ),
        ({t: torch.zeros(1, 1, 2, 257) for t in "qkv"}, NotImplementedError, "head_dim 257"),
        ({t: torch.zeros(1, 1, 2, 0) for t in "qkv"}, NotImplementedError, "head_dim 0"),
    ],
)
def test_forward_and_backward_refuse(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"q": Q, "k": K, "v": V, "causal": False, "sm_scale": 1.0, **change}
    with pytest.raises(error, match=message):
        forward(**arguments)
    with pytest.raises(error, match=message):
        backward(DOUT, out=OUT, lse=LSE, **arguments)


def test_results_of_no_dtype_of_ours_are_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"out_dtype: got torch.int8, expected one of"):
        forward(Q, K, V, causal=False, sm_scale=1.0, out_dtype=torch.int8)
    with pytest.raises(NotImplementedError, match=r"grad_dtype: got torch.int8, expected one of"):
        backward(DOUT, Q, K, V, OUT, LSE, causal=False, sm_scale=1.0, grad_dtype=torch.int8)


@pytest.mark.parametrize("q", [Q[0], Q[..., :0], torch.tensor(1.0), [1.0]])
def test_without_a_scale_q_is_checked_too(q: Any) -> None:
    with pytest.raises((ValueError, NotImplementedError, TypeError), match="q: got "):
        flash_v2(q, K, V)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dout": DOUT[:, :2]}, "dout: got shape"),
        ({"dout": DOUT.half()}, "dout: got dtype"),
        ({"dout": DOUT[..., :1].expand(DOUT.shape)}, "dout: got strides"),
        ({"out": OUT[:, :, 1:]}, "out: got shape"),
        ({"lse": LSE[..., None]}, "lse: got shape"),
        ({"lse": LSE.half()}, "lse: got dtype"),
    ],
)
def test_backward_refuses(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"dout": DOUT, "q": Q, "k": K, "v": V, "out": OUT, "lse": LSE, **change}
    with pytest.raises(ValueError, match=message):
        backward(**arguments, causal=False, sm_scale=1.0)


def test_a_last_stride_without_meaning_is_taken() -> None:
    tensors = make(5, 7, 1)
    strided = (
        t.expand(*t.shape[:3], 2)[..., ::2].clone().as_strided(t.shape, (*t.stride()[:3], 2)) for t in tensors
    )
    actual, expected = run(*strided), run(*tensors)
    assert torch.equal(actual["out"], expected["out"])


def test_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "INTERPRETED", tl.constexpr(False))
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        forward(Q.cpu(), K.cpu(), V.cpu(), causal=False, sm_scale=1.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_a_hopper_loads_described_tiles_of_as_many_keys_as_others(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, causal: bool
) -> None:
    """The bits of a row must not depend on whether rows are aligned, and only rows that are can be described."""
    monkeypatch.setattr(settings, "INTERPRETED", tl.constexpr(False))
    monkeypatch.setattr(settings, "is_hopper", lambda _: True)

    def prepared(columns: int, rows: int = 3, window: int = 0, **launch: Any) -> tuple[bool, int]:
        q = torch.empty(1, 2, rows, columns, dtype=torch.float16, device="meta")[..., :head_dim]
        arguments = (q, q, q, None, None, None, causal, 1.0, 0.0, window, 0.0, None)
        made, described = forward_pass._prepared(*arguments, **launch)
        return described, made.constants["BLOCK_LOOP"]

    keys = 128 if head_dim == 64 else 64
    assert prepared(head_dim) == (True, keys)
    assert prepared(head_dim + 1) == (False, keys)
    assert prepared(head_dim, rows=0) == (False, keys)
    assert prepared(head_dim, window=2) == (False, 64)
    assert prepared(head_dim, block_n=32) == (False, 32)


def test_only_float32_through_tf32_claims_tf32() -> None:
    arithmetic = KERNEL.capabilities.arithmetic
    for device in ("cpu", "cuda"):
        assert arithmetic("float32", device, {"precision": "tf32"}).weights == TF32_TRUNCATED
        assert arithmetic("float32", device, {"precision": "tf32"}).operand_rounding == 2.0**-10
        assert arithmetic("float32", device, {}).weights == FLOAT32
    assert arithmetic("float16", "cuda", {"precision": "tf32"}) == arithmetic("float16", "cuda", {})


def test_tiles_are_cut_down_where_they_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "INTERPRETED", tl.constexpr(False))
    launch = settings.Settings(block_m=128, block_n=64, num_stages=2, precision="tf32")

    def tile(largest: Any, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
        constants = launch.constants(torch.empty(1, 1, 1, head_dim, dtype=dtype), largest)
        return constants["BLOCK_OWN"], constants["BLOCK_LOOP"]

    assert tile(settings.DK_DV_TILES, 64, torch.float16) == (128, 64)
    assert tile(settings.DK_DV_TILES, 65, torch.float16) == (128, 32)
    assert tile(settings.FORWARD_TILES, 256, torch.float16) == (128, 64)
    assert tile(settings.FORWARD_TILES, 129, torch.float32) == (32, 32)
    assert launch.constants(torch.empty(1, 1, 1, 40), settings.DQ_TILES)["MASK_COLS"]
