"""Launches that are prepared once for tensors that differ from call to call in nothing but their addresses.

What a launcher in Python computes from dtypes, shapes and strides takes several times as long as the launch itself, and
a GPU would wait for it where sequences are short. So a function that is ``remembered`` computes it, and returns what is
``Prepared``.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.common.launching import has_hooks, launch

Describe = Callable[[Tensor], Any] | None
"""What makes the descriptor that a kernel takes in place of a pointer to a tensor; None if it takes the pointer."""


class Prepared:
    """A launch of a kernel with tensors of certain dtypes, shapes and strides on one device.

    The kernel takes the tensors, each by a pointer or as ``described``, then ``numbers``, then constants. In place of a
    tensor there may be None in all calls, or a number that may differ from call to call.
    """

    def __init__(
        self, fn: Any, programs: int, described: Sequence[Describe], *numbers: float | None, **constants: Any
    ) -> None:
        self.fn = fn
        self.programs = programs
        self.described = described
        self.numbers = numbers
        self.constants = constants
        self.direct: _Direct | None = None

    def __call__(self, *tensors: Any) -> None:
        """Launch the kernel with these tensors."""
        if self.direct and self.direct.device == torch.cuda.current_device() and not has_hooks():
            self.direct(tensors)
            return
        arguments = [
            describe(tensor) if describe else tensor
            for tensor, describe in zip(tensors, self.described, strict=True)
        ]
        compiled = launch(self.fn, self.programs, *arguments, *self.numbers, **self.constants)
        if compiled is None or self.direct is not None:
            return
        if tensors[0].is_cuda and triton.__version__.startswith("3.6."):
            constants = [
                self.constants[name] for name in self.fn.arg_names[len(tensors) + len(self.numbers) :]
            ]
            numbers = [*self.numbers, *constants]
            self.direct = _Direct(tensors[0].get_device(), compiled, self.programs, self.described, numbers)


class _Direct:
    """The function in C through which Triton 3.6 launches what it compiled, with the arguments that it takes.

    It takes descriptors that are encoded. Triton, in Python around it, encodes all of them at each launch, which takes
    longer than the launch. Here they are kept: what is encoded depends on a tensor's address, and else on what is the
    same in all calls.
    """

    def __init__(
        self,
        device: int,
        compiled: Any,
        programs: int,
        described: Sequence[Describe],
        numbers: Sequence[Any],
    ) -> None:
        run = compiled.run
        self.device = device
        # Triton wraps it only for a kernel that takes descriptors.
        self.launch = (
            inspect.getclosurevars(run.launch).nonlocals["launcher"] if any(described) else run.launch
        )
        scratch, hooks = (None, None), (None, None, None)
        cooperative = (run.launch_cooperative_grid, run.launch_pdl)
        self.grid = (programs, 1, 1)
        self.handles = (compiled.function, *cooperative, *scratch, compiled.packed_metadata, *hooks)
        encodings = iter(compiled.metadata.tensordesc_meta)
        self.operands = [
            _Encoded(describe, next(encodings)) if describe else _pointer for describe in described
        ]
        self.numbers = numbers

    def __call__(self, tensors: Sequence[Any]) -> None:
        arguments: list[Any] = []
        for tensor, operand in zip(tensors, self.operands, strict=True):
            arguments += operand(tensor)
        stream = triton.runtime.driver.active.get_current_stream(self.device)
        self.launch(*self.grid, stream, *self.handles, *arguments, *self.numbers)


def _pointer(operand: Any) -> tuple[Any]:
    return (operand.data_ptr() if isinstance(operand, Tensor) else operand,)


class _Encoded:
    """Encoded descriptors of tensors that have the same dtype, shape and strides, by their address."""

    def __init__(self, describe: Callable[[Tensor], Any], encoding: Any) -> None:
        self.describe = describe
        self.encoding = encoding
        self.by_address: dict[int, list[Any]] = {}

    def __call__(self, tensor: Tensor) -> list[Any]:
        address = tensor.data_ptr()
        encoded = self.by_address.get(address)
        if encoded is None:
            if len(self.by_address) >= MOST_ADDRESSES:
                self.by_address.clear()
            encode = triton.backends.nvidia.driver.make_tensordesc_arg
            encoded = self.by_address[address] = encode(self.describe(tensor), self.encoding)
        return encoded


MOST_ADDRESSES = 256
"""How many tensors an operand keeps descriptors of before it drops all."""
