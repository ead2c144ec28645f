"""What our kernels may spill, and where they make no claim, by registered name.

Keys are words that say something of a compilation: a target, a dtype, ``head_dim=N``, ``causal`` or ``full``,
``aligned`` or ``unaligned``, ``masked``, a launch setting (``name=value``) and a function's name. The first entry all
of whose words say something of a compilation holds for it (``declared``).
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from kernels import registry
from kernels.algorithms import flash_v2

T = TypeVar("T")

_SPILLS_OF_FLASH_V2 = {
    "gfx942": 1280,
    "sm_80 unaligned": 6176,  # loads one element wide, each with an address of its own
    "unaligned": 2784,
    "num_stages=1": 448,
    "sm_100 masked": 512,  # a bias beside them, each of whose elements has an address of its own
    "masked": 304,  # Philox's words and products of twice their width, a window, and what changes scores
    "float32": 96,
    "sm_80": 64,
    # Registers are kept few, so that more programs fit a multiprocessor.
    "sm_90 head_dim=64 _dk_dv_kernel": 112,
    "sm_90 head_dim=96 _dk_dv_kernel": 32,
    "sm_90 _forward_kernel": 72,
    "sm_90": 16,
}

SPILLS: Mapping[str, Mapping[str, int]] = {
    "flash_v1": {"gfx942": 960, "unaligned": 3776, "float32": 544, "sm_90": 208, "sm_100": 64},
    "flash_v2": _SPILLS_OF_FLASH_V2,
    "flash_v2_atomic": {
        "gfx942": 492,
        "sm_100 unaligned": 2784,
        "unaligned": 1552,
        "sm_90 _forward_kernel": 72,
    },
    "flash_v2_staged": {"gfx942": 868, "unaligned": 2040, "float32": 40, "sm_90": 16, "sm_100": 16},
    "flash_v2_persistent": {"gfx942": 548, "unaligned": 432, "v_dtype=float8_e5m2": 256, "float32": 16},
    "decode": {
        "gfx942": 140,
        "unaligned block_n=128": 6448,  # loads one element wide, each with an address of its own
        "unaligned": 1928,
        "float32": 16,
        "sm_80": 32,
        "sm_90 float16 head_dim=96": 8,
    },
    "flash_v3": {"gfx942": 936, "sm_80": 928},
    "flash_v3_gluon": {
        "head_dim=64 _dk_dv_kernel": 240,  # three consumers, which share the registers
        "head_dim=64": 152,
        "head_dim=256": 72,  # outside of the loop over tiles
        "_dk_dv_kernel": 120,  # most outside of the loop over tiles, as those of dq
        "_dq_kernel": 56,
    },
    "flash_v3_gluon_atomic": {"_forward_kernel": 152},  # that of flash_v3_gluon
    "fp8": {"sm_100 unaligned head_dim=256": 8},  # 64 pointers, for a second load
    "fp8_gluon": {
        "head_dim=256": 512,  # the output of a row group takes more than half of the registers
        "_forward_kernel": 296,  # three consumers, which share the registers; outside of the second loop over tiles
    },
    "ring": _SPILLS_OF_FLASH_V2,
    "varlen": {"gfx942": 908, "unaligned": 240, "masked": 128, "float32": 72, "sm_90": 16},
}
"""Bytes that a thread may spill, where that is more than none."""

_OF_A_HOPPER = "tiles are cut to the shared memory of a Hopper, 227 KB; here it is less"
_OF_FLASH_V2 = {
    "sm_80 head_dim=192": _OF_A_HOPPER,
    "sm_80 head_dim=256": _OF_A_HOPPER,
    "sm_80 float32 precision=tf32": _OF_A_HOPPER,
    "gfx942 head_dim=192": _OF_A_HOPPER,
    "gfx942 head_dim=256": _OF_A_HOPPER,
}
_OF_GLUON = {"gfx942": "refused: expected a Hopper GPU"}
_OF_E5M2 = "refused: no products of 8-bit operands there"
_OF_FP8 = "refused: no products of the OCP's 8-bit formats there"

UNCLAIMED: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("flash_v2", "ring"), _OF_FLASH_V2),
    "flash_v2_persistent": {"sm_80 v_dtype=float8_e5m2": _OF_E5M2, "gfx942 v_dtype=float8_e5m2": _OF_E5M2},
    **dict.fromkeys(("flash_v3_gluon", "flash_v3_gluon_atomic", "fp8_gluon"), _OF_GLUON),
    "fp8": {"sm_80": _OF_FP8, "gfx942": _OF_FP8},
}
"""The compilations for which launch settings are not claimed to fit, each with the reason."""


def limits(table: Mapping[str, Mapping[str, T]], kernel: str) -> Mapping[str, T]:
    """What a table says of a kernel. If it says nothing, a kernel with flash_v2's launch settings has its limits.

    Such a kernel is made of flash_v2: its tiles are cut by the same ``Settings``, and most take its backward as it is.
    """
    if kernel in table:
        return table[kernel]
    launch = registry.load(kernel).capabilities.launch
    return table[flash_v2.KERNEL.name] if launch is flash_v2.LAUNCH else {}


def declared(table: Mapping[str, T], words: Sequence[str]) -> T | None:
    """Return the value of the first key of a table whose words are all among ``words``, or None."""
    return next((value for key, value in table.items() if set(key.split()) <= set(words)), None)
