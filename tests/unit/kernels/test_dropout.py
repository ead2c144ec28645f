"""Dropout: the reference's mask is Philox's, the kernels drop exactly what the reference drops, and nothing else."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.algorithms import flash_v1, flash_v2
from kernels.contract import AttentionKernel
from reference.dropout import WORD, keep_mask, philox
from strategies.case import Case
from tests.unit.support.calling import DEVICE, uphold

each_kernel = pytest.mark.parametrize(
    "kernel", [flash_v1.KERNEL, flash_v2.KERNEL], ids=lambda kernel: kernel.name
)
SEED = 0x1234_5678_9ABC_DEF0


@pytest.mark.parametrize(
    ("counter", "seed", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: Any, seed: int, expected: tuple[int, ...]) -> None:
    """The known answers are those for philox4x32 with 10 rounds in Random123's kat_vectors."""
    c0, c1, c2, c3 = (torch.tensor(c) for c in counter)
    words = philox((c0, c1, c2, c3), seed)
    assert tuple(int(word) for word in words) == expected


def test_a_share_is_kept() -> None:
    keep = keep_mask((2, 3, 100, 200), dropout_p=0.3, seed=1)
    assert abs(keep.float().mean() - 0.7) < 0.005
    part = keep_mask((1, 2, 100, 200), dropout_p=0.3, seed=1, rows=slice(40, 50), first_head=4)
    assert torch.equal(part, keep[1:, 1:, 40:50])
    assert keep_mask((1, 1, 9, 9), dropout_p=0.0, seed=1).all()


@each_kernel
@pytest.mark.parametrize("block_n", [32, 64])
@pytest.mark.parametrize("seed", [0, 5, SEED])
def test_masks_are_the_references_in_both_passes(kernel: AttentionKernel, block_n: int, seed: int) -> None:
    """With q = 0 and v = 1 in one column for each key, out shows the mask; with dout likewise, dv does."""
    batch, heads_kv, group, rows, keys = 2, 1, 2, 70, 100
    q = torch.zeros(batch, heads_kv * group, rows, 128, device=DEVICE)
    k = torch.zeros(batch, heads_kv, keys, 128, device=DEVICE)
    v = torch.eye(keys, 128, device=DEVICE).expand(k.shape).contiguous()
    options: dict[str, Any] = {"causal": False, "sm_scale": 1.0, "dropout_p": 0.4, "dropout_seed": seed}
    options["block_n"] = block_n
    keep = keep_mask((batch, heads_kv * group, rows, keys), dropout_p=0.4, seed=seed, device=DEVICE)
    out, lse = kernel.forward(q, k, v, **options)
    assert torch.equal(out[..., :keys] != 0, keep)
    assert kernel.backward is not None
    for member in range(group):
        dout = torch.zeros_like(q)
        dout[:, member] = torch.eye(rows, 128, device=DEVICE)
        _, _, dv = kernel.backward(dout, q, k, v, out, lse, **options)
        assert torch.equal(dv[:, 0, :, :rows].mT != 0, keep[:, member])


@each_kernel
def test_agrees_with_the_reference(kernel: AttentionKernel) -> None:
    case = Case(batch=2, heads_kv=2, group=2, seqlen_q=70, seqlen_k=90, causal=True, sm_scale=0.3)
    uphold("backward", kernel, replace(case, dropout_p=0.3))


@each_kernel
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dropout_p": "0.1"}, TypeError, "dropout_p: got '0.1'"),
        ({"dropout_p": 1.0}, ValueError, "dropout_p: got 1.0, expected a probability"),
        ({"dropout_p": -0.1}, ValueError, "dropout_p: got -0.1"),
        ({"dropout_p": float("nan")}, ValueError, "dropout_p: got nan"),
        ({"dropout_seed": 0.5}, TypeError, "dropout_seed: got 0.5"),
        ({"dropout_seed": -1}, ValueError, "dropout_seed: got -1"),
        ({"dropout_seed": 2**63}, ValueError, "dropout_seed: got 9223372036854775808"),
    ],
)
def test_refusals(
    kernel: AttentionKernel, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    x = torch.zeros(1, 1, 2, 16, device=DEVICE)
    with pytest.raises(error, match=message):
        kernel.forward(x, x, x, causal=False, sm_scale=1.0, **change)
    assert kernel.backward is not None
    with pytest.raises(error, match=message):
        kernel.backward(x, x, x, x, x, x[..., 0], causal=False, sm_scale=1.0, **change)
