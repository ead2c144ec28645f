"""What a bug shows with ordinary numbers, which tells bugs apart that small cases do not.

In the smallest case of a bug most numbers are 0, so that a wrong result may be right by chance, and the length from
which on the bug shows follows from the few others as well as from the kernel's tiles. With ordinary numbers in many
rows it follows from the tiles alone.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from kernels.contract import GRADIENTS, Capabilities
from strategies.case import LAYOUT_FIELDS, SIMPLEST, Case
from strategies.features import (
    EXPANDED,
    LENGTHS,
    SCORES,
    VALUES_OF,
    with_no_more_than,
    with_normal_numbers,
    with_value,
)
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.law import law_named
from tests.harness.running.runs import Try
from tests.harness.symptoms import is_small, wrong_tensors
from tests.harness.verdict import NUMBERS, Finding

LONGER = 64
"""Rows and keys that a case gets more of: with few, what a wrong forward returns may be right by chance."""
FEWEST = 8
"""With so many rows and keys of ordinary numbers, what a wrong forward returns is hardly right by chance."""

ELSEWHERE = ((129, 7), (7, 129), (129, 129), (15, 3), (3, 15))
"""Numbers of rows and keys at which two bugs may be told apart: fewer than any tile has, or more. None fills its tiles,
so that a bug shows in both passes of a kernel whose tiles are of other sizes.
"""

ORDINARY = 20
"""How many are tried: enough to tell a bug that shows in every case from one that shows in few."""

TILE = 64
ORDINARY_LENGTHS = {
    "cpu": (TILE - 1, TILE, TILE + 1, 2 * TILE, 100, 16, 150),
    "cuda": (TILE - 1, TILE, TILE + 1, 4 * TILE, 1000, 16, 128, 300),
}
"""Lengths by device type: whole tiles, one row more or less, lengths between, and one that fits into any tile."""
COMMON_HEAD_DIMS = (64, 128, 32)
SEED = 17

TILES = (32, 64, 128)
"""Lengths at which a kernel's last tile may be full, whatever its tiles are."""
MOST_LENGTHS = 14
"""How many lengths are tried at most, the shortest ones first."""


def are_apart(
    one: Bug, other: Bug, run: Try, capabilities: Capabilities, third: Collection[Bug] = ()
) -> bool:
    """Whether two bugs make different tensors wrong, each in its smallest case with ordinary numbers.

    They do if no tensor is wrong in both, if out is wrong in one of them and right in the other, or if out is right in
    both and the tensor that one was found by is right in the other. If out is wrong in both although one was found by a
    gradient alone, they do if that gradient is wrong at other lengths where out and lse are right.

    Tensors of a bug of ``third`` that shows only after rows were added tell nothing. Neither does a wrong out, if the
    bug was found while out was not judged, because another bug is known to make it wrong.
    """
    both = (one, other)
    some, others = (_wrong_in_more_rows(bug, run, capabilities, third) for bug in both)
    if not some or not others:
        return False
    if "out" in some & others:
        of_gradients = [x for x in (wrong_tensors(bug.failure.finding) for bug in both) if x <= {*GRADIENTS}]
        cases = [bug.failure.case for bug in both]
        return any(
            x & symptoms_apart_from_forward(case, run, capabilities, third)
            for x in of_gradients
            for case in cases
        )
    if "out" in some | others:
        return "out" not in (one if "out" in some else other).failure.ignored
    if any(brought_in(bug.failure.case, third) for bug in both):
        return False
    found_by = {bug.failure.finding.tensor for bug in both}
    return some.isdisjoint(others) or not found_by <= some & others


def _wrong_in_more_rows(bug: Bug, run: Try, capabilities: Capabilities, third: Collection[Bug]) -> set[str]:
    """Return the tensors that are wrong in a bug's smallest case with ordinary numbers in more rows and keys.

    Tensors of a bug of ``third`` that shows only after rows were added are left out. If it makes out wrong, it may make
    any tensor wrong, and nothing is returned.
    """
    f = bug.failure
    unknown = {tensor for x in brought_in(f.case, third) for tensor in x.tensors}
    if "out" in unknown:
        return set()
    return symptoms_on_dense_case(f.law, f.case, f.finding, run, capabilities, bug.needs) - unknown


def leaves_out_right(law: str, case: Case, finding: Finding, run: Try, capabilities: Capabilities) -> bool:
    """Whether out is right in a failure, and in the same case with ordinary numbers, where something is wrong too.

    That case has the same lengths, if they are not so short that out may be right by chance, or else longer ones.
    """
    if "out" in wrong_tensors(finding):
        return False
    rows = (LONGER,) if min(case.seqlen_q, case.seqlen_k) < FEWEST else (0, LONGER)
    wrong = (symptoms_on_dense_case(law, case, finding, run, capabilities, more=x) for x in rows)
    found = next(filter(None, wrong), set[str]())
    return bool(found) and "out" not in found


def symptoms_apart_from_forward(
    case: Case, run: Try, capabilities: Capabilities, known: Collection[Bug] = ()
) -> set[str]:
    """Return the gradients that are wrong where out and lse are right, with the case's options at some other lengths.

    A bug that makes out and gradients wrong does so there as well. A tensor tells nothing where one of the ``known``
    bugs makes it wrong and leaves out right.
    """
    others = [x for x in known if "out" not in x.tensors]
    alone: set[str] = set()
    for seqlen_q, seqlen_k in ELSEWHERE if capabilities.backward else ():
        elsewhere = with_no_more_than(SIMPLEST, replace(case, seqlen_q=seqlen_q, seqlen_k=seqlen_k))
        if not capabilities.admits(elsewhere):
            continue
        found = run("backward", elsewhere, frozenset())
        wrong = wrong_tensors(found) if found and found.kind in NUMBERS and not is_small(found) else set()
        wrong -= {tensor for x in others if x.is_met(elsewhere) for tensor in x.tensors}
        if wrong <= {*GRADIENTS}:
            alone |= wrong
    return alone


def brought_in(case: Case, bugs: Collection[Bug]) -> list[Bug]:
    """Return the bugs whose needs a case does not meet as it is, and meets once it has more rows and keys."""
    return [bug for bug in bugs if bug.is_met(longer(case)) and not bug.is_met(case)]


def longer(case: Case, rows: int = LONGER) -> Case:
    """Return the case with so many more rows of queries and of keys."""
    return replace(case, **{name: getattr(case, name) + rows for name in LENGTHS})


def symptoms_on_dense_case(
    law: str,
    case: Case,
    finding: Finding,
    run: Try,
    capabilities: Capabilities,
    needs: Sequence[Condition] = (),
    more: int = LONGER,
) -> set[str]:
    """Return what is wrong in a case with ordinary numbers in more rows; nothing if all that was wrong is right then.

    With few rows, rows that are alike, or other numbers, a tensor may be right by chance. So it may with a large
    sm_scale, which leaves the weights of one key: the default comes first, unless it is among the ``needs`` of the bug.
    Where all of out is NaN no gradient can be judged, so that all of them count as wrong. Errors of roundings tell
    nothing if they are as small with ordinary numbers. ``more`` says how many rows and keys the case gets in addition.
    """
    if finding.kind not in NUMBERS or not law_named(law).is_basic:
        return set()
    different: dict[str, Any] = {
        name: "contiguous" for name in LAYOUT_FIELDS if getattr(case, name) in EXPANDED
    }
    ordinary = with_no_more_than(SIMPLEST, longer(replace(case, **different), more))
    needs_scale = any(need.name in ("sm_scale", SCORES) for need in needs)
    judged_by = "backward" if capabilities.backward else "forward"
    for sm_scale in dict.fromkeys((case.sm_scale,) if needs_scale else (None, case.sm_scale)):
        scaled = replace(ordinary, sm_scale=sm_scale)
        found = run(judged_by, scaled, frozenset()) if capabilities.admits(scaled) else None
        if found is None or found.kind not in NUMBERS or (is_small(finding) and is_small(found)):
            continue
        wrong = wrong_tensors(found) | ({*GRADIENTS} if found.is_all_nan else set())
        if wrong & wrong_tensors(finding):
            return wrong
    return set()


def ordinary_cases(capabilities: Capabilities, dtype: str, device_type: str) -> list[Case]:
    """Return cases, the same for all bugs of a kernel in a dtype: with and without a causal mask, if claimed."""
    c = capabilities
    lengths = ORDINARY_LENGTHS[device_type]
    head_dims = [x for x in COMMON_HEAD_DIMS if x in c.head_dims] or list(c.head_dims)[:1]
    launch = tuple((name, values[0]) for name, values in c.launch.items())
    drawn = [
        Case(
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            causal=causal,
            head_dim=head_dims[at % len(head_dims)],
            v_head_dim=min(c.v_head_dim),
            v_in_k=min(c.v_in_k),
            heads_kv=1 + at % 2,
            group=2 if c.grouped_heads and at % 3 == 0 else 1,
            dtype=dtype,
            seed=at,
            launch=launch,
        )
        for at, (seqlen_q, seqlen_k, causal) in enumerate(product(lengths, lengths, c.causal))
    ]
    claimed = [case for case in drawn if c.admits(case)]
    return random.Random(SEED).sample(claimed, min(ORDINARY, len(claimed)))


def show_at_same_lengths(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether two bugs need nothing but one length and numbers, and one rule says at which lengths either shows.

    The lengths that are tried are those of both searches, and whole tiles beyond. The rule is that the length is above
    some other, or no multiple of a tile's. Two bugs of different rules fit none of these together.
    """
    names = {_length_needed(one), _length_needed(other)}
    tensors = {*one.tensors} & {*other.tensors}
    found_by = {one.failure.finding.tensor, other.failure.finding.tensor}
    kinds = {one.failure.finding.kind, other.failure.finding.kind}
    if "" in names or len(names) > 1 or kinds != {"error"} or not found_by <= tensors:
        return False
    (name,) = names
    own = {getattr(bug.failure.case, name) for bug in (one, other)}
    tried = {x for bug in (one, other) for need in bug.needs if need.name == name for x in need.holds}
    beyond = {tile * (max(own) // tile + 1) for tile in TILES}
    shows: dict[int, bool] = {}
    for length in sorted(filter(None, own | tried | beyond))[:MOST_LENGTHS]:
        case = with_ordinary_numbers(one.failure.case, name, length)
        if capabilities.admits(case):
            finding = run(one.failure.law, case, frozenset())
            shows[length] = finding is not None and not tensors.isdisjoint(wrong_tensors(finding))
    return all(shows.get(length, False) for length in own) and _is_of_one_rule(shows)


def _length_needed(bug: Bug) -> str:
    """Return the length that a bug needs, if it needs one and nothing else but numbers, or else ""."""
    names = {need.name for need in bug.needs} - {SCORES, *VALUES_OF}
    return names.pop() if len(names) == 1 and names <= {*LENGTHS} else ""


def with_ordinary_numbers(case: Case, name: str, length: int) -> Case:
    """Return a case with ordinary numbers in which ``name`` is of this length, and the other length is a long one."""
    (other,) = {*LENGTHS} - {name}
    return with_value(with_value(with_normal_numbers(case), other, LONGER), name, length)


def _is_of_one_rule(shows: Mapping[int, bool]) -> bool:
    """Whether failing lengths are those above one, or those that are no multiples of a tile; some have to hold."""
    failing, holding = ([x for x in shows if shows[x] == fails] for fails in (True, False))
    if not holding:
        return False
    above = min(failing) > max(holding)
    return above or any(all((x % tile > 0) == shows[x] for x in shows) for tile in TILES)
