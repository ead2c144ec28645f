"""The investigation of one failure: its smallest case, its conditions, its severity, and a script to reproduce it."""

import math
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from reference.bounds.accumulation import SHRINKING_SAFETY
from strategies.case import LAYOUT_FIELDS, Case
from strategies.features import LENGTHS, SCORES, value_of, with_seeds, with_value
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs
from tests.harness.bugs.bug import COUNTS, ENOUGH, FEW_CRASHES, Bug, Condition, Occurrences, Severity
from tests.harness.bugs.counterfactuals import counterfactuals, is_present
from tests.harness.bugs.dense import ordinary_cases
from tests.harness.bugs.failure import (
    HOLDS_ALONE,
    HOLDS_IN_TURN,
    OF_MEMORY,
    UNEXPLAINED,
    Explanation,
    Failure,
    Field,
    headline,
)
from tests.harness.bugs.suggested_claims import excluding, offered
from tests.harness.certificates.certified import CERTIFICATE_SECONDS, certified
from tests.harness.certificates.same import why_duplicates
from tests.harness.clock import BudgetSpent, ShrinkBudget
from tests.harness.diagnosis.conditions import ConditionSearch, explained
from tests.harness.diagnosis.explanation import explain
from tests.harness.diagnosis.known_bugs import KnownBugs
from tests.harness.diagnosis.severity import found_in_ordinary, with_contrast, with_uses
from tests.harness.diagnosis.shrink import RUNS, in_general_layout, is_step, reduced, shrunk_in_few_runs
from tests.harness.law import law_named
from tests.harness.run import ALL_DESIGNS, ONE_DESIGN
from tests.harness.running.child import ChildDied, DeviceLost
from tests.harness.running.exits import exit_status, prepare
from tests.harness.running.runs import Runs, Seen
from tests.harness.symptoms import is_in_common, is_not_cured, is_of_format, is_small
from tests.harness.verdict import NUMBERS, UNCLEAR, Finding

EXPLAIN_SECONDS = 10.0
"""Seconds to find out which fields of the smallest case matter."""
NEEDS_SECONDS = 15.0
"""Seconds to find the conditions of a bug, in addition to those that explain its smallest case."""
SEVERITY_SECONDS = 8.0
"""Seconds to run the ordinary cases, and as many again to find claims to offer."""
LEAST_HASTE = 0.3
"""The least share of their time that explanation, conditions and severity get when the run is about to end."""
LARGE = 2**16
"""A case with more scores than this gets fewer sequences and heads before it is run many times."""
OTHER_NUMBERS = 4
"""How many other seeds are tried to see whether an ordinary case fails only with certain numbers."""
SHRUNK_CASES = 40
"""How many of the failing cases met while shrinking are kept. They are much alike, so that a few are enough."""


@dataclass
class Investigation:
    """The investigation of one failure. A report is written at once, and replaced at each smaller case.

    Attributes:
        runs: runs cases; once its clock has run out, the investigation must end soon.
        failure: the failure, on the smallest case found so far.
        known: the kernel's known bugs.
        shrinking: the time and the calls that may be spent.
        hurried: whether to report the case as it was drawn, so that time is left for other failures.
        cases: failing cases met on the way.
        haste: the share of its time that shrinking has left near the end of the run, which later steps get too.
        answers: findings of cases as far as they count for this failure (see ``counted``).
        judged: findings of cases whatever less precise design would explain them.
        needs: the conditions that are known so far.
        is_misled: whether the smallest case passes if the kernel is compiled for its own sizes, as users compile it.
    """

    runs: Runs
    failure: Failure
    known: KnownBugs
    shrinking: ShrinkBudget
    hurried: bool = False
    cases: Occurrences = field(default_factory=Occurrences)
    haste: float = 1.0
    answers: dict[tuple[str, Case], Finding | None] = field(default_factory=dict)
    judged: dict[tuple[str, Case], Finding | None] = field(default_factory=dict)
    needs: tuple[Condition, ...] = ()
    is_misled: bool = False

    def bug(self, *, shrink: bool = True) -> Bug:
        """Return the bug, with all that can be found out in time; without ``shrink`` the case is reported as it is."""
        drawn = self.failure
        whole = self.shrinking
        self.shrinking = whole.within(self.runs.clock)
        self.haste = self.shrinking.seconds / whole.seconds if whole.seconds else 1.0
        if shrink:
            self.failure = self.without_few_bits()
        number = sum(known.failure.kin == self.failure.kin for known in self.known.bugs.values())
        self.failure = replace(self.failure, number=number)
        self.known.write_first(self.failure)
        prepare(self.runs.child.device)
        self.cases.keep([(drawn.law, drawn.case)])
        gently = self.is_slow
        if shrink and not gently:
            self.lighten()
            self.diagnose()
            self.certify()
            if self.is_known():
                return self.as_it_is
        first = self.failure
        thorough = shrink and not self.hurried
        if shrink and gently:
            self.reduce_gently()
        elif thorough:
            self.reduce()
        if not gently and not self.hurried:
            self.explain()
        bug = self.as_it_is
        if thorough and not gently:
            bug = self.with_needs(bug, first)
        failure, script = self.scripted(self.by_value(bug.failure))
        if not self.runs.clock.cut(math.inf):  # there is no time to draw
            failure = replace(failure, explanation=replace(failure.explanation, pictures=()))
        self.known.write(failure, script)
        bug = replace(bug, failure=failure)
        return self.with_severity(bug) if thorough else bug

    def by_value(self, failure: Failure) -> Failure:
        """Return the failure with the finding of a kernel compiled for this case's sizes and strides, as users run it.

        If the case passes then, the kernel compiled for any values misled the search, and ``is_misled`` is set.
        """
        if not self.runs.compiling.is_general:
            return failure
        with suppress(BudgetSpent):
            verdict = self.runs.in_time(failure.law, failure.case, ignored=failure.ignored)
            finding = self.runs.info.finding(verdict)
            self.is_misled = finding is None or not is_in_common(failure.finding, finding)
            if finding and finding.tensor == failure.finding.tensor and not self.is_misled:
                known = failure.finding
                return replace(failure, finding=finding.with_nan_of(known).told_instead_as(known))
        return failure

    @property
    def is_slow(self) -> bool:
        """Whether each run takes a new process, which takes seconds to start, so that few are made."""
        return self.failure.finding.ends_process or self.runs.is_slow

    @property
    def as_it_is(self) -> Bug:
        """Return the bug with what is known so far: of its conditions, those that the present case still meets."""
        case = self.failure.case
        named = (self.failure.finding.tensor,) if self.failure.finding.tensor else ()
        present = (need for need in self.needs if is_present(need, case))
        needs = [replace(need, fails=(value_of(case, need.name),)) for need in present]
        return Bug(self.failure, tensors=named, needs=tuple(explained(needs, self.failure)))

    def lighten(self) -> None:
        """Give a large case fewer sequences and heads, if it fails alike with them.

        An investigation takes some hundred runs. Each takes a second or two if the case is large.
        """
        fails = partial(self.fails_alike, self.beside_shrinking(NEEDS_SECONDS))
        with suppress(BudgetSpent):
            for name in COUNTS:
                case, value = self.failure.case, getattr(self.failure.case, name)
                fewer = (with_value(case, name, x) for x in (1, 2) if x < value)
                claimed = (x for x in fewer if self.runs.info.capabilities.admits(x))
                if case.scores > LARGE:
                    any(map(fails, claimed))  # the first that fails becomes the case

    def diagnose(self) -> None:
        """Find the conditions of the drawn case in few runs, in case there is no time to find more."""
        fails = partial(self.fails_in_common, self.beside_shrinking(NEEDS_SECONDS))
        self.needs = self.search_of(self.failure).diagnosed(fails)

    def certify(self) -> None:
        """Find out what the kernel computes instead, from calls that meet the conditions."""
        seconds = max(self.haste, LEAST_HASTE) * CERTIFICATE_SECONDS
        needs, known = {need.name for need in self.needs}, [*self.known.bugs.values()]
        self.failure = certified(self.failure, self.runs, needs, seconds, known)

    def is_known(self) -> bool:
        """Whether the conditions of the drawn case show that a known bug has a further symptom here."""
        bug, mine = self.as_it_is, self.failure.finding.instead
        if any(not mine.isdisjoint(other.failure.finding.instead) for other in self.others()):
            return True
        spend = self.beside_shrinking(NEEDS_SECONDS)
        asked = self.runs.oracle(is_precise=not self.known.precision.claims)

        def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
            spend()
            return asked(law, case, ignored)

        known = list(self.known.bugs.values()) if bug.needs else []
        with suppress(BudgetSpent):
            return any(why_duplicates(other, bug, run, self.runs, known) for other in known)
        return False

    def fails_in_common(self, spend: Callable[[], None], case: Case) -> bool:
        """Whether a changed case fails in the same tensor, and no known bug explains that better.

        Other wrong tensors do not count, as they may be due to an unknown bug. Unless the kernel is known to be less
        precise, an error counts whatever less precise design would explain it.
        """
        f = self.failure
        ran, is_precise = (f.law, case), not self.known.precision.common
        if is_precise and (ran in self.judged or ran not in self.answers):
            found = self.search_of(f).found(case, f.law, spend)
        elif ran in self.answers:
            found = self.answers[ran]
        else:
            spend()
            found = self.found(case)
        return is_not_cured(f.finding, found) and not self.is_of_another(found, case)

    def is_of_another(self, found: Finding | None, case: Case) -> bool:
        """Whether a changed case has finite wrong numbers where this failure has NaN, and a known bug may make them."""
        if found is None or (self.failure.finding.kind, found.kind) != ("nonfinite", "error"):
            return False
        return any(bug.could_break(found) and bug.is_met(case) for bug in self.others())

    @cached_property
    def needs_earlier_calls(self) -> bool:
        """Whether the failure's case has earlier calls, and passes without them."""
        f = self.failure
        has_some = law_named(f.law).has_earlier_calls and bool(f.case.earlier)
        return has_some and self.found(replace(f.case, earlier=())) is None

    @cached_property
    def search(self) -> ConditionSearch:
        """Return the search for the bug's conditions. It is first used once the smallest case is known."""
        return self.search_of(self.failure)

    def search_of(self, failure: Failure) -> ConditionSearch:
        """Return the search for a failure's conditions; errors of a known lower precision do not count in it.

        They do count if the failure may be such an error itself.
        """
        is_imprecise = failure.finding.explained_by or is_small(failure.finding)
        known_as = () if is_imprecise else self.known.precision.needed
        return ConditionSearch(self.runs, failure, self.judged, known_as, self.known.bugs)

    def beside_shrinking(self, seconds: float, calls: float = math.inf) -> Callable[[], None]:
        """Return a meter of so many seconds, or fewer near the end of the run: the share that ``haste`` leaves."""
        return self.runs.clock.meter(max(self.haste, LEAST_HASTE) * seconds, calls)

    def found(self, case: Case) -> Finding | None:
        """Run the failure's law on a case, and return the finding, whatever bug causes it; it is remembered.

        No less precise design explains what the failure's certificate does.
        """
        f, designs = self.failure, ALL_DESIGNS if self.known.precision.common else ONE_DESIGN
        run = partial(self.runs.judged, safety=SHRINKING_SAFETY, explained=True, designs=designs)
        finding, instead = run(f.law, case, f.ignored), f.finding.alternatives
        is_told = bool(finding and finding.explained_by and instead)
        if finding and is_told and self.runs.holds_as(f.law, case, f.ignored, instead):
            finding = replace(finding, explained_by=(), likely=())
        self.answers[f.law, case] = finding = self.counted(finding)
        return finding

    def found_anew(self, case: Case) -> Finding | None:
        """Return the finding of a case. The failure's own case is run anew, to see whether it fails on every run."""
        if case == self.failure.case:
            self.runs.forget()
        return self.found(case)

    def counted(self, finding: Finding | None) -> Finding | None:
        """Return a finding as it counts for this failure.

        1. As it is, if no less precise design explains it, or if this failure is of that kind or a rounding error.
        2. As none, if the kernel is known to be that imprecise: the case counts as passed.
        3. As unclear: the case counts neither as passed nor as failed.
        """
        mine = self.failure.finding
        if finding is None or mine.explained_by or not finding.explained_by or is_small(mine):
            return finding
        usual = not {*finding.explained_by}.isdisjoint(self.known.precision.common)
        return None if usual else replace(finding, kind=UNCLEAR)

    def new(self, case: Case) -> Finding | None:
        """Return the finding of a case unless known bugs or a less precise design explain it."""
        finding = self.found(case)
        if finding and finding.explained_by and not self.failure.finding.explained_by:
            return None
        suspects = [bug for bug in self.others() if finding and bug.could_break(finding) and bug.is_met(case)]
        if finding is None or not suspects:
            return finding
        run = partial(self.runs.judged, safety=SHRINKING_SAFETY)
        broken = FailingExample(self.failure.law, case, finding, self.failure.ignored)
        rest = explain_by_known_bugs(broken, suspects, run, self.runs.claims_of(self.failure.law)).rest
        return finding if rest is not None and rest.finding == finding else None

    def alike(self, case: Case) -> Failure | None:
        """Return the failure on another case, or None if that case passes, or fails in another way.

        1. Tensor and kind of the finding must be the same.
        2. An error that any cast to a format of few bits makes is another failure, unless this one is of that kind.
        3. If this failure needs its earlier calls, so does one that is like it.
        """
        finding, mine = self.new(case), self.failure.finding
        if finding is None or (finding.tensor, finding.kind) != (mine.tensor, mine.kind):
            return None
        if not finding.is_akin(mine) or (is_of_format(finding) and not is_of_format(mine)):
            return None
        if self.needs_earlier_calls and self.found(replace(case, earlier=())) is not None:
            return None
        found = finding.with_nan_of(mine).told_instead_as(mine)
        return replace(self.failure, case=case, finding=found, explanation=UNEXPLAINED)

    def fails_alike(self, spend: Callable[[], None], case: Case, *, as_small: bool = False) -> bool:
        """Whether a smaller case fails alike. If so, it becomes the failure's case, unless ``is_step`` says otherwise.

        With ``as_small``, a large error and a rounding error are not alike.
        """
        spend()
        smaller = self.alike(case)
        if smaller is None or (as_small and is_small(smaller.finding) != is_small(self.failure.finding)):
            return False
        if is_step(case):
            return True
        self.failure = smaller
        self.known.write(smaller, None)
        if len(self.cases.shrunk) < SHRUNK_CASES:
            self.cases.keep([(smaller.law, case)])
        return True

    def reduce(self) -> None:
        """Shrink the case, as long as it fails in the same way and there is time."""
        fails = partial(
            self.fails_alike, self.runs.clock.meter(self.shrinking.reducing_seconds, self.shrinking.calls)
        )
        with suppress(BudgetSpent):
            for name in LAYOUT_FIELDS:  # so that heads can be removed without losing the layout's strides
                in_general_layout(self.failure.case, name, fails, self.runs.info.capabilities)
            reduced(self.failure.case, fails, self.runs.info.capabilities)
            self.leave_known_bugs(fails)

    def without_few_bits(self) -> Failure:
        """Return the failure in float32 if a large error shows there too: it is no rounding error then, nor hides one.

        This is for the CPU alone. On a GPU a kernel may take another path in float32, and take minutes to compile.
        """
        f = self.failure
        case = replace(f.case, dtype="float32")
        is_large = f.finding.kind == "error" and not is_small(f.finding)
        if self.runs.device_type == "cpu" and is_large and self.runs.info.capabilities.admits(case):
            with suppress(BudgetSpent):
                wide = self.alike(case)
                return f if wide is None or is_small(wide.finding) else wide
        return f

    def leave_known_bugs(self, fails: Callable[[Case], bool]) -> None:
        """Remove a known bug's trigger from the smallest case, if it fails without that too.

        As long as a known bug makes the case fail, changing any other field can't fix it, so that no condition of the
        bug under investigation would be found.
        """
        for bug in filter(lambda bug: bug.could_break(self.failure.finding), self.others()):
            smallest, claims = self.failure.case, self.runs.info.capabilities
            for case in (case for need in bug.needs for case in counterfactuals(need, smallest, claims)):
                if bug.is_met(self.failure.case):
                    fails(case)  # if it does, it becomes the smallest case

    def others(self) -> list[Bug]:
        """Return the known bugs except the one under investigation."""
        return [bug for bug in self.known.bugs.values() if bug.key != str(self.failure.folder)]

    def reduce_gently(self) -> None:
        """Shrink in few runs, since each takes a process; what can't be simplified becomes a condition."""
        drawn = self.failure.case
        fails = partial(self.fails_alike, self.runs.clock.meter(self.shrinking.seconds, RUNS))
        with suppress(BudgetSpent):
            if self.needs_earlier_calls:
                once = (replace(drawn, earlier=(kind,), rounds=1) for kind in drawn.earlier)
                any(fails(case) for case in once if case != drawn)  # the first that fails becomes the case
                self.needs = (Condition("earlier", (self.failure.case.earlier,), ((),)),)
                self.known.announce(self.as_it_is)
            case, claims = self.failure.case, self.runs.info.capabilities
            for _, needs in shrunk_in_few_runs(case, fails, claims, self.needs):
                if needs != self.needs:
                    self.needs = needs
                    self.known.announce(self.as_it_is)
        self.needs = tuple(self.beside_those_held(need) for need in self.needs)
        fields = (Field(x.name, str(x.fails[0]), (), tuple(map(str, x.holds))) for x in self.needs)
        self.failure = replace(self.failure, explanation=Explanation(fields=tuple(fields)))

    def beside_those_held(self, need: Condition) -> Condition:
        """Add to a condition on a length the shorter lengths of drawn cases that passed."""
        if need.name not in LENGTHS:
            return need
        least = need.fails[0]
        lengths = [getattr(case, need.name) for law, case in self.runs.held if law == self.failure.law]
        below = [x for x in lengths if x < least]
        return replace(need, holds=tuple(dict.fromkeys([*need.holds, *below])))

    def explain(self) -> None:
        """Add an explanation of its case to the failure."""
        spend = self.beside_shrinking(EXPLAIN_SECONDS)
        failure = self.failure

        def fails(case: Case) -> bool | None:
            # A failure in any tensor counts: a field does not matter if the case fails in another tensor without it.
            spend()
            finding = self.found_anew(case)
            return None if finding and finding.kind == UNCLEAR else finding is not None

        def look(case: Case) -> Seen | None:
            spend()
            # That no known bug explains the failure's own case is known already.
            fails_alike = self.found_anew(case) if case == failure.case else self.alike(case)
            return self.runs.look(replace(failure, case=case)) if fails_alike else None

        # If no number is wrong there is nothing to look at.
        looks = None if failure.finding.actual is None else look
        with suppress(ChildDied):
            tell = "lengths" not in law_named(failure.law).sets
            claims = self.runs.claims_of(failure.law)
            told = explain(failure.case, fails, looks, claims, lengths_tell=tell)
            self.failure = replace(failure, explanation=told)

    def with_needs(self, bug: Bug, first: Failure) -> Bug:
        """Return the bug with its conditions, and with all tensors that are wrong because of it."""
        spend = self.beside_shrinking(NEEDS_SECONDS)
        failure, seen = bug.failure, set[str]()
        fails = partial(self.fails_in_common, spend)
        with suppress(BudgetSpent):
            witnesses, larger = [failure.case], failure.explanation.larger
            for witness in (first.case, larger):
                if witness and witness not in witnesses and self.new(witness):
                    witnesses.append(witness)
            if is_small(failure.finding):
                # At another size or layout a few numbers may all be rounded to the right result. So only the case with
                # most numbers is a witness.
                witnesses = witnesses[-1:]
            search = self.search
            for needs in search.needs(witnesses, fails):
                bug = replace(bug, needs=needs)
                seen = search.tensors_of(needs, witnesses, spend) if needs else search.always_wrong(spend)
        return replace(bug, tensors=tuple(sorted({*bug.tensors, *seen})))

    def scripted(self, failure: Failure) -> tuple[Failure, str | None]:
        """Return the failure with its script or, if that exits 0 as if the bug were fixed, with a note instead."""
        script, depends = self.script(failure)
        if depends and failure.finding.tensor:
            failure = replace(failure, explanation=failure.explanation.with_sentence(OF_MEMORY))
        # The script of a hang is not tried, as it would hang too.
        if script is not None and failure.finding.kind != "hung":
            with suppress(OSError, subprocess.TimeoutExpired):  # a script that can't be tried is kept
                if exit_status(script, self.script_seconds, self.runs.child.device) == 0:
                    reason = HOLDS_IN_TURN if self.holds_in_turn(failure) else HOLDS_ALONE
                    return replace(failure, explanation=failure.explanation.with_sentence(reason)), None
        return failure, script

    def script(self, failure: Failure) -> tuple[str | None, bool]:
        """Return the stand-alone script of a failure, or None if its calls can't be repeated.

        With it comes whether the wrong tensor depends on memory that nobody has written.
        """
        for kind in (
            failure.finding.kind,
            "died",
        ):  # if the calls crash meanwhile, it is the script of a crash
            try:
                finding = replace(failure.finding, kind=kind)
                return self.runs.script(failure, finding, headline(failure), self.script_seconds)
            except DeviceLost:
                continue
            except ChildDied as death:
                if death.hung and self.runs.clock.left <= 0:
                    break  # the time was up: nothing has crashed
        return None, False

    def holds_in_turn(self, failure: Failure) -> bool:
        """Whether a failure shows only if programs of a launch run at the same time, which they do not in a script."""
        with suppress(ChildDied, DeviceLost):
            return self.runs.holds_in_turn(failure, self.script_seconds)
        return False

    @property
    def script_seconds(self) -> float:
        """Return the seconds that a script may take. Its compilation gets less time than in a search."""
        child = self.runs.child
        clock = self.runs.clock
        return max(clock.least, clock.cut(min(child.run_seconds, child.start_seconds)))

    def with_severity(self, bug: Bug) -> Bug:
        """Return the bug with the share of ordinary cases that show it, and with claims to offer.

        A bug without a condition that distinguishes bugs, or a rounding error, that every ordinary case shows becomes
        an unconditional bug (``everywhere``), unless a known bug is behind these cases too (``is_hidden_in``).
        """
        mine = bug.failure.finding
        spend = self.beside_shrinking(SEVERITY_SECONDS, FEW_CRASHES if self.is_slow else math.inf)
        found = [(case, self.counted(x)) for case, x in found_in_ordinary(bug.failure, self.runs, spend)]
        # A case that fails without numbers, by a crash say, does not show whether numbers would be wrong.
        telling = [(case, x) for case, x in found if not x or not x.hides_numbers or is_in_common(mine, x)]
        common = sum(x is not None and is_in_common(mine, x) for _, x in telling)
        is_by_chance = is_small(mine) or not any(need.is_telling or need.is_certain for need in bug.needs)
        always = common == len(telling) >= ENOUGH and is_by_chance
        if always and not self.is_hidden_in([case for case, _ in telling]):
            return with_uses(self.everywhere(bug, len(telling)), telling, self.runs, self.counted, spend)
        if 0 < common < len(telling):
            showing = [case for case, x in telling if x is not None and is_in_common(mine, x)]
            fewest = min(showing, key=lambda case: case.scores)
            bug = replace(bug, by_numbers=self.is_by_numbers(bug, fewest, spend))
        shown = sum(x is not None and bug.could_break(x) and bug.is_met(case) for case, x in telling)
        bug = bug if self.is_slow else with_contrast(bug, telling, self.search, self.counted, spend)
        missed = sum(not is_not_cured(mine, x) and bug.is_met(case) for case, x in telling)
        bug = replace(bug, severity=Severity(shown, len(telling), missed), offers=self.offers(bug))
        return with_uses(bug, telling, self.runs, self.counted, spend)

    def is_hidden_in(self, cases: Sequence[Case]) -> bool:
        """Whether a known bug makes the same tensor wrong in all of these ordinary cases, and may hide this one.

        The known bug has a confirmed condition, such as head_dim=128, which all these cases meet. Normal numbers pass
        without it, so that the bug under investigation does not show in all of them by itself.
        """
        return any(
            bug.could_break(self.failure.finding)
            and any(need.is_certain and need.is_telling for need in bug.needs)
            and all(map(bug.is_met, cases))
            for bug in self.others()
        )

    def is_by_numbers(self, bug: Bug, showing: Case, spend: Callable[[], None]) -> bool:
        """Whether an ordinary case that shows the bug passes with another seed, so that its numbers decide.

        Only a bug whose conditions are lengths, numbers or the dtype can be one of numbers. A bug of certain lengths
        shows with any numbers.
        """
        mine = bug.failure.finding
        of_numbers = all(need.is_numeric or need.name in (SCORES, "dtype") for need in bug.needs)
        if not of_numbers or mine.kind not in NUMBERS or is_small(mine):
            return False
        _, *others = with_seeds(showing, 1 + OTHER_NUMBERS)
        with suppress(BudgetSpent):
            return not all(self.fails_in_common(spend, case) for case in others)
        return False

    def offers(self, bug: Bug) -> tuple[str, ...]:
        """Return claims that would exclude the bug, or under which its cases pass."""
        failure = bug.failure
        varied = [(failure.law, case) for x in failure.explanation.fields for case in x.held]
        ordinary = [ran for ran, finding in self.runs.ordinary.items() if self.counted(finding) is None]
        held = [*self.runs.held, *varied, *ordinary]
        spend = self.beside_shrinking(0.0 if self.is_slow else SEVERITY_SECONDS)
        failing, holding = [case for _, case in self.cases.shrunk], [case for _, case in held]
        return (
            *offered(bug, self.cases.shrunk, self.runs, spend),
            *excluding(bug.needs, failing, holding, self.runs.info.capabilities),
        )

    def everywhere(self, bug: Bug, tried: int) -> Bug:
        """Return the bug with no condition but the dtype, because every ordinary case of its dtype shows it.

        Fields that seemed to matter in its smallest case did so by chance, or because that case shows another bug as
        well.
        """
        spend, search = self.beside_shrinking(SEVERITY_SECONDS), self.search
        always, needs = set[str](), tuple[Condition, ...]()
        with suppress(BudgetSpent):
            needs = search.dtypes(spend)
            always = search.always_wrong(spend)
        if not is_small(bug.failure.finding):  # a rounding error may pass in any other case by chance
            before = self.failure
            if (apart := self.shown_apart_from([bug, *self.known.bugs.values()])) is not before:
                bug = replace(bug, failure=apart)
        named = {self.failure.finding.tensor} - {""}
        tensors = tuple(sorted(always | named))
        bug = replace(bug, needs=needs, tensors=tensors, severity=Severity(tried, tried))
        return replace(bug, offers=offered(bug, self.cases.shrunk, self.runs, spend))

    def shown_apart_from(self, others: Sequence[Bug]) -> Failure:
        """Return the failure on a smallest case that meets no other bug's conditions, or unchanged if there is none.

        A bug that every ordinary case shows does not require, say, causal, which another bug requires. If its smallest
        case is causal all the same, shrinking may have slipped to the other bug. Therefore an ordinary case without the
        conditions of others is shrunk afresh. A rounding error is not exchanged for a large error, which may be due to
        an unknown bug.
        """
        before, claims = self.failure, self.runs.claims_of(self.failure.law)
        met = [bug for bug in others if not bug.needs_no_more_than_dtype and bug.is_met(before.case)]
        spend = self.beside_shrinking(self.shrinking.reducing_seconds)
        fails = partial(self.fails_alike, spend, as_small=True)

        def fails_apart(case: Case) -> bool:
            return not any(bug.is_met(case) for bug in met) and fails(case)

        ordinary = ordinary_cases(claims, before.case.dtype, self.runs.device_type, before.case)
        with suppress(BudgetSpent):
            if met and any(map(fails_apart, ordinary)):
                reduced(self.failure.case, fails_apart, claims)
        if self.failure is not before:
            self.explain()
            self.failure, script = self.scripted(self.failure)
            self.known.write(self.failure, script)
        return self.failure
