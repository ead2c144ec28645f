"""Attention functions for a GPU whose results are right, although each does one thing that only a sanitizer sees."""

import torch
import triton
import triton.language as tl

from tests.panel.eager import float32 as sound

THREADS = tl.constexpr(128)


@triton.jit
def _write(pointer, offset):
    tl.store(pointer + offset, 1.0)


@triton.jit
def _copy(source, target):
    tl.store(target, tl.load(source))


@triton.jit
def _exchange(target):
    """Read what another warp has written to shared memory, without a barrier in between."""
    lane = tl.arange(0, THREADS)
    read = tl.inline_asm_elementwise(
        """{
        .shared .align 4 .b32 shared_words[128];
        .reg .b32 place, address;
        mov.u32 place, %tid.x;
        shl.b32 place, place, 2;
        mov.u32 address, shared_words;
        add.u32 address, address, place;
        st.shared.b32 [address], $1;
        xor.b32 place, place, 128;
        mov.u32 address, shared_words;
        add.u32 address, address, place;
        ld.shared.b32 $0, [address];
        }""",
        "=r,r",
        [lane],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(target + lane, read)


@triton.jit
def _multiply(target, factor):
    tl.store(target, factor * factor)


@triton.jit
def _assert_few(target, keys):
    tl.device_assert(keys < 32, "few keys")
    tl.store(target, keys)


def writing_outside(q, k, v, *, causal, sm_scale):
    """Writes an element some way behind the end of an allocation."""
    scratch = torch.empty(512, device=q.device)
    _write[(1,)](scratch, 512 + 32)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def reading_unwritten(q, k, v, *, causal, sm_scale):
    """Copies an element that nobody has written."""
    scratch = torch.empty(512, device=q.device)
    _copy[(1,)](scratch, torch.zeros(1, device=q.device))
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def racing(q, k, v, *, causal, sm_scale):
    """Exchanges numbers between warps without a barrier."""
    _exchange[(1,)](torch.zeros(128, dtype=torch.int32, device=q.device), num_warps=4)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def overflowing(q, k, v, *, causal, sm_scale):
    """Multiplies integers whose product needs more than 32 bits."""
    _multiply[(1,)](torch.zeros(1, dtype=torch.int32, device=q.device), 70_000)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def asserting(q, k, v, *, causal, sm_scale):
    """Asserts that there are fewer than 32 keys, which Triton checks only if it is asked to."""
    _assert_few[(1,)](torch.zeros(1, dtype=torch.int32, device=q.device), k.shape[2])
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)
