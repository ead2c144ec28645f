"""Lay keys and values out in pages, as a paged key-value cache holds them."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from strategies.case import OF_SEED
from strategies.layouts import Window, are_first_columns, changed_together, place, writable

MOST_SPARE = 3
"""The most pages that belong to no sequence."""


def page_size_of(sizes: Sequence[int], keys: int, chance: random.Random) -> int:
    """Return a random one of the claimed sizes of a page, for sequences of at most so many keys.

    Mostly it is smaller than the number of keys, as far as such a size is claimed, since a bug that takes one page for
    another needs two of a sequence.
    """
    several = [size for size in sizes if size < keys] or [min(sizes)]
    return chance.choice((min(sizes), chance.choice(sizes), chance.choice(several), chance.choice(several)))


def pool_layouts(claimed: Sequence[str]) -> list[str]:
    """Return those of the claimed layouts that a pool of different pages may have; ``huge`` is a last resort."""
    able = writable(claimed)
    return [layout for layout in able if layout != "huge"] or able


@dataclass(frozen=True, eq=False)
class Pages:
    """A pool of pages, and a table that says which of them each sequence has.

    Attributes:
        k, v: (pages, heads_kv, page_size, head_dim). v is the first columns of k if it is for those laid out.
        block_table: (batch, pages of a sequence) int32; its rows may lie apart.
        windows: k and v, by name, as windows in poisoned storage; v is left out if it is in the same window as k.
    """

    k: Tensor
    v: Tensor
    block_table: Tensor
    windows: Mapping[str, Window] = field(default_factory=dict)

    def of(self, sequence: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the first ``length`` keys and values of a sequence, (1, heads_kv, length, head_dim) each."""
        used = self.block_table[sequence, : -(-length // self.k.shape[2])].long()
        k, v = (x[used].transpose(0, 1).flatten(1, 2)[None, :, :length] for x in (self.k, self.v))
        return k, v

    def fill(self, sequence: int, keys: slice, value: float) -> None:
        """Overwrite keys and values of a sequence, which it shares with no other one."""
        numbers = torch.arange(keys.start, keys.stop, device=self.k.device)
        used = self.block_table[sequence, numbers // self.k.shape[2]].long()
        for x in (self.k, self.v):
            x[used, :, numbers % self.k.shape[2]] = value


def one_page_each(k: Tensor, v: Tensor) -> Pages:
    """Return a copy of the keys and values of each sequence as a page of its own: a cache that has no pages."""
    table = torch.arange(len(k), dtype=torch.int32, device=k.device)[:, None]
    return Pages(*changed_together(k, v, torch.clone, torch.clone), table)


def in_pages(
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    page_size: int,
    layouts: Sequence[str],
    chance: random.Random,
    own: int = 0,
    *,
    order: str = OF_SEED,
    pool: str = "apart",
) -> Pages:
    """Lay out the first ``lengths[b]`` keys and values of each sequence b in pages.

    k and v are (batch, heads_kv, seqlen_k, head_dim), of any dtype and on any device. Each pool has one of ``layouts``,
    and lies in memory as a value of the claim ``pools`` says. What no sequence has is NaN or 1, and entries of the
    table that are not used are -1, far too large, or a page of the pool. ``order`` is one of ``case.TABLES``. If pages
    are shared, two sequences have as many first pages together as both fill without their last ``own`` keys, so that
    ``Pages.of`` alone says which keys a sequence has. By ``OF_SEED``, half of the seeds have them shared.
    """
    counts = [-(-n // page_size) for n in lengths]
    columns = max(1, *counts) + chance.randint(0, 2)
    numbers = list(range(sum(counts) + chance.randint(1, MOST_SPARE)))
    if order == "in_order":
        numbers.reverse()  # the first page of the first sequence is taken from the end
    else:
        chance.shuffle(numbers)
    shape, anywhere = (len(k), columns + chance.choice((0, 2))), chance.choice(numbers)
    table = torch.full(shape, anywhere, dtype=torch.int32, device=k.device)[:, :columns]
    table.fill_(chance.choice((-1, 2**31 - 1, anywhere)))
    pages_of = {b: [numbers.pop() for _ in range(count)] for b, count in enumerate(counts)}
    for b, pages in pages_of.items():
        table[b, : len(pages)] = torch.tensor(pages, dtype=torch.int32, device=k.device)
    if len(lengths) > 1 and (order == "shared" or (order == OF_SEED and chance.random() < 0.5)):
        first, other = chance.sample(range(len(lengths)), 2)
        shared = max(0, min(lengths[first], lengths[other]) - own) // page_size
        table[other, :shared] = table[first, :shared]

    rest = chance.choice((math.nan, 1.0))
    if pool != "apart":
        rest = 1.0  # a page that is taken for another shows in the same way, whatever the seed

    def filled(x: Tensor) -> Tensor:
        pages_of_x = x.new_full((sum(counts) + len(numbers), x.shape[1], page_size, x.shape[3]), rest)
        for b, pages in pages_of.items():
            rows = x.new_full((x.shape[1], len(pages) * page_size, x.shape[3]), rest)
            rows[:, : lengths[b]] = x[b, :, : lengths[b]]
            pages_of_x[pages] = rows.unflatten(1, (len(pages), page_size)).transpose(0, 1)
        return pages_of_x

    def pool_of(x: Tensor) -> Tensor:
        own_pages = filled(x)
        if pool == "padded":
            own_pages = _alternating(own_pages, torch.ones_like(own_pages))
        window = place(own_pages, chance.choice(layouts), device=x.device)
        if pool == "padded":
            window = replace(window, tensor=window.tensor[::2])
        windows["v" if "k" in windows else "k"] = window
        return window.tensor

    windows: dict[str, Window] = {}
    if pool == "interleaved" and k.shape == v.shape and not are_first_columns(v, k):
        both = place(_alternating(filled(k), filled(v)), chance.choice(layouts), device=k.device)
        return Pages(both.tensor[::2], both.tensor[1::2], table, {"k": both})
    return Pages(*changed_together(k, v, pool_of, pool_of), table, windows)


def _alternating(x: Tensor, y: Tensor) -> Tensor:
    """Return the pages of two pools of one shape in turn."""
    return torch.stack((x, y), 1).flatten(0, 1)
