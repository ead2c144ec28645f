"""Needs of several fields replaced by what these have in common, so that each way to show a bug counts as one."""

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
    feature,
    value_of,
    with_normal_numbers,
    with_seeds,
    with_slices_as,
    with_value,
)
from tests.harness.bugs.bug import Condition
from tests.harness.bugs.counterfactuals import counterfactuals
from tests.harness.bugs.dense import FEWEST, LONGER, longer
from tests.harness.bugs.failure import Failure
from tests.harness.diagnosis.confirmation import SEEDS, claimed_and
from tests.harness.verdict import Finding

OF_ROWS = ("out", "lse", "dq")
"""Tensors that have elements of their own for each row."""

Fails = Callable[[Case], bool]
"""Whether a changed case fails as the smallest case of a bug does."""


Look = Callable[[Case], Finding | None]
"""Returns what is found in a changed case, None where it does not fail as the smallest case of a bug does."""


def generalised(
    needs: Sequence[Condition], failure: Failure, fails: Fails, look: Look, capabilities: Capabilities
) -> list[Condition]:
    """Return the needs of a failure, each group of them that a more general one explains replaced by that."""
    case = failure.case
    needs = generalise_to_scores(generalise_to_nan(needs, case, fails), failure, fails)
    needs = generalise_to_blind_rows(needs, case, fails, look, capabilities)
    needs = generalise_to_heads(needs, case, fails, capabilities)
    return generalise_to_masks(
        generalise_to_slices(needs, case, fails, capabilities), case, fails, capabilities
    )


def generalise_to_scores(needs: Sequence[Condition], failure: Failure, fails: Fails) -> list[Condition]:
    """Replace needs of sm_scale and of the numbers of q and k by one need of large scores.

    A large scale and large numbers make the same scores. A scale that is needed alone stays a need, unless the case
    fails at the default one too, with the numbers of q as many times as large. NaN and infinity come from large scores,
    wherever these come from, unless the sign of the scale is what matters.
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
    """Whether a scale that is not positive is needed: a positive one holds that makes no smaller scores."""
    held = (replace(case, sm_scale=value).scale for value in of_scale.holds)
    return case.scale <= 0 and any(0 < scale >= -case.scale for scale in held)


def _is_of_scores(case: Case, fails: Fails) -> bool:
    """Whether a case with few numbers in q fails at the default scale too, if these numbers make the same scores.

    Of one that has the default scale this tells nothing.
    """
    if case.sm_scale is None or case.q_values != "zeros" or value_of(case, NAN):
        return False
    at_default = replace(case, sm_scale=None)
    times = case.scale / at_default.scale
    spikes = (replace(x, value=times * float(x.value)) if x.tensor == "q" else x for x in case.spikes)
    return fails(replace(at_default, spikes=tuple(spikes)))


def generalise_to_nan(needs: Sequence[Condition], case: Case, fails: Fails) -> list[Condition]:
    """Replace needs of numbers by one of NaN or infinity, if NaN in another tensor fails as well."""
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
    """Replace needs of lengths and of the causal mask by one of rows that see no key, if only such rows are wrong.

    A wrong causal mask fails with more keys than queries too, or with as many, if there are enough rows. But so may
    another bug, which tells nothing if with ordinary numbers only rows that see no key are wrong. If there are no keys,
    lengths say the same, unless a mask that hides all keys fails as well. In a case with NaN, other lengths tell
    nothing, because they move it to other rows.
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

    # With rows that are no whole tiles, or no whole tiles more than there are keys, a failure of certain lengths holds.
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
    """Whether only rows that see no key are wrong.

    This is asked of the case with ordinary numbers and with a few more rows and keys, so that some rows see one.
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
    """Replace needs of ``heads_kv`` and ``group`` by one of the number of query heads, if it fails for both alike.

    The numbers of the smallest case may lie in a key head that shows nothing then. Ordinary ones fail in any, and what
    else the bug needs tells that it is this bug.
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
    if not of_heads or not all(map(is_alike, alike)):
        return list(needs)
    holds = {with_value(case, need.name, value).heads_q for need in of_heads for value in need.holds}
    number = Condition(HEADS, (case.heads_q,), tuple(sorted(holds)))
    return [*(need for need in needs if need not in of_heads), number]


def generalise_to_slices(
    needs: Sequence[Condition], case: Case, fails: Fails, capabilities: Capabilities
) -> list[Condition]:
    """Replace needs of the batch and of heads by one need: that there are several slices, of whichever kind.

    This is so if the case fails with all of its slices as sequences, and with all of them as heads, but not with a
    single one. One slice then spoils another, for example because a kernel keeps something in one place for all.
    """
    of_slices = [need for need in needs if need.name in feature(SLICES).made_of or need.name == HEADS]
    alike = [x for x in (with_slices_as(name, case) for name in ("batch", "heads_kv")) if x != case]
    if not of_slices or not all(_fails_with_some_seed(x, fails, capabilities) for x in alike):
        return list(needs)
    if _fails_with_some_seed(with_value(case, SLICES, ONE), fails, capabilities):
        return list(needs)
    return [*(need for need in needs if need not in of_slices), Condition(SLICES, (SEVERAL,), (ONE,))]


def generalise_to_masks(
    needs: Sequence[Condition], case: Case, fails: Fails, capabilities: Capabilities
) -> list[Condition]:
    """Replace needs of the causal mask and of lengths by one of masked scores, if either mask alone fails.

    Kernels mask alike what the causal mask hides and what lies beyond the last key. But each may also have a bug of its
    own. They are one only if something else is needed, and without it neither mask fails.
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
    """Whether a changed case fails with some seed: its numbers may hide what one slice does to another."""
    return capabilities.admits(case) and any(map(fails, with_seeds(case, SEEDS)))
