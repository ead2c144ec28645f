"""Attention functions with faults that only a GPU has: a sound kernel is followed by a small one with the fault.

A run must report each fault once, as what it is, and go on. What is no failure is here too: a kernel that takes long to
compile, and one that fills the GPU's memory.
"""

import os

import torch
import triton
import triton.language as tl

from tests.panel.triton_tutorial import attention as sound

UNROLLED = int(os.environ.get("FLASHPROOF_UNROLLED", "100000"))
"""Steps that ``slow_to_compile`` unrolls."""
FAR = 2**44
"""Elements from any tensor to where nothing is mapped, because addresses in use have at most 47 bits."""
KEPT_BYTES = 4 * 2**20
"""Bytes that ``leaking`` keeps of each call."""
RARELY, SELDOM = 53, 1009
"""Of so many calls ``racing`` and ``racing_seldom`` give a wrong element in one, on average."""

KEPT: list[torch.Tensor] = []


@triton.jit
def _read(x, offset, out):
    tl.store(out, tl.load(x + offset))


@triton.jit(do_not_specialize=["offset"])
def _read_in_fours(x, offset, out, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out + i, tl.load(x + tl.max_contiguous(tl.multiple_of(offset + i, 4), 4)))


@triton.jit
def _write_zeros(x, offset, COUNT: tl.constexpr):
    tl.store(x + offset + tl.arange(0, COUNT), tl.zeros([COUNT], x.dtype.element_ty))


@triton.jit
def _add_one(x):
    tl.store(x, tl.load(x) + 1.0)


@triton.jit
def _trap(out):
    code = tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out, code)


@triton.jit(debug=True)
def _assert_positive(x):
    tl.device_assert(tl.load(x) > 0, "a number is positive")


@triton.jit
def _wait_for(flag, out):
    count = 0
    while tl.load(flag, volatile=True) == 0:
        count += 1
    tl.store(out, count)


@triton.jit
def _unroll(x, COUNT: tl.constexpr):
    y = tl.load(x)
    for i in tl.static_range(COUNT):
        y = y * (i + 1.5) + 0.5
    tl.store(x, y)


@triton.jit
def _clock():
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _write_twice(x, CALLS: tl.constexpr):
    right = tl.load(x).to(tl.float32)
    start = _clock()
    if tl.program_id(0) == 0:
        tl.store(x, right.to(x.dtype.element_ty))
    else:
        while _clock() - start < 10000:
            pass
        tl.store(x, (right + 1.0).to(x.dtype.element_ty), mask=start % CALLS == 0)


def reading_far_outside(q, k, v, *, causal, sm_scale):
    """Reads an illegal address, far behind v, if the keys fill no tile of 16."""
    if k.shape[2] % 16:
        _read[(1,)](v, FAR, torch.empty(1, dtype=v.dtype, device=v.device))
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def misaligned(q, k, v, *, causal, sm_scale):
    """Reads 16 bytes at once from an address that is no multiple of 16 if the queries fill no tile of 16."""
    if q.shape[2] % 16:
        numbers = torch.zeros(1024, device=q.device)
        _read_in_fours[(1,)](numbers, 1, torch.empty(512, device=q.device), COUNT=512)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def trapping(q, k, v, *, causal, sm_scale):
    """Executes the instruction ``trap`` if query heads share a key head."""
    if q.shape[1] > k.shape[1]:
        _trap[(1,)](torch.zeros(1, dtype=torch.int32, device=q.device))
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def asserting(q, k, v, *, causal, sm_scale):
    """Fails an assertion on the device under a causal mask."""
    if causal:
        _assert_positive[(1,)](torch.zeros(1, device=q.device))
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def hanging(q, k, v, *, causal, sm_scale):
    """Never ends on the device with more than 100 keys."""
    flag = torch.zeros(1, dtype=torch.int32, device=q.device)
    if k.shape[2] > 100:
        _wait_for[(1,)](flag, torch.zeros_like(flag))
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def writing_outside(q, k, v, *, causal, sm_scale):
    """Writes 16 zeros behind the end of out, where another tensor may lie, if the queries fill no tile of 16."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    if q.shape[2] % 16:
        _write_zeros[(1,)](out, out.numel(), COUNT=16)
    return out, lse


def corrupting(q, k, v, *, causal, sm_scale):
    """Adds 1 to the first element of k under a causal mask."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    if causal and k.numel():
        _add_one[(1,)](k)
    return out, lse


def racing(q, k, v, *, causal, sm_scale):
    """Gives one wrong element in one of 53 calls, whatever is asked: two programs write it, without an atomic."""
    return _raced(*sound(q, k, v, causal=causal, sm_scale=sm_scale), RARELY)


def racing_seldom(q, k, v, *, causal, sm_scale):
    """Gives one wrong element in one of 1009 calls, whatever is asked: two programs write it, without an atomic."""
    return _raced(*sound(q, k, v, causal=causal, sm_scale=sm_scale), SELDOM)


def _raced(out, lse, calls):
    if out.numel():
        _write_twice[(2,)](out, CALLS=calls, num_warps=1)
    return out, lse


def leaking(q, k, v, *, causal, sm_scale):
    """Keeps a few megabytes of the GPU's memory of each causal call."""
    if causal:
        KEPT.append(torch.ones(KEPT_BYTES, dtype=torch.uint8, device=q.device))
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def slow_to_compile(q, k, v, *, causal, sm_scale):
    """Unrolls a long loop for a head_dim of 32, which takes long to compile. This is no failure."""
    if q.shape[3] == 32:
        _unroll[(1,)](torch.zeros(1, device=q.device), COUNT=UNROLLED)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def filling(q, k, v, *, causal, sm_scale):
    """Fills as much of the GPU's memory as it gets if query heads share a key head. This is no failure."""
    if q.shape[1] > k.shape[1]:
        pieces = []
        while True:
            pieces.append(torch.empty(2**28, dtype=torch.uint8, device=q.device))
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)
