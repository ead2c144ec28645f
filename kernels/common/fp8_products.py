"""Products of tiles of 8-bit numbers, and the GPUs that have them."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def check_fp8(q: Tensor) -> None:
    """Raise NotImplementedError for a GPU that has no tensor cores for the OCP's 8-bit formats."""
    if q.device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(q.device)
    if torch.version.hip or capability < (8, 9):
        name = torch.cuda.get_device_name(q.device)
        raise NotImplementedError(
            f"q: on {name}, compute capability {capability}, expected an NVIDIA GPU of (8, 9) or above: "
            "others have no products of float8_e4m3fn and float8_e5m2"
        )


@triton.jit
def fp8_product(a, b):
    """Return the float32 product of tiles of 8-bit numbers."""
    # A Hopper sums the products of one instruction, 32, in 14 bits; those sums are then added in float32.
    return tl.dot(a, b, max_num_imprecise_acc=32)
