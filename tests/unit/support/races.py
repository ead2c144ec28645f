"""Attention in Triton whose programs write the same place: some race until ``MENDED``, and others are sound.

Each forward and each backward has a ``how`` that says how its programs share what they write. Tensors are float32.
"""

import math
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.contract import OUTPUTS, AttentionKernel, Capabilities

MENDED = False
ROWS, STEP, KEYS, SPLITS = 16, 8, 16, 3
"""Rows that a program computes, those of them that are its own where programs overlap, keys of a tile, splits."""


@triton.jit
def _scores(q, k, rows, keys, seqlen_q, seqlen_k, scale, CAUSAL: tl.constexpr):
    """Return the scores of a tile, -inf where a row does not see a key."""
    seen = (rows < seqlen_q)[:, None] & (keys < seqlen_k)[None, :]
    if CAUSAL:
        seen = seen & (keys[None, :] <= rows[:, None] + seqlen_k - seqlen_q)
    return tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))


@triton.jit
def _attended(
    q,
    k,
    v,
    rows,
    first,
    end,
    seqlen_q,
    seqlen_k,
    scale,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
):
    """Return unnormalised out, the maximum and the sum of rows over the keys from ``first`` to ``end``."""
    acc = tl.zeros([ROWS, D], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    cols = tl.arange(0, D)[None, :]
    for start in range(first, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        at = keys[:, None] * D + cols
        of_k = tl.load(k + at, mask=(keys < end)[:, None], other=0.0)
        of_v = tl.load(v + at, mask=(keys < end)[:, None], other=0.0)
        s = _scores(q, of_k, rows, keys, seqlen_q, end, scale, False)
        if CAUSAL:
            s = tl.where(keys[None, :] <= rows[:, None] + seqlen_k - seqlen_q, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha, p = tl.exp(m - shift), tl.exp(s - shift[:, None])
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p, of_v, input_precision="ieee")
        m = m_new
    return acc, m, l


@triton.jit
def _store(out, lse, acc, m, l, rows, stored, D: tl.constexpr):
    """Store normalised out, and lse, of some rows."""
    divisor = tl.where(l > 0.0, l, 1.0)
    at = rows[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(out + at, acc / divisor[:, None], mask=stored[:, None])
    tl.store(lse + rows, m + tl.log(l), mask=stored)


@triton.jit
def _tiles(
    q,
    k,
    v,
    out,
    lse,
    tickets,
    seqlen_q,
    seqlen_k,
    scale,
    CAUSAL: tl.constexpr,
    HOW: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
):
    """Compute ``ROWS`` rows, of which the last ones are those of the next program as well."""
    tile, head = tl.program_id(0), tl.program_id(1)
    if HOW == "tickets":
        tile = tl.atomic_add(tickets + head, 1)
    rows = tile * STEP + tl.arange(0, ROWS)
    inside = rows < seqlen_q
    own = inside & (rows < (tile + 1) * STEP)
    loaded = inside if HOW == "same values" else own
    stored = inside if HOW == "others' rows" else loaded
    of_q = tl.load(
        q + head * seqlen_q * D + rows[:, None] * D + tl.arange(0, D)[None, :],
        mask=loaded[:, None],
        other=0.0,
    )
    k += head * seqlen_k * D
    v += head * seqlen_k * D
    acc, m, l = _attended(of_q, k, v, rows, 0, seqlen_k, seqlen_q, seqlen_k, scale, CAUSAL, ROWS, KEYS, D)
    _store(out + head * seqlen_q * D, lse + head * seqlen_q, acc, m, l, rows, stored, D)


@triton.jit
def _splits(
    q,
    k,
    v,
    out,
    lse,
    parts,
    sums,
    arrived,
    seqlen_q,
    seqlen_k,
    each,
    scale,
    CAUSAL: tl.constexpr,
    HOW: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
):
    """Attend to a part of the keys, and have one program of a tile merge the parts of all."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile * ROWS + tl.arange(0, ROWS)
    inside = rows < seqlen_q
    at = rows[:, None] * D + tl.arange(0, D)[None, :]
    of_q = tl.load(q + head * seqlen_q * D + at, mask=inside[:, None], other=0.0)
    k += head * seqlen_k * D
    v += head * seqlen_k * D
    end = tl.minimum(seqlen_k, (split + 1) * each)
    acc, m, l = _attended(
        of_q, k, v, rows, split * each, end, seqlen_q, seqlen_k, scale, CAUSAL, ROWS, KEYS, D
    )
    heads = tl.num_programs(1)
    part = (split * heads + head) * seqlen_q
    tl.store(parts + part * D + at, acc, mask=inside[:, None])
    tl.store(sums + 2 * (part + rows), m, mask=inside)
    tl.store(sums + 2 * (part + rows) + 1, l, mask=inside)
    merges = split == SPLITS - 1
    if HOW == "first":
        merges = split == 0
    if HOW == "counted":
        tl.debug_barrier()
        merges = tl.atomic_add(arrived + tile * heads + head, 1) == SPLITS - 1
    if HOW == "counted without atomics":
        before = tl.load(arrived + tile * heads + head)
        tl.store(arrived + tile * heads + head, before + 1)
        merges = before == SPLITS - 1
    if merges:
        total = tl.zeros([ROWS, D], tl.float32)
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        divisor = tl.zeros([ROWS], tl.float32)
        for i in range(SPLITS):
            part = (i * heads + head) * seqlen_q
            m_i = tl.load(sums + 2 * (part + rows), mask=inside, other=0.0)
            l_i = tl.load(sums + 2 * (part + rows) + 1, mask=inside, other=1.0)
            m_new = tl.maximum(largest, m_i, propagate_nan=tl.PropagateNan.ALL)
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            old, new = tl.exp(largest - shift), tl.exp(m_i - shift)
            acc_i = tl.load(parts + part * D + at, mask=inside[:, None], other=0.0)
            total = total * old[:, None] + acc_i * new[:, None]
            divisor = divisor * old + l_i * new
            largest = m_new
        _store(out + head * seqlen_q * D, lse + head * seqlen_q, total, largest, divisor, rows, inside, D)


@triton.jit
def _add(x, value, mask, HOW: tl.constexpr):
    """Add to what other programs add to as well."""
    if HOW == "atomic":
        tl.atomic_add(x, value, mask=mask)
    else:
        tl.store(x, tl.load(x, mask=mask, other=0.0) + value, mask=mask)


@triton.jit
def _acquire(turn):
    while tl.atomic_cas(turn, 0, 1) != 0:
        pass


@triton.jit
def _gradients(
    dout,
    q,
    k,
    v,
    lse,
    delta,
    dq,
    dk,
    dv,
    turns,
    seqlen_q,
    seqlen_k,
    scale,
    CAUSAL: tl.constexpr,
    HOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
):
    """Compute dq of a tile of rows, and its parts of dk and dv, which are added to those of others, or kept apart."""
    tile, head = tl.program_id(0), tl.program_id(1)
    rows = tile * ROWS + tl.arange(0, ROWS)
    inside = rows < seqlen_q
    cols = tl.arange(0, D)[None, :]
    at = head * seqlen_q * D + rows[:, None] * D + cols
    of_q = tl.load(q + at, mask=inside[:, None], other=0.0)
    of_dout = tl.load(dout + at, mask=inside[:, None], other=0.0)
    of_lse = tl.load(lse + head * seqlen_q + rows, mask=inside, other=0.0)
    of_delta = tl.load(delta + head * seqlen_q + rows, mask=inside, other=0.0)
    shift = tl.where(of_lse == float("-inf"), 0.0, of_lse)
    of_dq = tl.zeros([ROWS, D], tl.float32)
    if HOW == "apart":
        dk += tile * tl.num_programs(1) * seqlen_k * D
        dv += tile * tl.num_programs(1) * seqlen_k * D
    if HOW == "in turn":
        while tl.atomic_add(turns + head, 0) != tile:
            pass
    if HOW == "locked":
        _acquire(turns + head)
    for start in range(0, seqlen_k, KEYS):
        keys = start + tl.arange(0, KEYS)
        in_keys = (keys < seqlen_k)[:, None]
        of_keys = head * seqlen_k * D + keys[:, None] * D + cols
        of_k = tl.load(k + of_keys, mask=in_keys, other=0.0)
        of_v = tl.load(v + of_keys, mask=in_keys, other=0.0)
        s = _scores(of_q, of_k, rows, keys, seqlen_q, seqlen_k, scale, CAUSAL)
        p = tl.exp(s - shift[:, None])
        dp = tl.dot(of_dout, tl.trans(of_v), input_precision="ieee")
        ds = p * (dp - of_delta[:, None]) * scale
        of_dq += tl.dot(ds, of_k, input_precision="ieee")
        _add(dv + of_keys, tl.dot(tl.trans(p), of_dout, input_precision="ieee"), in_keys, HOW)
        _add(dk + of_keys, tl.dot(tl.trans(ds), of_q, input_precision="ieee"), in_keys, HOW)
    tl.store(dq + at, of_dq, mask=inside[:, None])
    tl.debug_barrier()
    if HOW == "in turn":
        tl.atomic_xchg(turns + head, tile + 1)
    if HOW == "locked":
        tl.atomic_xchg(turns + head, 0)


def _by_head(q: Tensor, *others: Tensor) -> list[Tensor]:
    """Return tensors (heads, length, head_dim) in which each query head has its own keys."""
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1).flatten(0, 1).contiguous() for x in (q, *others)]


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, how: str, mended: str
) -> tuple[Tensor, Tensor]:
    """Return out and lse."""
    how = mended if MENDED else how
    heads, seqlen_q, seqlen_k = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]
    given = _by_head(q, k, v)
    out, lse = torch.empty(q.shape), torch.empty(q.shape[:3])
    counters = torch.zeros(heads * math.ceil(seqlen_q / STEP) + 1, dtype=torch.int32)
    sizes = {"CAUSAL": causal, "HOW": how, "ROWS": ROWS, "KEYS": KEYS, "D": q.shape[3]}
    if how in ("last", "first", "counted", "counted without atomics"):
        each = max(1, math.ceil(seqlen_k / SPLITS))
        parts = torch.empty(SPLITS, heads, seqlen_q, q.shape[3]), torch.empty(SPLITS, heads, seqlen_q, 2)
        grid = (math.ceil(seqlen_q / ROWS), heads, SPLITS)
        arguments = (*given, out, lse, *parts, counters, seqlen_q, seqlen_k, each, float(sm_scale))
        if math.prod(grid):
            _splits[grid](*arguments, SPLITS=SPLITS, **sizes)
        return out, lse
    tiles = (math.ceil(seqlen_q / STEP), heads)
    if math.prod(tiles):
        _tiles[tiles](*given, out, lse, counters, seqlen_q, seqlen_k, float(sm_scale), STEP=STEP, **sizes)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    how: str,
    mended: str,
) -> tuple[Tensor, ...]:
    """Return dq, dk and dv."""
    how = mended if MENDED else how
    delta = (dout * out).sum(-1)
    given = _by_head(q, dout, k, v)
    of_q, of_dout, of_k, of_v = given
    grid = (math.ceil(q.shape[2] / ROWS), len(of_q))
    copies = max(1, grid[0]) if how == "apart" else 1
    dq, dk, dv = torch.zeros_like(of_q), *(torch.zeros(copies, *x.shape) for x in (of_k, of_v))
    turns = torch.zeros(len(of_q) + 1, dtype=torch.int32)
    if math.prod(grid):
        _gradients[grid](
            *(of_dout, of_q, of_k, of_v, lse.contiguous(), delta.contiguous(), dq, dk, dv, turns),
            *(q.shape[2], k.shape[2], float(sm_scale)),
            *(causal, how, ROWS, KEYS, q.shape[3]),
        )
    grouped = [x.sum(0).view(*k.shape[:2], -1, *k.shape[2:]).sum(2) for x in (dk, dv)]
    return dq.view(q.shape), *grouped


def _kernel(rows: str, keys: str, mended: tuple[str, str] | None = None, **claims: Any) -> AttentionKernel:
    """Return a kernel by how the programs of its forward share rows, and those of its backward share keys."""
    sound_rows, sound_keys = mended or (rows, keys)
    return AttentionKernel(
        name=f"{rows}, {keys}",
        forward=partial(forward, how=rows, mended=sound_rows),
        backward=partial(backward, how=keys, mended=sound_keys),
        capabilities=Capabilities(dtypes=("float32",), head_dims=(16,), validates=False, **claims),
    )


BUT_KEYS = tuple(name for name in OUTPUTS if name not in ("dk", "dv"))
SAFE = ("own rows", "apart")

OTHERS_ROWS = _kernel("others' rows", "apart", SAFE)
LAST_SPLIT = _kernel("last", "apart", ("counted", "apart"))
FIRST_SPLIT = _kernel("first", "apart", ("counted", "apart"))
UNPROTECTED_COUNTER = _kernel("counted without atomics", "apart", ("counted", "apart"))
LOST_SUMS = _kernel("own rows", "load and store", SAFE)
CLAIMED_ATOMIC = _kernel("own rows", "atomic", SAFE)

SAME_VALUES = _kernel("same values", "apart")
TICKETS = _kernel("tickets", "apart")
COUNTED = _kernel("counted", "apart")
IN_TURN = _kernel("own rows", "in turn")
ATOMIC = _kernel("own rows", "atomic", deterministic=BUT_KEYS)
LOCKED = _kernel("own rows", "locked", deterministic=BUT_KEYS)
