"""What is compiled: each kernel's declared launch settings, dtypes and head dimensions, for each target."""

import importlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from triton.runtime import KernelInterface

from kernels import registry
from kernels.contract import Capabilities
from tests.compile.targets import TARGETS

HEAD_DIMS = (64, 96, 128, 256)
"""Widths of tiles that are not small, and one (96) that is padded. Kernels compile those of them that they claim."""


@dataclass(frozen=True)
class Item:
    """One call of a kernel, forward and backward, on one target. An empty ``launch`` means the default settings.

    ``aligned``: rows start at multiples of 16 bytes. ``masked``: the call has all that is claimed of key padding,
    dropout, windows, chunks and what changes scores.
    """

    kernel: str
    target: str
    dtype: str
    head_dim: int
    causal: bool
    aligned: bool
    launch: tuple[tuple[str, Any], ...] = ()
    masked: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """The words for this item by which ``tests.compile.limits`` has entries."""
        return (
            self.target,
            self.dtype,
            f"head_dim={self.head_dim}",
            "causal" if self.causal else "full",
            "aligned" if self.aligned else "unaligned",
            *(["masked"] if self.masked else []),
            *([f"{name}={value}" for name, value in self.launch] or ["default"]),
        )

    def __str__(self) -> str:
        return "-".join((self.kernel, *self.words))


def launches_triton(spec: str) -> bool:
    """Whether the kernel's module, or one of our modules from which it imports, has a jitted function."""
    module = registry.module_of(spec)
    origins = {getattr(value, "__module__", None) for value in vars(module).values()} | {
        value.__name__ for value in vars(module).values() if isinstance(value, ModuleType)
    }
    ours = [importlib.import_module(name) for name in origins if name and name.startswith("kernels.")]
    return any(isinstance(value, KernelInterface) for m in (module, *ours) for value in vars(m).values())


def items(kernel: str, capabilities: Capabilities, *, every: bool) -> list[Item]:
    """List items with the default settings, then with the declared ones: all combinations, or enough for all pairs."""
    axes: dict[str, Sequence[Any]] = {
        "target": tuple(TARGETS),
        "dtype": capabilities.dtypes,
        "head_dim": [n for n in HEAD_DIMS if n in capabilities.head_dims] or capabilities.head_dims[-1:],
        "causal": capabilities.causal[::-1],
        "aligned": (True, False) if set(capabilities.layouts) - {"contiguous"} else (True,),
        "masked": (False, True)
        if capabilities.key_padding or any((*capabilities.dropout, *capabilities.window))
        else (False,),
    }
    both = {**axes, **capabilities.launch}
    chosen = [Item(kernel, **fields) for fields in (_product(axes) if every else pairs(axes, axes))]
    for fields in (
        (_product(both) if every else pairs(both, capabilities.launch)) if capabilities.launch else ()
    ):
        launch = tuple((name, fields.pop(name)) for name in capabilities.launch)
        chosen.append(Item(kernel, launch=launch, **fields))
    return chosen


def _product(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def pairs(axes: Mapping[str, Sequence[Any]], new: Collection[str]) -> list[dict[str, Any]]:
    """Return rows with one value of each axis, such that all pairs of values of two axes, one of them new, occur.

    Each row starts with a pair that is still missing; each further axis takes the value that adds the most such pairs.
    """
    missing = {
        frozenset([(a, i), (b, j)]): None  # in an order, unlike a set
        for a, b in itertools.combinations(axes, 2)
        if a in new or b in new
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for name in axes:
            if name not in row:
                row[name] = max(
                    range(len(axes[name])),
                    key=lambda i: sum(frozenset([(name, i), x]) in missing for x in row.items()),
                )
        for two in itertools.combinations(row.items(), 2):
            missing.pop(frozenset(two), None)
        rows.append({name: axes[name][row[name]] for name in axes})
    return rows
