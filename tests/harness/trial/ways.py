"""Carry out the ways of calling a kernel that ``strategies.ways`` declares.

A stand-alone script contains this whole module, so that it makes the same calls: it needs torch and the standard
library alone.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Forward = Callable[..., tuple[Tensor, Tensor | None]]
"""A kernel's forward, which takes q, k and v by position and all else by name, and returns out with lse or None."""


def by_autograd(
    way: str,
    forward: Forward,
    given: Mapping[str, Any],
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Sequence[str],
) -> dict[str, Tensor | None]:
    """Return what a call returns in a way, by name: out, lse, and the ``wanted`` gradients by autograd.

    ``given`` has q, k, v and the keywords of the call. Those whose gradients are wanted require grad in the call. A
    gradient is None if autograd has none for its input. If out depends on no such input, or has not the shape of dout,
    there are no gradients. ``dlse`` is the gradient of lse, float32 like it; None if none flows through lse.
    """
    needed = ("q", "k", "v") if way == "no_grad" else [name[1:] for name in wanted]
    inputs = {**given, **{name: given[name].detach().requires_grad_() for name in needed}}
    leaves = [inputs[name[1:]] for name in wanted]

    def there_and_back() -> dict[str, Tensor | None]:
        out, lse = _forth(way, forward, inputs)
        kept = [None if x is None else x.detach() for x in (out, lse)]
        if way in ("out_overwritten", "inference_mode"):
            kept = [None if x is None else x.clone() for x in kept]
        returned = dict(zip(("out", "lse"), kept, strict=True))
        if not wanted or not out.requires_grad or out.shape != dout.shape:
            return returned
        if way == "two_forwards":
            _forth(way, forward, other_numbers(inputs))
        if way == "other_scale":
            _forth(way, forward, {**inputs, "sm_scale": inputs["sm_scale"] / 2.0})
        if way == "out_overwritten":
            out.add_(1.0)
        ends, gradients = [out], [dout]
        if dlse is not None and lse is not None and lse.requires_grad:
            ends, gradients = [out, lse], [dout, dlse]
        if way == "second_backward":
            differentiated(ends, leaves, gradients, again=True)
        return returned | dict(zip(wanted, differentiated(ends, leaves, gradients), strict=True))

    return on_another_thread(there_and_back, dout.device) if way == "another_thread" else there_and_back()


def _forth(way: str, forward: Forward, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Call forward in a way."""
    options = {name: x for name, x in inputs.items() if name not in ("q", "k", "v")}
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    call = partial(forward, **options)
    if way == "vmap":
        return over_two(call, q, k, v)
    if way == "checkpoint":
        return checkpointed(call, q, k, v)
    with mode(way, q):
        return call(q, k, v)


def mode(way: str, q: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return the mode of PyTorch in which a forward is called."""
    if way == "no_grad":
        return torch.no_grad()
    if way == "inference_mode":
        return torch.inference_mode()
    if way == "autocast":
        return torch.autocast(q.device.type, dtype=q.dtype)
    return contextlib.nullcontext()


def in_its_way(way: str, call: Callable[[], Any], q: Tensor) -> Any:
    """Make a call of a kernel that has a backward of its own, in a way that means something for such a kernel."""
    if way == "another_thread":
        return on_another_thread(call, q.device)
    with mode(way, q):
        return call()


def over_two(call: Forward, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return what a call returns as the second of two that ``torch.func.vmap`` makes at once."""
    other = other_numbers({"q": q, "k": k, "v": v})
    pairs = [torch.stack((other[name], x)) for name, x in (("q", q), ("k", k), ("v", v))]

    def tensors(*one: Tensor) -> tuple[Tensor, ...]:
        return tuple(x for x in call(*one) if x is not None)

    returned = torch.func.vmap(tensors)(*pairs)
    return returned[0][1], returned[1][1] if len(returned) > 1 else None


def checkpointed(call: Forward, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Call forward, and have the backward call it once more for the tensors that it saves, which are not kept.

    So does ``torch.utils.checkpoint`` with ``use_reentrant=False``. That imports PyTorch's compiler, after which this
    process would count as one that compiles its kernels.
    """
    numbers = itertools.count()
    saved: list[Tensor] = []

    def of_another_call(number: int) -> Tensor:
        if not saved:
            others = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
            with torch.enable_grad(), saved_tensors_hooks(lambda x: saved.append(x.detach()), lambda x: x):
                call(*others)
        return saved[number]

    with saved_tensors_hooks(lambda x: next(numbers), of_another_call):
        return call(*inputs)


def other_numbers(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs with -q in place of q and -v in place of v, by which out and lse are others."""
    changed = {name: negative(inputs[name]) for name in ("q", "v")}
    return {**inputs, **changed}


def negative(x: Tensor) -> Tensor:
    """Return -x, with strides of 0 where x has them, which requires grad if x does."""
    once = x.detach()[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]
    return (-once).expand(x.shape).requires_grad_(x.requires_grad)


def on_another_thread(call: Callable[[], Any], device: torch.device) -> Any:
    """Make a call on a thread of its own, and return what it returns, or raise its error.

    If the ``device`` of its tensors is no CPU, the current device of this thread is that of the other one too.
    """
    results: list[Any] = []
    errors: list[BaseException] = []
    number = None if device.type == "cpu" else torch.accelerator.current_device_index()

    def run() -> None:
        try:
            if number is not None:
                torch.accelerator.set_device_index(number)
            results.append(call())
            if number is not None:
                torch.accelerator.synchronize()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def differentiated(
    ends: Sequence[Tensor], leaves: Sequence[Tensor], gradients: Sequence[Tensor], *, again: bool = False
) -> Sequence[Tensor | None]:
    """Return the gradient of each leaf, None if no end depends on it; ``again`` if there is to be another backward.

    ``torch.autograd.grad`` returns them as the kernel makes them, while ``backward`` may copy them. Where a reentrant
    ``torch.utils.checkpoint`` is in the graph, only ``backward`` is allowed.
    """
    if not _is_checkpointed(ends[0]):
        return torch.autograd.grad(ends, leaves, gradients, retain_graph=again, allow_unused=True)
    for leaf in leaves:
        leaf.grad = None
    torch.autograd.backward(ends, gradients, retain_graph=again)
    return [leaf.grad for leaf in leaves]


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
