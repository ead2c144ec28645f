"""Why a case fails, as far as it can be told: what its wrong elements have in common, and which fields matter."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kernels.contract import Capabilities
from strategies.case import SIZES, TENSORS, Case
from strategies.features import LENGTHS, UNEQUAL
from tests.harness.bugs.failure import COMES_AND_GOES, EVER_OTHER, Explanation, Field
from tests.harness.clock import BudgetSpent
from tests.harness.diagnosis.cause import causes
from tests.harness.diagnosis.vary import fields
from tests.harness.running.runs import Seen

FURTHER = 70
"""This many more queries and keys reach into one more tile, for most tile sizes."""
WIDE = 16
"""From this many columns on, a single wrong one stands out."""

TELLING_SCALE = 0.3
"""Differs from every other constant in ``known_numbers``, so that a wrong factor of 0.3 is named unambiguously."""


def explain(
    case: Case,
    fails: Callable[[Case], bool | None],
    look: Callable[[Case], Seen | None] | None,
    capabilities: Capabilities,
    *,
    lengths_tell: bool = True,
) -> Explanation:
    """Explain a failing case.

    ``fails`` says whether a case breaks the law, or None if that is not known. ``look`` returns what is seen in a
    case that fails as this one does, and None for any other; it is None if no number is wrong. Either may raise
    BudgetSpent, which ends the search with what is known by then. With ``lengths_tell=False``, lengths are not
    named as causes, because the law draws others, up to those of the case.
    """
    known = Explanation()
    with suppress(BudgetSpent):
        if look:
            others = [*_larger(case, capabilities)]
            larger = ((x, look(x)) for x in (replace(others[0], sm_scale=TELLING_SCALE), *others))
            other, seen = next(((x, found) for x, found in larger if found), (case, Seen((), ())))
            if seen.sentences and other != case:
                seen = replace(seen, sentences=(f"a larger case, {other}:", *seen.sentences))
            larger_case = other if other != case else None
            known = Explanation(seen.sentences, pictures=seen.pictures, larger=larger_case)
            known = replace(known, sentences=(*seen.sentences, *_repeated(case, look)))
        elif not (fails(case) and fails(case)):
            return Explanation((COMES_AND_GOES,))
        for field in fields(case, fails, capabilities):
            known = replace(known, fields=(*known.fields, field))
        found = causes(case, known.fields, capabilities.launch)
        needed = [
            cause
            for field, cause in found
            if (lengths_tell or field.name not in (*LENGTHS, UNEQUAL))
            and fails(_with_more(case, field, capabilities))
            and fails(_with_more(field.held[-1], field, capabilities)) is False
        ]
        known = replace(known, causes=tuple(needed))
    return known


def _with_more(case: Case, field: Field, capabilities: Capabilities) -> Case:
    """Return the case with more numbers, and with other sizes than that of the field.

    A small case may hold by luck without a feature, and with the feature fail only because of its few numbers.
    """
    larger = next(_larger(case, capabilities))
    # The default scale follows from head_dim.
    size = "head_dim" if field.name == "sm_scale" else field.name
    if size in SIZES:
        larger = replace(larger, **{size: getattr(case, size)})
    return larger if capabilities.admits(larger) else case


def _repeated(case: Case, look: Callable[[Case], Seen | None]) -> list[str]:
    """Say whether the case fails otherwise, or not at all, when it is run again; [] if it fails in the same way."""
    first, second = look(case), look(case)
    if first is None or second is None:
        return [COMES_AND_GOES]
    return [] if first == second else [EVER_OTHER]


def _larger(case: Case, capabilities: Capabilities) -> Iterator[Case]:
    """Yield cases in which more elements can be wrong, the largest first, then the case itself.

    A case that was shrunk shows one wrong element, and does not show where others would be.
    """
    wide = next((x for x in capabilities.head_dims if x >= WIDE), case.head_dim)
    dense: dict[str, Any] = {f"{tensor}_values": "normal" for tensor in TENSORS}
    more: dict[str, Any] = {"batch": max(2, case.batch), "heads_kv": max(2, case.heads_kv)}
    longer: dict[str, Any] = {"seqlen_q": case.seqlen_q + FURTHER, "seqlen_k": case.seqlen_k + FURTHER}
    wider: dict[str, Any] = {"head_dim": max(wide, case.head_dim)}
    for changes in ({**more, **longer, **wider}, {**more, **longer}, longer, more, {}):
        larger = replace(case, spikes=(), **dense, **changes)
        if capabilities.admits(larger):
            yield larger
    yield case
