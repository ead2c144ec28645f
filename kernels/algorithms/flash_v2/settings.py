"""Launch settings of FlashAttention-2: the tiles of each kernel, and constants of its own on a Hopper."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.common.launching import check_settings, is_hopper, padded_head_dim
from kernels.common.tiles import INTERPRETED

LAUNCH: Mapping[str, tuple[Any, ...]] = {
    "block_m": (64, 128),
    "block_n": (32, 64),
    "num_stages": (1, 2, 3),
    "precision": ("ieee", "tf32"),
}
"""Launch settings: block_m rows (of dk and dv: keys) of the tile that a program owns, 128 where rows have more than 256
bytes; block_n rows of each tile that it loops over; the depth of the loads' pipeline; how float32 operands are
multiplied. On a Hopper, a forward whose scores only a causal mask changes has the fastest tiles in place of 64 by 64:
see ``forward_on_hopper``."""

FORWARD_TILES = {1024: (32, 32)}
DK_DV_TILES = {256: (128, 32), 512: (32, 32), 1024: (32, 32)}
DQ_TILES = {256: (128, 32), 512: (128, 32), 1024: (32, 32)}
DBIAS_TILES = {**DK_DV_TILES, 256: (64, 32)}
"""The largest (BLOCK_OWN, BLOCK_LOOP) of each kernel that fits a Hopper's registers and shared memory, by bytes in a
row of HEAD_DIM elements. Larger launch settings are cut down; every tile fits rows that have no entry. With a bias, out
has the tiles of dq, since each element of a bias has an address of its own. The loop of dbias loads tiles of all four
operands."""

_LARGEST_FMA_TILE = (32, 16)
"""The largest (BLOCK_OWN, BLOCK_LOOP) for float32 without tensor cores: products are unrolled into multiply-adds."""


@dataclass(frozen=True)
class Settings:
    """Launch settings, checked against ``LAUNCH``.

    The defaults are the fastest for head_dim 64 and 128 in 16 bits on an H200, or nearly: two programs fit a
    multiprocessor, and the softmax of one hides behind the products of the other. Rows of more than 256 bytes leave
    shared memory for two stages alone, and so does any row on an AMD GPU.
    """

    block_m: int = 64
    block_n: int = 64
    num_stages: int = 3
    precision: str = "ieee"

    def __post_init__(self) -> None:
        check_settings(vars(self), LAUNCH)

    def constants(self, q: Tensor, tiles: Mapping[int, tuple[int, int]]) -> dict[str, Any]:
        """Return the constants that a kernel is compiled with for q; ``tiles`` is like ``FORWARD_TILES``."""
        padded = padded_head_dim(q.shape[3])
        row_bytes = padded * q.element_size()
        # Rows of more than 256 bytes take the registers of eight warps, which have 128 rows of a tile.
        own, loop = self.block_m if row_bytes <= 256 else 128, self.block_n
        fma = q.dtype == torch.float32 and self.precision == "ieee"
        largest = _LARGEST_FMA_TILE if fma else tiles.get(row_bytes, (own, loop))
        if not INTERPRETED.value:
            own, loop = min(own, largest[0]), min(loop, largest[1])
        return {
            "HEAD_DIM": padded,
            "MASK_COLS": padded != q.shape[3],
            # Products of 16-bit operands ignore the precision, so one value for all saves compilations.
            "PRECISION": self.precision if q.dtype == torch.float32 else "ieee",
            "BLOCK_OWN": own,
            "BLOCK_LOOP": loop,
            "num_warps": 4 if own == 64 and row_bytes <= 256 else 8,
            "num_stages": min(self.num_stages, 2 if row_bytes > 256 or torch.version.hip else 3),
        }

    def on_hopper(self, q: Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the constants of dk and dv, and of dq, for 16 bits and a padded head_dim of 64 or 128 on a Hopper.

        dk and dv load through descriptors, as pointers take more registers, and there is no dropout nor anything
        else that changes scores. At head_dim 64, three of their programs of four warps then fit a multiprocessor.
        At 128, tiles are larger than ``DK_DV_TILES`` and ``DQ_TILES`` have them, and more than two stages of those
        of dk and dv would leave room for one program on a multiprocessor.
        """
        of_keys = replace(self, num_stages=min(self.num_stages, 2)).constants(q, {})
        if of_keys["HEAD_DIM"] == 64:
            fewer = {"maxnreg": 168} if of_keys["num_warps"] == 4 else {}
            return of_keys | fewer, self.constants(q, DQ_TILES)
        return of_keys, replace(self, block_m=128).constants(q, {})


def is_tuned_for_hopper(
    q: Tensor, dropout_p: float, window: int, softcap: float, *extras: Tensor | None
) -> bool:
    """Whether q is on a Hopper, and the call is one of those for which there are constants of its own.

    These are calls in 16 bits with a padded head_dim of 64 or 128 whose scores nothing but a causal mask changes.
    """
    plain = not (dropout_p or window or softcap) and all(extra is None for extra in extras)
    sizes = (q.element_size(), padded_head_dim(q.shape[3]))
    return plain and sizes in ((2, 64), (2, 128)) and is_hopper(q.device)


def forward_on_hopper(padded: int, causal: bool, aligned: bool, num_stages: int) -> dict[str, Any]:
    """Return the fastest constants of a forward of 16 bits on a Hopper, by the padded head_dim, which is 64 or 128.

    There are at most ``num_stages`` stages. Keys and values whose rows are aligned are loaded through descriptors,
    which take fewer registers than pointers. If a thread has at most ``maxnreg`` registers, three programs of four
    warps or two of eight fit a multiprocessor, and the softmax of one hides behind the products of the others. Other
    rows are loaded through pointers, in tiles of as many keys, since the bits of a result depend on that.
    """
    if padded == 64:
        own, loop, num_warps, stages, maxnreg = (64, 128, 4, 2, 168) if aligned else (128, 128, 8, 2, None)
    elif aligned and not causal:
        own, loop, num_warps, stages, maxnreg = 128, 64, 8, 2, 128
    else:
        own, loop, num_warps, stages, maxnreg = 64, 64, 4, 3, None
    return {
        "BLOCK_OWN": own,
        "BLOCK_LOOP": loop,
        "num_warps": num_warps,
        "num_stages": min(num_stages, stages),
        "maxnreg": maxnreg,
    }


def most_keys_in_a_tile(dtype: str, device: str, launch: Mapping[str, Any]) -> int:
    """Return how many keys a tile of the forward has at most; with the default block_n, a Hopper may have more."""
    keys: int = launch.get("block_n", Settings.block_n)
    return keys if dtype == "float32" or device == "cpu" or keys != Settings.block_n else 128
