"""A plain call made as one of a kind of the claim ``ragged``, for cases of such a kind.

Each sequence of the batch has all of the problem's queries and keys. The sequences are packed end to end, or their keys
lie in pages or in a cache. So laws that compare plain calls can be asked of kernels that answer no other calls, and of
the other calls of those that do.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kernels.contract import LAYOUTS, RAGGED_KEYWORDS, Capabilities
from strategies.case import OF_SEED, TENSORS, Case
from strategies.layouts import Window, bits, changed_together, fitting, place, writable
from strategies.pages import Pages, in_pages, page_size_of, pool_layouts
from strategies.ways import WAYS
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
        may_fail: whether it is no call that a kernel has to answer, so that an exception tells nothing.
        order: in which order the programs of Triton kernels run on the CPU, as in ``programs``.
        place: where on a GPU it is made, as in ``streams``; "" if it is a plain call.
        way: the way in which it is made, of ``strategies.ways``; none for the plain one.
    """

    problem: Problem
    launch: Mapping[str, Any]
    windows: Mapping[str, Window]
    packed: int = 0
    cache: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    may_fail: bool = False
    order: str = ""
    place: str = ""
    way: str = "none"

    @property
    def has_gradients(self) -> bool:
        """Whether gradients may be asked for: those of a cache never are."""
        return "cache_seqlens" not in self.launch

    @property
    def may_be_refused(self) -> bool:
        """Whether an error means no more than that the call is refused in its way."""
        return self.way in WAYS and WAYS[self.way].may_be_refused

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
        case: the case, which says the kind, the size and the order of pages, and the claimed layout that each of q, k,
            v and dout shall have, if it can hold the numbers.
        claims: the kernel's claims.
        chance: a function from words for a choice to what makes it.
        poison: what fills the memory around the inputs.
    """

    case: Case
    claims: Capabilities
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
            "packed_paged": self._packed_over_pages,
        }
        prepared = made[self.case.ragged](p)
        return replace(prepared, launch={**launch, **prepared.launch})

    def _packed(self, p: Problem) -> Prepared:
        batch, rows, keys = len(p.q), p.q.shape[2], p.k.shape[2]
        problem, windows = self._placed(end_to_end(p, [(rows, keys)] * batch))
        lengths = {
            "cu_seqlens_q": _int32([rows * b for b in range(batch + 1)], p),
            "cu_seqlens_k": _int32([keys * b for b in range(batch + 1)], p),
            "max_seqlen_q": rows,
            "max_seqlen_k": keys,
        }
        return Prepared(problem, lengths, windows, packed=batch)

    def _packed_over_pages(self, p: Problem) -> Prepared:
        batch, rows, pages = len(p.q), p.q.shape[2], self._pages(p)
        placed, windows = self._placed(end_to_end(p, [(rows, 0)] * batch))
        lengths = {
            "cu_seqlens_q": _int32([rows * b for b in range(batch + 1)], p),
            "max_seqlen_q": rows,
            "cache_seqlens": _lengths(p, p.k.shape[2]),
            "block_table": pages.block_table,
        }
        given = {"q": windows["q"], "dout": windows["dout"], **pages.windows}
        return Prepared(replace(placed, k=pages.k, v=pages.v), lengths, given, packed=batch)

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
        placed, windows = self._placed(p, is_written=True)
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
        if self.case.block_table == OF_SEED:
            page_size = page_size_of(self.claims.page_sizes, keys, chance)
        else:
            page_size = self.case.page_size or min(self.claims.page_sizes)
        # Sequences that share pages would have the same keys.
        order = "in_order" if self.case.block_table == "in_order" else "shuffled"
        layouts, lengths = pool_layouts(self.claims.layouts) or LAYOUTS[:1], [keys] * len(p.k)
        return in_pages(p.k, p.v, lengths, page_size, layouts, chance, order=order, pool=self.case.pool)

    def _placed(self, p: Problem, *, is_written: bool = False) -> tuple[Problem, dict[str, Window]]:
        return placed(p, self.case, self.claims, self.poison, is_written=is_written)


def placed(
    p: Problem, case: Case, claims: Capabilities, poison: float = math.nan, *, is_written: bool = False
) -> tuple[Problem, dict[str, Window]]:
    """Return a problem with its tensors placed in the layouts of a case, and the windows that they are.

    A tensor whose numbers its layout cannot hold is placed in another one that is claimed, or in the first of all. If
    the kernel writes to k and v, ``is_written``, no two of their entries share memory.
    """
    windows: dict[str, Window] = {}
    preferred = dict(zip(TENSORS, case.layouts, strict=True))

    def one(name: str, x: Tensor) -> Tensor:
        able = writable(claims.layouts) if is_written and name in ("k", "v") else claims.layouts
        layout = fitting(x, able, preferred[name]) or LAYOUTS[0]
        windows[name] = place(x, layout, margin_value=poison, device=x.device)
        return windows[name].tensor

    k, v = changed_together(p.k, p.v, lambda k: one("k", k), lambda v: one("v", v))
    return replace(p, q=one("q", p.q), k=k, v=v, dout=one("dout", p.dout)), windows


def end_to_end(p: Problem, lengths: Sequence[tuple[int, int]], behind: int = 0) -> Problem:
    """Return a problem of one batch element, in which sequences lie end to end.

    Sequence b has the first ``lengths[b]`` queries and keys of batch element b. ``behind`` more rows of each tensor
    follow the last sequence. They are ones, and those of dout are zeros, since no loss depends on their results.
    """

    def of_each(x: Tensor, counts: Sequence[int], rest: float = 1.0) -> Tensor:
        rows = [x[b, :, :n] for b, n in enumerate(counts)]
        return torch.cat([*rows, x.new_full((x.shape[1], behind, x.shape[3]), rest)], 1)[None]

    rows, keys = ([pair[i] for pair in lengths] for i in (0, 1))
    k, v = changed_together(p.k, p.v, lambda x: of_each(x, keys), lambda x: of_each(x, keys))
    mask = p.key_padding_mask
    if mask is not None:
        seen = [mask[b, :n] for b, n in enumerate(keys)]
        mask = torch.cat([*seen, mask.new_ones(behind)])[None]
    return replace(p, q=of_each(p.q, rows), k=k, v=v, dout=of_each(p.dout, rows, 0.0), key_padding_mask=mask)


def only_sequence(p: Problem, launch: Mapping[str, Any], b: int) -> tuple[Problem, dict[str, Any]]:
    """Return a call, its problem and its keywords, with one of its sequences and none beside it.

    The other keywords are as in the whole call, as the longest lengths are. A cache is as large as it was.
    """
    only = dict(launch)

    def part(name: str) -> slice:
        start, end = launch[name][b : b + 2].tolist()
        only[name] = launch[name].new_tensor([0, end - start])
        return slice(start, end)

    if "cu_seqlens_q" in launch:
        p = p.with_rows(part("cu_seqlens_q"))
        p = p.with_keys(part("cu_seqlens_k")) if "cu_seqlens_k" in launch else p
    elif "block_table" in launch:
        p = replace(p, q=p.q[b : b + 1], dout=p.dout[b : b + 1])
    else:
        p = p.with_batch(slice(b, b + 1))
    only |= {name: launch[name][b : b + 1] for name in ("cache_seqlens", "block_table") if name in launch}
    return p, only


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
