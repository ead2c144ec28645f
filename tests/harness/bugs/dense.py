"""What a bug shows in dense cases, of normal numbers in many rows: they distinguish bugs that small cases do not.

In the smallest case of a bug most numbers are 0, so that a wrong result may be right by chance, and the length from
which on the bug shows depends on these few numbers as well as on the kernel's tiles. In a dense case it depends on the
tiles alone.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from kernels.contract import GRADIENTS, Capabilities
from kernels.contract.tuners import is_tuner
from strategies.by_device import ByDevice
from strategies.case import LAYOUT_FIELDS, SIMPLEST, Case
from strategies.earlier import FIELDS as OF_EARLIER
from strategies.features import (
    EXPANDED,
    LENGTHS,
    SCORES,
    VALUES_OF,
    with_no_more_than,
    with_normal_numbers,
    with_value,
)
from strategies.size_rules import left
from strategies.ways import as_its_way_has_it
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.law import law_named
from tests.harness.running.runs import Try
from tests.harness.symptoms import is_small, wrong_tensors
from tests.harness.verdict import NUMBERS, Finding

LONGER = 64
"""Rows and keys that are added to a case: with few, the output of a wrong forward may be right by chance."""
FEWEST = 8
"""With at least this many rows and keys of normal numbers, the output of a wrong forward is hardly right by chance."""

ELSEWHERE = ((129, 7), (7, 129), (129, 129), (15, 3), (3, 15))
"""Numbers of rows and keys at which it is tried whether gradients are wrong where out is right: fewer than any tile
has, or more. None fills its tiles, so that a bug shows in both passes of a kernel whose tiles are of other sizes.
"""

ORDINARY = 20
"""How many ordinary cases are tried: enough to distinguish a bug that shows in all of them from one that shows in few.
"""

TILE = 64
ORDINARY_LENGTHS = ByDevice(
    cpu=(TILE - 1, TILE, TILE + 1, 2 * TILE, 100, 16, 150),
    accelerator=(TILE - 1, TILE, TILE + 1, 4 * TILE, 1000, 16, 128, 300),
)
"""Lengths by device type: whole tiles, one row more or less, lengths between, and 16, which fits into any tile."""
COMMON_HEAD_DIMS = (64, 128, 32)
SEED = 17

TILES = (32, 64, 128)
"""Lengths at which a kernel's last tile may be full, whatever the size of its tiles."""
MOST_LENGTHS = 14
"""How many lengths are tried at most, the shortest first."""


def are_apart(
    one: Bug, other: Bug, run: Try, capabilities: Capabilities, third: Collection[Bug] = ()
) -> bool:
    """Whether different tensors are wrong in the smallest cases of two bugs, with normal numbers in more rows.

    The first rule that applies decides:

    1. Not known to be apart, if in either case nothing is wrong.
    2. If out is wrong in both: apart only if one bug was found by gradients alone, and at other lengths these are wrong
       where out and lse are right.
    3. If out is wrong in one: apart, unless that bug was found while out was not judged because another bug makes it
       wrong.
    4. Not known to be apart, if a bug of ``third`` shows only in the cases with more rows.
    5. If out is right in both: apart if no tensor is wrong in both, or if a tensor by which a bug was found is not
       wrong in both. Example: dk and dv are wrong for one, dv for the other, which were found by dk and dv.
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
    """Return the tensors that are wrong in a bug's smallest case with normal numbers in more rows and keys.

    Tensors of a bug of ``third`` that shows only after rows were added are left out. If one of these bugs makes out
    wrong, any tensor may be wrong because of it, and nothing is returned.
    """
    f = bug.failure
    unknown = {tensor for x in brought_in(f.case, third) for tensor in x.tensors}
    if "out" in unknown:
        return set()
    return symptoms_on_dense_case(f.law, f.case, f.finding, run, capabilities, bug.needs) - unknown


def leaves_out_right(law: str, case: Case, finding: Finding, run: Try, capabilities: Capabilities) -> bool:
    """Whether out is right in a failure, and in its dense case too, where something else is wrong.

    The dense case has the same lengths and, if nothing is wrong there, longer ones; only longer ones if there are fewer
    than ``FEWEST`` rows or keys, with which out may be right by chance.
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
    """Return the gradients that are wrong where out and lse are right, at the lengths of ``ELSEWHERE``.

    A bug that makes out wrong makes it wrong at these lengths too, so that gradients which are wrong beside a right out
    are of another bug. A gradient is left out where one of the ``known`` bugs makes it wrong.
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
    """Return the bugs that adding rows and keys to a case would newly trigger."""
    return [bug for bug in bugs if bug.is_met(longer(case)) and not bug.is_met(case)]


def longer(case: Case, rows: int = LONGER) -> Case:
    """Return the case with ``rows`` more rows of queries and of keys."""
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
    """Return the tensors that are wrong in a case with normal numbers in more rows, if any is wrong as in the finding.

    ``more`` is the number of rows and keys that are added. Where a tensor could still be right by chance:

    1. Rows that are all alike are made different: layouts that repeat rows become contiguous.
    2. A large sm_scale leaves the weight of one key, so the default is tried first, unless ``needs`` has a condition on
       it.
    3. If all of out is NaN, no gradient can be judged, and all gradients count as wrong.
    4. A rounding error that stays one with normal numbers does not count.
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


def ordinary_cases(
    capabilities: Capabilities, dtype: str, device_type: str, like: Case | None = None
) -> list[Case]:
    """Return cases, with and without a causal mask, if claimed. They are the same for all bugs of a kernel in a dtype.

    Tuners take the configurations that they take in the case ``like``: users may get any of them. The same calls come
    before them as before that case, and calls are made in its way.
    """
    c = capabilities
    lengths = ORDINARY_LENGTHS[device_type]
    rows = lengths if c.max_seqlen_q is None else [min(x, c.max_seqlen_q) for x in lengths]
    head_dims = [x for x in COMMON_HEAD_DIMS if x in c.head_dims] or list(c.head_dims)[:1]
    own = {name: value for name, value in like.launch if is_tuner(name)} if like else {}
    launch = tuple((name, own.get(name, values[0])) for name, values in c.launch.items())
    before: dict[str, Any] = {name: getattr(like or Case, name) for name in (*OF_EARLIER, "way")}
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
            **before,
        )
        for at, (seqlen_q, seqlen_k, causal) in enumerate(product(dict.fromkeys(rows), lengths, c.causal))
    ]
    claimed = [case for case in (as_its_way_has_it(c, x) for x in drawn) if c.admits(case)]
    return random.Random(SEED).sample(claimed, min(ORDINARY, len(claimed)))


def show_at_same_lengths(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether two bugs need nothing but the same length and numbers, and show at the same lengths by one rule.

    The rule is one of ``strategies.size_rules``. The first bug's dense case is run
    at the lengths that both searches tried, and at whole tiles beyond. Example: one failed at 65 and held at 64, the
    other at 70 and 32. If lengths 65 and 70 fail, and 32, 64, 96 and 128 hold, both show in a last tile that is not
    full. If 96 fails and 128 still holds, no rule fits, so that there are two bugs.
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
    fails: list[int] = []
    holds: list[int] = []
    for length in sorted(filter(None, own | tried | beyond))[:MOST_LENGTHS]:
        case = with_ordinary_numbers(one.failure.case, name, length)
        if capabilities.admits(case):
            finding = run(one.failure.law, case, frozenset())
            shows = finding is not None and not tensors.isdisjoint(wrong_tensors(finding))
            (fails if shows else holds).append(length)
    return own <= {*fails} and bool(left(tuple(fails), tuple(holds)))


def _length_needed(bug: Bug) -> str:
    """Return the only length in a bug's conditions, if all others are on numbers; "" if there is none."""
    names = {need.name for need in bug.needs} - {SCORES, *VALUES_OF}
    return names.pop() if len(names) == 1 and names <= {*LENGTHS} else ""


def with_ordinary_numbers(case: Case, name: str, length: int) -> Case:
    """Return a dense case in which the length ``name`` is this one, and the other length is ``LONGER``."""
    (other,) = {*LENGTHS} - {name}
    return with_value(with_value(with_normal_numbers(case), other, LONGER), name, length)
