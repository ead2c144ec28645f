"""Tiny kernels with planted bugs for the tests of the harness, which load them by path in a child process.

Most bugs show only in calls with at least ``ROWS`` queries. If ``MENDED`` is True, there are no bugs.
"""

import ctypes
import itertools
import os
import sys
import time
from dataclasses import replace

import torch

from kernels.contract import AttentionKernel, Capabilities, KnownFailure
from reference import safe_softmax
from reference.score_rule import ScoreRule
from tests.harness.device.specialisation import is_general
from tests.harness.device.sync import wait_for_device

MENDED = False
ROWS = 3


def sound(q, k, v, *, causal, sm_scale):
    """Is right: attention by the contract, computed in float32."""
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
    # This is not exp(scores - lse), which for two equal keys of large scores is 1 each, because float32 rounds lse.
    p = torch.softmax(scores, -1).masked_fill(lse[..., None] == -torch.inf, 0.0)
    return (p.to(q.dtype).float() @ values).to(q.dtype), lse


def fused(q, k, v, *, causal, sm_scale):
    """Is right, with exponents of one rounding: that of the largest score is what its maximum was rounded by."""
    products = q.double() @ k.double().transpose(-1, -2)
    maximum = (products * sm_scale).float().amax(-1, keepdim=True)
    p = (products * sm_scale - maximum.double()).float().exp()
    total = p.sum(-1, keepdim=True)
    lse = (maximum + total.log()).squeeze(-1)
    return ((p.to(q.dtype).float() @ v.float()) / total).to(q.dtype), lse


def nonfinite_where_scores_are_large(q, k, v, *, causal, sm_scale):
    """Makes NaN from scores on that are large, but not so large that a fused multiply-add would do it."""
    out, lse = fused(q, k, v, causal=causal, sm_scale=sm_scale)
    is_large = (q.float() @ k.float().transpose(-1, -2) * sm_scale).abs().amax(-1) > 1e5
    return out.masked_fill(is_large[..., None], torch.nan), lse.masked_fill(is_large, torch.nan)


def has_bug(q):
    """Whether the planted bug shows in this call."""
    return not MENDED and q.shape[2] >= ROWS


def wrong(q, k, v, *, causal, sm_scale):
    """Makes one row of out half as large again."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    rows = torch.arange(q.shape[2])[:, None]
    return torch.where(rows == ROWS - 1, 1.5 * out, out) if has_bug(q) else out, lse


def wrong_for_one_query(q, k, v, *, causal, sm_scale):
    """Makes out half as large again in a call with one query."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return 1.5 * out if q.shape[2] == 1 else out, lse


def wrong_if_general(q, k, v, *, causal, sm_scale):
    """Makes out half as large again, in every call that is compiled for any values, and else in few."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return 1.5 * out if is_general() or has_bug(q) else out, lse


def nonfinite(q, k, v, *, causal, sm_scale):
    """Makes one row of out NaN."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    rows = torch.arange(q.shape[2])[:, None]
    return torch.where(rows == ROWS - 1, torch.nan, out) if has_bug(q) else out, lse


def wrong_in_company(q, k, v, *, causal, sm_scale):
    """Is wrong only in the process that verifies it, like a kernel that depends on what else lies in memory."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return 1.5 * out if sys.argv[0].endswith("worker/main.py") and has_bug(q) else out, lse


def wrong_gradient(q, k, v, *, causal, sm_scale):
    """Returns the right out, and a dq that has half of dout added to it."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return out + 0.5 * (q - q.detach()) if has_bug(q) else out, lse


def raising(q, k, v, *, causal, sm_scale):
    """Raises an exception whose text is hard to quote."""
    if has_bug(q):
        raise RuntimeError('planted """\n\\N{nonsense} {braces} \'')
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def faulting(q, k, v, *, causal, sm_scale):
    """Raises what an index past the end raises on a GPU, after which the context is lost."""
    if has_bug(q):
        return q.flatten()[torch.tensor([q.numel()], device=q.device)].view(q.shape)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def misshapen(q, k, v, *, causal, sm_scale):
    """Returns out in another dtype."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return out.double() if has_bug(q) else out, lse


def writing(q, k, v, *, causal, sm_scale):
    """Scales q in place."""
    if has_bug(q):
        q.detach().mul_(0.0)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def overwriting(q, k, v, *, causal, sm_scale):
    """Returns the right answer, and has overwritten v."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    if has_bug(q):
        v.detach().add_(1.0)
    return out, lse


def pooled(q, k, v, *, causal, sm_scale):
    """Keeps the lse of all calls of one shape in one storage, which a later call overwrites."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    if not has_bug(q):
        return out, lse
    return out, POOL.setdefault(lse.shape, torch.empty_like(lse)).copy_(lse.detach())


POOL: dict[torch.Size, torch.Tensor] = {}


def unwritten(q, k, v, *, causal, sm_scale):
    """Leaves one row of out as it was allocated."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    if not has_bug(q):
        return out, lse
    partly = torch.empty_like(out)
    partly[:, :, : ROWS - 1] = out[:, :, : ROWS - 1]
    partly[:, :, ROWS:] = out[:, :, ROWS:]
    return partly, lse


def unwritten_with_wrong_lse(q, k, v, *, causal, sm_scale):
    """Leaves one row of out as it was allocated, and makes one row of lse 1 too large."""
    out, lse = unwritten(q, k, v, causal=causal, sm_scale=sm_scale)
    return out, lse + 1.0 if has_bug(q) else lse


def crashing(q, k, v, *, causal, sm_scale):
    """Reads address 0, which ends the process."""
    if has_bug(q):
        ctypes.string_at(0)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def crashing_on_one_key(q, k, v, *, causal, sm_scale):
    """Makes one row of out half as large again; with a single key it reads address 0, which ends the process."""
    if has_bug(q) and k.shape[2] == 1:
        ctypes.string_at(0)
    return wrong(q, k, v, causal=causal, sm_scale=sm_scale)


def raising_on_one_key(q, k, v, *, causal, sm_scale):
    """Makes one row of out half as large again; with a single key it raises an exception."""
    if has_bug(q) and k.shape[2] == 1:
        raise RuntimeError("one key")
    return wrong(q, k, v, causal=causal, sm_scale=sm_scale)


def hanging(q, k, v, *, causal, sm_scale):
    """Never returns."""
    while has_bug(q):
        time.sleep(1)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


CALLS, FIRST = itertools.count(), itertools.count()
LONGEST = [0]


def slower_from_call_to_call(q, k, v, *, causal, sm_scale):
    """Is wrong, and never returns from its third call on."""
    while has_bug(q) and next(CALLS) >= 2:
        time.sleep(1)
    return wrong(q, k, v, causal=causal, sm_scale=sm_scale)


def racing(q, k, v, *, causal, sm_scale):
    """Is wrong in one of five calls."""
    return (wrong if next(CALLS) % 5 == 4 else sound)(q, k, v, causal=causal, sm_scale=sm_scale)


def wrong_once(q, k, v, *, causal, sm_scale):
    """Is wrong in the first call of a process, and right in any other."""
    return (wrong if next(FIRST) == 0 else sound)(q, k, v, causal=causal, sm_scale=sm_scale)


def right_once(q, k, v, *, causal, sm_scale):
    """Is wrong in any call of a process but the second."""
    return (sound if next(FIRST) == 1 else wrong)(q, k, v, causal=causal, sm_scale=sm_scale)


def racing_on_few_rows(q, k, v, *, causal, sm_scale):
    """Is wrong, but for two of four calls with few rows."""
    is_few = q.shape[2] < 3 * ROWS
    return (sound if is_few and next(CALLS) % 4 < 2 else wrong)(q, k, v, causal=causal, sm_scale=sm_scale)


def keeping_the_longest(q, k, v, *, causal, sm_scale):
    """Is wrong after a call with more keys, and without a causal mask."""
    LONGEST[0] = max(LONGEST[0], k.shape[2])
    is_wrong = LONGEST[0] > k.shape[2] or not causal
    return (wrong if is_wrong else sound)(q, k, v, causal=causal, sm_scale=sm_scale)


def hanging_on_the_device(q, k, v, *, causal, sm_scale):
    """Returns, but the work that it has launched on the device never ends."""
    # This takes the place of a device that never finishes, so that the test needs no device.
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
    """Refuses every case."""
    raise NotImplementedError("not today")


def refusing_some(q, k, v, *, causal, sm_scale):
    """Refuses a causal mask."""
    if causal:
        raise NotImplementedError("no mask")
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def refusing_claimed(q, k, v, *, causal, sm_scale):
    """Refuses long sequences, which it claims."""
    if has_bug(q):
        raise NotImplementedError("too long")
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


class Forgetful:
    """A kernel whose answer depends on how often it was called."""

    calls = 0

    def __call__(self, q, k, v, *, causal, sm_scale):
        """Return an out that grows a little with the number of calls."""
        out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
        self.calls += has_bug(q)
        return out + self.calls * 2**-10, lse


def accepting(q, k, v, *, causal, sm_scale):
    """Answers any call, also one that it should refuse."""
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
KNOWN_FOR_ONE_QUERY = AttentionKernel(
    name="known_for_one_query",
    forward=wrong_for_one_query,
    capabilities=CLAIMS,
    known_failures=(
        KnownFailure(
            what="one query",
            laws=("forward",),
            case={"seqlen_q": 1, "seqlen_k": 2},
            where={"seqlen_q": (1,)},
            device="cpu",
            torch=("",),
        ),
    ),
)
FORGETFUL = AttentionKernel(name="forgetful", forward=Forgetful(), capabilities=CLAIMS)
ACCEPTING = AttentionKernel(
    name="accepting", forward=accepting, capabilities=Capabilities(dtypes=("float32",), deterministic=())
)


def masked(q, k, v, *, key_padding_mask=None, softcap=0.0, bias=None, sinks=None, **options):
    """Attends padded keys too."""
    mask, rule = None if has_bug(q) else key_padding_mask, ScoreRule(softcap=softcap, bias=bias, sinks=sinks)
    out, lse = safe_softmax.forward(q, k, v, key_padding_mask=mask, rule=rule, **options)
    return out.to(q.dtype), lse.float()


def lse_too_large(q, k, v, **options):
    """Returns the right out, and an lse that is 1 too large."""
    out, lse = safe_softmax.forward(q, k, v, **options)
    return out.to(q.dtype), lse.float() + (1.0 if has_bug(q) else 0.0)


def twice_the_gradients(dout, q, k, v, out, lse, **options):
    """Returns twice the exact gradients, whatever out and lse it is given."""
    return tuple(
        (2.0 if has_bug(q) else 1.0) * x.to(q.dtype) for x in safe_softmax.backward(dout, q, k, v, **options)
    )


WRONG_THROUGHOUT = AttentionKernel(
    name="wrong throughout", forward=lse_too_large, backward=twice_the_gradients, capabilities=CLAIMS
)


def biased(q, k, v, *, bias=None, **options):
    """Doubles the gradient of the bias, which autograd finds: out is as it should be."""
    bias = None if bias is None else bias.double()
    doubled = 2.0 * bias - bias.detach() if has_bug(q) and bias is not None else bias
    return attended(q, k, v, doubled, **options)


def attended(q, k, v, bias, *, causal, sm_scale):
    """Returns out in float64 arithmetic, for as many query heads as key heads and without a mask."""
    scores = q.double() @ k.double().mT * sm_scale
    weights = torch.softmax(scores if bias is None else scores + bias, -1)
    return (weights @ v.double()).to(q.dtype)


def of_biased(q, k, v, *, bias=None, **options):
    """Returns the exact out and lse."""
    out, lse = safe_softmax.forward(q, k, v, rule=ScoreRule(bias=bias), **options)
    return out.to(q.dtype), lse.float()


def doubled_gradient(dout, q, k, v, out, lse, *, bias=None, **options):
    """Returns the exact gradients, but twice that of the bias."""
    found = safe_softmax.backward(
        dout, q, k, v, rule=ScoreRule(bias=bias), bias_gradient=bias is not None, **options
    )
    factors = (1.0, 1.0, 1.0, 2.0 if has_bug(q) else 1.0)
    return tuple(factor * x.to(q.dtype) for factor, x in zip(factors, found, strict=False))


OF_BIAS = Capabilities(
    causal=(False,), grouped_heads=False, lse=False, bias=("shared",), bias_gradient=True, min_seqlen=1
)
BIASED = AttentionKernel(name="biased", forward=biased, capabilities=OF_BIAS)
BIASED_BACKWARD = AttentionKernel(
    name="biased backward",
    forward=of_biased,
    backward=doubled_gradient,
    capabilities=replace(OF_BIAS, lse=True),
)
MASKED = AttentionKernel(
    name="masked",
    forward=masked,
    capabilities=Capabilities(
        backward=False, key_padding=True, dropout=(0.0, 0.5), softcap=(0.0, 2.0), bias=("full",), sinks=True
    ),
)
