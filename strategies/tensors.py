"""Build the tensors that a case describes."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.contract import BIASES, DTYPES, LAYOUTS
from reference.score_rule import PLAIN, ScoreRule
from strategies.case import NONFINITE, TENSORS, Case, Spike
from strategies.earlier import KINDS
from strategies.layouts import Window, place
from strategies.padding import FAMILIES as PADDINGS
from strategies.padding import is_spoiled, key_padding_mask
from strategies.score_rules import score_rule
from strategies.values import FAMILIES, fill

MOST_DRAWN = 2**27
"""Of a tensor of more elements than this, some rows are drawn, and repeated, as to draw all takes many seconds."""
REPEATED_ROWS = 4093
"""So many rows: a prime number, so that no row is like those a power of two before it."""
MOST_ELEMENTS = 2**32
"""The most elements that a tensor may have in a case that is read from a file."""


@dataclass(frozen=True, eq=False)
class Tensors:
    """Inputs of forward and backward, each a window in poisoned storage, the key padding mask, and the score rule."""

    q: Window
    k: Window
    v: Window
    dout: Window
    key_padding_mask: Tensor | None = None
    rule: ScoreRule = PLAIN

    @property
    def own(self) -> dict[str, Window]:
        """The tensors that have a storage of their own, by name: v has none if it is the first columns of k."""
        names = (name for name in TENSORS if name != "v" or self.v.storage is not self.k.storage)
        return {name: getattr(self, name) for name in names}


def check_case(case: Case) -> None:
    """Raise ValueError, naming the field, for a case read from a file of which no tensors can be made."""
    names = {
        "dtype": DTYPES,
        "key_padding": ("none", *PADDINGS),
        "bias": ("none", *BIASES),
        **{f"{tensor}_layout": LAYOUTS for tensor in TENSORS},
        **{f"{tensor}_values": FAMILIES for tensor in TENSORS},
    }
    for name, known in names.items():
        if getattr(case, name) not in known:
            raise ValueError(f"case.{name}: got {getattr(case, name)!r}, expected one of {', '.join(known)}")
    for kind in case.earlier:
        if kind not in KINDS:
            raise ValueError(f"case.earlier: got {kind!r}, expected one of {', '.join(KINDS)}")
    for spike in case.spikes:
        if spike.tensor not in TENSORS:
            raise ValueError(f"case.spikes: got {spike!r}, expected a tensor of {', '.join(TENSORS)}")
    if case.seed >= 2**32:  # Seeds that are drawn are below this too; that of dropout has twice their bits.
        raise ValueError(f"case.seed: got {case.seed}, expected a number below 2^32")
    for tensor in TENSORS:
        if math.prod(case.shape(tensor)) > MOST_ELEMENTS:
            shape = f"{tensor} of shape {case.shape(tensor)}"
            raise ValueError(f"case: got {shape}, expected at most {MOST_ELEMENTS} elements")


def tensors(
    case: Case, device: torch.device | str, margin: float = float("nan"), *, around: bool = True
) -> Tensors:
    """Build the tensors: each of its shape in the case (``Case.shape``).

    The same case gives the same bits on every device. ``margin`` is the poison that fills the storage around the
    tensors or, if not ``around``, what lies between their entries alone: see ``layouts.place``. Raises ValueError for
    an unknown dtype, family, layout or padding, or a spike of an unknown tensor or value.
    """
    if case.dtype not in DTYPES:
        raise ValueError(f"dtype: got {case.dtype!r}, expected one of {DTYPES}")
    mask = key_padding_mask(case)
    mask = None if mask is None else mask.to(device)
    own = {
        name: _window(case, name, device, margin, around)
        for name in TENSORS
        if name != "v" or not case.v_is_of_k
    }
    windows = Tensors(
        **{"v": _first_columns(own["k"], case), **own},
        key_padding_mask=mask,
        rule=score_rule(case, device),
    )
    for spike in case.spikes:
        _set(spike, windows)
    if mask is not None and is_spoiled(case):
        for x in (windows.k.tensor, windows.v.tensor):
            if 0 not in x.stride():  # Otherwise masked keys share memory with others.
                x.masked_fill_(~mask[:, None, :, None], float("nan"))
    return windows


def _window(case: Case, name: str, device: torch.device | str, margin: float, around: bool) -> Window:
    # Each tensor has a generator of its own, so that changing one leaves the others as they were.
    generator = torch.Generator().manual_seed(len(TENSORS) * case.seed + TENSORS.index(name))
    dtype, shape = getattr(torch, case.dtype), case.shape(name)
    batch, heads, length, head_dim = shape
    drawn = length if math.prod(shape) <= MOST_DRAWN else min(length, REPEATED_ROWS)
    data = fill(getattr(case, f"{name}_values"), (batch, heads, drawn, head_dim), dtype, generator)
    if drawn < length:
        data = data.repeat(1, 1, -(-length // drawn), 1)[:, :, :length]
    return place(data, getattr(case, f"{name}_layout"), margin_value=margin, device=device, around=around)


def _first_columns(k: Window, case: Case) -> Window:
    """Return the window of a v that is the first columns of k."""
    return replace(k, tensor=k.tensor[..., : case.shape("v")[3]])


def _set(spike: Spike, windows: Tensors) -> None:
    if spike.tensor not in TENSORS:
        raise ValueError(f"spike.tensor: got {spike.tensor!r}, expected one of {TENSORS}")
    if isinstance(spike.value, str) and spike.value not in NONFINITE:
        raise ValueError(f"spike.value: got {spike.value!r}, expected a number or one of {NONFINITE}")
    tensor = getattr(windows, spike.tensor).tensor
    if tensor.numel() == 0:
        return
    maximum = torch.finfo(tensor.dtype).max
    value = float(spike.value) if isinstance(spike.value, str) else max(-maximum, min(spike.value, maximum))
    index = tuple(i % size for i, size in zip(spike.index, tensor.shape, strict=True))
    tensor[index] = value
