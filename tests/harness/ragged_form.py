"""A plain call made as one of a kind of the claim ``ragged``, for kernels that answer no other calls.

Each sequence of the batch has all of the problem's queries and keys. The sequences are packed end to end, or their keys
lie in pages or in a cache. So every law that compares plain calls can be asked of such a kernel too.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.contract import RAGGED_KEYWORDS, Capabilities
from strategies.layouts import Window, changed_together, fitting, place
from strategies.pages import in_pages, page_size_of, pool_layouts
from tests.harness.problem import Outputs, Problem
from tests.harness.scripted import apart

KEYWORDS = frozenset(name for names in RAGGED_KEYWORDS.values() for name in names)
"""The keywords of all kinds of calls with sequences of different lengths."""


@dataclass(frozen=True)
class Prepared:
    """A call as a kernel is given it.

    Attributes:
        problem: its tensors and options.
        launch: launch settings, and keywords that say which call it is.
        windows: its inputs by name, each a window in poisoned storage.
        packed: the number of sequences that lie end to end in one batch element; 0 if none do.
    """

    problem: Problem
    launch: Mapping[str, Any]
    windows: Mapping[str, Window]
    packed: int = 0

    @property
    def has_gradients(self) -> bool:
        """Whether gradients may be asked for: those of a cache never are."""
        return "cache_seqlens" not in self.launch

    def of_sequences(self, outputs: Outputs, lse_layout: str) -> Outputs:
        """Return what the call returned with a batch element for each sequence, as a plain call has them."""
        if not self.packed:
            return outputs
        tensors: dict[str, Any] = apart(outputs.named(), self.packed, lse_layout)
        return replace(outputs, **tensors)


@dataclass(frozen=True)
class RaggedForm:
    """Makes plain calls of a kernel in one kind of ``ragged``.

    Attributes:
        kind: the kind.
        claims: the kernel's claims.
        layouts: the claimed layout that each of q, k, v and dout shall have, if it can hold the numbers.
        chance: a function from words for a choice to what makes it.
        poison: what fills the memory around the inputs.
    """

    kind: str
    claims: Capabilities
    layouts: Mapping[str, str]
    chance: Callable[[str], random.Random]
    poison: float

    def prepare(self, p: Problem, launch: Mapping[str, Any]) -> Prepared:
        """Return the call by which the kernel is given a problem."""
        made: dict[str, Callable[[Problem], Prepared]] = {
            "packed": self._packed,
            "document": self._documents,
            "cache": self._cached,
            "paged": self._paged,
            "append": self._appended,
        }
        prepared = made[self.kind](p)
        return replace(prepared, launch={**launch, **prepared.launch})

    def _packed(self, p: Problem) -> Prepared:
        batch, rows, keys, mask = len(p.q), p.q.shape[2], p.k.shape[2], p.key_padding_mask
        placed, windows = self._placed(p, lambda x: x.transpose(0, 1).flatten(1, 2)[None])
        lengths = {
            "cu_seqlens_q": _int32([rows * b for b in range(batch + 1)], p),
            "cu_seqlens_k": _int32([keys * b for b in range(batch + 1)], p),
            "max_seqlen_q": rows,
            "max_seqlen_k": keys,
        }
        problem = replace(placed, key_padding_mask=None if mask is None else mask.reshape(1, -1))
        return Prepared(problem, lengths, windows, packed=batch)

    def _documents(self, p: Problem) -> Prepared:
        placed, windows = self._placed(p)
        ids = torch.zeros(len(p.q), p.q.shape[2], dtype=torch.int32, device=p.q.device)
        return Prepared(placed, {"document_ids": ids}, windows)

    def _cached(self, p: Problem) -> Prepared:
        placed, windows = self._placed(p)
        return Prepared(placed, {"cache_seqlens": _lengths(p, p.k.shape[2])}, windows)

    def _paged(self, p: Problem) -> Prepared:
        placed, windows = self._placed(p)
        return self._in_pages(placed, windows, p.k.shape[2])

    def _in_pages(self, p: Problem, windows: Mapping[str, Window], length: int) -> Prepared:
        """Return a call whose keys lie in pages, ``length`` of them in those that the kernel is told of."""
        keys, chance = p.k.shape[2], self.chance("pages of all keys")
        page_size = page_size_of(self.claims.page_sizes, keys, chance)
        layouts = pool_layouts(self.claims.layouts)
        pages = in_pages(p.k, p.v, [keys] * len(p.k), page_size, layouts, chance, may_share=False)
        tables = {"cache_seqlens": _lengths(p, length), "block_table": pages.block_table}
        in_pools = {name: x for name, x in windows.items() if name in ("q", "dout")} | {**pages.windows}
        return Prepared(replace(p, k=pages.k, v=pages.v), tables, in_pools)

    def _appended(self, p: Problem) -> Prepared:
        """Leave some of the last keys out of the cache, which the kernel is given as new ones."""
        keys, claimed = p.k.shape[2], self.claims.ragged
        new = self.chance("new keys of all").randint(1, keys)
        of_new, given = self._placed(p.with_both(lambda x: x[:, :, keys - new :]))
        in_a_pool = "paged" in claimed and ("cache" not in claimed or self.chance("in a pool").random() < 0.5)
        whole, windows = self._placed(p)
        cache = self._in_pages(whole, windows, keys - new) if in_a_pool else self._cached(whole)
        appended = {"cache_seqlens": _lengths(p, keys - new), "k_new": of_new.k, "v_new": of_new.v}
        read_only = {"q": windows["q"], "dout": windows["dout"], "k_new": given["k"], "v_new": given.get("v")}
        return replace(
            cache,
            launch={**cache.launch, **appended},
            windows={name: x for name, x in read_only.items() if x is not None},
        )

    def _placed(
        self, p: Problem, change: Callable[[Tensor], Tensor] = lambda x: x
    ) -> tuple[Problem, dict[str, Window]]:
        """Return a problem with its tensors changed and placed in claimed layouts, and the windows that they are."""
        windows: dict[str, Window] = {}

        def placed(name: str, x: Tensor) -> Tensor:
            changed = change(x)
            layout = fitting(changed, self.claims.layouts, self.layouts[name])
            assert layout is not None  # without dense calls, a layout is claimed that can hold any numbers
            windows[name] = place(changed, layout, margin_value=self.poison, device=x.device)
            return windows[name].tensor

        k, v = changed_together(p.k, p.v, lambda k: placed("k", k), lambda v: placed("v", v))
        return replace(p, q=placed("q", p.q), k=k, v=v, dout=placed("dout", p.dout)), windows


def _lengths(p: Problem, length: int) -> Tensor:
    """Return the same length for each sequence of a problem."""
    return _int32([length] * len(p.q), p)


def _int32(numbers: list[int], p: Problem) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=p.q.device)
