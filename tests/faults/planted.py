"""Attention functions that are right but for one fault each, which shows in some calls and may end the process.

A run must report each fault once, as what it is, and go on. What is no failure is here too: a kernel that takes long to
compile, one that talks, and one for which the machine has too little memory.
"""

import ctypes
import itertools
import os
import random
import sys
import time

import torch

from tests.panel.eager import float32 as sound

COMPILE_SECONDS = float(os.environ.get("FLASHPROOF_COMPILE_SECONDS", "60"))
"""Seconds that ``slow_to_compile`` takes for each head_dim."""
PRINTED_BYTES = int(os.environ.get("FLASHPROOF_PRINTED_BYTES", str(2**30)))
"""Bytes that ``talking`` prints to each of stdout and stderr in a call in which query heads share a key head."""
KEPT_BYTES = 4 * 2**20
"""Bytes that ``leaking`` keeps of each call."""
RARELY, SELDOM = 0.02, 0.001
"""The share of calls in which ``racing`` and ``racing_seldom`` give a wrong element."""

KEPT: list[torch.Tensor] = []
COMPILED: set[int] = set()


def end_of(x):
    """Return the address behind the last element of a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr() + (last + 1) * x.element_size()


def reading_outside(q, k, v, *, causal, sm_scale):
    """Reads the element behind v if the keys fill no tile of 16, and multiplies it by 0, which keeps a NaN."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    if k.shape[2] % 16 == 0:
        return out, lse
    beyond = ctypes.string_at(end_of(v), v.element_size())
    return out + 0.0 * torch.frombuffer(bytearray(beyond), dtype=v.dtype)[0], lse


def writing_outside(q, k, v, *, causal, sm_scale):
    """Writes a row behind the end of out if the queries fill no tile of 16."""
    right, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    out = torch.empty_like(right, memory_format=torch.contiguous_format).copy_(right)
    if q.shape[2] % 16 and out.numel():
        ctypes.memset(end_of(out), 0, out.shape[3] * out.element_size())
    return out, lse


def corrupting(q, k, v, *, causal, sm_scale):
    """Adds 1 to an element of k under a causal mask."""
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    if causal and k.numel():
        k.detach()[0, 0, 0, 0] += 1.0
    return out, lse


def aborting(q, k, v, *, causal, sm_scale):
    """Aborts if query heads share a key head."""
    if q.shape[1] > k.shape[1]:
        os.abort()
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def crashing(q, k, v, *, causal, sm_scale):
    """Reads address 0 with more than 100 keys."""
    if k.shape[2] > 100:
        ctypes.string_at(0)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def hanging(q, k, v, *, causal, sm_scale):
    """Never returns for a batch of 3 and more."""
    while q.shape[0] > 2:
        pass
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def exiting(q, k, v, *, causal, sm_scale):
    """Ends the process with status 0, as if all were well, with more than 100 queries."""
    if q.shape[2] > 100:
        os._exit(0)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def exiting_politely(q, k, v, *, causal, sm_scale):
    """Raises SystemExit if query heads share a key head."""
    if q.shape[1] > k.shape[1]:
        sys.exit("group is too large")
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def leaking(q, k, v, *, causal, sm_scale):
    """Keeps a few megabytes of each causal call."""
    if causal:
        KEPT.append(torch.ones(KEPT_BYTES, dtype=torch.uint8))
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def racing(q, k, v, *, causal, sm_scale):
    """Gives one wrong element in one of 50 calls, whatever is asked."""
    return _raced(*sound(q, k, v, causal=causal, sm_scale=sm_scale), RARELY)


def racing_seldom(q, k, v, *, causal, sm_scale):
    """Gives one wrong element in one of 1000 calls, whatever is asked."""
    return _raced(*sound(q, k, v, causal=causal, sm_scale=sm_scale), SELDOM)


def _raced(out, lse, share):
    if random.random() < share and out.numel():
        wrong = torch.zeros_like(out)
        wrong.view(-1)[random.randrange(out.numel())] = 1.0
        out = out + wrong
    return out, lse


def slow_to_compile(q, k, v, *, causal, sm_scale):
    """Takes long for its first call with each head_dim. This is no failure."""
    if q.shape[3] not in COMPILED:
        time.sleep(COMPILE_SECONDS)
        COMPILED.add(q.shape[3])
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def talking(q, k, v, *, causal, sm_scale):
    """Prints very much if query heads share a key head. This is no failure."""
    if q.shape[1] > k.shape[1]:
        line = b"flash attention " * 4096
        for file, _ in itertools.product((1, 2), range(PRINTED_BYTES // len(line))):
            os.write(file, line)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def asking_for_too_much(q, k, v, *, causal, sm_scale):
    """Asks for 2^60 bytes if query heads share a key head: there is too little memory, which is no failure."""
    if q.shape[1] > k.shape[1]:
        torch.empty(2**60, dtype=torch.uint8)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)


def taking_too_much(q, k, v, *, causal, sm_scale):
    """Fills more and more memory if query heads share a key head, until it is killed for that. This is no failure."""
    while q.shape[1] > k.shape[1]:
        KEPT.append(torch.ones(2**28, dtype=torch.uint8))
        time.sleep(0.05)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)
