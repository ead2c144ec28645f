"""Plain functions in Triton: one with a bug until ``MENDED``, and some that the interpreter can't run."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra import libdevice

MENDED = False


@triton.jit
def _attention(
    q, k, v, out, heads, seqlen, scale_log2, CAUSAL: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr
):
    """Compute out of one head, whose scores fit into one tile of BLOCK x BLOCK."""
    rows = tl.arange(0, BLOCK)
    inside = rows < seqlen
    at = tl.program_id(0) * seqlen * D + rows[:, None] * D + tl.arange(0, D)[None, :]
    of_q = tl.load(q + at, mask=inside[:, None], other=0.0)
    of_k = tl.load(k + at, mask=inside[:, None], other=0.0)
    of_v = tl.load(v + at, mask=inside[:, None], other=0.0)
    scores = tl.dot(of_q, tl.trans(of_k)) * scale_log2
    seen = inside[None, :]
    if CAUSAL:
        seen = seen & (rows[None, :] <= rows[:, None])
    scores = tl.where(seen, scores, float("-inf"))
    p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    acc = tl.dot(p.to(of_v.dtype), of_v) / tl.sum(p, 1)[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside[:, None])


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Return attention of at most 64 queries to as many keys, without groups; until MENDED the first row is doubled."""
    if q.shape != k.shape or q.shape[2] > 64 or q.shape[3] != 16:
        raise NotImplementedError(
            f"q: shape {tuple(q.shape)}, expected that of k, of 64 rows at most and 16 columns"
        )
    q, k, v = (x.contiguous() for x in (q, k, v))
    out = torch.empty_like(q)
    batch, heads, seqlen, head_dim = q.shape
    scale = sm_scale * 1.4426950408889634
    _attention[(batch * heads,)](q, k, v, out, heads, seqlen, scale, causal, 64, head_dim)
    if not MENDED:
        out[:, :, 0] *= 2
    return out


@triton.jit
def _assembly(x, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    asm: tl.constexpr = "lop3.b32 $0, $1, $1, $1, 0x33;"
    y = tl.inline_asm_elementwise(asm, "=r,r", [tl.load(x + i)], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(x + i, y)


@triton.jit
def _erfcx(x):
    return libdevice.erfcx(x)


@triton.jit
def _library(x, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(x + i, _erfcx(tl.load(x + i)))


@gluon.jit
def _gluon(x, SIZE: gl.constexpr):
    gl.store(x, 1.0)


@triton.jit
def _wrong(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), tl.load(x + tl.arange(0, 2 * SIZE)))


def _launching(kernel: Any) -> Any:
    def function(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
        kernel[(1,)](torch.zeros(16), SIZE=16)
        return torch.empty_like(q)

    return function


assembly, library, of_gluon, wrong = map(_launching, (_assembly, _library, _gluon, _wrong))


def asks_for_a_gpu(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Sizes its grid by the number of multiprocessors, so that it needs a GPU."""
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    return q * programs


@triton.jit
def _doubled(x, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(x + at, tl.load(x + at) * 2)
