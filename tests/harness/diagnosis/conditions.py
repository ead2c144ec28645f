"""What a bug needs to show, and all tensors that are wrong because of it.

What the case as it was drawn needs is told first, in few runs: as it has many numbers, hardly a field matters in it by
accident, and that tells one bug from another even if there is no time for anything else.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from kernels.contract import GRADIENTS, OUTPUTS, Capabilities
from reference.bounds.accumulation import SHRINKING_SAFETY
from strategies.case import KINDS, LAYOUT_FIELDS, OPTIONS, SIMPLEST, SIZES, TENSORS, Case
from strategies.features import (
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
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.bugs.counterfactuals import counterfactuals, needs_of, resisted_shrinking
from tests.harness.bugs.dense import (
    FEWEST,
    TILES,
    longer,
    ordinary_cases,
    symptoms_apart_from_forward,
    symptoms_on_dense_case,
    with_ordinary_numbers,
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

COUNTS = ("batch", "heads_kv", "group")
"""Fields for which the value 1 tells most: any other value may move the error to where the numbers hide it."""
ROWS = (*COUNTS, *LENGTHS)
"""The fields that the number of rows of a tensor follows from."""
FEW_ORDINARY = 3
"""How many ordinary cases of another dtype must all be wrong for a bug to show everywhere in that dtype too."""
ORDINARY_JUDGED = 8
"""How many ordinary cases are run to see which tensors a bug spoils that needs nothing."""
ASKED_OF_DESIGNS = 3
"""In how many ordinary cases a less precise design is looked for that explains the other wrong tensors."""
OF_SCORES = ("dq", "dk", "dbias")
"""The gradients that are made of dS."""
FOLLOW = {"out": GRADIENTS, **{name: tuple(x for x in OF_SCORES if x != name) for name in OF_SCORES}}
"""The gradients that have the roundings of a tensor, or of what it is made of."""
AS_SMALL = 4
"""Roundings that follow from others are at most this many times as large; those of two formats are 8 times apart."""

WHOLE_TILES = (64, 128)
"""Lengths that fill the tiles of most kernels."""


@dataclass
class ConditionSearch:
    """The search for what the bug behind a failure needs, and for the tensors that it spoils.

    ``failure`` has the smallest case that was found, ``bugs`` are those that are known of the kernel. Functions that
    are passed in run a case; they may raise BudgetSpent, which ends the search. ``judged`` remembers what was found by
    looking for wrong tensors. ``known_as`` are claims by which the kernel is known to be less precise: what these
    explain is not wrong because of the bug.
    """

    runs: Runs
    failure: Failure
    judged: dict[tuple[str, Case], Finding | None] = field(default_factory=dict)
    known_as: tuple[str, ...] = ()
    bugs: Mapping[str, Bug] = field(default_factory=dict)

    @property
    def claims(self) -> Capabilities:
        """The claims that changed cases must meet: a case that the kernel refuses tells nothing."""
        return self.runs.claims_of(self.failure.law)

    def needs(
        self, witnesses: Sequence[Case], fails: Callable[[Case], bool]
    ) -> Iterator[tuple[Condition, ...]]:
        """Yield the fields without which none of the ``witnesses`` fails; ``fails`` says whether a case does.

        They are yielded first as the witnesses tell them, then with what larger cases say, which takes many more runs.
        """
        case, capabilities = self.failure.case, self.claims
        varied = [x for x in fields(case, fails, capabilities) if x.matters]
        matter = [need for x in varied for need in self.as_needs(x, fails)]
        # Lengths that do not matter as far as they were varied may still do so at whole tiles.
        others = (name for name in LENGTHS if name not in [need.name for need in matter])
        matter += [Condition(name, (getattr(case, name),), ()) for name in others]
        matter = [self.with_whole_tiles(need, fails) for need in matter]
        found = needs_of(matter, witnesses, fails, capabilities)
        # A failure that comes and goes may also be absent by chance, so no field is to blame.
        if COMES_AND_GOES in self.failure.explanation.sentences:
            yield ()
            return
        yield self.in_general(found, fails)
        several = self.without_rows(self.with_certain(found, matter, fails), fails)
        several = [self.with_ordinary_border(need, fails) for need in several]
        yield self.in_general(several, fails)

    def in_general(self, needs: Sequence[Condition], fails: Callable[[Case], bool]) -> tuple[Condition, ...]:
        """Return general needs in place of those they explain, without those that matter by chance."""
        law = self.failure.law

        def look(case: Case) -> Finding | None:
            return self.found(case, law, lambda: None) if law_named(law).is_basic and fails(case) else None

        general = generalised(needs, self.failure, fails, look, self.claims)
        told = without_lengths_of_no_rule(without_accidents(general))
        return without_several_keys(told) if self.failure.finding.tensor in OF_SCORES else told

    def with_certain(
        self, needs: Sequence[Condition], matter: Sequence[Condition], fails: Callable[[Case], bool]
    ) -> list[Condition]:
        """Return the needs, with those that are certain, although larger cases may fail without them.

        Those that matter by accident are left out.
        """
        sure: dict[str, Condition] = {}
        others, case = list(needs), self.failure.case
        with suppress(BudgetSpent):
            for need in confirmed(matter, case, fails, self.claims):
                sure[need.name] = need
            for need in refuted(needs, [*sure.values()], case, fails, self.claims):
                others.remove(need)
        return [*(need for need in others if need.name not in sure), *sure.values()]

    def without_rows(self, needs: Sequence[Condition], fails: Callable[[Case], bool]) -> list[Condition]:
        """Return the needs; beside a layout, without sizes above 1 that only make strides tell something.

        Strides tell nothing in a single row, and several heads are several rows as well.
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
        """Whether a size above 1 may be another one. If the layout cures the changed case, that has the same bug."""
        case, claims = self.failure.case, self.claims
        if need.name not in ROWS or not {0, 1}.issuperset(need.holds):
            return False
        one = with_value(case, need.name, 1)
        changed = (with_value(one, x, 2) for x in ROWS if x != need.name and getattr(case, x) == 1)
        claimed = [x for x in changed if claims.admits(x)]
        return any(fails(x) and not any(map(fails, counterfactuals(layout, x, claims))) for x in claimed)

    def is_of_layout(self, need: Condition, layout: Condition, fails: Callable[[Case], bool]) -> bool:
        """Whether a size above 1 only gives a layout its strides: at 1 the tensors lie as contiguous ones do.

        Gaps may keep their strides there. If they do, and fail at this size but hold at 1, the size matters by itself.
        The law that compares elements of a batch has nothing to compare at 1, so that no gaps tell.
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
        """Turn a field that matters into needs: a layout may matter because it differs from another tensor's."""
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
            if name in COUNTS:  # of any number but one, what is wrong may be another
                holds = tuple(x for x in holds if x == 1) or self.with_ordinary_numbers(name, holds, fails)
            also = varied.fails if name in KINDS else ()
            # Nothing is wrong in an empty tensor.
            if name not in LENGTHS or any(holds):
                yield Condition(name, (own, *also), holds)

    def with_ordinary_numbers(
        self, name: str, holds: tuple[Any, ...], fails: Callable[[Case], bool]
    ) -> tuple[Any, ...]:
        """Return those values of a field that hold with ordinary numbers in some rows, if these show the bug; else all.

        A small case has its numbers in one head or sequence, and with others it may be another one that is wrong.
        """
        normal = longer(with_normal_numbers(self.failure.case), FEWEST)
        if not fails(normal):
            return holds
        return tuple(x for x in holds if not fails(with_value(normal, name, x))) or holds

    def other_way_round(self, fails: Callable[[Case], bool]) -> list[str]:
        """Return the value of ``UNEQUAL`` with more of the other length, if the case and a longer one hold that way."""
        case, claims = self.failure.case, self.claims
        turned = replace(case, seqlen_q=case.seqlen_k, seqlen_k=case.seqlen_q)
        both = [turned, longer(turned)]
        if fails(
            with_normal_numbers(case)
        ):  # single entries may lie where nothing is wrong in the turned case
            both = [*both, *map(with_normal_numbers, both)]
        hold = all(claims.admits(x) and not fails(x) for x in both)
        return [value_of(turned, UNEQUAL)] if hold else []

    def pair_of(self, name: str, fails: Callable[[Case], bool]) -> str:
        """Return the name of two layouts that must differ, if one matters by differing from the other, or ""."""
        case, mine = self.failure.case, name.removesuffix("_layout")
        for other in TENSORS:
            if getattr(case, f"{other}_layout") == getattr(case, name):
                continue
            alike = with_value(case, f"{other}_layout", getattr(case, name))
            if self.claims.admits(alike) and not fails(alike):
                return pair_of(mine, other)
        return ""

    def diagnosed(self, fails: Callable[[Case], bool]) -> tuple[Condition, ...]:
        """Return what the case needs as far as few runs, or fewer if the time is over, can tell."""
        found: list[Condition] = []
        with suppress(BudgetSpent):
            found.extend(diagnosed(self.failure.case, fails, self.claims))
        # As it was drawn, a case has more numbers in q than can be asked about here.
        return without_accidents(generalise_to_scores(found, self.failure, lambda _: False))

    def dtypes(self, spend: Callable[[], None]) -> tuple[Condition, ...]:
        """Return the dtype as a need if ordinary cases of other dtypes hold."""
        f, claims, holding = self.failure, self.claims, []
        for dtype in (x for x in claims.dtypes if x != f.case.dtype):
            ordinary = ordinary_cases(claims, dtype, self.runs.device_type)[:FEW_ORDINARY]
            if not all(is_not_cured(f.finding, self.found(case, f.law, spend)) for case in ordinary):
                holding.append(dtype)
        return (Condition("dtype", (f.case.dtype,), tuple(holding)),) if holding else ()

    def with_whole_tiles(self, need: Condition, fails: Callable[[Case], bool]) -> Condition:
        """Return a need of a length with those of ``TILES`` at which the case holds; other needs as they are."""
        if need.name not in LENGTHS:
            return need
        case, capabilities = self.failure.case, self.claims
        tiles = [(x, with_value(case, need.name, x)) for x in TILES if x not in need.holds]
        holds = [x for x, tiled in tiles if capabilities.admits(tiled) and not fails(tiled)]
        return replace(need, holds=(*need.holds, *holds))

    def with_ordinary_border(self, need: Condition, fails: Callable[[Case], bool]) -> Condition:
        """Return a need of a large length with the border beyond which ordinary numbers show the bug.

        The few numbers of a smallest case may hide the bug at lengths that are only a little too long. It then begins
        at the end of a tile: that length holds with many rows of ordinary numbers, and one more row or key fails. Any
        other need is returned as it is.
        """
        side = need.side
        if side is None or side[0] != "above" or side[1] % TILES[0] == 0:
            return need
        for tile in (tile for tile in TILES if tile < side[1]):
            pair = [
                with_ordinary_numbers(self.failure.case, need.name, length) for length in (tile, tile + 1)
            ]
            claimed = all(self.claims.admits(case) for case in pair)
            if claimed and not fails(pair[0]) and fails(pair[1]):
                return replace(need, holds=(*(x for x in need.holds if x < tile), tile))
        return need

    def tensors_of(
        self, needs: Sequence[Condition], cases: Sequence[Case], spend: Callable[[], None]
    ) -> set[str]:
        """Return all tensors that are wrong because of the bug, under its own law and the plain ones.

        Tensors that are still wrong when a need of the bug is taken away are another bug's, and so are those that are
        right in its smallest case with ordinary numbers, and gradients that are wrong elsewhere while out is right. A
        bug that needs no numbers of its own shows with normal ones what few numbers hide, and in more rows and keys
        what one of them hides: of one key, dq and dk are 0.
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
        """Yield the case with more rows and keys, if it is claimed and has what the bug needs."""
        more = longer(case)
        if self.claims.admits(more) and all(need.is_met(more) for need in needs):
            yield more

    def always_wrong(self, spend: Callable[[], None]) -> set[str]:
        """Return the tensors that are wrong in every ordinary case in which this failure's own tensor is wrong.

        This is asked for a bug that needs no field. Its small cases can't tell, as they were made to show one tensor.
        Another bug that shows in every ordinary case may still hold with few rows and keys, so those are tried as well.
        Of a law whose calls no basic law makes, its own cases are asked.
        Tensors that are wrong where this failure's own tensor is right are another bug's. Gradients that follow from
        roundings of these tensors are among them, even if they are wrong in some cases only.
        """
        finding, info = self.failure.finding, self.runs.info
        own, law = finding.tensor, self.failure.law
        has_own_calls = law_named(law).has_own_calls
        if not own or not (has_own_calls or law_named(law).shares_cases):
            return set()
        law = "backward" if info.capabilities.backward and not has_own_calls else law
        ordinary = ordinary_cases(info.capabilities, self.failure.case.dtype, self.runs.device_type)
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
        """Return the tensors, beside this failure's own, that are wrong in a case and that no one design explains.

        The others are wrong because the kernel is less precise than claimed, which may not be known of it so far.
        """
        found = set()
        for case in cases:
            spend()
            ignored = self.failure.ignored | {self.failure.finding.tensor}
            finding = self.runs.hard(law, case, ignored, self.known_as, SHRINKING_SAFETY)
            found |= wrong_tensors(finding) if finding else set()
        return found

    def rounded_after(
        self, tensor: str, law: str, found: Mapping[Case, set[str]], spend: Callable[[], None]
    ) -> Iterator[str]:
        """Yield the gradients that follow from a tensor, and whose errors are about as small where they are wrong.

        Whether roundings that gradients inherit are above their bounds is decided by the numbers of a case. ``found``
        are cases with all that is wrong in them.
        """
        for other in FOLLOW.get(tensor, ()):
            case = next((case for case, wrong in found.items() if {tensor, other} <= wrong), None)
            if case is not None:
                mine, others = (self.error_alone(x, law, case, spend) for x in (tensor, other))
                if others <= AS_SMALL * mine:
                    yield other

    def error_alone(self, tensor: str, law: str, case: Case, spend: Callable[[], None]) -> float:
        """Return the relative error of a tensor that is wrong in a case, or infinity if that is not known."""
        spend()
        ignored = frozenset({*OUTPUTS} - {tensor})
        finding = self.runs.wrong(law, case, ignored, SHRINKING_SAFETY, self.known_as)
        return math.inf if finding is None or finding.relative is None else float(finding.relative)

    def kindred(self, wrong: set[str]) -> set[str]:
        """Return the tensors that one mistake may have made wrong together with the failure's own."""
        own = self.failure.finding.tensor
        return {tensor for tensor in wrong if "out" in wrong or are_kindred({own}, {tensor})}

    def wrong(self, case: Case, law: str, spend: Callable[[], None]) -> set[str]:
        """Return the tensors that are wrong in a case."""
        finding = self.found(case, law, spend)
        same = finding is not None and finding.signature == self.failure.finding.signature
        return wrong_tensors(finding) if finding and same else set()

    def found(self, case: Case, law: str, spend: Callable[[], None]) -> Finding | None:
        """Return what is found in a case, and remember it."""
        if (law, case) not in self.judged:
            spend()
            asked = law, case, self.failure.ignored, SHRINKING_SAFETY, self.known_as
            self.judged[law, case] = self.runs.wrong(*asked)
        return self.judged[law, case]


def explained(needs: Sequence[Condition], failure: Failure) -> list[Condition]:
    """Return what a case needs as it was drawn, corrected by what is told of the smallest case that was made of it.

    A field that does not matter there is not needed. One that matters, and that shrinking had to leave at a special
    value, is needed too.
    """
    case, told = failure.case, {x.name: x for x in failure.explanation.fields}
    kept = [need for need in needs if need.name not in told or told[need.name].matters]
    left_out = {*LENGTHS, *(need.name for need in kept)}
    others = (
        Condition(name, (value_of(case, name),), tuple(value_of(x, name) for x in varied.held))
        for name, varied in told.items()
        if varied.matters and name in SIMPLEST and name not in left_out
    )
    return [*kept, *filter(resisted_shrinking, others)]


def without_lengths_of_no_rule(needs: Sequence[Condition]) -> tuple[Condition, ...]:
    """Return the needs; beside one that tells bugs apart, without lengths of which only a few are known to hold.

    If these are neither all above nor all below that of the smallest case, nor whole tiles, they may hold by chance,
    and a failing case of such a length may be of the same bug.
    """
    telling = any(need.is_telling for need in needs)
    return tuple(
        need
        for need in needs
        if not (telling and need.name in LENGTHS and not (need.side or need.is_certain))
    )


def without_several_keys(needs: Sequence[Condition]) -> tuple[Condition, ...]:
    """Return the needs of a bug of dq or dk without that of more than one key, unless it is the only one.

    With one key dS is 0, so that dq and dk are right whatever the bug does. NaN among the scores shows it all the same.
    """
    others = tuple(need for need in needs if (need.name, need.side) != ("seqlen_k", ("above", 1)))
    return others or tuple(needs)


def without_accidents(needs: Sequence[Condition]) -> tuple[Condition, ...]:
    """Return each need once, without those that others imply.

    The dtype counts only if ordinary numbers show the bug, because special numbers are special to a format. Neither
    does a count of 1 tell anything then: with more heads or batches the special numbers are elsewhere.
    """
    unique: dict[Any, Condition] = {need.name: need for need in needs}
    if not unique.keys().isdisjoint((SCORES, NAN)) or any(name.endswith("_values") for name in unique):
        unique.pop("dtype", None)
        singles = [name for name in (*COUNTS, HEADS) if name in unique and unique[name].fails[0] == 1]
        unique = {name: need for name, need in unique.items() if name not in singles}
    if SCORES in unique:  # they are sums of head_dim products, by default scaled by it
        unique.pop("head_dim", None)
    if UNEQUAL in unique:  # a change of one length may make both equal
        unique = {name: need for name, need in unique.items() if need.is_certain or name not in LENGTHS}
    return tuple(unique.values())


def diagnosed(case: Case, fails: Callable[[Case], bool], capabilities: Capabilities) -> Iterator[Condition]:
    """Yield the fields of a case without whose values it does not fail; ``fails`` may end the search."""
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
        if name == UNEQUAL:  # short ones may cure a case by being short
            holds = ["equal"] if holds and len(holds) == len(claimed) else []
            lengths_tell = not holds
        if holds:
            yield Condition(name, (value_of(case, name),), tuple(holds))


def _alternatives(case: Case, capabilities: Capabilities) -> Iterator[tuple[str, list[Any]]]:
    """Yield the fields that are not at their simplest value, with the values to try instead."""
    for name in (x for x in (*OPTIONS, *SIZES) if x not in (*LENGTHS, "head_dim")):
        yield name, [SIMPLEST[name]]
    for name, value in case.launch:
        yield name, [x for x in capabilities.launch[name][:1] if x != value]
    yield HUGE, [False]
    for name in LAYOUT_FIELDS:
        yield name, [] if getattr(case, name) == "huge" else ["contiguous"]
    for name in VALUES_OF:
        yield name, ["normal"]
    yield "dtype", [x for x in capabilities.dtypes if x != case.dtype]
    if case.seqlen_q != case.seqlen_k:
        yield UNEQUAL, [x for x in (case.seqlen_q, case.seqlen_k) if x]
    for name in LENGTHS:
        yield name, [x for x in WHOLE_TILES if x != getattr(case, name)]
    yield "head_dim", _beside(case.head_dim, capabilities.head_dims)


def _beside(value: int, allowed: tuple[int, ...]) -> list[int]:
    """Return the allowed values next to one."""
    at = allowed.index(value)
    return [*allowed[max(at - 1, 0) : at], *allowed[at + 1 : at + 2]]
