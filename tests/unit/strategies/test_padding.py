"""Key padding in the reference, and in ``flash_v1`` where the laws do not look."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.algorithms.flash_v1 import backward, flash_v1, forward
from reference import safe_softmax
from reference.dropout import keep_mask
from strategies.case import Case
from strategies.padding import FAMILIES, key_padding_mask
from tests.unit.support.calling import DEVICE, make

BATCH, GROUP, ROWS, KEYS = 3, 2, 70, 100
Q, K, V, DOUT = make(ROWS, KEYS, batch=BATCH, heads_kv=2, group=GROUP)
MASK = torch.rand(BATCH, KEYS, generator=torch.Generator().manual_seed(0)) < 0.5
MASK[1, 32:96] = False
MASK[2] = False
MASK = MASK.to(DEVICE)
MASKED = ~MASK[:, None, :, None]


def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any) -> tuple[Tensor, ...]:
    out, lse = forward(q, k, v, **options)
    return out, lse, *backward(dout, q, k, v, out, lse, **options)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_torchs(causal: bool, dropout_p: float) -> None:
    leaves = [x.double().requires_grad_() for x in (Q, K, V)]
    seen = MASK[:, None, None] & torch.ones(ROWS, KEYS, dtype=torch.bool, device=DEVICE).tril(
        KEYS - ROWS if causal else KEYS
    )
    keys, values = (x.repeat_interleave(GROUP, 1) for x in leaves[1:])
    scores = (0.3 * leaves[0] @ keys.mT).masked_fill(~seen, -math.inf)
    # In rows that see no key torch's softmax is nan, and so is its gradient.
    empty = ~seen.any(-1, keepdim=True)
    p = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    p = p * keep_mask(p.shape, dropout_p=dropout_p, seed=9, device=DEVICE) / (1 - dropout_p)
    right = (p @ values, *torch.autograd.grad(p @ values, leaves, DOUT.double()))
    options: dict[str, Any] = {"causal": causal, "sm_scale": 0.3, "key_padding_mask": MASK, "chunk": 32}
    options |= {"dropout_p": dropout_p, "dropout_seed": 9}
    k, v = (x.masked_fill(MASKED, math.nan) for x in (K, V))
    out, lse = safe_softmax.forward(Q, k, v, **options)
    for got, expected in zip((out, *safe_softmax.backward(DOUT, Q, k, v, **options)), right, strict=True):
        torch.testing.assert_close(got, expected)
    torch.testing.assert_close(lse, scores.detach().logsumexp(-1))


def test_masked_keys_are_as_if_they_were_not_there() -> None:
    options: dict[str, Any] = {"causal": False, "sm_scale": 0.3}
    found = run(Q, K, V, DOUT, key_padding_mask=MASK, **options)
    for b in range(BATCH):
        here, left = slice(b, b + 1), MASK[b]
        alone = run(Q[here], K[here, :, left], V[here, :, left], DOUT[here], **options)
        for whole, part in zip(found, alone, strict=True):
            of_keys = whole.shape == K.shape
            torch.testing.assert_close(whole[here, :, left] if of_keys else whole[here], part)
    out, lse, dq, dk, dv = found
    assert (out[2] == 0).all()
    assert (lse[2] == -math.inf).all()
    assert (dq[2] == 0).all()
    for gradient in (dk, dv):
        assert (gradient.masked_select(MASKED) == 0).all()


def test_what_masked_keys_hold_changes_no_bit() -> None:
    options: dict[str, Any] = {"causal": True, "sm_scale": 0.3, "key_padding_mask": MASK}
    spoiled = run(Q, K.masked_fill(MASKED, math.nan), V.masked_fill(MASKED, math.inf), DOUT, **options)
    for x, y in zip(run(Q, K, V, DOUT, **options), spoiled, strict=True):
        assert torch.equal(x, y)


def test_autograd() -> None:
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    out, lse = flash_v1(*leaves, causal=True, key_padding_mask=MASK)
    options: dict[str, Any] = {"causal": True, "sm_scale": 0.25, "key_padding_mask": MASK}
    expected = backward(DOUT, Q, K, V, out.detach(), lse, **options)
    for x, y in zip(torch.autograd.grad(out, leaves, DOUT), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([True], TypeError, "key_padding_mask: got list"),
        (MASK.float(), ValueError, "key_padding_mask: got"),
        (MASK[:, 1:], ValueError, "key_padding_mask: got shape"),
        (MASK[:2], ValueError, "key_padding_mask: got shape"),
        (MASK[:, None], ValueError, "key_padding_mask: got shape"),
        (MASK.repeat_interleave(2, 1)[:, ::2], ValueError, "key_padding_mask: got"),
        (MASK.mT.contiguous().mT, ValueError, r"key_padding_mask: got strides \(1, 3\)"),
    ],
)
def test_refusals(mask: Any, error: type[Exception], message: str) -> None:
    options: dict[str, Any] = {"causal": False, "sm_scale": 1.0, "key_padding_mask": mask}
    with pytest.raises(error, match=message):
        forward(Q, K, V, **options)
    with pytest.raises(error, match=message):
        backward(DOUT, Q, K, V, Q, Q[..., 0], **options)


def test_masks_of_keys_are_of_every_kind() -> None:
    masks = [
        key_padding_mask(Case(batch=3, seqlen_k=100, key_padding=family, seed=start))
        for family in FAMILIES
        for start in range(30)
    ]
    rows = torch.cat([mask for mask in masks if mask is not None])
    assert rows.shape == (3 * 30 * len(FAMILIES), 100)
    # The masks: all keys, none, one, sequences that begin late, and one that lacks a whole tile of 32 in the middle.
    whole = rows.unfold(1, 32, 32).any(2)
    for kind in (
        rows.all(1),
        ~rows.any(1),
        rows.sum(1) == 1,
        ~rows[:, 0] & rows[:, -1],
        whole[:, 0] & ~whole[:, 1],
    ):
        assert kind.any()
    assert any(mask is not None and not torch.equal(mask[0], mask[1]) for mask in masks)
