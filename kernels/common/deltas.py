"""The first step of a backward pass: delta of each row, and its lse in base 2."""

import math

import torch
import triton.language as tl
from torch import Tensor

from kernels.common.launching import padded_head_dim, remembered, row_strides
from kernels.common.prepared import Prepared
from kernels.common.tiles import INTERPRETED, LOG2E, NEG_INF, columns_inside, kernel, load_tile, tile_pointers


@kernel
def _delta_kernel(
    dout,
    out,
    lse,
    delta,
    lse_log2,
    stride_dob: tl.int64,
    stride_doh: tl.int64,
    stride_dom: tl.int64,
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    stride_om: tl.int64,
    heads_q,
    seqlen_q,
    head_dim,
    HEAD_DIM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_OWN: tl.constexpr,
):
    """Compute delta, and lse in base 2, of a query tile (algorithm 2, line 4).

    The order of the sum follows from the width of the loads, and gradients must not depend on where in memory a row
    lies. So ALIGNED is the same in all calls of a launcher.
    """
    tiles = tl.cdiv(seqlen_q, BLOCK_OWN)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    batch = head // heads_q
    head_q = head % heads_q

    cols = tl.arange(0, HEAD_DIM)
    in_cols = columns_inside(cols, head_dim, dout, ALIGNED)
    rows = tl.program_id(0) % tiles * BLOCK_OWN + tl.arange(0, BLOCK_OWN)
    in_rows = rows < seqlen_q
    do_ptrs = tile_pointers(dout + batch * stride_dob + head_q * stride_doh, rows, stride_dom, cols, ALIGNED)
    o_ptrs = tile_pointers(out + batch * stride_ob + head_q * stride_oh, rows, stride_om, cols, ALIGNED)
    do_tile = load_tile(do_ptrs, in_rows, in_cols, True, True).to(tl.float32)
    o_tile = load_tile(o_ptrs, in_rows, in_cols, True, True).to(tl.float32)
    row_lse = tl.load(lse + head * seqlen_q + rows, mask=in_rows, other=0.0)

    # With lse = inf, exp2(score - lse) is 0: so are the weights of a row that sees no key.
    row_lse = tl.where(row_lse == NEG_INF, float("inf"), row_lse * LOG2E)
    tl.store(delta + head * seqlen_q + rows, tl.sum(do_tile * o_tile, 1), mask=in_rows)
    tl.store(lse_log2 + head * seqlen_q + rows, row_lse, mask=in_rows)


def row_deltas(dout: Tensor, out: Tensor, lse: Tensor, aligned: bool = False) -> tuple[Tensor, Tensor]:
    """Return delta, and lse in base 2 with inf in place of -inf: (batch, heads_q, seqlen_q) float32 each.

    ``aligned`` promises what ``is_aligned`` checks of dout and out, for every call of a caller or for none.
    """
    delta, lse_log2 = (torch.empty(*lse.shape, dtype=torch.float32, device=out.device) for _ in range(2))
    _prepared_deltas(dout, out, aligned)(dout, out, lse.contiguous(), delta, lse_log2)
    return delta, lse_log2


@remembered
def _prepared_deltas(dout: Tensor, out: Tensor, aligned: bool) -> Prepared:
    """Prepare the launch of ``row_deltas``."""
    batch, heads_q, seqlen_q, head_dim = out.shape
    padded = padded_head_dim(head_dim)
    block = 128 if INTERPRETED.value else 4096 // padded
    return Prepared(
        _delta_kernel,
        batch * heads_q * math.ceil(seqlen_q / block),
        [None] * 5,  # dout, out, lse, delta, lse_log2
        *row_strides(dout, out),
        *(heads_q, seqlen_q, head_dim),
        HEAD_DIM=padded,
        ALIGNED=aligned,
        BLOCK_OWN=block,
    )
