"""The investigation of one failure: its smallest case, what it needs, its severity, and a script that shows it."""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from reference.bounds.accumulation import SHRINKING_SAFETY
from strategies.case import LAYOUT_FIELDS, TENSORS, Case
from strategies.cases import is_claimed
from tests.harness.attribute import Broken, attribute, cures, needs_of
from tests.harness.budget import (
    EXPLAIN_SECONDS,
    LEAST_SECONDS,
    PATIENCE,
    BudgetSpent,
    Clock,
    ShrinkBudget,
    meter,
)
from tests.harness.bugs import ENOUGH, Bug, Need, Severity, Sightings, are_kindred, wrong_tensors
from tests.harness.child import ChildDied, DeviceLost
from tests.harness.explain import COMES_AND_GOES, HOLDS_ALONE, Explanation, Seen, explain
from tests.harness.gentle import AMBIGUOUS, GENERAL, RUNS, gently_reduced
from tests.harness.offers import offered
from tests.harness.ordinary import ordinary_cases
from tests.harness.plainly import NO_PLAIN_LAW, PLAIN_LAWS
from tests.harness.reduce import reduced
from tests.harness.report import Failure, headline
from tests.harness.runs import Runs
from tests.harness.standalone import exit_status
from tests.harness.vary import LENGTHS, PAIR, SCORES, Field, fields, value_of, with_value
from tests.harness.verdict import NUMBERS, UNCLEAR, Finding

NEEDS_SECONDS = 15.0
"""Seconds for finding what a bug needs, in addition to those that explain its case."""
SEVERITY_SECONDS = 8.0
"""Seconds for the ordinary cases, and again for the claims to offer."""
FEW_CRASHES = 3
"""How many ordinary cases are run of a failure that ends the process."""
TILES = (32, 64, 128)
"""Lengths at which a kernel's last tile may be full, whatever its tiles are."""
CONTRASTS = ("causal", "group", "heads_kv", "head_dim", "seqlen_k", "seqlen_q")
"""The fields in which ordinary cases differ."""
OF_ROUNDINGS = 2.0**-7
"""A relative error below this may come from a format of few bits."""
COUNTS = ("batch", "heads_kv", "group")
"""Fields for which the value 1 tells most: any other value may move the error to where the numbers hide it."""
CONTRASTED = 4
"""How many ordinary cases that show a bug, and how many that do not, are compared."""
ORDINARY_JUDGED = 8
"""How many ordinary cases are run to see which tensors a bug spoils that needs nothing."""
LEAST_HASTE = 0.3
"""The least share of their time that explanation, needs and severity get when the run is about to end."""
SHRUNK_CASES = 40
"""How many failing cases are kept of those met on the way to the smallest case, since they are much alike."""


@dataclass
class Investigation:
    """The investigation of one failure of a kernel some of whose bugs are ``known``.

    Each of ``less_precise`` would explain all less precise calls of the kernel that are known.
    ``clock`` is that of the run; after its end the investigation must soon be over. ``write`` writes the report, which
    the report of each smaller case replaces. ``ordinary`` remembers the kernel's answers to ordinary cases.
    """

    runs: Runs
    failure: Failure
    known: Sequence[Bug]
    shrinking: ShrinkBudget
    write: Callable[[Failure, str | None], None]
    number_of: Callable[[Failure], int]
    clock: Clock = field(default_factory=Clock)
    ordinary: dict[tuple[str, Case], Finding | None] = field(default_factory=dict)
    held: Sequence[tuple[str, Case]] = ()
    less_precise: Sequence[str] = ()
    cases: Sightings = field(default_factory=Sightings)
    haste: float = 1.0
    answers: dict[tuple[str, Case], Finding | None] = field(default_factory=dict)
    judged: dict[tuple[str, Case], Finding | None] = field(default_factory=dict)
    needs: tuple[Need, ...] = ()

    def bug(self, *, shrink: bool = True) -> Bug:
        """Tell all that can be told within the time; without ``shrink`` the case is reported as it is."""
        drawn = self.failure
        whole = self.shrinking
        self.shrinking = whole.within(self.clock)
        self.haste = self.shrinking.seconds / whole.seconds if whole.seconds else 1.0
        self.failure = replace(self.failure, number=self.number_of(self.failure))
        first = self.failure
        self.write(self.failure, None)
        gently = self.failure.finding.ends_process
        if shrink:
            (self.reduce_gently if gently else self.reduce)()
        if not gently:
            self.explain()
        bug = self.as_it_is
        if shrink and not gently:
            bug = self.with_needs(bug, first)
        failure, script = self.scripted(bug.failure)
        self.write(failure, script)
        bug = replace(bug, failure=failure)
        self.cases.keep([(drawn.law, drawn.case)])
        return self.with_severity(bug) if shrink else bug

    @property
    def as_it_is(self) -> Bug:
        """The bug, as far as it is known."""
        named = (self.failure.finding.tensor,) if self.failure.finding.tensor else ()
        return Bug(self.failure, tensors=named, needs=self.needs)

    def spender(self, seconds: float, calls: float = float("inf")) -> Callable[[], None]:
        """Return a meter of so many seconds and calls that ends with the investigation's time at the latest."""
        return meter(self.clock.cut(seconds), calls, self.clock.cut(PATIENCE * seconds))

    def beside_shrinking(self, seconds: float, calls: float = float("inf")) -> Callable[[], None]:
        """Return a meter of the share of these seconds that shrinking has of its own (``haste``), but never too few."""
        return self.spender(max(self.haste, LEAST_HASTE) * seconds, calls)

    def found(self, case: Case) -> Finding | None:
        """Return what is found in a case, whatever bug causes it, and remember the answer."""
        law = self.failure.law
        finding = self.runs.hard(law, case, self.failure.ignored, safety=SHRINKING_SAFETY, explained=True)
        self.answers[law, case] = finding = self.counted(finding)
        return finding

    def counted(self, finding: Finding | None) -> Finding | None:
        """Return a finding as what it says of this failure; one that a less precise design explains says nothing.

        It shows no wrong numbers, and it does not hold either, unless the kernel is known to be as imprecise.
        """
        mine = self.failure.finding
        if finding is None or mine.explained_by or not finding.explained_by:
            return finding
        usual = not {*finding.explained_by}.isdisjoint(self.less_precise)
        return None if usual else replace(finding, kind=UNCLEAR)

    def new(self, case: Case) -> Finding | None:
        """Return what is found in a case unless known bugs explain it."""
        finding = self.found(case)
        if finding and finding.explained_by and not self.failure.finding.explained_by:
            return None
        suspects = [bug for bug in self.known if finding and bug.could_break(finding) and bug.is_met(case)]
        if finding is None or not suspects:
            return finding
        run = partial(self.runs.hard, safety=SHRINKING_SAFETY)
        broken = Broken(self.failure.law, case, finding, self.failure.ignored)
        rest = attribute(broken, suspects, run, self.runs.info.capabilities).rest
        return finding if rest is not None and rest.finding == finding else None

    def alike(self, case: Case) -> Failure | None:
        """Return the same failure on another case, or None if that case holds or fails in another way."""
        finding, mine = self.new(case), self.failure.finding
        if finding is None or (finding.tensor, finding.kind) != (mine.tensor, mine.kind):
            return None
        if not finding.is_akin(mine):
            return None
        return replace(self.failure, case=case, finding=finding.with_nan_of(mine))

    def fails_alike(self, spend: Callable[[], None], case: Case) -> bool:
        """Whether a smaller case fails in the same way; if it does, it becomes the failure's case."""
        spend()
        smaller = self.alike(case)
        if smaller is None:
            return False
        self.failure = smaller
        self.write(smaller, None)
        if len(self.cases.shrunk) < SHRUNK_CASES:
            self.cases.keep([(smaller.law, case)])
        return True

    def reduce(self) -> None:
        """Look for smaller cases that fail in the same way."""
        fails = partial(self.fails_alike, self.spender(self.shrinking.reducing_seconds, self.shrinking.calls))
        with suppress(BudgetSpent):
            for name in LAYOUT_FIELDS:  # with strides of its own a tensor may lose its heads
                general = with_value(self.failure.case, name, GENERAL)
                if getattr(self.failure.case, name) in AMBIGUOUS and is_claimed(
                    general, self.runs.info.capabilities
                ):
                    fails(general)
            reduced(self.failure.case, fails, self.runs.info.capabilities)

    def reduce_gently(self) -> None:
        """Look for smaller cases in few runs, as each ends a process; what can't be left out is what the bug needs."""
        first = self.failure.case
        fails = partial(self.fails_alike, self.spender(self.shrinking.seconds, RUNS))
        with suppress(BudgetSpent):
            for _, needs in gently_reduced(first, fails, self.runs.info.capabilities):
                self.needs = needs
        self.needs = tuple(self.beside_those_held(need) for need in self.needs)
        fields = tuple(self.as_field(need) for need in self.needs)
        self.failure = replace(self.failure, explanation=Explanation(fields=fields))

    def beside_those_held(self, need: Need) -> Need:
        """Add to a need the lengths of drawn cases that held, as long as these are shorter than the failing length."""
        if need.name not in LENGTHS:
            return need
        least = need.fails[0]
        lengths = [getattr(case, need.name) for law, case in self.held if law == self.failure.law]
        below = [x for x in lengths if x < least]
        return replace(need, holds=tuple(dict.fromkeys([*need.holds, *below])))

    def as_field(self, need: Need) -> Field:
        """Return a need as a report shows it."""
        return Field(need.name, str(need.fails[0]), (), tuple(map(str, need.holds)))

    def explain(self) -> None:
        """Add to the failure all that can be told of its case."""
        spend = self.beside_shrinking(EXPLAIN_SECONDS)
        failure = self.failure

        def fails(case: Case) -> bool | None:
            # Any failure counts: a field does not matter if without it the same bug makes another tensor wrong. If a
            # known bug does that, nothing is known of the field.
            spend()
            finding = self.found(case)
            return None if finding and finding.kind == UNCLEAR else finding is not None

        def look(case: Case) -> Seen | None:
            spend()
            return None if self.alike(case) is None else self.runs.look(replace(failure, case=case))

        # If no number is wrong there is nothing to look at.
        looks = None if failure.finding.actual is None else look
        with suppress(ChildDied):
            tell = failure.law != "ragged"
            told = explain(failure.case, fails, looks, self.runs.info.capabilities, lengths_tell=tell)
            self.failure = replace(failure, explanation=told)

    def with_needs(self, bug: Bug, first: Failure) -> Bug:
        """Return the bug with the fields that it needs, and with all tensors that are wrong because of it."""
        spend = self.beside_shrinking(NEEDS_SECONDS)
        failure, capabilities = bug.failure, self.runs.info.capabilities
        seen: set[str] = set()

        def fails(case: Case) -> bool:
            # Only a failure in the same tensor counts: others may be wrong because of a bug that is not known yet.
            if (failure.law, case) not in self.answers:
                spend()
                self.found(case)
            finding = self.answers[failure.law, case]
            return is_not_cured(failure.finding, finding)

        with suppress(BudgetSpent):
            witnesses = [failure.case]
            for witness in (first.case, failure.explanation.larger):
                if witness and witness not in witnesses and self.new(witness):
                    witnesses.append(witness)
            varied = [x for x in fields(failure.case, fails, capabilities) if x.matters]
            matter = [need for x in varied for need in self.as_needs(x, fails)]
            matter = [self.with_whole_tiles(need, fails) for need in (*matter, *self.lengths_beside(matter))]
            larger = failure.explanation.larger
            if larger in witnesses and is_small(failure.finding):
                # Few numbers may all be rounded the right way at any other size or layout.
                witnesses = [larger]
            found = needs_of(matter, witnesses, fails, capabilities)
            # A failure that comes and goes may also be absent by chance, so no field is to blame.
            flaky = COMES_AND_GOES in failure.explanation.sentences
            bug = replace(bug, needs=() if flaky else without_accidents(self.by_scores(found)))
            seen = self.tensors_of(bug, witnesses, spend) if bug.needs else self.always_wrong(spend)
        return replace(bug, tensors=tuple(sorted({*bug.tensors, *seen})))

    def pair_of(self, name: str, fails: Callable[[Case], bool]) -> str:
        """Return the name of two layouts that must differ, if one matters by differing from the other, or ""."""
        case, mine = self.failure.case, name.removesuffix("_layout")
        for other in TENSORS:
            if getattr(case, f"{other}_layout") == getattr(case, name):
                continue
            alike = with_value(case, f"{other}_layout", getattr(case, name))
            if is_claimed(alike, self.runs.info.capabilities) and not fails(alike):
                return " and ".join(sorted((mine, other))) + PAIR
        return ""

    def lengths_beside(self, needs: Sequence[Need]) -> list[Need]:
        """Return the lengths that do not matter as far as they were varied: whole tiles may still show that they do."""
        case, names = self.failure.case, {need.name for need in needs}
        return [Need(name, (getattr(case, name),), ()) for name in LENGTHS if name not in names]

    def with_whole_tiles(self, need: Need, fails: Callable[[Case], bool]) -> Need:
        """Return a need of a length with those of ``TILES`` at which the case holds; other needs as they are."""
        if need.name not in LENGTHS:
            return need
        case, capabilities = self.failure.case, self.runs.info.capabilities
        tiles = [(x, with_value(case, need.name, x)) for x in TILES if x not in need.holds]
        holds = [x for x, tiled in tiles if is_claimed(tiled, capabilities) and not fails(tiled)]
        return replace(need, holds=(*need.holds, *holds))

    def tensors_of(self, bug: Bug, witnesses: Sequence[Case], spend: Callable[[], None]) -> set[str]:
        """Return all tensors that are wrong because of the bug, under its own law and the plain ones.

        Tensors that are still wrong when a need of the bug is taken away are another bug's.
        """
        own = self.failure.law
        beside = () if own in NO_PLAIN_LAW or self.failure.finding.kind not in NUMBERS else PLAIN_LAWS
        found: set[str] = set()
        for law in dict.fromkeys((own, *beside)):
            for witness in witnesses:
                wrong = self.wrong(witness, law, spend)
                for need in bug.needs:
                    cured = list(cures(need, witness, self.runs.info.capabilities))[:1] if wrong else []
                    for case in cured:
                        wrong = wrong - self.wrong(case, law, spend)
                found |= wrong
        return found

    def by_scores(self, needs: Sequence[Need]) -> list[Need]:
        """Replace needs of sm_scale and of the numbers of q and k by one need of large scores.

        A large scale and large numbers make the same scores.
        """
        made = [need for need in needs if need.name in ("sm_scale", "qk_values")]
        if not made or (len(made) == 1 and made[0].name == "sm_scale" and not self.is_nonfinite):
            return list(needs)
        return [*(need for need in needs if need not in made), Need(SCORES, ("other",), ("ordinary",))]

    @property
    def is_nonfinite(self) -> bool:
        """Whether the failure is NaN or infinity, which large scores cause wherever they come from."""
        return self.failure.finding.kind == "nonfinite"

    def always_wrong(self, spend: Callable[[], None]) -> set[str]:
        """Return the tensors that are wrong in every ordinary case in which this failure's own tensor is wrong.

        This is asked for a bug that needs no field. Its small cases can't tell, as they were made to show one tensor.
        """
        finding, info = self.failure.finding, self.runs.info
        own, law = finding.tensor, self.failure.law
        if not own or law in NO_PLAIN_LAW:
            return set()
        law = "backward" if info.capabilities.backward else law
        ordinary = ordinary_cases(info.capabilities, self.failure.case.dtype, self.runs.device_type)
        found = [self.wrong(case, law, spend) for case in ordinary[:ORDINARY_JUDGED]]
        showing = [wrong for wrong in found if own in wrong]
        always = set.intersection(*showing) if showing else set()
        return {tensor for tensor in always if are_kindred({own}, {tensor}) or "out" in always}

    def wrong(self, case: Case, law: str, spend: Callable[[], None]) -> set[str]:
        """Return the tensors that are wrong in a case."""
        if (law, case) not in self.judged:
            spend()
            # Errors that a less precise design would explain count as well.
            options: dict[str, Any] = {"safety": SHRINKING_SAFETY, "explained": True}
            self.judged[law, case] = self.runs.hard(law, case, self.failure.ignored, **options)
        finding = self.judged[law, case]
        same = finding is not None and finding.signature == self.failure.finding.signature
        return wrong_tensors(finding) if finding and same else set()

    def as_needs(self, varied: Field, fails: Callable[[Case], bool]) -> Iterator[Need]:
        """Turn a field that matters into needs: a layout may matter because it differs from another tensor's."""
        case, name = self.failure.case, varied.name
        own = value_of(case, name)
        if name == "lengths":
            yield Need(name, (own,), ("equal",))
        elif own == "huge":
            yield Need("huge", (True,), (False,))
        elif name.endswith("_layout") and (pair := self.pair_of(name, fails)):
            yield Need(pair, ("other",), ("contiguous",))
        else:
            holds = tuple(value_of(held, name) for held in varied.held)
            if name in COUNTS:  # of any number but one, what is wrong may be another
                holds = tuple(x for x in holds if x == 1) or holds
            # Nothing is wrong in an empty tensor.
            if name not in LENGTHS or any(holds):
                yield Need(name, (own,), holds)

    def scripted(self, failure: Failure) -> tuple[Failure, str | None]:
        """Return the failure with its script or, if that exits 0 and would call the bug mended, with a note instead."""
        script = self.script(failure)
        # A script that hangs as the kernel does shows the bug; running it to wait for that would show nothing more.
        if script is not None and failure.finding.kind != "hung":
            with suppress(OSError, subprocess.TimeoutExpired):  # then it goes as it is
                if exit_status(script, self.script_seconds) == 0:
                    known = failure.explanation
                    told = replace(known, sentences=(*known.sentences, HOLDS_ALONE))
                    return replace(failure, explanation=told), None
        return failure, script

    def script(self, failure: Failure) -> str | None:
        """Return the stand-alone script of a failure, if its calls can be made a second time."""
        for kind in (failure.finding.kind, "died"):  # where a crash comes and goes, as if it had come
            with suppress(ChildDied, DeviceLost):
                finding = replace(failure.finding, kind=kind)
                return self.runs.script(failure, finding, headline(failure), self.script_seconds)
        return None

    @property
    def script_seconds(self) -> float:
        """Seconds that a script may take: fewer than the first compilation of a kernel is given."""
        return max(LEAST_SECONDS, self.clock.cut(self.runs.script_seconds))

    def with_severity(self, bug: Bug) -> Bug:
        """Return the bug with the share of ordinary cases that show it, and with claims that would exclude it."""
        ends = bug.failure.finding.ends_process
        spend = self.beside_shrinking(SEVERITY_SECONDS, FEW_CRASHES if ends else float("inf"))
        shown = tried = common = 0
        dtype = bug.failure.case.dtype
        with suppress(BudgetSpent):
            for case in ordinary_cases(self.runs.info.capabilities, dtype, self.runs.device_type):
                finding = self.ordinary_answer(spend, bug.failure.law, case)
                if finding and finding.hides_numbers and not is_in_common(bug.failure.finding, finding):
                    continue  # it tells nothing of another bug
                tried += 1
                shown += finding is not None and bug.could_break(finding) and bug.is_met(case)
                common += finding is not None and is_in_common(bug.failure.finding, finding)
        if common == tried >= ENOUGH and not any(need.is_telling for need in bug.needs):
            return self.everywhere(bug, tried)
        bug = bug if ends else self.with_contrast(bug, spend)
        held, failing = self.held_apart_from(bug), self.cases.shrunk
        offers = offered(
            bug.needs, failing, held, self.runs, self.beside_shrinking(0.0 if ends else SEVERITY_SECONDS)
        )
        return replace(bug, severity=Severity(shown, tried), offers=offers)

    def everywhere(self, bug: Bug, tried: int) -> Bug:
        """Return the bug without needs, because every ordinary case shows it.

        The lengths and numbers that seemed to matter in its smallest case did so by chance.
        """
        always: set[str] = set()
        with suppress(BudgetSpent):
            always = self.always_wrong(self.beside_shrinking(SEVERITY_SECONDS))
        named = {self.failure.finding.tensor} - {""}
        tensors = tuple(sorted(always | named))
        return replace(bug, needs=(), tensors=tensors, severity=Severity(tried, tried))

    def with_contrast(self, bug: Bug, spend: Callable[[], None]) -> Bug:
        """Find needs of a bug that seems to need nothing, by comparing ordinary cases that show it with others."""
        answers = [
            (case, self.counted(x)) for (law, case), x in self.ordinary.items() if law == bug.failure.law
        ]
        answers = [(case, x) for case, x in answers if not (x and x.kind == UNCLEAR)]
        showing = [case for case, x in answers if x and is_in_common(bug.failure.finding, x)]
        without = [case for case, x in answers if x is None or not is_in_common(bug.failure.finding, x)]
        if bug.needs or not showing or not without:
            return bug

        def fails(case: Case) -> bool:
            spend()
            finding = self.runs.hard(bug.failure.law, case, self.failure.ignored, explained=True)
            return is_not_cured(bug.failure.finding, self.counted(finding))

        with suppress(BudgetSpent):
            differences = [need for case in without[:CONTRASTED] for need in contrast(showing[0], case)]
            needs = needs_of(differences, showing[:CONTRASTED], fails, self.runs.info.capabilities)
            bug = replace(bug, needs=without_accidents(needs))
            if needs:
                bug = replace(
                    bug, tensors=tuple(sorted(self.tensors_of(bug, showing[:1], spend))) or bug.tensors
                )
        return bug

    def held_apart_from(self, bug: Bug) -> list[tuple[str, Case]]:
        """Return cases that held: drawn, ordinary, or made by varying the fields of the bug's case."""
        varied = [(bug.failure.law, case) for x in bug.failure.explanation.fields for case in x.held]
        ordinary = (ran for ran, finding in self.ordinary.items() if self.counted(finding) is None)
        return [*self.held, *varied, *ordinary]

    def ordinary_answer(self, spend: Callable[[], None], law: str, case: Case) -> Finding | None:
        """Return what is found in an ordinary case, which is run only once for all bugs."""
        if (law, case) not in self.ordinary:
            spend()
            self.ordinary[law, case] = self.runs.hard(law, case, self.failure.ignored, explained=True)
        return self.counted(self.ordinary[law, case])


def contrast(showing: Case, without: Case) -> Iterator[Need]:
    """Yield the fields in which a case that does not show a bug differs from one that does."""
    for name in CONTRASTS:
        value, other = value_of(showing, name), value_of(without, name)
        if value != other:
            yield Need(name, (value,), (other,))


def is_small(finding: Finding) -> bool:
    """Whether an error is as small as a rounding error in a format of few bits."""
    return finding.relative is not None and float(finding.relative) < OF_ROUNDINGS


def is_in_common(mine: Finding, other: Finding) -> bool:
    """Whether two findings are of one kind and, where numbers are wrong, of one tensor."""
    return mine.signature == other.signature and (mine.tensor == "" or mine.tensor in wrong_tensors(other))


def is_not_cured(mine: Finding, found: Finding | None) -> bool:
    """Whether a changed case may still fail as before: if it fails without giving numbers, that is not known."""
    return found is not None and (found.hides_numbers or is_in_common(mine, found))


def without_accidents(needs: Sequence[Need]) -> tuple[Need, ...]:
    """Return each need once, without those that others imply.

    The dtype counts only if ordinary numbers show the bug, because special numbers are special to a format.
    """
    unique: dict[Any, Need] = {need.name: need for need in needs}
    if any(name.endswith("_values") for name in unique):
        unique.pop("dtype", None)
    if SCORES in unique:
        unique.pop("dtype", None)
    if "lengths" in unique:  # a change of one length may make both equal
        unique = {name: need for name, need in unique.items() if name not in LENGTHS}
    return tuple(unique.values())
