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
"""Widths of a tile that are not small, and one that is padded to one. Of these, those that a kernel claims."""


@dataclass(frozen=True)
class Item:
    """One call of a kernel, forward and backward, on one target. Without ``launch`` settings are the default.

    ``aligned``: rows start at multiples of 16 bytes. ``masked``: with all of key padding and dropout that is claimed.
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
        """What a kernel's file tells it by: see ``declared``."""
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
    """Whether the kernel's module, or one of ours that it takes something from, has a jitted function."""
    module = registry.module_of(spec)
    origins = {getattr(value, "__module__", None) for value in vars(module).values()} | {
        value.__name__ for value in vars(module).values() if isinstance(value, ModuleType)
    }
    ours = [importlib.import_module(name) for name in origins if name and name.startswith("kernels.")]
    return any(isinstance(value, KernelInterface) for m in (module, *ours) for value in vars(m).values())


def items(kernel: str, capabilities: Capabilities, *, every: bool) -> list[Item]:
    """The default settings, then the declared ones: every combination, or so many that every pair is there."""
    axes: dict[str, Sequence[Any]] = {
        "target": tuple(TARGETS),
        "dtype": capabilities.dtypes,
        "head_dim": [n for n in HEAD_DIMS if n in capabilities.head_dims] or capabilities.head_dims[-1:],
        "causal": capabilities.causal[::-1],
        "aligned": (True, False) if set(capabilities.layouts) - {"contiguous"} else (True,),
        "masked": (False, True) if capabilities.key_padding or any(capabilities.dropout) else (False,),
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
    """Rows with a value of each axis, so that every two values of two axes, one of them new, meet in one.

    Each row starts with a pair that is missing, and takes, axis by axis, what adds the most of those missing.
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


def declared(table: Mapping[str, Any], words: Sequence[str]) -> Any:
    """What a kernel's file says of an item: the value of the first key whose words are all among ``words``.

    None where no key is.
    """
    return next((value for key, value in table.items() if set(key.split()) <= set(words)), None)
