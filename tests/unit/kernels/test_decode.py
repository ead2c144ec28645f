"""``decode``, where the laws do not look: any number of splits, the shortest and longest caches, refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.algorithms import decode as module
from kernels.algorithms.decode import LAUNCH, forward
from tests.unit.support.calling import DEVICE, make

Q, K, V, _ = make(3, 9, heads_kv=2, group=2, batch=2)


@pytest.mark.parametrize("splits", [2, 9, 10, 100])
def test_any_number_of_splits(splits: int) -> None:
    q, k, v, _ = make(3, 150, group=2)
    for causal in (False, True):
        whole = forward(q, k, v, causal=causal, sm_scale=0.3, splits=1)
        merged = forward(q, k, v, causal=causal, sm_scale=0.3, splits=splits)
        for a, b in zip(whole, merged, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_splits_follow_the_keys_where_they_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = make(1, 150)
    monkeypatch.setattr(module, "KEYS_OF_ONE_SPLIT", 149)
    monkeypatch.setattr(module, "KEYS_PER_SPLIT", 64)
    chosen = forward(q, k, v, causal=False, sm_scale=0.3)
    expected = forward(q, k, v, causal=False, sm_scale=0.3, splits=3)
    assert all(torch.equal(a, b) for a, b in zip(chosen, expected, strict=True))


@pytest.mark.parametrize("taken", [1, 2, 3, 5])
def test_how_many_splits_a_program_takes_changes_no_bit(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    q, k, v, _ = make(3, 150, group=2)
    expected = forward(q, k, v, causal=True, sm_scale=0.3, splits=5, block_n=64)
    monkeypatch.setattr(module, "_taken", lambda *_: taken)
    found = forward(q, k, v, causal=True, sm_scale=0.3, splits=5, block_n=64)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("splits", [1, 3])
def test_a_full_cache_changes_no_bit_and_an_empty_one_has_no_answer(splits: int) -> None:
    lengths = torch.tensor([9, 0], dtype=torch.int32, device=DEVICE)
    out, lse = forward(Q, K, V, causal=True, sm_scale=0.3, splits=splits, cache_seqlens=lengths)
    expected = forward(Q, K, V, causal=True, sm_scale=0.3, splits=splits)
    assert torch.equal(out[0], expected[0][0])
    assert torch.equal(lse[0], expected[1][0])
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()


def test_strided_cache_seqlens() -> None:
    pairs = torch.tensor([[4, 0], [7, 0]], dtype=torch.int32, device=DEVICE)
    strided = forward(Q, K, V, causal=False, sm_scale=0.3, cache_seqlens=pairs[:, 0])
    expected = forward(Q, K, V, causal=False, sm_scale=0.3, cache_seqlens=pairs[:, 0].contiguous())
    assert all(torch.equal(a, b) for a, b in zip(strided, expected, strict=True))


LENGTHS = torch.tensor([3, 4], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"v": V[:, :, :6]}, ValueError, r"v: got shape \(2, 2, 6, 16\), expected \(2, 2, 9, 16\)"),
        ({"block_m": 48}, ValueError, "block_m: got 48, expected one of"),
        ({"block_n": 0}, ValueError, "block_n: got 0, expected one of"),
        ({"splits": 0}, ValueError, "splits: got 0, expected a positive integer"),
        ({"splits": 2.0}, ValueError, "splits: got 2.0, expected a positive integer"),
        ({"cache_seqlens": [3, 4]}, TypeError, "cache_seqlens: got list, expected a torch.Tensor"),
        ({"cache_seqlens": LENGTHS[:1]}, ValueError, r"cache_seqlens: got shape \(1,\), expected \(2,\)"),
        ({"cache_seqlens": LENGTHS.long()}, ValueError, "cache_seqlens: got dtype torch.int64"),
        ({"cache_seqlens": LENGTHS.to("meta")}, ValueError, "cache_seqlens: got device meta"),
    ],
)
def test_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        forward(**{"q": Q, "k": K, "v": V, "causal": False, "sm_scale": 1.0, **change})


@pytest.mark.parametrize("lengths", [[3, 10], [-1, 3]])
def test_lengths_out_of_range_are_refused_on_the_cpu(lengths: list[int]) -> None:
    q, k, v = (x.cpu() for x in (Q, K, V))
    given = torch.tensor(lengths, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cache_seqlens: got .*, expected 0 to 9"):
        forward(q, k, v, causal=False, sm_scale=1.0, cache_seqlens=given)


PAGED: dict[str, Any] = {
    "k": K[:, :, :8].repeat(3, 1, 2, 1),
    "v": V[:, :, :8].repeat(3, 1, 2, 1),
    "cache_seqlens": torch.tensor([20, 4], dtype=torch.int32, device=DEVICE),
    "block_table": torch.tensor([[5, 0], [2, -1]], dtype=torch.int32, device=DEVICE),
}
"""A cache of six pages of 16 keys, of which two sequences have three."""
TABLE = PAGED["block_table"]


def gathered(pool: Tensor, pages: list[int], length: int) -> Tensor:
    """Return the first ``length`` keys of some pages, (1, heads_kv, length, head_dim)."""
    return torch.cat([pool[page : page + 1] for page in pages], 2)[:, :, :length]


@pytest.mark.parametrize("splits", [1, 3])
def test_pages_change_no_bit(splits: int) -> None:
    options: dict[str, Any] = {"causal": True, "sm_scale": 0.3, "splits": splits}
    out, lse = forward(Q, **PAGED, **options)
    for b, (pages, length) in enumerate([([5, 0], 20), ([2], 4)]):
        k, v = (gathered(PAGED[name], pages, length) for name in ("k", "v"))
        expected = forward(Q[b : b + 1], k, v, **options)
        assert torch.equal(out[b : b + 1], expected[0])
        assert torch.equal(lse[b : b + 1], expected[1])


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("paged", [False, True])
def test_new_keys_are_in_the_cache_afterwards_and_seen(new: int, paged: bool) -> None:
    given = PAGED if paged else {"k": K, "v": V, "cache_seqlens": LENGTHS}
    k_new, v_new = (torch.randn_like(x[:2, :, :new]) for x in (given["k"], given["v"]))
    cache = {name: given[name].clone() for name in ("k", "v")}
    options: dict[str, Any] = {"causal": True, "sm_scale": 0.3, "splits": 2}
    found = forward(Q, **{**given, **cache}, k_new=k_new, v_new=v_new, **options)
    for name, added in (("k", k_new), ("v", v_new)):
        wanted = given[name].clone()
        for b, length in enumerate(given["cache_seqlens"].tolist()):
            for at in range(new):
                page, row = divmod(length + at, 16 if paged else 9)
                wanted[int(TABLE[b, page]) if paged else b, :, row] = added[b, :, at]
        assert torch.equal(cache[name], wanted)
    lengths = given["cache_seqlens"] + new
    expected = forward(Q, **{**given, **cache, "cache_seqlens": lengths}, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


NEW = K[:, :, :6]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k_new": NEW}, TypeError, "v_new: got NoneType, expected a torch.Tensor"),
        ({"v_new": NEW}, TypeError, "k_new: got NoneType, expected a torch.Tensor"),
        (
            {"k_new": NEW, "v_new": NEW[:1]},
            ValueError,
            r"v_new: got shape \(1, 2, 6, 16\), expected \(2, 2, 6",
        ),
        ({"k_new": NEW.double(), "v_new": NEW}, ValueError, "k_new: got dtype torch.float64"),
        (
            {"k_new": NEW, "v_new": NEW, "cache_seqlens": None},
            ValueError,
            "cache_seqlens: got None beside new",
        ),
    ],
)
def test_refuses_new_keys(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"q": Q, "k": K, "v": V, "causal": False, "sm_scale": 1.0, "cache_seqlens": LENGTHS}
    with pytest.raises(error, match=message):
        forward(**{**given, **change})


EIGHT: dict[str, Any] = {name: x.to(torch.float8_e4m3fn) for name, x in (("k", K), ("v", V))}
SCALES = torch.tensor([2.0, 0.5], device=DEVICE)


@pytest.mark.parametrize("splits", [1, 3])
def test_8_bit_keys_and_values_are_multiplied_by_the_scales_of_their_heads(splits: int) -> None:
    options: dict[str, Any] = {"causal": True, "sm_scale": 0.3, "splits": splits}
    found = forward(Q, **EIGHT, k_scale=SCALES, v_scale=SCALES.flip(0), **options)
    k, v = (EIGHT[name].float() * x[:, None, None] for name, x in (("k", SCALES), ("v", SCALES.flip(0))))
    expected = forward(Q, k, v, **options)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_8_bit_pages_are_multiplied_by_their_own_scales() -> None:
    options: dict[str, Any] = {"causal": True, "sm_scale": 0.3, "splits": 2}
    scales = 2.0 ** torch.arange(12, device=DEVICE).view(6, 2).sub(6)
    pages = {name: PAGED[name].to(torch.float8_e4m3fn) for name in ("k", "v")}
    found = forward(Q, **{**PAGED, **pages}, k_scale=scales, v_scale=scales.flip(0), **options)
    meant = {
        name: pages[name].float() * x[..., None, None] for name, x in (("k", scales), ("v", scales.flip(0)))
    }
    expected = forward(Q, **{**PAGED, **meant}, **options)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"v_scale": None}, TypeError, "v_scale: got NoneType, expected a torch.Tensor"),
        ({"k_scale": None}, TypeError, "k_scale: got NoneType, expected a torch.Tensor"),
        ({"k_scale": SCALES.expand(2, 2)}, ValueError, r"k_scale: got shape \(2, 2\), expected \(2,\)"),
        ({"k_scale": SCALES[:1]}, ValueError, r"k_scale: got shape \(1,\), expected \(2,\)"),
        (
            {"k_scale": SCALES.double()},
            ValueError,
            "k_scale: got dtype torch.float64, expected torch.float32",
        ),
        ({"v_scale": SCALES.expand(2, 2)[:, 0]}, ValueError, r"v_scale: got strides \(0,\), expected"),
        ({"k": K}, ValueError, "k: got dtype torch.float32, expected torch.float8_e4m3fn"),
    ],
)
def test_refuses_scales(change: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"q": Q, **EIGHT, "causal": False, "sm_scale": 1.0, "k_scale": SCALES, "v_scale": SCALES}
    with pytest.raises(error, match=message):
        forward(**{**given, **change})


def test_new_keys_beyond_the_cache_are_refused_on_the_cpu() -> None:
    q, k, v, new = (x.cpu() for x in (Q, K, V, NEW))
    options: dict[str, Any] = {"causal": False, "sm_scale": 1.0, "k_new": new, "v_new": new}
    with pytest.raises(ValueError, match=r"cache_seqlens: got \[3, 4\], expected 0 to 3"):
        forward(q, k, v, cache_seqlens=LENGTHS.cpu(), **options)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"block_table": [[5, 0], [2, 1]]}, TypeError, "block_table: got list, expected a torch.Tensor"),
        (
            {"block_table": TABLE.long()},
            ValueError,
            "block_table: got dtype torch.int64, expected torch.int32",
        ),
        ({"block_table": TABLE[0]}, ValueError, r"block_table: got shape \(2,\), expected \(batch, pages"),
        ({"block_table": TABLE[:1]}, ValueError, r"block_table: got shape \(1, 2\), expected \(2, 2\)"),
        ({"block_table": TABLE.to("meta")}, ValueError, "block_table: got device meta"),
        (
            {"block_table": TABLE.mT},
            ValueError,
            r"block_table: got strides \(1, 2\), expected the last to be 1",
        ),
        ({"cache_seqlens": None}, ValueError, "cache_seqlens: got None beside a block_table"),
        ({"k": K, "v": V}, NotImplementedError, r"k: got pages of 9 keys, expected one of \(16, 32"),
    ],
)
def test_refuses_with_pages(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        forward(**{"q": Q, **PAGED, "causal": False, "sm_scale": 1.0, **change})


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([33, 4], r"cache_seqlens: got \[33, 4\], expected 0 to 32"),
        ([20, 17], r"block_table: got \[2, -1\] for a sequence, expected pages 0 to 5"),
    ],
)
def test_pages_out_of_range_are_refused_on_the_cpu(lengths: list[int], message: str) -> None:
    pages: dict[str, Any] = {name: x.cpu() for name, x in PAGED.items()}
    pages["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        forward(Q.cpu(), **pages, causal=False, sm_scale=1.0)


def test_tiles_are_cut_down_where_they_would_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERPRETED", module.INTERPRETED.__class__(False))
    largest = {name: max(values) for name, values in LAUNCH.items() if name != "splits"}

    def tile(head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
        constants = module._constants(**largest, q=torch.empty(1, 1, 1, head_dim, dtype=dtype))
        return constants["BLOCK_OWN"], constants["BLOCK_LOOP"]

    assert tile(128, torch.float16) == (64, 128)
    assert tile(129, torch.bfloat16) == (16, 64)
    assert tile(64, torch.float32) == (16, 16)
