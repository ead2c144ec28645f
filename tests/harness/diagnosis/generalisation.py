"""Replace conditions on several fields by the one condition behind them, so that every trigger of a bug is recognised.

Example: a bug of large scores was found with a large sm_scale. The condition on scores recognises it where q is large.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kernels.contract import Capabilities
from strategies.case import Case, Spike
from strategies.features import (
    BLIND,
    HEADS,
    HIDDEN,
    LENGTHS,
    MASKED,
    NAN,
    NO_KEYS,
    NONE,
    ONE,
    SCORES,
    SEEN,
    SEVERAL,
    SLICES,
    SOME,
    UNEQUAL,
    VALUES_OF,
    WHOLE_TILES,
    WORK,
    Work,
    feature,
    value_of,
    with_normal_numbers,
    with_seeds,
    with_slices_as,
    with_value,
)
from tests.harness.bugs.bug import Condition
from tests.harness.bugs.counterfactuals import counterfactuals, is_needed
from tests.harness.bugs.dense import FEWEST, LONGER, longer
from tests.harness.bugs.failure import Failure
from tests.harness.diagnosis.confirmation import SEEDS, claimed_and
from tests.harness.verdict import Finding

MOST_ROWS = 2**15
"""The longest sequence that is tried in place of many heads: a call with a longer one may take many seconds."""
OF_ROWS = ("out", "lse", "dq")
"""Tensors that have elements for each row of queries."""

Fails = Callable[[Case], bool]
"""Whether a changed case fails as the smallest case of a bug does."""


Look = Callable[[Case], Finding | None]
"""Returns the finding of a changed case, or None if that does not fail as the smallest case of a bug does."""


def generalised(
    needs: Sequence[Condition], failure: Failure, fails: Fails, look: Look, capabilities: Capabilities
) -> list[Condition]:
    """Return the conditions of a failure, with each group that has a more general condition replaced by it."""
    case = failure.case
    needs = generalise_to_scores(generalise_to_nan(needs, case, fails), failure, fails)
    needs = generalise_to_blind_rows(needs, case, fails, look, capabilities)
    needs = generalise_to_heads(needs, case, fails, capabilities)
    needs = generalise_to_work(needs, failure, fails, capabilities)
    return generalise_to_masks(
        generalise_to_slices(needs, case, fails, capabilities), case, fails, capabilities
    )


def generalise_to_scores(needs: Sequence[Condition], failure: Failure, fails: Fails) -> list[Condition]:
    """Replace conditions on sm_scale and on numbers of q and k by one on large scores.

    A large sm_scale and large numbers make the same scores. If sm_scale is the only such condition, it is replaced if

    1. the case fails at the default scale too, with numbers of q that make the same scores. Example: with head_dim=64
       the default is 1/8, so that sm_scale=1 and an entry 1 in q become 1/8 and an entry 8;
    2. or the failure is NaN or infinity, which any large scores make, and the sign of sm_scale does not matter.
    """
    case = failure.case
    made = [need for need in needs if need.name in ("sm_scale", "qk_values")]
    if not made:
        return list(needs)
    is_scale = [need.name for need in made] == ["sm_scale"] and not _is_of_scores(case, fails)
    if is_scale and (failure.finding.kind != "nonfinite" or _is_of_sign(made[0], case)):
        return list(needs)
    return [*(need for need in needs if need not in made), Condition(SCORES, ("other",), ("ordinary",))]


def _is_of_sign(of_scale: Condition, case: Case) -> bool:
    """Whether the sign of the scale matters: it is 0 or negative, and a positive scale that is as large passes."""
    held = (replace(case, sm_scale=value).scale for value in of_scale.holds)
    return case.scale <= 0 and any(0 < scale >= -case.scale for scale in held)


def _is_of_scores(case: Case, fails: Fails) -> bool:
    """Whether a case with single entries in q fails at the default scale too, with larger entries for the same scores.

    It does not count if the case has the default scale already, or has NaN.
    """
    if case.sm_scale is None or case.q_values != "zeros" or value_of(case, NAN):
        return False
    at_default = replace(case, sm_scale=None)
    times = case.scale / at_default.scale
    spikes = (replace(x, value=times * float(x.value)) if x.tensor == "q" else x for x in case.spikes)
    return fails(replace(at_default, spikes=tuple(spikes)))


def generalise_to_nan(needs: Sequence[Condition], case: Case, fails: Fails) -> list[Condition]:
    """Replace conditions on numbers by one on NaN or infinity, if the case passes without and fails with NaN elsewhere.

    Example: inf in q fails. So does NaN in v instead, and without either the case passes.
    """
    numbers = [need for need in needs if need.name in VALUES_OF]
    other = "v" if any(spike.tensor != "v" for spike in case.spikes) else "q"
    finite = with_value(case, NAN, False)
    elsewhere = replace(finite, spikes=(*finite.spikes, Spike(other, (0, 0, 0, 0), "nan")))
    if not numbers or finite == case or fails(finite) or not fails(elsewhere):
        return list(needs)
    return [*(need for need in needs if need not in numbers), Condition(NAN, (True,), (False,))]


def generalise_to_blind_rows(
    needs: Sequence[Condition], case: Case, fails: Fails, look: Look, capabilities: Capabilities
) -> list[Condition]:
    """Replace conditions on lengths and the causal mask by one on rows that see no key, if such rows are the trigger.

    Example: causal, 9 queries, 5 keys: rows 0 to 3 see no key. All of these must be true:

    1. The case has such rows and no NaN, which other lengths would move to other rows.
    2. With lengths that let each row see a key the case passes, in more rows too; a wrong causal mask would still fail
       there. Or with normal numbers only rows that see no key are wrong: what fails at the changed lengths is then
       another bug.
    3. With causal, rows without keys fail as well if there are many: 193 queries and 5 keys.

    The condition holds for a case without any keys only if such a case fails too.
    """
    of_rows = [need for need in needs if need.name in (*LENGTHS, UNEQUAL, "causal")]
    own = value_of(case, BLIND)
    blind = Condition(BLIND, (own,), (SEEN,))
    cured = (
        list(counterfactuals(blind, case, capabilities))
        if of_rows and own != SEEN and not value_of(case, NAN)
        else []
    )
    if not cured:
        return list(needs)
    if any(map(fails, [*cured, *map(longer, cured)])) and not _are_rows_blind(case, look, capabilities):
        return list(needs)

    def fails_too(**fields: Any) -> bool:
        other = replace(case, **fields)
        return capabilities.admits(other) and fails(other)

    # Two numbers of rows, one more and nine more than whole tiles: a bug of certain lengths does not show at both.
    rows = max(case.seqlen_q, 2 * LONGER) + LONGER
    is_of_hidden = any(
        fails_too(causal=True, seqlen_q=rows + more, seqlen_k=case.seqlen_k or LONGER) for more in (1, 9)
    )
    if not is_of_hidden:
        return list(needs)
    is_of_none = own == NO_KEYS or fails_too(seqlen_k=0)
    blind = blind if is_of_none else replace(blind, holds=(SEEN, NO_KEYS))
    return [*(need for need in needs if need not in of_rows), blind]


def _are_rows_blind(case: Case, look: Look, capabilities: Capabilities) -> bool:
    """Whether only rows that see no key are wrong in the case with normal numbers and 8 more rows and keys.

    Example: causal, 9 queries and 0 keys become 17 queries and 8 keys: rows 0 to 8 see no key, rows 9 to 16 do.
    """
    few = longer(with_normal_numbers(case), FEWEST)
    finding = look(few) if capabilities.admits(few) else None
    if finding is None or finding.tensor not in OF_ROWS or value_of(few, BLIND) != HIDDEN:
        return False
    blind = few.seqlen_q - few.seqlen_k
    return finding.index[2] < blind and finding.wrong * few.seqlen_q <= finding.total * blind


def generalise_to_heads(
    needs: Sequence[Condition], case: Case, fails: Fails, capabilities: Capabilities
) -> list[Condition]:
    """Replace conditions on ``heads_kv`` and ``group`` by one on the number of query heads, if either way to it fails.

    Example: heads_kv=2 with group=3 fails, and so do heads_kv=6 with group=1, and heads_kv=1 with group=6. The few
    numbers of the smallest case may lie in a head that shows nothing then; normal numbers in a few more rows count too,
    if the bug has other conditions and changing each of them fixes that case. One head can be had in one way alone, so
    that it says nothing of which number matters.
    """
    of_heads = [need for need in needs if need.name in ("heads_kv", "group")]
    others = [need for need in needs if need not in of_heads]

    def is_alike(changed: Case) -> bool:
        if _fails_with_some_seed(changed, fails, capabilities):
            return True
        normal = longer(with_normal_numbers(changed), FEWEST)
        if not others or not _fails_with_some_seed(normal, fails, capabilities):
            return False
        return not any(all(map(fails, counterfactuals(need, normal, capabilities))) for need in others)

    alike = [replace(case, heads_kv=case.heads_q, group=1), replace(case, heads_kv=1, group=case.heads_q)]
    if not of_heads or case.heads_q == 1 or not all(map(is_alike, alike)):
        return list(needs)
    holds = {with_value(case, need.name, value).heads_q for need in of_heads for value in need.holds}
    number = Condition(HEADS, (case.heads_q,), tuple(sorted(holds)))
    return [*(need for need in needs if need not in of_heads), number]


def generalise_to_work(
    needs: Sequence[Condition], failure: Failure, fails: Fails, capabilities: Capabilities
) -> list[Condition]:
    """Replace conditions on a length, the batch and heads by one on the tiles that all slices have together.

    Example: four heads of one tile fail, and so do one head of four tiles and two heads of two, while three heads or
    three tiles pass. Then the fourth tile decides, as where each of three programs takes several tiles in turn and
    leaves something behind for the next. Normal numbers have to show it. In calls of so many tiles that have more keys
    and queries, the bug's other conditions have to matter too, or are left out.
    """
    case = with_normal_numbers(failure.case)
    length = "seqlen_q" if failure.finding.tensor in OF_ROWS else "seqlen_k"
    for name, work in WORK.items():
        of_work = [x for x in needs if x.name in (*feature(name).made_of, HEADS, SLICES)]
        count = work.count(case)
        if work.length != length or not of_work or not 1 < count <= MOST_ROWS // work.rows:
            continue
        failing, holding = _counts(work, case, count, lambda x: _fails_with_some_seed(x, fails, capabilities))
        if count in failing and not failing & holding and count - 1 in holding:
            told = Condition(
                name, (count, *sorted(failing - {count})), tuple(sorted(holding)), is_certain=True
            )
            dense = work.of_slices(longer(case, LONGER), count, work.rows)
            needed = (x for x in needs if x not in of_work)
            if fails(dense):
                needed = (x for x in needed if is_needed(x, dense, fails, capabilities))
            return [*needed, told]
    return list(needs)


def _counts(work: Work, case: Case, count: int, fails: Fails) -> tuple[set[int], set[int]]:
    """Return at which numbers of tiles a case fails, and at which it passes, however slices share the tiles.

    So many tiles are asked as ``count`` says, one less, and twice that; no more once these can't be what decides.
    """
    failing, holding, rows = set[int](), set[int](), work.rows
    for slices, at in (
        (1, (count - 1) * rows + rows // 8),
        (1, (count - 1) * rows),
        (1, (count - 1) * rows - rows // 2),
        (count, rows),
        (count - 1, rows),
        (-(-count // 2), 2 * rows),
        (2 * count - 2, rows),
        (count - 1, 2 * rows),
    ):
        asked = work.of_slices(case, slices, at)
        (failing if fails(asked) else holding).add(work.count(asked))
        if failing & holding or count in holding or count - 1 in failing:
            break
    return failing, holding


def generalise_to_slices(
    needs: Sequence[Condition], case: Case, fails: Fails, capabilities: Capabilities
) -> list[Condition]:
    """Replace conditions on the batch and on heads by one on several slices (a slice is one head of one sequence).

    Example: batch=2 with heads_kv=3 fails, and so do batch=6 with one head, and six heads of one sequence, while a
    single slice passes. One slice then corrupts another, as where a kernel has one buffer for all of them.
    """
    of_slices = [need for need in needs if need.name in feature(SLICES).made_of or need.name == HEADS]
    alike = [x for x in (with_slices_as(name, case) for name in ("batch", "heads_kv")) if x != case]
    if (
        not of_slices
        or not case.batch
        or not all(_fails_with_some_seed(x, fails, capabilities) for x in alike)
    ):
        return list(needs)
    if _fails_with_some_seed(with_value(case, SLICES, ONE), fails, capabilities):
        return list(needs)
    return [*(need for need in needs if need not in of_slices), Condition(SLICES, (SEVERAL,), (ONE,))]


def generalise_to_masks(
    needs: Sequence[Condition], case: Case, fails: Fails, capabilities: Capabilities
) -> list[Condition]:
    """Replace conditions on the causal mask and on lengths by one on masked scores, if either mask alone fails.

    Kernels mask the keys that causal hides in the same way as those beyond the last key. All of these must be true:

    1. 128 queries and keys with causal fail, and so do 128 queries and 127 keys without it.
    2. 128 queries and keys without causal pass: no score is masked there.
    3. The bug has another condition, and changing it fixes both failures; else each mask may have a bug of its own.
    """
    of_masks = [x for x in needs if x.name in ("causal", UNEQUAL, *LENGTHS) or feature(x.name).rows]
    others = [need for need in needs if need not in of_masks and need.is_telling]
    if not of_masks or not others:
        return list(needs)
    shows = claimed_and(fails, capabilities)
    for numbers in (case, with_normal_numbers(case)):
        whole = replace(with_value(numbers, MASKED, NONE), seqlen_q=WHOLE_TILES, seqlen_k=WHOLE_TILES)
        masked = [replace(whole, causal=True), replace(whole, seqlen_k=WHOLE_TILES - 1)]
        cured = [x for one in masked for need in others for x in counterfactuals(need, one, capabilities)]
        if all(map(shows, masked)) and not any(map(shows, (whole, *cured))):
            return [*(need for need in needs if need not in of_masks), Condition(MASKED, (SOME,), (NONE,))]
    return list(needs)


def _fails_with_some_seed(case: Case, fails: Fails, capabilities: Capabilities) -> bool:
    """Whether a changed case is claimed and fails with any of ``SEEDS`` seeds, as some numbers may hide the bug."""
    return capabilities.admits(case) and any(map(fails, with_seeds(case, SEEDS)))
