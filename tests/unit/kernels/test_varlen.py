"""``varlen``, where the laws do not look: the packed call itself, what is copied, what is refused."""

from typing import Any

import pytest
import torch

from kernels.algorithms import flash_v2, varlen
from kernels.algorithms.varlen import packed_backward, packed_forward
from tests.unit.support.calling import DEVICE, make


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


# Packed, (total, heads, head_dim).
Q, K, V, DOUT = (x[0].transpose(0, 1) for x in make(9, 12, group=2, heads_kv=2))
CALL: dict[str, Any] = {
    "q": Q,
    "k": K,
    "v": V,
    "cu_seqlens_q": int32(0, 4, 4, 9),
    "cu_seqlens_k": int32(0, 2, 7, 12),
    "max_seqlen_q": 5,
    "max_seqlen_k": 5,
    "causal": True,
    "sm_scale": 0.3,
}


def test_each_sequence_is_what_flash_v2_makes_of_it() -> None:
    out, lse = packed_forward(**CALL)
    dq, dk, dv = packed_backward(DOUT, out=out, lse=lse, **CALL)
    assert lse.shape == (4, 9)
    for rows, keys in ((slice(0, 4), slice(0, 2)), (slice(4, 4), slice(2, 7)), (slice(4, 9), slice(7, 12))):
        q, dout = (x[rows].transpose(0, 1)[None] for x in (Q, DOUT))
        k, v = (x[keys].transpose(0, 1)[None] for x in (K, V))
        one_out, one_lse = flash_v2.forward(q, k, v, causal=True, sm_scale=0.3)
        gradients = flash_v2.backward(dout, q, k, v, one_out, one_lse, causal=True, sm_scale=0.3)
        assert torch.equal(out[rows].transpose(0, 1)[None], one_out)
        assert torch.equal(lse[None, :, rows], one_lse)
        for packed, one, part in zip((dq, dk, dv), gradients, (rows, keys, keys), strict=True):
            assert torch.equal(packed[part].transpose(0, 1)[None], one)


def test_longest_lengths_may_be_more_than_the_longest() -> None:
    more = packed_forward(**{**CALL, "max_seqlen_q": 2**31, "max_seqlen_k": 300})
    assert all(torch.equal(a, b) for a, b in zip(more, packed_forward(**CALL), strict=True))


@pytest.mark.parametrize("name", ["window", "window_right", "chunk"])
def test_sizes_that_do_not_fit_32_bits_hide_what_both_lengths_together_do(name: str) -> None:
    huge, wide = (packed_forward(**{**CALL, "causal": False, name: size}) for size in (2**40, 21))
    assert all(torch.equal(a, b) for a, b in zip(huge, wide, strict=True))


def test_no_sequences() -> None:
    none = {**CALL, "q": Q[:0], "k": K[:0], "v": V[:0], "cu_seqlens_q": int32(0), "cu_seqlens_k": int32(0)}
    out, lse = packed_forward(**none)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (4, 0)


def test_rows_that_follow_each_other_are_not_copied() -> None:
    bnhd = torch.empty(3, 5, 2, 16).transpose(1, 2)
    for view in (bnhd, bnhd.contiguous()[:1], bnhd[2:, :, ::2]):
        assert varlen._packed(view).data_ptr() == view.data_ptr()
    copied = bnhd.contiguous()
    assert varlen._packed(copied).data_ptr() != copied.data_ptr()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": Q[None]}, ValueError, r"q: got shape \(1, 9, 4, 16\), expected packed \(total, heads, head"),
        ({"v": None}, TypeError, "v: got NoneType, expected a torch.Tensor"),
        ({"q": Q[:, :3]}, ValueError, "q: got 3 heads, expected a multiple of k's 2"),
        ({"cu_seqlens_q": [0, 9]}, TypeError, "cu_seqlens_q: got list, expected a torch.Tensor"),
        ({"cu_seqlens_q": int32()}, ValueError, "cu_seqlens_q: got no entries"),
        ({"cu_seqlens_q": int32(0, 9).long()}, ValueError, "cu_seqlens_q: got dtype torch.int64"),
        ({"cu_seqlens_k": int32(0, 12)}, ValueError, r"cu_seqlens_k: got shape \(2,\), expected \(4,\)"),
        ({"max_seqlen_q": None}, ValueError, "max_seqlen_q: got None, expected an integer, 0 or more"),
        ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k: got -1, expected an integer, 0 or more"),
        ({"block_m": 48}, ValueError, "block_m: got 48, expected one of"),
        ({"window": 1.5}, TypeError, "window: got 1.5, expected an integer"),
        ({"window_right": -1}, ValueError, "window_right: got -1, expected an integer of at least 0"),
        ({"chunk": -16}, ValueError, "chunk: got -16, expected an integer of at least 0"),
        ({"softcap": -1.0}, ValueError, "softcap: got -1.0, expected a finite number of at least 0"),
        ({"sinks": torch.zeros(2, device=DEVICE)}, ValueError, r"sinks: got shape \(2,\), expected \(4,\)"),
    ],
)
def test_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        packed_forward(**{**CALL, **change})
    with pytest.raises(error, match=message):
        packed_backward(DOUT, out=Q, lse=torch.zeros(4, 9, device=DEVICE), **{**CALL, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": int32(1, 4, 4, 9)}, r"cu_seqlens_q: got \[1, 4, 4, 9\], expected 0 first"),
        ({"cu_seqlens_q": int32(0, 5, 4, 9)}, r"cu_seqlens_q: got \[0, 5, 4, 9\], expected 0 first"),
        ({"cu_seqlens_k": int32(0, 2, 7, 13)}, r"cu_seqlens_k: got .*, expected 0 first, then rising to 12"),
        ({"max_seqlen_q": 4}, "max_seqlen_q: got 4, expected 5 or more"),
    ],
)
def test_wrong_lengths_are_refused_on_the_cpu(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {**CALL, **change}
    call |= {name: x.cpu() for name, x in call.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(ValueError, match=message):
        packed_forward(**call)


def test_a_batch_is_not_packed_already() -> None:
    q, k, v, _ = make(5, 7, batch=2)
    with pytest.raises(ValueError, match="q: got batch 2 with cu_seqlens, expected 1"):
        varlen.forward(q, k, v, causal=False, sm_scale=1.0, cu_seqlens_q=int32(0, 5))


IDS = int32(*[7] * 2, *[3] * 3, *[3] * 4, 0).view(2, 5)
"""The documents of two batch elements, of which the second begins with the number that the first ends with."""


def test_documents_are_packed_sequences() -> None:
    q, k, v, dout = make(5, 5, batch=2, group=2, heads_kv=2)
    call: dict[str, Any] = {"causal": True, "sm_scale": 0.3}
    out, lse = varlen.forward(q, k, v, document_ids=IDS, **call)
    gradients = varlen.backward(dout, q, k, v, out, lse, document_ids=IDS, **call)
    end_to_end: dict[str, Any] = {
        "cu_seqlens_q": int32(0, 2, 5, 9, 10),
        "cu_seqlens_k": int32(0, 2, 5, 9, 10),
        "max_seqlen_q": 4,
        "max_seqlen_k": 4,
    }
    q, k, v, dout = (varlen._packed(x) for x in (q, k, v, dout))
    packed_out, packed_lse = packed_forward(q, k, v, **end_to_end, **call)
    packed = packed_backward(dout, q, k, v, packed_out, packed_lse, **end_to_end, **call)
    for one, other in zip((out, *gradients), (packed_out, *packed), strict=True):
        assert torch.equal(varlen._packed(one), other)
    assert torch.equal(lse.transpose(0, 1).flatten(1), packed_lse)


def test_documents_of_no_rows() -> None:
    q, k, v, _ = make(0, 0, batch=2)
    out, _ = varlen.forward(q, k, v, causal=True, sm_scale=1.0, document_ids=int32().view(2, 0))
    assert out.shape == q.shape


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"document_ids": [[0] * 5] * 2}, TypeError, "document_ids: got list, expected a torch.Tensor"),
        (
            {"document_ids": IDS.long()},
            ValueError,
            "document_ids: got dtype torch.int64, expected torch.int32",
        ),
        ({"document_ids": IDS[0]}, ValueError, r"document_ids: got shape \(5,\), expected \(2, 5\), as q is"),
        ({"document_ids": IDS.to("meta")}, ValueError, "document_ids: got device meta, expected .* as q"),
        ({"seqlen_k": 7}, ValueError, "k: got seqlen 7 beside document_ids, expected 5 as q"),
        (
            {"cu_seqlens_q": int32(0, 5), "max_seqlen_q": 5},
            ValueError,
            "document_ids: got a tensor beside cu_seqlens, expected one or the other",
        ),
    ],
)
def test_refuses_documents(change: dict[str, Any], error: type[Exception], message: str) -> None:
    options: dict[str, Any] = {"document_ids": IDS, "causal": False, "sm_scale": 1.0, **change}
    q, k, v, dout = make(5, options.pop("seqlen_k", 5), batch=2)
    with pytest.raises(error, match=message):
        varlen.forward(q, k, v, **options)
    with pytest.raises(error, match=message):
        varlen.backward(dout, q, k, v, q, torch.zeros(q.shape[:3], device=DEVICE), **options)


def test_documents_whose_rows_lie_apart_are_refused_on_the_cpu() -> None:
    q, k, v, _ = (x.cpu() for x in make(4, 4))
    ids = torch.tensor([[2, 0, 0, 2]], dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"document_ids: got \[2, 0, 2\] one after another, expected each nu"
    ):
        varlen.forward(q, k, v, causal=False, sm_scale=1.0, document_ids=ids)
