"""A plain call made as one of a kind of the claim ``ragged``, for kernels that answer no other calls.

Each sequence of the batch has all of the problem's queries and keys. The sequences are packed end to end, or their keys
lie in pages or in a cache. So every law that compares plain calls can be asked of such a kernel too.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kernels.contract import RAGGED_KEYWORDS, Capabilities
from strategies.layouts import Window, bits, changed_together, fitting, place
from strategies.pages import Pages, in_pages, page_size_of, pool_layouts
from tests.harness.trial.problem import Outputs, Problem

APPENDED = (
    "after the call the cache has the new rows behind the old ones, and is else as it was, but it differs"
)
"""What is claimed of the cache of a call that appends keys to it."""

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
        cache: for a call that appends keys, the k and v that it writes to, each with what they must hold afterwards.
        order: in which order the programs of Triton kernels run on the CPU, as in ``programs``.
    """

    problem: Problem
    launch: Mapping[str, Any]
    windows: Mapping[str, Window]
    packed: int = 0
    cache: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    order: str = ""

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
        pages = self._pages(p)
        tables = {"cache_seqlens": _lengths(p, p.k.shape[2]), "block_table": pages.block_table}
        given = {"q": windows["q"], "dout": windows["dout"], **pages.windows}
        return Prepared(replace(placed, k=pages.k, v=pages.v), tables, given)

    def _appended(self, p: Problem) -> Prepared:
        """Leave some of the last keys out of the cache, which the kernel is given as new ones."""
        keys, claimed = p.k.shape[2], self.claims.ragged
        first = keys - self.chance("new keys of all").randint(1, keys)
        last, windows_of_last = self._placed(p.with_both(lambda x: x[:, :, first:]))
        placed, windows = self._placed(p)
        in_a_pool = "paged" in claimed and ("cache" not in claimed or self.chance("in a pool").random() < 0.5)
        whole = Pages(placed.k, placed.v, torch.arange(len(p.k), device=p.k.device)[:, None])
        pages = self._pages(p) if in_a_pool else whole
        filled = {"k": (pages.k, pages.k.clone()), "v": (pages.v, pages.v.clone())}
        for b in range(len(p.k)):
            pages.fill(b, slice(first, keys), self.poison)
        table = {"block_table": pages.block_table} if in_a_pool else {}
        launch = {"cache_seqlens": _lengths(p, first), "k_new": last.k, "v_new": last.v, **table}
        given = {"q": windows["q"], "dout": windows["dout"]}
        given |= {f"{name}_new": x for name, x in windows_of_last.items() if name in ("k", "v")}
        return Prepared(replace(placed, k=pages.k, v=pages.v), launch, given, cache=filled)

    def _pages(self, p: Problem) -> Pages:
        """Return pools of pages of a claimed size and layout, which hold all keys and values."""
        keys, chance = p.k.shape[2], self.chance("pages of all keys")
        page_size = page_size_of(self.claims.page_sizes, keys, chance)
        layouts = pool_layouts(self.claims.layouts)
        return in_pages(p.k, p.v, [keys] * len(p.k), page_size, layouts, chance, may_share=False)

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


def wrong_in(cache: Mapping[str, tuple[Tensor, Tensor]]) -> str:
    """Say which tensors of a cache differ from what they must hold, bit for bit; "" if none does."""
    wrong = [name for name, pair in cache.items() if not torch.equal(*map(bits, pair))]
    return f"wrong in {' and '.join(wrong)}" if wrong else ""


def _lengths(p: Problem, length: int) -> Tensor:
    """Return the same length for each sequence of a problem."""
    return _int32([length] * len(p.q), p)


def _int32(numbers: list[int], p: Problem) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=p.q.device)


def apart(tensors: dict[str, Tensor], batch: int, lse_layout: str) -> dict[str, Tensor]:
    """Return tensors of equally long sequences, which lie end to end in one batch element, with one for each sequence.

    Rows are in the dimension 2; those of lse, if its layout is "bnh", in the dimension 1.
    """
    found = {}
    for name, x in tensors.items():
        axis = 1 if name == "lse" and lse_layout == "bnh" else 2
        rows = x.shape[axis] // batch
        found[name] = x.unflatten(axis, (batch, rows)).movedim(axis, 0).squeeze(1).contiguous()
    return found
