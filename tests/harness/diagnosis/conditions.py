"""The conditions under which a bug shows, and all tensors that are wrong because of it.

The conditions of the drawn case come first, in few runs (``diagnosed``). It has many numbers, so that hardly a field
matters in it by chance, and they distinguish bugs even if there is no time for the smallest case.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from kernels.contract import GRADIENTS, OUTPUTS, Capabilities
from kernels.contract.tuners import is_tuner
from reference.bounds.accumulation import SHRINKING_SAFETY
from strategies.case import KINDS, LAYOUT_FIELDS, OPTIONS, SIMPLEST, SIZES, TENSORS, Case
from strategies.features import (
    DIFFERENT,
    EMPTY,
    HEADS,
    HUGE,
    LENGTHS,
    NAN,
    SCORES,
    UNEQUAL,
    VALUES_OF,
    feature,
    laid_out,
    lie_as_contiguous,
    pair_of,
    value_of,
    with_normal_numbers,
    with_value,
)
from strategies.landmarks import MANY
from strategies.size_rules import ABOVE, Rule
from tests.harness.bugs.bug import COUNTS, Bug, Condition
from tests.harness.bugs.counterfactuals import counterfactuals, needs_of, resisted_shrinking
from tests.harness.bugs.dense import (
    FEWEST,
    TILES,
    longer,
    ordinary_cases,
    symptoms_apart_from_forward,
    symptoms_on_dense_case,
)
from tests.harness.bugs.failure import COMES_AND_GOES, Failure, Field
from tests.harness.clock import BudgetSpent
from tests.harness.diagnosis.confirmation import confirmed, refuted
from tests.harness.diagnosis.explanation import fields
from tests.harness.diagnosis.generalisation import generalise_to_scores, generalised
from tests.harness.law import basic_laws, law_named
from tests.harness.running.runs import Runs
from tests.harness.symptoms import are_kindred, is_not_cured, is_small, wrong_tensors
from tests.harness.verdict import NUMBERS, Finding

OF_SEVERAL_PAGES = ("batch", "seqlen_k", UNEQUAL, "page_size", "block_table", *DIFFERENT.values())
"""Features that decide how many pages a case has, and which come first."""
ROWS = (*COUNTS, *LENGTHS)
"""The fields that decide how many rows a tensor has."""
FEW_ORDINARY = 3
"""How many ordinary cases of another dtype must all fail for a bug to count as one that shows in that dtype too."""
ORDINARY_JUDGED = 8
"""How many ordinary cases are run to see which tensors a bug without conditions makes wrong."""
ASKED_OF_DESIGNS = 3
"""In how many ordinary cases it is tried whether a less precise design explains the wrong tensors but the failure's."""
OF_SCORES = ("dq", "dk", "dbias", "dsinks")
"""The gradients that are computed from dS."""
FOLLOW = {"out": GRADIENTS, **{name: tuple(x for x in OF_SCORES if x != name) for name in OF_SCORES}}
"""The gradients that inherit rounding errors: those of out all, and dq, dk, dbias and dsinks those of dS."""
AS_SMALL = 4
"""Inherited rounding errors are at most this many times as large; those of float16 and bfloat16 differ by 8."""

WHOLE_TILES = (64, 128)
"""Lengths that fill the tiles of most kernels."""
LONG = tuple(MANY << n for n in range(11))
"""Lengths beyond which some kernels take others: a long case is tried with those that are shorter."""


@dataclass
class ConditionSearch:
    """The search for the conditions of the bug behind a failure, and for the tensors that it makes wrong.

    ``failure`` has the smallest case that was found, and ``bugs`` are the kernel's known ones. ``judged`` remembers
    what ``found`` returned. ``known_as`` are claims by which the kernel is known to be less precise: an error that they
    explain is not due to the bug. Functions that are passed in, such as ``fails`` and ``spend``, may raise BudgetSpent,
    which ends the search.
    """

    runs: Runs
    failure: Failure
    judged: dict[tuple[str, Case], Finding | None] = field(default_factory=dict)
    known_as: tuple[str, ...] = ()
    bugs: Mapping[str, Bug] = field(default_factory=dict)

    @property
    def claims(self) -> Capabilities:
        """The claims that admit changed cases: a case that the kernel refuses does not show whether a field matters."""
        return self.runs.claims_of(self.failure.law)

    def needs(
        self, witnesses: Sequence[Case], fails: Callable[[Case], bool]
    ) -> Iterator[tuple[Condition, ...]]:
        """Yield the conditions without which none of the ``witnesses`` fails, twice: a quick answer, then a better one.

        The first follows from the witnesses alone. The second has been confirmed or refuted by larger cases, which
        takes many more runs. ``fails`` says whether a case fails as the failure's own does.
        """
        case, capabilities = self.failure.case, self.claims
        varied = [x for x in fields(case, fails, capabilities) if x.matters]
        matter = [need for x in varied for need in self.as_needs(x, fails)]
        # A length for which no other value passed may still matter: all of its whole tiles may pass.
        others = (name for name in LENGTHS if name not in [need.name for need in matter])
        matter += [Condition(name, (getattr(case, name),), ()) for name in others]
        matter = [self.with_whole_tiles(need, fails) for need in matter]
        found = needs_of(matter, witnesses, fails, capabilities)
        # A failure that comes and goes may be absent by chance, so that no field can be blamed for it.
        if COMES_AND_GOES in self.failure.explanation.sentences:
            yield ()
            return
        yield self.in_general(found, fails)
        yield self.in_general(self.without_rows(self.with_certain(found, matter, fails), fails), fails)

    def in_general(self, needs: Sequence[Condition], fails: Callable[[Case], bool]) -> tuple[Condition, ...]:
        """Return the conditions, generalised where several have one reason, without those that matter by chance.

        Example: a large sm_scale and set numbers of q become one condition, on large scores.
        """
        law = self.failure.law

        def look(case: Case) -> Finding | None:
            return self.found(case, law, lambda: None) if law_named(law).is_basic and fails(case) else None

        general = generalised(needs, self.failure, fails, look, self.claims)
        told = without_lengths_of_no_rule(without_accidents(general))
        return without_several_keys(told) if self.failure.finding.tensor in OF_SCORES else told

    def with_certain(
        self, needs: Sequence[Condition], matter: Sequence[Condition], fails: Callable[[Case], bool]
    ) -> list[Condition]:
        """Return the conditions after normal numbers in many rows have confirmed or refuted some of them.

        A confirmed condition is added even if it is not among ``needs``, since a larger witness may fail without it
        because of another bug. One on a size that does not matter in dense cases is left out. ``matter`` are all fields
        that matter in the smallest case.
        """
        sure: dict[str, Condition] = {}
        others, case = list(needs), self.failure.case
        with suppress(BudgetSpent):
            for need in confirmed(matter, case, fails, self.claims):
                sure[need.name] = need
            for need in refuted(needs, [x for x in sure.values() if x.holds], case, fails, self.claims):
                others.remove(need)
        found = (need for need in sure.values() if need.holds)
        return [*(need for need in others if need.name not in sure), *found]

    def without_rows(self, needs: Sequence[Condition], fails: Callable[[Case], bool]) -> list[Condition]:
        """Return the conditions; if one is on a layout, without sizes that matter only because they give it strides.

        Example: k in the layout bnhd, with two heads. With one head a tensor in this layout lies as a contiguous one,
        so that the bug can't show. Only the layout is a condition then.
        """
        layouts = [need for need in needs if feature(need.name).is_layout]
        if not layouts:
            return list(needs)
        return [
            need
            for need in needs
            if not (self.has_instead(need, layouts[0], fails) or self.is_of_layout(need, layouts[0], fails))
        ]

    def has_instead(self, need: Condition, layout: Condition, fails: Callable[[Case], bool]) -> bool:
        """Whether another size can stand in for this one: the case fails with 1 here and 2 there, as the same bug.

        Example: it fails with heads_kv=2, and with heads_kv=1 and batch=2. It is the same bug if changing the layout
        fixes the second case too.
        """
        case, claims = self.failure.case, self.claims
        if need.name not in ROWS or not {0, 1}.issuperset(need.holds):
            return False
        one = with_value(case, need.name, 1)
        changed = (with_value(one, x, 2) for x in ROWS if x != need.name and getattr(case, x) == 1)
        claimed = [x for x in changed if claims.admits(x)]
        return any(fails(x) and not any(map(fails, counterfactuals(layout, x, claims))) for x in claimed)

    def is_of_layout(self, need: Condition, layout: Condition, fails: Callable[[Case], bool]) -> bool:
        """Whether a size matters only because it gives a layout its strides: at 1 the tensors lie as contiguous ones.

        The first rule that applies decides:

        1. No, unless the tensors have strides of their own in the case, and those of contiguous tensors at size 1.
        2. Yes, if the size is the batch and the law compares elements of a batch: at 1 it has nothing to compare, so
           that no run can decide.
        3. The layout ``gap`` may keep strides of its own even at size 1. If it does, the answer is no where ``gap``
           fails at this size and passes at 1, as the size then matters by itself, and yes elsewhere.
        4. No, if ``gap`` lies as a contiguous tensor at 1 too, or is not claimed.
        """
        case, claims = self.failure.case, self.claims
        if need.name not in ROWS or not {0, 1}.issuperset(need.holds):
            return False
        tensors, one = laid_out(layout.name, case), with_value(case, need.name, 1)
        if not tensors or lie_as_contiguous(tensors, case) or not lie_as_contiguous(tensors, one):
            return False
        if need.name == "batch" and "batch" in law_named(self.failure.law).compares:
            return True
        gaps: dict[str, Any] = {f"{tensor}_layout": "gap" for tensor in tensors}
        own, single = (replace(x, **gaps) for x in (case, one))
        told = claims.admits(own) and not lie_as_contiguous(tensors, single)
        return told and (fails(single) or not fails(own))

    def as_needs(self, varied: Field, fails: Callable[[Case], bool]) -> Iterator[Condition]:
        """Yield the condition on a field that matters, or none if only a length of 0 passes.

        1. Unequal lengths: passing values are "equal" and, if swapping the lengths fixes the case, the other order.
        2. A huge layout: any tensor's huge strides count as one condition.
        3. A layout that matters because it differs from another tensor's: one condition on the pair.
        4. A count, such as heads_kv: of the passing values only 1, if it passes. With another count the wrong head may
           be one without numbers, so that the case passes by luck.
        5. An option with a few kinds, or a tuner: all values that were seen to fail.
        6. A length: passing values, of which 0 alone is no condition, since nothing is wrong in an empty tensor.
        """
        case, name = self.failure.case, varied.name
        own = value_of(case, name)
        if name == UNEQUAL:
            yield Condition(name, (own,), ("equal", *self.other_way_round(fails)))
        elif own == "huge":
            yield Condition(HUGE, (True,), (False,))
        elif feature(name).is_layout and (pair := self.pair_of(name, fails)):
            yield Condition(pair, ("other",), ("contiguous",))
        else:
            holds = tuple(value_of(held, name) for held in varied.held)
            if name in COUNTS:
                holds = tuple(x for x in holds if x == 1) or self.with_ordinary_numbers(name, holds, fails)
            also = varied.fails if name in KINDS or is_tuner(name) else ()
            if name == "pool":  # pages that are taken for others may have the same few numbers
                kept = self.with_ordinary_numbers(name, holds, fails)
                also, holds = (*also, *(x for x in holds if x not in kept)), kept
            if name not in LENGTHS or any(holds):
                values = self.claims.launch.get(name, ()) if is_tuner(name) else ()
                untried = tuple(x for x in values if x not in (own, *also, *holds))
                yield Condition(name, (own, *also), holds, untried=untried)

    def with_ordinary_numbers(
        self, name: str, holds: tuple[Any, ...], fails: Callable[[Case], bool]
    ) -> tuple[Any, ...]:
        """Return those of the passing values of a field that also pass with normal numbers in a few more rows.

        A small case has its numbers in one head or sequence. With another count the wrong head may be one without
        numbers, so that the case passes by luck. All values are returned if normal numbers do not show the bug, or
        leave no passing value.
        """
        normal = longer(with_normal_numbers(self.failure.case), FEWEST)
        if not fails(normal):
            return holds
        return tuple(x for x in holds if not fails(with_value(normal, name, x))) or holds

    def other_way_round(self, fails: Callable[[Case], bool]) -> list[str]:
        """Return the value of ``UNEQUAL`` for swapped lengths if the case passes that way, in more rows too; else [].

        Example: it fails with 5 queries and 9 keys, and passes with 9 queries and 5 keys, and with 73 and 69.
        """
        case, claims = self.failure.case, self.claims
        turned = replace(case, seqlen_q=case.seqlen_k, seqlen_k=case.seqlen_q)
        both = [turned, longer(turned)]
        if fails(with_normal_numbers(case)):  # single entries may lie where the swapped case has no error
            both = [*both, *map(with_normal_numbers, both)]
        hold = all(claims.admits(x) and not fails(x) for x in both)
        return [value_of(turned, UNEQUAL)] if hold else []

    def pair_of(self, name: str, fails: Callable[[Case], bool]) -> str:
        """Return the pair of layouts that must differ, if this layout matters only by differing from another; else "".

        Example: k is contiguous and v has the layout bnhd, and the case passes with bnhd for both: "k and v layouts".
        """
        case, mine = self.failure.case, name.removesuffix("_layout")
        for other in TENSORS:
            if getattr(case, f"{other}_layout") == getattr(case, name):
                continue
            alike = with_value(case, f"{other}_layout", getattr(case, name))
            if self.claims.admits(alike) and not fails(alike):
                return pair_of(mine, other)
        return ""

    def diagnosed(self, fails: Callable[[Case], bool]) -> tuple[Condition, ...]:
        """Return the conditions of the failure's case that few runs find, or those found when the time is over."""
        found: list[Condition] = []
        with suppress(BudgetSpent):
            found.extend(diagnosed(self.failure.case, fails, self.claims))
        # A drawn case has too many numbers in q to try the same scores by other numbers.
        return without_accidents(generalise_to_scores(found, self.failure, lambda _: False))

    def dtypes(self, spend: Callable[[], None]) -> tuple[Condition, ...]:
        """Return the dtype as a condition if ordinary cases pass in some other dtype, else no condition."""
        f, claims, holding = self.failure, self.claims, []
        for dtype in (x for x in claims.dtypes if x != f.case.dtype):
            ordinary = ordinary_cases(claims, dtype, self.runs.device_type, f.case)[:FEW_ORDINARY]
            if not all(is_not_cured(f.finding, self.found(case, f.law, spend)) for case in ordinary):
                holding.append(dtype)
        return (Condition("dtype", (f.case.dtype,), tuple(holding)),) if holding else ()

    def with_whole_tiles(self, need: Condition, fails: Callable[[Case], bool]) -> Condition:
        """Add to a condition on a length those of ``TILES`` at which the case passes; any other stays as it is."""
        if need.name not in LENGTHS:
            return need
        case, capabilities = self.failure.case, self.claims
        tiles = [(x, with_value(case, need.name, x)) for x in TILES if x not in need.holds]
        holds = [x for x, tiled in tiles if capabilities.admits(tiled) and not fails(tiled)]
        return replace(need, holds=(*need.holds, *holds))

    def tensors_of(
        self, needs: Sequence[Condition], cases: Sequence[Case], spend: Callable[[], None]
    ) -> set[str]:
        """Return all tensors that are wrong because of the bug, under its own law and the basic laws.

        ``cases`` show the bug. If it needs no special numbers, its smallest case is tried with normal numbers too, and
        in more rows and keys: with one key, for example, dq and dk are 0 and can't be wrong. Of the tensors that are
        wrong, these are left out, as they belong to another bug:

        1. tensors that stay wrong when a condition of the bug is removed;
        2. tensors that are right in the dense case (``symptoms_on_dense_case``), if that shows the bug at all;
        3. if out is wrong, gradients that at other lengths are wrong where out is right;
        4. tensors that no single mistake makes wrong together with the failure's own (``kindred``).
        """
        f, own = self.failure, self.failure.law
        if not any(need.name in (SCORES, NAN, *VALUES_OF) for need in needs):
            normal = with_normal_numbers(f.case)
            cases = [*cases, normal, *self.longer(normal, needs)]
        is_shared = law_named(own).shares_cases and f.finding.kind in NUMBERS
        beside = basic_laws() if is_shared else ()
        found: set[str] = set()
        for law in dict.fromkeys((own, *beside)):
            for witness in cases:
                wrong = self.wrong(witness, law, spend)
                for need in needs:
                    cured = list(counterfactuals(need, witness, self.claims))[:1] if wrong else []
                    for case in cured:
                        wrong = wrong - self.wrong(case, law, spend)
                found |= wrong

        def run(law: str, case: Case, _: frozenset[str]) -> Finding | None:
            return self.found(case, law, spend)

        ordinarily = symptoms_on_dense_case(f.law, f.case, f.finding, run, self.claims, needs)
        found &= ordinarily or found
        with suppress(BudgetSpent):
            if "out" in found:
                found -= symptoms_apart_from_forward(f.case, run, self.claims, self.bugs.values())
        return self.kindred(found)

    def longer(self, case: Case, needs: Sequence[Condition]) -> Iterator[Case]:
        """Yield the case with more rows and keys, if it is claimed and meets the bug's conditions."""
        more = longer(case)
        if self.claims.admits(more) and all(need.is_met(more) for need in needs):
            yield more

    def always_wrong(self, spend: Callable[[], None]) -> set[str]:
        """Return the tensors that are wrong in every ordinary case in which the failure's own tensor is wrong.

        This is for a bug without conditions. Its small cases can't answer, as they were shrunk to show one tensor. The
        law ``backward`` is run, or the failure's own law if the kernel has no backward or no basic law makes its calls.

        1. Cases with few rows and keys are run too: a second bug that shows in every ordinary case may pass there.
        2. Tensors that are wrong in a case where the failure's own tensor is right belong to another bug.
        3. A rounding error: gradients that inherit it are added, even if they are wrong in some cases only.
        4. Any other error: tensors that a less precise design explains are left out.
        """
        finding, info = self.failure.finding, self.runs.info
        own, law = finding.tensor, self.failure.law
        has_own_calls = law_named(law).has_own_calls
        if not own or not (has_own_calls or law_named(law).shares_cases):
            return set()
        law = "backward" if info.capabilities.backward and not has_own_calls else law
        case = self.failure.case
        ordinary = ordinary_cases(info.capabilities, case.dtype, self.runs.device_type, case)
        few = [replace(case, seqlen_q=FEWEST, seqlen_k=FEWEST) for case in ordinary[:FEW_ORDINARY]]
        claimed = [case for case in few if info.capabilities.admits(case)]
        found = {case: self.wrong(case, law, spend) for case in (*ordinary[:ORDINARY_JUDGED], *claimed)}
        showing = {case: wrong for case, wrong in found.items() if own in wrong}
        always = set.intersection(*showing.values()) if showing else set()
        always = always.difference(*(wrong for wrong in found.values() if own not in wrong))
        if is_small(finding):
            always |= {x for tensor in always for x in self.rounded_after(tensor, law, showing, spend)}
        elif always > {own}:
            always &= {own, *self.beyond_any_design(law, [*showing][:ASKED_OF_DESIGNS], spend)}
        return self.kindred(always)

    def beyond_any_design(self, law: str, cases: Sequence[Case], spend: Callable[[], None]) -> set[str]:
        """Return the tensors, except the failure's own, that are wrong in any of the cases and that no design explains.

        Wrong tensors that a design explains are wrong because the kernel is less precise than claimed. It need not be
        known as such yet.
        """
        found = set()
        for case in cases:
            spend()
            ignored = self.failure.ignored | {self.failure.finding.tensor}
            finding = self.runs.judged(law, case, ignored, self.known_as, SHRINKING_SAFETY)
            found |= wrong_tensors(finding) if finding else set()
        return found

    def rounded_after(
        self, tensor: str, law: str, found: Mapping[Case, set[str]], spend: Callable[[], None]
    ) -> Iterator[str]:
        """Yield the gradients that inherit rounding errors of a tensor, and are wrong by about as much in some case.

        The numbers of a case decide whether an inherited rounding error exceeds its bound, so one case is enough.
        ``found`` has cases with all tensors that are wrong in them.
        """
        for other in FOLLOW.get(tensor, ()):
            case = next((case for case, wrong in found.items() if {tensor, other} <= wrong), None)
            if case is not None:
                mine, others = (self.error_alone(x, law, case, spend) for x in (tensor, other))
                if others <= AS_SMALL * mine:
                    yield other

    def error_alone(self, tensor: str, law: str, case: Case, spend: Callable[[], None]) -> float:
        """Return the relative error of a tensor in a case, or infinity if none is reported for this tensor alone."""
        spend()
        ignored = frozenset({*OUTPUTS} - {tensor})
        finding = self.runs.judged_raw(law, case, ignored, SHRINKING_SAFETY, self.known_as)
        return math.inf if finding is None or finding.relative is None else float(finding.relative)

    def kindred(self, wrong: set[str]) -> set[str]:
        """Return those of the wrong tensors that one mistake may have made wrong together with the failure's own."""
        own = self.failure.finding.tensor
        return {tensor for tensor in wrong if "out" in wrong or are_kindred({own}, {tensor})}

    def wrong(self, case: Case, law: str, spend: Callable[[], None]) -> set[str]:
        """Return the tensors that are wrong in a case, if it fails in the same kind of way as the failure."""
        finding = self.found(case, law, spend)
        same = finding is not None and finding.signature == self.failure.finding.signature
        return wrong_tensors(finding) if finding and same else set()

    def found(self, case: Case, law: str, spend: Callable[[], None]) -> Finding | None:
        """Run a law on a case, and return the finding, which is remembered."""
        if (law, case) not in self.judged:
            spend()
            asked = law, case, self.failure.ignored, SHRINKING_SAFETY, self.known_as
            self.judged[law, case] = self.runs.judged_raw(*asked)
        return self.judged[law, case]


def explained(needs: Sequence[Condition], failure: Failure) -> list[Condition]:
    """Return the conditions of the drawn case, corrected by the explanation of the smallest case.

    1. A condition is dropped if its field does not matter in the smallest case.
    2. A condition is added on each field that matters there and that shrinking could not simplify, such as causal, and
       on each tuner whose configuration matters. Lengths are not added.
    """
    case, told = failure.case, {x.name: x for x in failure.explanation.fields}
    kept = [need for need in needs if need.name not in told or told[need.name].matters]
    left_out = {*LENGTHS, *(need.name for need in kept)}
    others = (
        Condition(name, (value_of(case, name), *also), tuple(value_of(x, name) for x in varied.held))
        for name, varied in told.items()
        if varied.matters and (name in SIMPLEST or is_tuner(name)) and name not in left_out
        for also in [varied.fails if is_tuner(name) else ()]
    )
    return [*kept, *(need for need in others if is_tuner(need.name) or resisted_shrinking(need))]


def without_lengths_of_no_rule(needs: Sequence[Condition]) -> tuple[Condition, ...]:
    """Return the conditions; if one distinguishes bugs, without those on lengths that fail by no known rule.

    Example: with causal, 9 keys fail and 7 and 11 pass. Passing lengths are neither all above nor all below the failing
    one, nor whole tiles, so they may pass by chance, and a failure at 7 keys may be the same bug.
    """
    telling = any(need.is_telling for need in needs)
    return tuple(
        need
        for need in needs
        if not (telling and need.name in LENGTHS and not (need.rule or need.is_certain))
    )


def without_several_keys(needs: Sequence[Condition]) -> tuple[Condition, ...]:
    """Return the conditions of a bug of dq, dk or dbias without "more than one key", unless it is the only one.

    With one key dS is 0, so that these gradients are right whatever the bug does. NaN among the scores shows the bug
    all the same, so that the number of keys is no condition.
    """
    others = tuple(need for need in needs if (need.name, need.rule) != ("seqlen_k", Rule(ABOVE, 1)))
    return others or tuple(needs)


def without_accidents(needs: Sequence[Condition]) -> tuple[Condition, ...]:
    """Return one condition for each field, without those that another condition implies.

    1. Special numbers imply the dtype, because numbers such as the largest one are special to a format. They imply a
       count of 1 as well: with more heads or sequences the set entries are in other places.
    2. Large scores imply head_dim: scores are sums of head_dim products, by default scaled by it.
    3. A sequence without keys implies different numbers of keys, and so with queries.
    4. Pools that are interleaved or padded by page imply what gives a case several pages: a second sequence, another
       order, or more keys than a page has.
    5. Unequal lengths imply each length, since changing one length may make both equal. A confirmed condition on a
       length stays.
    """
    unique: dict[Any, Condition] = {need.name: need for need in needs}
    if not unique.keys().isdisjoint((SCORES, NAN)) or any(name.endswith("_values") for name in unique):
        unique.pop("dtype", None)
        singles = [name for name in (*COUNTS, HEADS) if name in unique and unique[name].fails[0] == 1]
        unique = {name: need for name, need in unique.items() if name not in singles}
    if SCORES in unique:
        unique.pop("head_dim", None)
    for name in EMPTY:
        if EMPTY[name] in unique:
            unique.pop(DIFFERENT[name], None)
    if "pool" in unique:
        unique = {name: need for name, need in unique.items() if name not in OF_SEVERAL_PAGES}
    if UNEQUAL in unique:
        unique = {name: need for name, need in unique.items() if need.is_certain or name not in LENGTHS}
    return tuple(unique.values())


def diagnosed(case: Case, fails: Callable[[Case], bool], capabilities: Capabilities) -> Iterator[Condition]:
    """Yield a condition for each field of which other values, a few of which are tried, make the case pass.

    Layouts are tried one by one only if making all of them contiguous fixes the case, and single lengths only if equal
    lengths do not. ``fails`` may raise BudgetSpent, which ends the search.
    """
    lengths_tell = True
    all_contiguous = reduce(lambda x, name: with_value(x, name, "contiguous"), LAYOUT_FIELDS, case)
    layouts_matter = all_contiguous != case and not (
        capabilities.admits(all_contiguous) and fails(all_contiguous)
    )
    for name, values in _alternatives(case, capabilities):
        if name in (*LAYOUT_FIELDS, HUGE) and not layouts_matter:
            continue
        if name in LENGTHS and not lengths_tell:
            continue
        changed = [(value, with_value(case, name, value)) for value in values]
        claimed = [(value, x) for value, x in changed if x != case and capabilities.admits(x)]
        holds = [value for value, x in claimed if not fails(x)]
        if name == UNEQUAL:  # all equal lengths must fix the case: a short one may fix it by being short
            holds = ["equal"] if holds and len(holds) == len(claimed) else []
            lengths_tell = not holds
        if holds:
            yield Condition(name, (value_of(case, name),), tuple(holds))


def _alternatives(case: Case, capabilities: Capabilities) -> Iterator[tuple[str, list[Any]]]:
    """Yield the fields that are not at their simplest value, with the values to try instead."""
    for name in (x for x in (*OPTIONS, *SIZES) if x not in (*LENGTHS, "head_dim")):
        yield name, [SIMPLEST[name]]
    yield "page_size", [*capabilities.page_sizes[:1], *capabilities.page_sizes[-1:]] if case.page_size else []
    yield from ((name, [False]) for name in (*DIFFERENT.values(), *EMPTY.values()))
    for name, value in case.launch:
        yield name, [x for x in capabilities.launch[name][:1] if x != value]
    yield HUGE, [False]
    for name in LAYOUT_FIELDS:
        yield name, [] if getattr(case, name) == "huge" else ["contiguous"]
    for name in VALUES_OF:
        yield name, ["normal"]
    yield "dtype", [x for x in capabilities.dtypes if x != case.dtype]
    # Both lengths as long as the longer one of a long case would take too long, or not be judged as a whole.
    if case.seqlen_q != case.seqlen_k and max(case.seqlen_q, case.seqlen_k) <= MANY:
        yield UNEQUAL, [x for x in (case.seqlen_q, case.seqlen_k) if x]
    for name in LENGTHS:
        length = getattr(case, name)
        yield name, [*(x for x in WHOLE_TILES if x != length), *(x for x in LONG if x < length)]
    at, claimed = capabilities.head_dims.index(case.head_dim), capabilities.head_dims
    yield "head_dim", [*claimed[max(at - 1, 0) : at], *claimed[at + 1 : at + 2]]
