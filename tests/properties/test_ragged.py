"""Ragged: if sequences of different lengths are in one call, each is answered as if it were alone.

The case says which kind of call is made, and which lengths its sequences have. The kernel takes a cache of which each
sequence fills a part, one in pages, one to which it is to append new keys, sequences packed end to end, packed queries
over keys in pages, or documents that each batch element is made of; what is in a cache may be 8-bit numbers with
scales. Out, lse and the gradients of each sequence are within the bound of float64, and have the same bits as in a call
for it alone, if that is claimed. Lengths are 0, 1, close to whole tiles or pages, random, or the full length. Catches
lengths, offsets, pages, scales or numbers of another sequence, rows and keys of the neighbour, a causal corner or a
window that is that of the longest, empty sequences, what lies in a cache behind its last key, rows that no sequence
has, and new keys that are written elsewhere or not seen. Calls that append keys may have the kernel rotate them and the
queries.

Patterns of masks, soft-caps, ALiBi and sinks are drawn with it, and each sequence has them as if it were alone: the
diagonal of its query i is ``i + seqlen_k - seqlen_q`` by its own lengths. Key padding masks are drawn too, but for keys
in pages and new keys. Biases are not passed.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels.contract import GRADIENTS, LAYOUTS
from reference.bounds.exact import largest
from reference.masks import blank
from strategies.case import OF_SEED, Case, changed
from strategies.eight_bits import quantised
from strategies.pages import Pages, in_pages, one_page_each, pool_layouts
from strategies.rotary import Rotation, drawn, rows_from
from strategies.sequences import (
    Lengths,
    claimed_cuts,
    drawn_keys,
    drawn_page_size,
    length,
    lengths_of,
    tile_of,
)
from tests.harness.law import law
from tests.harness.trial.judge import judge, judge_plain_call
from tests.harness.trial.problem import Outputs, Problem
from tests.harness.trial.ragged_form import APPENDED, end_to_end, only_sequence, placed, wrong_in
from tests.harness.trial.relate import (
    ALONE,
    Derived,
    agree,
    allowances,
    bits_repeat,
    claimed_length,
    in_claimed_layouts,
)
from tests.harness.trial.trial import Check, LawBroken, Trial

MOST_SEQUENCES = 4
"""The most sequences that a batch element made of documents is cut into."""

LARGE = 2.0**15
"""Products that are smaller than this are finite in any dtype."""

NO_ROWS_BEHIND = (
    "packed calls fail if there are rows behind the last sequence, in {}: no bug as nothing is claimed;"
    " --claims rows_behind=zero asks for more"
)
"""What is noted of a kernel that takes no rows behind the last packed sequence."""

JUDGED_BEHIND = {"gradients": GRADIENTS, "zero": ("out", *GRADIENTS)}
"""The outputs that are 0 in rows and keys behind the last sequence, by values of the claim ``rows_behind``."""


@dataclass(frozen=True)
class Called:
    """A call with several sequences, before it is made.

    Attributes:
        trial: the trial, with the keywords of the call.
        problem: the tensors and options of the call.
        alone: for each sequence the problem that has it alone.
    """

    trial: Trial
    problem: Problem
    alone: list[Problem]


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
    """Judge each sequence of a call of the kind that the case has.

    A case of no kind has the call that the basic laws make, which tells whether a failure is a matter of the kind.
    """
    p = replace(trial.problem, rule=replace(trial.problem.rule, bias=None))
    case = with_sequences_of_seed(trial)
    others: dict[str, Callable[[Trial, Problem], None]] = {
        "none": judge_plain_call,
        "append": partial(appended, case=case),
        "document": documents,
    }
    if case.ragged in others:
        others[case.ragged](trial, p)
        return
    calls = {
        "cache": filled_in_part,
        "packed": packed,
        "paged": from_a_pool,
        "packed_paged": packed_over_a_pool,
    }
    made = partial(calls[case.ragged], trial, p=p)
    try:
        judge_sequences(made(case))
    except LawBroken as broken:
        if not may_have_no_rows_behind(trial, case, broken):
            raise
        trial.note(NO_ROWS_BEHIND, shows=True)
        judge_sequences(made(changed(case, rows_behind=0)))


def may_have_no_rows_behind(trial: Trial, case: Case, broken: LawBroken) -> bool:
    """Whether a call failed, or returned another number of rows, because it has rows behind the last sequence.

    A kernel of sequences that are packed without such rows is sound, so that this is no bug where nothing is claimed.
    """
    is_unclaimed = trial.kernel.capabilities.rows_behind == "gradients"
    return bool(case.rows_behind) and is_unclaimed and broken.finding.kind in ("contract", "exception")


def with_sequences_of_seed(trial: Trial) -> Case:
    """Return the case; if an older version wrote it, with the lengths and the page size that follow from its seed."""
    case, claims = trial.case, trial.kernel.capabilities
    if case.block_table != OF_SEED:
        return case
    sized = changed(case, page_size=drawn_page_size(claims, case)) if case.ragged == "paged" else case
    return changed(sized, seqlens_k=drawn_keys(claims, sized))


def judge_sequences(called: Called | None) -> None:
    """Make a call, if there is one, and judge what it returns for each sequence, and for rows that no sequence has."""
    if called is None:
        return
    trial, p, alone = called.trial, called.problem, called.alone
    outputs = trial.gradients(p)
    for b, one in enumerate(alone):
        here, expressions = of_sequence(outputs, trial.launch, b)
        judge(trial, one, replace(outputs, **here), expressions)
    judge_rows_behind(trial, outputs)
    if len(alone) > 1 and any(bits_repeat(trial, name) for name in outputs.named()):
        compare_bits(called, outputs, len(alone) - 1)


def of_sequence(outputs: Outputs, launch: Mapping[str, Any], b: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what a call returned for its sequence ``b``, and how it is cut from the tensors of the call."""
    if "cu_seqlens_q" not in launch:
        named = outputs.named()
        return {name: x[b : b + 1] for name, x in named.items()}, {
            name: f"{name}[{b}:{b + 1}]" for name in named
        }
    found, expressions = {}, {}
    for name, x in outputs.named().items():
        starts = launch["cu_seqlens_k" if name in ("dk", "dv") else "cu_seqlens_q"]
        start, end = starts[b : b + 2].tolist()
        found[name], expressions[name] = x[:, :, start:end], f"{name}[:, :, {start}:{end}]"
    return found, expressions


def judge_rows_behind(trial: Trial, outputs: Outputs) -> None:
    """Judge rows and keys behind the last packed sequence: what is claimed of them is 0."""
    checks = []
    for name in JUDGED_BEHIND.get(trial.kernel.capabilities.rows_behind, ()):
        starts = trial.launch.get("cu_seqlens_k" if name in ("dk", "dv") else "cu_seqlens_q")
        if starts is None or (x := getattr(outputs, name)) is None:
            continue
        behind = x[:, :, int(starts[-1]) :]
        checks.append(
            Check(
                claim=f"{name} is 0 in rows behind the last sequence",
                tensor=name,
                actual=behind,
                expected=torch.zeros_like(behind, dtype=torch.float64),
                bound=torch.zeros_like(behind, dtype=torch.float64),
                maximum=math.inf,
                call=outputs.call,
                expression=f"{name}[:, :, {int(starts[-1])}:]",
            )
        )
    trial.hold([check for check in checks if check.actual.numel()])


def compare_bits(called: Called, outputs: Outputs, b: int) -> None:
    """Compare the bits of one sequence with those of a call that has it alone."""
    trial = called.trial
    problem, launch = only_sequence(called.problem, trial.launch, b)
    other = trial.with_launch(launch)
    got = other.gradients(problem)
    here, expressions = of_sequence(outputs, trial.launch, b)
    allowed = allowances(trial, called.alone[b], gradients=got.dq is not None)
    only = tuple(name for name in here if bits_repeat(trial, name))
    expected = Derived(outputs.call, here, expressions)
    agree(other, ALONE, got, expected, allowed, only=only, exactly=True)


def filled_in_part(trial: Trial, case: Case, p: Problem) -> Called | None:
    """Give each sequence of the batch its number of keys, in half of the cases with NaN behind the last one."""
    lengths = keys_of(trial, case)
    if trial.chance("behind").random() < 0.5:
        p = p.with_both(torch.clone)
        for b, n in enumerate(lengths):
            p.k[b, :, n:] = p.v[b, :, n:] = math.nan
    eight, p, scales = in_8_bits(trial, p)
    if (given := in_claimed_layouts(trial, eight)) is None:
        return None
    trial = trial.with_launch({**trial.launch, "cache_seqlens": int32(lengths, p.q.device), **scales})
    alone = [p.with_batch(slice(b, b + 1)).with_keys(slice(n)) for b, n in enumerate(lengths)]
    return Called(trial, given, alone)


def from_a_pool(trial: Trial, case: Case, p: Problem) -> Called | None:
    """Give each sequence of the batch its number of keys, in pages."""
    p = with_every_key_seen(p)
    lengths = keys_of(trial, case)
    pages = pool(trial, case, p, lengths)
    eight, meant, scales = in_8_bits(trial, replace(p, k=pages.k, v=pages.v))
    if (given := in_claimed_layouts(trial, eight if scales else p)) is None:
        return None
    given = given if scales else replace(given, k=pages.k, v=pages.v)
    tensors = {"cache_seqlens": int32(lengths, p.q.device), "block_table": pages.block_table}
    trial = trial.with_launch({**trial.launch, **tensors, **scales})
    return Called(trial, given, in_cache(meant, replace(pages, k=meant.k, v=meant.v), lengths))


def packed_over_a_pool(trial: Trial, case: Case, p: Problem) -> Called | None:
    """Pack the queries of all sequences end to end, and lay their keys in pages."""
    p = with_every_key_seen(p)
    lengths = lengths_of(trial.kernel.capabilities, case)
    rows, keys = ([pair[i] for pair in lengths] for i in (0, 1))
    pages = pool(trial, case, p, keys)
    claims = trial.kernel.capabilities
    given, _ = placed(end_to_end(p, [(n, 0) for n in rows], case.rows_behind), case, claims)
    tensors = {
        "cu_seqlens_q": starts_of(rows, p.q.device),
        "max_seqlen_q": case.seqlen_q,
        "cache_seqlens": int32(keys, p.q.device),
        "block_table": pages.block_table,
    }
    trial = trial.with_launch({**trial.launch, **tensors})
    alone = [one.with_rows(slice(n)) for one, n in zip(in_cache(p, pages, keys), rows, strict=True)]
    return Called(trial, replace(given, k=pages.k, v=pages.v), alone)


def packed(trial: Trial, case: Case, p: Problem) -> Called | None:
    """Pack the queries of all sequences end to end, and so their keys."""
    lengths = lengths_of(trial.kernel.capabilities, case)
    if case.block_table == OF_SEED:
        p, lengths = cut_apart(trial, p)
    if most_sequences(p) == 1:
        lengths = lengths[:1]
    given, _ = placed(end_to_end(p, lengths, case.rows_behind), case, trial.kernel.capabilities)
    rows, keys = ([pair[i] for pair in lengths] for i in (0, 1))
    longest = (max(rows), max(keys)) if case.block_table == OF_SEED else (case.seqlen_q, case.seqlen_k)
    starts_q, starts_k = starts_of(rows, p.q.device), starts_of(keys, p.q.device)
    tensors = {
        "cu_seqlens_q": starts_q,
        "cu_seqlens_k": starts_k,
        "max_seqlen_q": longest[0],
        "max_seqlen_k": longest[1],
    }
    trial = trial.with_launch({**trial.launch, **tensors})
    places = zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True)
    return Called(
        trial, given, [given.with_rows(slice(*of_q)).with_keys(slice(*of_k)) for of_q, of_k in places]
    )


def cut_apart(trial: Trial, p: Problem) -> tuple[Problem, list[Lengths]]:
    """Return the sequences that the seed cuts the rows and the keys of the first batch element into, one after another.

    Each is a batch element whose first rows and keys it has.
    """
    p, claims = p.with_batch(slice(1)), trial.kernel.capabilities
    sequences = trial.chance("sequences").randint(1, most_sequences(p))
    tiles = tile_of(trial.case, "block_m"), tile_of(trial.case, "block_n")
    cuts_q = cuts(trial, tiles[0], p.q.shape[2], sequences, trial.chance("rows"))
    cuts_k = cuts(trial, tiles[1], p.k.shape[2], sequences, trial.chance("keys"))
    if not claims.may_differ(causal=p.causal):
        cuts_k = cuts_q
    cuts_q, cuts_k = claimed_cuts(partial(claims.takes_lengths, causal=p.causal), cuts_q, cuts_k)

    def each(x: Tensor, places: list[int]) -> Tensor:
        """Return a batch element for each part of one, which begins with the part's rows and goes on with others."""
        return torch.cat([x.roll(-start, 2) for start in places[:-1]])

    k = each(p.k, cuts_k)
    mask = p.key_padding_mask
    apart = replace(
        p,
        q=each(p.q, cuts_q),
        dout=each(p.dout, cuts_q),
        k=k,
        v=k[..., : p.v.shape[3]] if p.v_in_k else each(p.v, cuts_k),
        key_padding_mask=None if mask is None else torch.cat([mask.roll(-start, 1) for start in cuts_k[:-1]]),
    )
    counts = ([end - start for start, end in pairwise(places)] for places in (cuts_q, cuts_k))
    return apart, [*zip(*counts, strict=True)]


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


def appended(trial: Trial, p: Problem, case: Case) -> None:
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
    lengths = with_new_keys(trial, case, new, in_a_pool=in_a_pool)
    pages = pool(trial, case, p, lengths, new) if in_a_pool else one_page_each(p.k, p.v)
    given = p if in_a_pool else replace(p, k=pages.k, v=pages.v)
    if (cache := in_claimed_layouts(trial, given, is_written=True)) is None:
        return
    cache = replace(cache, k=pages.k, v=pages.v) if in_a_pool else cache
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


def keys_of(trial: Trial, case: Case) -> list[int]:
    """Return the number of keys of each sequence."""
    return [keys for _, keys in lengths_of(trial.kernel.capabilities, case)]


def with_new_keys(trial: Trial, case: Case, new: int, *, in_a_pool: bool) -> list[int]:
    """Return the number of keys of each sequence, of which the last ``new`` are its own."""
    claims = trial.kernel.capabilities
    if case.block_table == OF_SEED:
        sized = changed(case, page_size=drawn_page_size(claims, case) if in_a_pool else 0)
        return [*drawn_keys(claims, sized, new)]
    lengths = [max(new, n) for n in keys_of(trial, case)]
    is_claimed = partial(claims.takes_lengths, case.seqlen_q, causal=case.causal)
    return [n if is_claimed(n) else case.seqlen_k for n in lengths]


def pool(trial: Trial, case: Case, p: Problem, lengths: list[int], new: int = 0) -> Pages:
    """Return keys of each sequence in pages, of which the last ``new`` are its own."""
    claimed = trial.kernel.capabilities
    if case.block_table == OF_SEED:
        page_size = drawn_page_size(claimed, case)
    else:
        page_size = case.page_size or min(claimed.page_sizes)
    layouts, chance = pool_layouts(claimed.layouts) or LAYOUTS[:1], trial.chance("pages")
    return in_pages(
        p.k, p.v, lengths, page_size, layouts, chance, new, order=case.block_table, pool=case.pool
    )


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
    tile = tile_of(trial.case, chance.choice(("block_m", "block_n")))
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


def starts_of(lengths: list[int], device: torch.device) -> Tensor:
    """Return where sequences of these lengths begin, and the end of the last one."""
    return int32([sum(lengths[:b]) for b in range(len(lengths) + 1)], device)


def int32(numbers: list[int], device: torch.device) -> Tensor:
    """Return lengths in the form in which kernels take them: int32, on the device."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)
