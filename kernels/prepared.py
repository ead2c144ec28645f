"""Launches that are prepared once for tensors that differ from call to call in nothing but their addresses.

What a launcher in Python computes from dtypes, shapes and strides takes several times as long as the launch itself, and
a GPU would wait for it where sequences are short. So a function that is ``remembered`` computes it, and returns what is
``Prepared``.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.hopper import descriptor
from kernels.launching import has_hooks, launch

Tile = tuple[int, int | None] | None
"""The rows and columns of the tiles in which a tensor is described, as in ``hopper.descriptor``; None for a pointer."""


class Prepared:
    """A launch of a kernel with tensors of certain dtypes, shapes and strides on one device.

    The kernel takes the tensors, each as its ``tiles`` say, then ``numbers``, then constants.
    """

    def __init__(
        self, fn: Any, programs: int, tiles: Sequence[Tile], *numbers: float, **constants: Any
    ) -> None:
        self.fn = fn
        self.programs = programs
        self.tiles = tiles
        self.numbers = numbers
        self.constants = constants
        self.direct: _Direct | None = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launch the kernel with these tensors."""
        if self.direct and self.direct.device == torch.cuda.current_device() and not has_hooks():
            self.direct(tensors)
            return
        arguments = [
            descriptor(tensor, *tile) if tile else tensor
            for tensor, tile in zip(tensors, self.tiles, strict=True)
        ]
        compiled = launch(self.fn, self.programs, *arguments, *self.numbers, **self.constants)
        if self.direct is None and tensors[0].is_cuda and triton.__version__.startswith("3.6."):
            constants = [
                self.constants[name] for name in self.fn.arg_names[len(tensors) + len(self.numbers) :]
            ]
            numbers = [*self.numbers, *constants]
            self.direct = _Direct(tensors[0].get_device(), compiled, self.programs, self.tiles, numbers)


class _Direct:
    """The function in C through which Triton 3.6 launches what it compiled, with the arguments that it takes.

    It takes descriptors that are encoded. Triton, in Python around it, encodes all of them at each launch, which takes
    longer than the launch. Here they are kept: what is encoded depends on a tensor's address, and else on what is the
    same in all calls.
    """

    def __init__(
        self, device: int, compiled: Any, programs: int, tiles: Sequence[Tile], numbers: Sequence[Any]
    ) -> None:
        run = compiled.run
        self.device = device
        self.launch = inspect.getclosurevars(run.launch).nonlocals["launcher"]
        scratch, hooks = (None, None), (None, None, None)
        cooperative = (run.launch_cooperative_grid, run.launch_pdl)
        self.grid = (programs, 1, 1)
        self.handles = (compiled.function, *cooperative, *scratch, compiled.packed_metadata, *hooks)
        encodings = iter(compiled.metadata.tensordesc_meta)
        self.operands = [_Encoded(tile, next(encodings)) if tile else _pointer for tile in tiles]
        self.numbers = numbers

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        arguments: list[Any] = []
        for tensor, operand in zip(tensors, self.operands, strict=True):
            arguments += operand(tensor)
        stream = triton.runtime.driver.active.get_current_stream(self.device)
        self.launch(*self.grid, stream, *self.handles, *arguments, *self.numbers)


def _pointer(tensor: Tensor) -> tuple[int]:
    return (tensor.data_ptr(),)


class _Encoded:
    """Encoded descriptors of tensors that have the same dtype, shape and strides, by their address."""

    def __init__(self, tile: tuple[int, int | None], encoding: Any) -> None:
        self.tile = tile
        self.encoding = encoding
        self.by_address: dict[int, list[Any]] = {}

    def __call__(self, tensor: Tensor) -> list[Any]:
        address = tensor.data_ptr()
        encoded = self.by_address.get(address)
        if encoded is None:
            if len(self.by_address) >= MOST_ADDRESSES:
                self.by_address.clear()
            encode = triton.backends.nvidia.driver.make_tensordesc_arg
            encoded = self.by_address[address] = encode(descriptor(tensor, *self.tile), self.encoding)
        return encoded


MOST_ADDRESSES = 256
"""How many tensors an operand keeps descriptors of before it drops all."""
