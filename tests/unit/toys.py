"""Tiny kernels for the harness's tests, each with one bug: loaded by path, in a child process.

Bugs show from ``ROWS`` queries on. Where ``MENDED`` is True there are none.
"""

import ctypes
import os
import sys
import time

import torch

from kernels.contract import AttentionKernel, Capabilities, KnownFailure
from reference import safe_softmax
from tests.harness.device import wait_for_device

MENDED = False
ROWS = 3


def sound(q, k, v, *, causal, sm_scale):
    """The contract, in float32."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ keys.transpose(-1, -2) * sm_scale
    if causal:
        unseen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).triu(1 + seqlen_k - seqlen_q)
        scores = scores.masked_fill(unseen, -torch.inf)
    if seqlen_k == 0:
        return 0.0 * q, torch.full(q.shape[:3], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    # not exp(scores - lse): 1 for each of two equal keys, where float32 can't tell lse from the scores
    p = torch.softmax(scores, -1).masked_fill(lse[..., None] == -torch.inf, 0.0)
    return (p.to(q.dtype).float() @ values).to(q.dtype), lse


def has_bug(q):
    """Whether the planted bug shows."""
    return not MENDED and q.shape[2] >= ROWS


def wrong(q, k, v, *, causal, sm_scale):
    """One row is half as large again."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    rows = torch.arange(q.shape[2])[:, None]
    return torch.where(rows == ROWS - 1, 1.5 * out, out) if has_bug(q) else out, lse


def nonfinite(q, k, v, *, causal, sm_scale):
    """One row is NaN."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    rows = torch.arange(q.shape[2])[:, None]
    return torch.where(rows == ROWS - 1, torch.nan, out) if has_bug(q) else out, lse


def wrong_in_company(q, k, v, *, causal, sm_scale):
    """Wrong in the process that verifies it alone, as a kernel is by what else lies in memory."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return 1.5 * out if sys.argv[0].endswith("worker.py") and has_bug(q) else out, lse


def wrong_gradient(q, k, v, *, causal, sm_scale):
    """The right out, with half of dout added to dq."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return out + 0.5 * (q - q.detach()) if has_bug(q) else out, lse


def raising(q, k, v, *, causal, sm_scale):
    """An exception whose text is hard to quote."""
    if has_bug(q):
        raise RuntimeError('planted """\n\\N{nonsense} {braces} \'')
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def faulting(q, k, v, *, causal, sm_scale):
    """An index past the end, which a GPU answers with the end of the context."""
    if has_bug(q):
        return q.flatten()[torch.tensor([q.numel()], device=q.device)].view(q.shape)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def misshapen(q, k, v, *, causal, sm_scale):
    """Out in another dtype."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return out.double() if has_bug(q) else out, lse


def writing(q, k, v, *, causal, sm_scale):
    """Scales q in place."""
    if has_bug(q):
        q.detach().mul_(0.0)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def overwriting(q, k, v, *, causal, sm_scale):
    """The right answer, and then v in place of what it was."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    if has_bug(q):
        v.detach().add_(1.0)
    return out, lse


def pooled(q, k, v, *, causal, sm_scale):
    """The lse of all calls of one shape is the same storage, and a later call overwrites it."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    if not has_bug(q):
        return out, lse
    return out, POOL.setdefault(lse.shape, torch.empty_like(lse)).copy_(lse.detach())


POOL: dict[torch.Size, torch.Tensor] = {}


def unwritten(q, k, v, *, causal, sm_scale):
    """One row of out is left as it was allocated."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    if not has_bug(q):
        return out, lse
    partly = torch.empty_like(out)
    partly[:, :, : ROWS - 1] = out[:, :, : ROWS - 1]
    partly[:, :, ROWS:] = out[:, :, ROWS:]
    return partly, lse


def unwritten_with_wrong_lse(q, k, v, *, causal, sm_scale):
    """One row of out is left as it was allocated, and one of lse is 1 too large."""
    out, lse = unwritten(q, k, v, causal=causal, sm_scale=sm_scale)
    return out, lse + 1.0 if has_bug(q) else lse


def crashing(q, k, v, *, causal, sm_scale):
    """Reads address 0."""
    if has_bug(q):
        ctypes.string_at(0)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def crashing_on_one_key(q, k, v, *, causal, sm_scale):
    """One row is half as large again; with a single key, address 0 is read as well."""
    if has_bug(q) and k.shape[2] == 1:
        ctypes.string_at(0)
    return wrong(q, k, v, causal=causal, sm_scale=sm_scale)


def raising_on_one_key(q, k, v, *, causal, sm_scale):
    """One row is half as large again; of a single key there is an exception."""
    if has_bug(q) and k.shape[2] == 1:
        raise RuntimeError("one key")
    return wrong(q, k, v, causal=causal, sm_scale=sm_scale)


def hanging(q, k, v, *, causal, sm_scale):
    """Never comes back."""
    while has_bug(q):
        time.sleep(1)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def hanging_on_the_device(q, k, v, *, causal, sm_scale):
    """Comes back, but what it has launched never ends."""
    # Stands in for a device, so that this end of it is tested without one.
    torch.cuda.synchronize = lambda device=None: time.sleep(60)
    wait_for_device("cuda", seconds=0.1)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def talking(q, k, v, *, causal, sm_scale):
    """Prints, in Python and below it, and asks for input."""
    print("flash!")
    os.write(1, b"attention!\n")
    if sys.stdin.read():
        raise RuntimeError("someone answered")
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def refusing_all(q, k, v, *, causal, sm_scale):
    """Does nothing."""
    raise NotImplementedError("not today")


def refusing_some(q, k, v, *, causal, sm_scale):
    """Wants no mask."""
    if causal:
        raise NotImplementedError("no mask")
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def refusing_claimed(q, k, v, *, causal, sm_scale):
    """Claims long sequences, and refuses them."""
    if has_bug(q):
        raise NotImplementedError("too long")
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


class Forgetful:
    """Remembers how often it was called."""

    calls = 0

    def __call__(self, q, k, v, *, causal, sm_scale):
        """The same out plus a thousandth, times the number of calls."""
        out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
        self.calls += has_bug(q)
        return out + self.calls * 2**-10, lse


def accepting(q, k, v, *, causal, sm_scale):
    """Answers anything."""
    if (
        k.shape != v.shape
        or k.shape[-1] != q.shape[-1]
        or q.shape[1] % k.shape[1]
        or len({q.dtype, k.dtype, v.dtype}) > 1
    ):
        if MENDED:
            raise ValueError("mismatch")
        return q.clone(), q.float().sum(-1)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


CLAIMS = Capabilities(dtypes=("float32",), validates=False)
REFUSING = AttentionKernel(name="refusing", forward=refusing_claimed, capabilities=CLAIMS)
KNOWN = AttentionKernel(
    name="known",
    forward=wrong,
    capabilities=CLAIMS,
    known_failures=tuple(
        KnownFailure(
            what=what,
            laws=("forward",),
            case=None if seqlen_k == 4 else {"seqlen_q": ROWS, "seqlen_k": seqlen_k, "dtype": "float32"},
            where={"seqlen_k": (seqlen_k,)},
            device=device,
            torch=("",),
        )
        for what, seqlen_k, device in (
            ("a row is half as large again", 2, "cpu"),
            ("nothing at all without keys", 0, "cpu"),
            ("not here", 1, "cuda"),
            ("now and then", 4, "cpu"),
        )
    ),
)
FORGETFUL = AttentionKernel(name="forgetful", forward=Forgetful(), capabilities=CLAIMS)
ACCEPTING = AttentionKernel(
    name="accepting", forward=accepting, capabilities=Capabilities(dtypes=("float32",), deterministic=())
)


def masked(q, k, v, *, key_padding_mask=None, **options):
    """Padded keys count."""
    mask = None if has_bug(q) else key_padding_mask
    out, lse = safe_softmax.forward(q, k, v, key_padding_mask=mask, **options)
    return out.to(q.dtype), lse.float()


def lse_too_large(q, k, v, **options):
    """The right out, beside an lse that is 1 too large."""
    out, lse = safe_softmax.forward(q, k, v, **options)
    return out.to(q.dtype), lse.float() + (1.0 if has_bug(q) else 0.0)


def twice_the_gradients(dout, q, k, v, out, lse, **options):
    """Twice what the exact out and lse say, which is not twice what an lse says that is too large."""
    return tuple(
        (2.0 if has_bug(q) else 1.0) * x.to(q.dtype) for x in safe_softmax.backward(dout, q, k, v, **options)
    )


WRONG_THROUGHOUT = AttentionKernel(
    name="wrong throughout", forward=lse_too_large, backward=twice_the_gradients, capabilities=CLAIMS
)
MASKED = AttentionKernel(
    name="masked",
    forward=masked,
    capabilities=Capabilities(backward=False, key_padding=True, dropout=(0.0, 0.5)),
)
