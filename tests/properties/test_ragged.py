"""Ragged: if sequences of different lengths are in one call, each is answered as if it were alone.

The case says which kind of call is made. The kernel takes a cache of which each sequence fills a part, one in pages,
one to which it is to append new keys, sequences packed end to end, or documents that each batch element is made of;
what is in a cache may be 8-bit numbers with scales. Out, lse and the gradients of each sequence are within the bound of
float64. Lengths are 0, 1, close to whole tiles or pages, random, or the full length. Catches lengths, offsets, pages,
scales or numbers of another sequence, rows and keys of the neighbour, a causal corner or a window that is that of the
longest, empty sequences, what lies in a cache behind its last key, and new keys that are written elsewhere or not seen.
Calls that append keys may have the kernel rotate them and the queries.

Patterns of masks, soft-caps, ALiBi and sinks are drawn with it, and each sequence has them as if it were alone: the
diagonal of its query i is ``i + seqlen_k - seqlen_q`` by its own lengths. Key padding masks are drawn too, but for keys
in pages and new keys. Biases are not passed.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.contract import LAYOUTS
from reference.bounds.exact import largest
from reference.masks import blank
from strategies.case import DEFAULT_BLOCK
from strategies.eight_bits import quantised
from strategies.pages import Pages, in_pages, one_page_each, page_size_of, pool_layouts
from strategies.rotary import Rotation, drawn, rows_from
from tests.harness.law import law
from tests.harness.trial.judge import judge, judge_plain_call
from tests.harness.trial.problem import Outputs, Problem
from tests.harness.trial.ragged_form import APPENDED, wrong_in
from tests.harness.trial.relate import claimed_length, in_claimed_layouts
from tests.harness.trial.trial import Trial

MOST_SEQUENCES = 4
"""The most sequences that the rows of a packed case, or of a batch element made of documents, are cut into."""

LARGE = 2.0**15
"""Products that are smaller than this are finite in any dtype."""


@law(
    needs="ragged",
    on_device=True,
    key_padding=True,
    variants=True,
    calls=("ragged", "fp8_cache", "rotary"),
    place=10,
    stands_alone=True,
    sets=("lengths",),
)
def ragged(trial: Trial) -> None:
    """Judge each sequence of a call of the kind that the case has; its seed decides their lengths.

    A case of no kind has the call that the basic laws make, which tells whether a failure is a matter of the kind.
    """
    p = replace(trial.problem, rule=replace(trial.problem.rule, bias=None))
    calls = {
        "none": judge_plain_call,
        "cache": filled_in_part,
        "packed": end_to_end,
        "paged": from_a_pool,
        "append": appended,
        "document": documents,
    }
    calls[trial.case.ragged](trial, p)


def filled_in_part(trial: Trial, p: Problem) -> None:
    """Give each sequence of the batch a random number of keys, in half of the cases with NaN behind the last one."""
    lengths = some_lengths(trial, tile_of(trial, "block_n"), p)
    if trial.chance("behind").random() < 0.5:
        p = p.with_both(torch.clone)
        for b, n in enumerate(lengths):
            p.k[b, :, n:] = p.v[b, :, n:] = math.nan
    eight, p, scales = in_8_bits(trial, p)
    if (given := in_claimed_layouts(trial, eight)) is None:
        return
    trial = trial.with_launch({**trial.launch, "cache_seqlens": int32(lengths, p.q.device), **scales})
    outputs = trial.forward(given)
    each_alone(
        trial, outputs, [p.with_batch(slice(b, b + 1)).with_keys(slice(n)) for b, n in enumerate(lengths)]
    )


def from_a_pool(trial: Trial, p: Problem) -> None:
    """Give each sequence of the batch a random number of keys, in pages of a size that is claimed."""
    p = with_every_key_seen(p)
    lengths, pages = pool(trial, p)
    eight, p, scales = in_8_bits(trial, replace(p, k=pages.k, v=pages.v))
    if (given := in_claimed_layouts(trial, eight)) is None:
        return
    tensors = {"cache_seqlens": int32(lengths, p.q.device), "block_table": pages.block_table}
    trial = trial.with_launch({**trial.launch, **tensors, **scales})
    outputs = trial.forward(given)
    each_alone(trial, outputs, in_cache(p, replace(pages, k=p.k, v=p.v), lengths))


def in_8_bits(trial: Trial, p: Problem) -> tuple[Problem, Problem, dict[str, Tensor]]:
    """Return a call, what its keys and values stand for, and scales, of 8 bits if the case has a cache of these.

    Products with 8-bit numbers overflow more easily than with those they stand for, so there are none of huge numbers.
    """
    if trial.case.fp8_cache == "none" or 0 in p.k.shape or trial.case.may_overflow:
        return p, p, {}
    of_pages, chance = trial.case.fp8_cache == "page", trial.chance("scales")
    k_8, k_scale, k = quantised(p.k, chance, of_pages=of_pages)
    if p.v_in_k:
        v_8, v_scale, v = k_8[..., : p.v.shape[3]], k_scale, k[..., : p.v.shape[3]]
    else:
        v_8, v_scale, v = quantised(p.v, chance, of_pages=of_pages)
    return replace(p, k=k_8, v=v_8), replace(p, k=k, v=v), {"k_scale": k_scale, "v_scale": v_scale}


def appended(trial: Trial, p: Problem) -> None:
    """Have the kernel append the same number of new keys to each sequence, in place of NaN or ones.

    The cache is in pages or not, as far as that is claimed. Afterwards it must hold the new keys, rotated if the call
    has them rotated, and everything else as it was. That is judged first, since results follow from it.
    """
    p, claimed = with_every_key_seen(p), trial.kernel.capabilities.ragged
    most = p.k.shape[2]
    if not most:
        return
    chance = trial.chance("new keys")
    new = chance.choice((1, min(most, max(1, p.q.shape[2])), chance.randint(1, most)))
    in_a_pool = "paged" in claimed and ("cache" not in claimed or trial.chance("in a pool").random() < 0.5)
    if in_a_pool:
        lengths, pages = pool(trial, p, new)
    else:
        pages = one_page_each(p.k, p.v)
        lengths = some_lengths(trial, tile_of(trial, "block_n"), p, new)
    if (cache := in_claimed_layouts(trial, replace(p, k=pages.k, v=pages.v))) is None:
        return
    pages = replace(pages, k=cache.k, v=cache.v)
    rotates = trial.case.rotary != "none" and p.q.shape[3] > 1
    if rotates and trial.alignment == "bottom_right":  # so that no query has a negative position
        p = p.with_rows(slice(min(lengths)))
    sequences, whole = in_cache(p, pages, lengths), (pages.k.clone(), pages.v.clone())
    last = [slice(n - new, n) for n in lengths]
    k_new, v_new = (
        torch.cat([getattr(alone, name)[:, :, keys] for alone, keys in zip(sequences, last, strict=True)])
        for name in ("k", "v")
    )
    rest = trial.chance("behind").choice((math.nan, 1.0))
    for b, keys in enumerate(last):
        pages.fill(b, keys, rest)
    q, tables = p.q, {}
    if rotates:
        room = pages.block_table.shape[1] * pages.k.shape[2]
        rotation = drawn(q, max(room, q.shape[2]), trial.case.rotary, trial.chance("angles"))
        q, k_new = rotated_later(trial, rotation, q, k_new, lengths)
        tables = rotation.options
    before = int32([n - new for n in lengths], p.q.device)
    if (last_keys := in_claimed_layouts(trial, replace(p, q=q, k=k_new, v=v_new))) is None:
        return
    tensors = {"cache_seqlens": before, "k_new": last_keys.k, "v_new": last_keys.v}
    table = {"block_table": pages.block_table} if in_a_pool else {}
    trial = trial.with_launch({**trial.launch, **tensors, **table, **tables})
    outputs = trial.forward(replace(cache, q=last_keys.q))
    held = {"k": (whole[0], pages.k), "v": (whole[1], pages.v)}
    if tables:  # rotating may add 0 to -0
        held["k"] = with_one_zero(whole[0]), with_one_zero(pages.k)
    if wrong := wrong_in(held):
        trial.fail(APPENDED, kind="contract", call=outputs.call, detail=wrong)
    each_alone(trial, outputs, sequences)


def with_one_zero(x: Tensor) -> Tensor:
    """Return a tensor with 0 in place of -0, and every other number with its bits, those of NaN too."""
    return x.masked_fill(x == 0, 0.0)


def rotated_later(
    trial: Trial, rotation: Rotation, q: Tensor, k_new: Tensor, lengths: list[int]
) -> tuple[Tensor, Tensor]:
    """Return what becomes these queries and new keys once it is rotated by their places in their sequences."""
    rows, new = q.shape[2], k_new.shape[2]
    first = [0 if trial.alignment == "top_left" else n - rows for n in lengths]
    of_q, of_new = rows_from(first, rows, q.device), rows_from([n - new for n in lengths], new, q.device)
    return rotation.back(q, of_q), rotation.back(k_new, of_new)


def with_every_key_seen(p: Problem) -> Problem:
    """Return a problem without padded keys: they are 0, because what is masked may hold anything."""
    return replace(p.with_both(lambda x: blank(x, p.key_padding_mask)), key_padding_mask=None)


def pool(trial: Trial, p: Problem, new: int = 0) -> tuple[list[int], Pages]:
    """Return a random number of keys of each sequence, of which the last ``new`` are its own, and all keys in pages."""
    claimed, chance = trial.kernel.capabilities, trial.chance("page size")
    page_size = page_size_of(claimed.page_sizes, p.k.shape[2], chance)
    tile = chance.choice((page_size, tile_of(trial, "block_n")))
    lengths = some_lengths(trial, tile, p, new)
    layouts = pool_layouts(claimed.layouts) or LAYOUTS[:1]
    return lengths, in_pages(p.k, p.v, lengths, page_size, layouts, trial.chance("pages"), new)


def in_cache(p: Problem, pages: Pages, lengths: list[int]) -> list[Problem]:
    """Return a problem for each sequence, which has that sequence alone with its keys in the cache."""
    return [
        replace(p.with_batch(slice(b, b + 1)), k=k, v=v)
        for b, (k, v) in enumerate(map(pages.of, range(len(lengths)), lengths))
    ]


def each_alone(trial: Trial, outputs: Outputs, sequences: list[Problem]) -> None:
    """Judge the results of each sequence of the batch by a problem that holds this sequence alone."""
    for b, alone in enumerate(sequences):
        here = slice(b, b + 1)
        expressions = {name: f"{name}[{b}:{b + 1}]" for name in outputs.named()}
        of_this: dict[str, Any] = {name: x[here] for name, x in outputs.named().items()}
        judge(trial, alone, replace(outputs, **of_this), expressions)


def end_to_end(trial: Trial, p: Problem) -> None:
    """Cut the rows of the first batch element into sequences, and its keys into as many, at other places.

    The places are the same where the rows of a sequence may not be fewer or more than its keys.
    """
    if (given := in_claimed_layouts(trial, p.with_batch(slice(1)))) is None:
        return
    p, claims = given, trial.kernel.capabilities
    sequences = trial.chance("sequences").randint(1, most_sequences(p))
    cuts_q = cuts(trial, tile_of(trial, "block_m"), p.q.shape[2], sequences, trial.chance("rows"))
    cuts_k = cuts(trial, tile_of(trial, "block_n"), p.k.shape[2], sequences, trial.chance("keys"))
    if not claims.may_differ(causal=p.causal):
        cuts_k = cuts_q
    cuts_q, cuts_k = claimed_cuts(partial(claims.takes_lengths, causal=p.causal), cuts_q, cuts_k)
    lengths = {
        "cu_seqlens_q": int32(cuts_q, p.q.device),
        "cu_seqlens_k": int32(cuts_k, p.q.device),
        "max_seqlen_q": max(end - start for start, end in pairwise(cuts_q)),
        "max_seqlen_k": max(end - start for start, end in pairwise(cuts_k)),
    }
    trial = trial.with_launch({**trial.launch, **lengths})
    outputs = trial.gradients(p)
    for of_q, of_k in zip(pairwise(cuts_q), pairwise(cuts_k), strict=True):
        part_alone(trial, outputs, p, 0, slice(*of_q), slice(*of_k))


def documents(trial: Trial, p: Problem) -> None:
    """Cut each batch element, with as many first rows as first keys, into documents at places of its own.

    In half of the cases their numbers are so small that batch elements have the same ones.
    """
    total = min(p.q.shape[2], p.k.shape[2])
    if not total:
        return
    if (given := in_claimed_layouts(trial, p.with_rows(slice(total)).with_keys(slice(total)))) is None:
        return
    p, claims = given, trial.kernel.capabilities
    chance = trial.chance("documents")
    tile = tile_of(trial, chance.choice(("block_m", "block_n")))
    most, numbers = most_sequences(p), range(chance.choice((MOST_SEQUENCES, 2**31)))
    ids = torch.empty(len(p.q), total, dtype=torch.int32, device="cpu")
    parts: list[tuple[int, slice]] = []
    for b, of_element in enumerate(ids):
        chance = trial.chance(f"documents of {b}")
        drawn_cuts = cuts(trial, tile, total, chance.randint(1, most), chance)
        places, _ = claimed_cuts(
            lambda rows, keys: min(rows, keys) > 0 and claims.takes_lengths(rows, keys, causal=p.causal),
            drawn_cuts,
            drawn_cuts,
        )
        own = [slice(*ends) for ends in pairwise(places)]
        for rows, number in zip(own, chance.sample(numbers, len(own)), strict=True):
            of_element[rows] = number
        parts += [(b, rows) for rows in own]
    trial = trial.with_launch({**trial.launch, "document_ids": ids.to(p.q.device)})
    outputs = trial.gradients(p)
    for b, rows in parts:
        part_alone(trial, outputs, p, b, rows, rows)


def most_sequences(p: Problem) -> int:
    """Return into how many sequences rows may be cut: one if products with keys are large, or those of dout and v.

    A kernel may make products of different sequences too, and mask them. Where these overflow, 0 * inf is NaN.
    """
    k, v = (blank(x, p.key_padding_mask) for x in (p.k, p.v))
    of_q, of_k, of_v, of_dout = (
        float(largest(x.double().norm(dim=-1).flatten(), 0)) for x in (p.q, k, v, p.dout)
    )
    scores = max(1.0, abs(p.sm_scale)) * max(of_q * of_k, of_q, of_k)
    return MOST_SEQUENCES if max(scores, of_dout * of_v) < LARGE else 1


def part_alone(trial: Trial, outputs: Outputs, p: Problem, b: int, rows: slice, keys: slice) -> None:
    """Judge the results of rows and keys of batch element ``b`` by a problem that holds these alone."""
    here = slice(b, b + 1)
    at = {name: keys if name in ("dk", "dv") else rows for name in outputs.named()}
    expressions = {name: f"{name}[{b}:{b + 1}, :, {x.start}:{x.stop}]" for name, x in at.items()}
    of_this: dict[str, Any] = {name: x[here, :, at[name]] for name, x in outputs.named().items()}
    alone = p.with_batch(here).with_rows(rows).with_keys(keys)
    judge(trial, alone, replace(outputs, **of_this), expressions)


def cuts(trial: Trial, tile: int, total: int, sequences: int, chance: random.Random) -> list[int]:
    """Return the places where the sequences begin, and the end of the last one, at multiples that are claimed."""
    places = [claimed_length(trial, length(tile, total, chance)) for _ in range(sequences - 1)]
    return [0, *sorted(places), total]


def claimed_cuts(
    is_claimed: Callable[[int, int], bool], cuts_q: list[int], cuts_k: list[int]
) -> tuple[list[int], list[int]]:
    """Return the cuts of rows and of keys without those that leave a sequence of lengths that are not claimed."""
    first, *others, last = zip(cuts_q, cuts_k, strict=True)
    kept = [first]
    for cut in others:
        of_this, of_rest = ((b[0] - a[0], b[1] - a[1]) for a, b in ((kept[-1], cut), (cut, last)))
        if is_claimed(*of_this) and is_claimed(*of_rest):
            kept.append(cut)
    rows, keys = zip(*kept, last, strict=True)
    return [*rows], [*keys]


def tile_of(trial: Trial, block: str) -> int:
    """Return the rows of a tile by the launch setting ``block``, or by default if the kernel has none of this name."""
    return int(trial.launch.get(block, DEFAULT_BLOCK))


def some_lengths(trial: Trial, tile: int, p: Problem, new: int = 0) -> list[int]:
    """Return a random number of keys for each sequence, that it may have by the kernel's claims and has ``new`` in."""
    claims, rows, most = trial.kernel.capabilities, p.q.shape[2], p.k.shape[2]
    drawn_lengths = (length(tile, most, trial.chance(f"length {b}")) for b in range(len(p.k)))
    lengths = [max(new, claims.length_from(0), claimed_length(trial, x)) for x in drawn_lengths]
    return [n if claims.takes_lengths(rows, n, causal=p.causal) else most for n in lengths]


def length(tile: int, most: int, chance: random.Random) -> int:
    """Return a random length: 0, 1, one close to whole tiles of so many rows, any length, or ``most``.

    Where there is no whole tile, it is any length more often. Were it ``most``, few sequences would be cut in two.
    """
    any_length = chance.randint(0, most)
    near_tile = chance.randint(1, most // tile) * tile + chance.randint(-1, 1) if most >= tile else any_length
    return min(most, chance.choice((0, 1, near_tile, near_tile, any_length, most)))


def int32(numbers: list[int], device: torch.device) -> Tensor:
    """Return lengths in the form in which kernels take them: int32, on the device."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)
