"""Gradients of a kernel that has no backward of its own, by autograd."""

from collections.abc import Sequence

import torch
from torch import Tensor


def differentiated(out: Tensor, leaves: Sequence[Tensor], dout: Tensor) -> Sequence[Tensor]:
    """Return the gradient of each leaf.

    ``torch.autograd.grad`` returns them as the kernel makes them, while ``backward`` may copy them. Where a reentrant
    ``torch.utils.checkpoint`` is in the graph, only ``backward`` is allowed.
    """
    if not _is_checkpointed(out):
        return torch.autograd.grad(out, leaves, dout, materialize_grads=True)
    torch.autograd.backward(out, dout)
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def _is_checkpointed(out: Tensor) -> bool:
    """Whether a reentrant ``torch.utils.checkpoint`` is among what a tensor was made by."""
    known, waiting = set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in known:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        known.add(node)
        waiting += [after for after, _ in node.next_functions]
    return False
