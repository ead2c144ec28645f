"""A cache in pages holds the keys of each sequence, and what no sequence has can be told from them."""

import random

import pytest
import torch

from strategies.case import Case
from strategies.layouts import are_first_columns
from strategies.pages import Pages, in_pages, one_page_each

LENGTHS = (0, 17, 32, 40)
PAGE_SIZE = 16
SEEDS = range(20)
CASE = Case(batch=3, heads_kv=2, seqlen_q=20, seqlen_k=70, dtype="float16")


def drawn(seed: int) -> tuple[torch.Tensor, Pages]:
    """Return keys of random numbers, and them in pages, with values that are their opposites."""
    k = torch.randn(len(LENGTHS), 2, max(LENGTHS), 4, generator=torch.Generator().manual_seed(seed))
    return k, in_pages(k, -k, LENGTHS, PAGE_SIZE, ["contiguous", "bnhd"], random.Random(seed))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sequence_has_its_keys_but_for_first_pages_that_it_shares(seed: int) -> None:
    given, pages = drawn(seed)
    for b, length in enumerate(LENGTHS):
        k, v = pages.of(b, length)
        assert k.shape == (1, 2, length, 4)
        assert torch.equal(v, -k)
        own = [torch.equal(k[0, :, at], given[b, :, at]) for at in range(length)]
        shared = own.index(True) if True in own else length
        assert all(own[shared:])
        assert shared % PAGE_SIZE == 0


def test_tables_vary_in_what_a_kernel_may_take_for_granted() -> None:
    pools = [drawn(seed)[1] for seed in SEEDS]
    counts = [-(-length // PAGE_SIZE) for length in LENGTHS]
    tables = [pages.block_table for pages in pools]
    unused = [[int(x) for row, count in zip(t, counts, strict=True) for x in row[count:]] for t in tables]
    assert {-1, 2**31 - 1} < {x for entries in unused for x in entries}
    assert {t.is_contiguous() for t in tables} == {True, False}
    assert {t.shape[1] - max(counts) for t in tables} == {0, 1, 2}
    assert {len({int(t[1, 0]), int(t[2, 0]), int(t[3, 0])}) for t in tables} == {2, 3}
    assert {bool(pages.k.isnan().any()) for pages in pools} == {True, False}
    assert all(len(pages.k) > sum(counts) for pages in pools)


def test_values_that_are_the_first_columns_of_keys_are_so_in_pages() -> None:
    k = torch.randn(len(LENGTHS), 2, max(LENGTHS), 4, generator=torch.Generator().manual_seed(1))
    v = k[..., :3]
    for pages in (
        one_page_each(k, v),
        *(in_pages(k, v, LENGTHS, PAGE_SIZE, ["contiguous", "bnhd"], random.Random(seed)) for seed in SEEDS),
    ):
        assert are_first_columns(pages.v, pages.k)
        assert pages.v.shape == (*pages.k.shape[:3], 3)
    assert not are_first_columns(*(getattr(one_page_each(k, v.clone()), name) for name in "vk"))


@pytest.mark.parametrize("layout", ["contiguous", "bnhd"])
@pytest.mark.parametrize("pool", ["apart", "interleaved", "padded"])
@pytest.mark.parametrize("order", ["in_order", "shuffled", "shared"])
def test_pools_hold_the_same_keys_however_they_lie(pool: str, order: str, layout: str) -> None:
    k = torch.randn(len(LENGTHS), 2, max(LENGTHS), 4, generator=torch.Generator().manual_seed(1))
    pages = in_pages(k, -k, LENGTHS, PAGE_SIZE, [layout], random.Random(1), order=order, pool=pool)
    for b, length in enumerate(LENGTHS):
        of_k, of_v = pages.of(b, length)
        assert torch.equal(of_v, -of_k)
        assert order == "shared" or torch.equal(of_k, k[b : b + 1, :, :length])
    size = PAGE_SIZE * 2 * 4
    assert pages.k.stride(0) == pages.v.stride(0) == (size if pool == "apart" else 2 * size)
    apart = pages.v.data_ptr() - pages.k.data_ptr()
    assert (apart == size * k.element_size()) == (pool == "interleaved")
    assert set(pages.windows) == ({"k"} if pool == "interleaved" else {"k", "v"})
    numbers = [
        int(x) for row, n in zip(pages.block_table, LENGTHS, strict=True) for x in row[: -(-n // PAGE_SIZE)]
    ]
    assert (numbers == [*range(len(numbers))]) == (order == "in_order")
    assert (len({*numbers}) < len(numbers)) == (order == "shared")


def test_what_lies_around_an_interleaved_pool_can_be_changed_and_its_keys_stay() -> None:
    k = torch.randn(len(LENGTHS), 2, max(LENGTHS), 4, generator=torch.Generator().manual_seed(1))
    pages = in_pages(
        k, -k, LENGTHS, PAGE_SIZE, ["bnhd"], random.Random(1), order="shuffled", pool="interleaved"
    )
    kept = [x.clone() for x in (pages.k, pages.v)]
    for window in pages.windows.values():
        window.refill(7.0)
    same = [torch.allclose(x, y, equal_nan=True) for x, y in zip(kept, (pages.k, pages.v), strict=True)]
    assert same == [True, True]
