"""A bug: its smallest case, its conditions, the tensors that it makes wrong, how bad it is, and where it showed."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kernels.contract import GRADIENTS
from kernels.contract.tuners import AT_WORK, is_tuner
from strategies.case import Case, from_json, to_json
from strategies.features import (
    HUGE,
    LENGTHS,
    NAN,
    SCORES,
    UNEQUAL,
    VALUES_OF,
    WORK,
    feature,
    has_small_scores,
    made_of,
    value_of,
)
from strategies.landmarks import MANY
from strategies.size_rules import ENDS, NO_MULTIPLE, Rule, left
from strategies.ways import WAYS
from tests.harness.bugs.failure import OF_MEMORY, Explanation, Failure
from tests.harness.law import law_named
from tests.harness.run import run_of
from tests.harness.symptoms import are_kindred, is_flushed, is_small, wrong_tensors
from tests.harness.verdict import AFTER_OTHERS, INTERMITTENT, NUMBERS, Finding

SMALLEST_TILE = 16
"""A length below this is not taken for the rows of a tile, unless the condition is confirmed."""
COUNTS = ("batch", "heads_kv", "group")
"""Fields that count sequences or heads."""
RULED = (*LENGTHS, *COUNTS, "head_dim", "page_size", *WORK)
"""Sizes of which a rule tells whether a bug shows."""

ENOUGH = 8
"""At least this many ordinary cases must be run to say that a bug shows in all of them."""
FEW_CRASHES = 3
"""So many ordinary cases are run, and are enough, of a bug that ends the process each time."""

MOST_CASES = 200
"""The most failing cases of a bug that are kept, so that other claims can be tried on them."""


@dataclass(frozen=True)
class Condition:
    """A feature of a case that must have a certain value for a bug to show, such as causal=True.

    ``fails`` are values with which the bug was seen, that of the smallest case first; ``holds`` are values without it.
    For a bug of long sequences these are, say, seqlen_k (65, 100) and (64, 32). ``is_certain`` says that normal numbers
    in many rows have confirmed the condition. ``untried`` are configurations that a tuner can't take in the smallest
    case, as the kernel's own pruning leaves them out. ``others`` are rules of a length that count in the place of its
    own where tiles are of other sizes, such as ("head_dim", 128, "above", 32). Their kind is "" where it is not known.
    """

    name: str
    fails: tuple[Any, ...]
    holds: tuple[Any, ...]
    is_certain: bool = False
    untried: tuple[Any, ...] = ()
    others: tuple[tuple[str, Any, str, int], ...] = ()

    @property
    def is_numeric(self) -> bool:
        """Whether the field has many values, of which only few were tried: a length, or the numbers of a tensor."""
        return self.name in LENGTHS or self.name in VALUES_OF

    @property
    def is_telling(self) -> bool:
        """Whether the condition distinguishes bugs, as causal=True does.

        Lengths, numbers and the dtype do not, because they may matter in a small case by chance.
        """
        return not self.is_numeric and self.name != "dtype"

    @property
    def is_irregular(self) -> bool:
        """Whether some lengths fail and others hold by no rule, as in failures at 5, 9 and 12 but not at 6."""
        return self.name in LENGTHS and self.is_certain and self.rule is None

    @property
    def is_of_parts(self) -> bool:
        """Whether part of a case may have what the case itself lacks, as one slice of several is one slice alone."""
        return feature(self.name).is_of_parts

    @property
    def cures_by_all(self) -> bool:
        """Whether every other value must fix the case: two short lengths that are equal may fix it by being short."""
        return self.name == UNEQUAL

    @property
    def rule(self) -> Rule | None:
        """The first rule of sizes that agrees with what was seen, such as "above 64"; None if none does.

        Of a condition that is not confirmed only lengths have one: "above", "no multiple of" or "at most", as few
        numbers hide a bug at many lengths. A number of tiles has no tiles of its own.
        """
        if self.name not in RULED if self.is_certain else self.name not in LENGTHS:
            return None
        is_any = self.is_certain and self.name not in WORK
        return next((x for x in left(self.fails, self.holds) if is_any or _is_plain(x)), None)

    @property
    def begins(self) -> tuple[int, int] | None:
        """The length of the smallest case after the longest one below it that holds, such as (64, 65); else None.

        A length of 0 does not count, as nothing can be wrong in an empty tensor.
        """
        below = [x for x in self.holds if 0 < x < self.fails[0]] if self.name in LENGTHS else []
        return (max(below), self.fails[0]) if below else None

    @property
    def begins_beyond(self) -> int:
        """The power of two beyond which long lengths fail, as 1,024 where 1,098 hold and 1,099 fail; else 0."""
        longest = self.begins[0] if self.begins else 0
        return 1 << longest.bit_length() - 1 if longest >= MANY else 0

    def seen_with(self, value: Any) -> "Condition":
        """Return the condition after the bug was seen with another value, which then counts as one that fails."""
        return replace(self, fails=(*self.fails, value), holds=tuple(x for x in self.holds if x != value))

    def is_met(self, case: Case) -> bool:
        """Whether a case may show the bug, as far as this field decides it.

        Where lengths fail by no rule, any length may show it.
        """
        if self.is_irregular:
            return True
        value, other = value_of(case, self.name), self.other_in(case)
        if other:
            return other.kind == "" or other.shows_at(value)
        return self.rule.shows_at(value) if self.rule else value not in self.holds

    def other_in(self, case: Case) -> Rule | None:
        """Return the rule that counts in a case in the place of the condition's own; None if its own does."""
        met = (Rule(kind, n) for name, value, kind, n in self.others if getattr(case, name) == value)
        return next(met, None)


def _is_plain(rule: Rule) -> bool:
    return rule.kind in ENDS or (rule.kind == NO_MULTIPLE and rule.size >= SMALLEST_TILE)


@dataclass(frozen=True)
class Severity:
    """How often a bug shows in ordinary cases: ``shown`` of ``tried``; both are 0 if the search was cut short.

    ``missed`` is how many of those that did not show it meet all of its conditions: it must have a further one.
    ``uses`` has for each use that the kernel claims, such as "decode steps", in how many of how many cases it shows.
    """

    shown: int = 0
    tried: int = 0
    missed: int = 0
    uses: tuple[tuple[str, int, int], ...] = ()

    @property
    def share(self) -> float | None:
        """The share of ordinary cases in which the bug shows, or of the cases of the use in which it shows most."""
        tried = (self.shown, self.tried), *(x[1:] for x in self.uses)
        return max((shown / number for shown, number in tried if number), default=None)


@dataclass(frozen=True)
class Bug:
    """A bug of a kernel, found in one law and dtype.

    Attributes:
        failure: its smallest case, as it is reported.
        tensors: all tensors that are wrong because of it; none if its failure names no tensor.
        needs: its conditions, without any of which it does not show; none if it always shows.
        severity: how often ordinary cases show it.
        offers: claims under which its failing cases hold, or that exclude them.
        by_numbers: whether another seed fixes an ordinary case that shows it, so that the numbers decide.
    """

    failure: Failure
    tensors: tuple[str, ...] = ()
    needs: tuple[Condition, ...] = ()
    severity: Severity = Severity()
    offers: tuple[str, ...] = ()
    by_numbers: bool = False

    @property
    def key(self) -> str:
        """The bug's name among all bugs of a run: the folder of its report."""
        return str(self.failure.folder)

    @property
    def is_huge(self) -> bool:
        """Whether it needs huge strides. All that fails with huge strides counts as one bug."""
        return any(need.name == HUGE for need in self.needs)

    @property
    def may_spoil(self) -> set[str]:
        """The tensors that it makes wrong, and the gradients if out is among these, as they follow from out."""
        return {*self.tensors, *(GRADIENTS if "out" in self.tensors else ())}

    @property
    def may_make_wrong(self) -> set[str]:
        """The tensors that it makes wrong; all that are wrong in its case, if no more was found out."""
        is_known = self.severity.tried or self.failure.finding.certificate
        return {*self.tensors, *(() if is_known else wrong_tensors(self.failure.finding))}

    @property
    def needs_no_more_than_dtype(self) -> bool:
        """Whether nothing but the dtype is known to decide whether the bug shows."""
        return all(need.name == "dtype" for need in self.needs)

    @property
    def fields_needed(self) -> set[str]:
        """The features in its conditions, and the fields that make them up: unequal lengths are of both lengths."""
        names = {need.name for need in self.needs}
        return names | made_of(names)

    @property
    def is_everywhere(self) -> bool:
        """Whether it shows in every case of its dtypes, to judge by the ordinary cases."""
        s, enough = self.severity, FEW_CRASHES if self.failure.finding.ends_process else ENOUGH
        is_of_own_calls = self.needs_own_numbers or self.needs_arguments_of
        return self.needs_no_more_than_dtype and s.shown == s.tried >= enough and not is_of_own_calls

    @property
    def needs_arguments_of(self) -> str:
        """The law that found wrong numbers, if it adds arguments to plain calls; "" for any other bug."""
        adds_arguments = law_named(self.failure.law).adds_arguments
        return self.failure.law if adds_arguments and self.failure.finding.kind in NUMBERS else ""

    @property
    def needs_own_numbers(self) -> bool:
        """Whether it has no condition that distinguishes bugs, and was found by a law that sets its own numbers."""
        sets_numbers = "numbers" in law_named(self.failure.law).sets
        return sets_numbers and not any(need.is_telling for need in self.needs)

    def may_show_under(self, law: str) -> bool:
        """Whether a law's calls may show the bug: not if it depends on arguments or numbers of its own law alone."""
        return law == self.failure.law or not (self.needs_own_numbers or self.needs_arguments_of)

    @property
    def needs_numbers(self) -> bool:
        """Whether it needs special numbers, such as large scores, so that normal ones do not show it."""
        return any(need.name in (*VALUES_OF, SCORES, NAN) for need in self.needs)

    @property
    def is_flush(self) -> bool:
        """Whether it turns a number smaller than the smallest normal one of the dtype into 0."""
        return is_flushed(self.failure.finding, self.failure.case.dtype)

    @property
    def is_by_chance(self) -> bool:
        """Whether it makes rounding errors in some ordinary cases only, so that their numbers decide where it shows."""
        s = self.severity
        return is_small(self.failure.finding) and s.shown < s.tried

    def is_met(self, case: Case) -> bool:
        """Whether a case meets all of the bug's conditions."""
        return all(need.is_met(case) for need in self.needs)

    def is_of_scores_in(self, case: Case) -> bool:
        """Whether the scores of a case may show the bug, to judge by its conditions and its smallest case.

        They may not if

        1. the bug needs special scores, and those of the case are no larger than normal ones, but those of its smallest
           case are;
        2. the bug needs an sm_scale, not just any that is not the default, and one of the two cases, not both, has a
           scale of 0.
        """
        own = self.failure.case
        is_small = has_small_scores(case) and not has_small_scores(own)
        is_other = (case.sm_scale == 0) != (own.sm_scale == 0)
        scales = (need.name == "sm_scale" and {*need.holds} > {None} for need in self.needs)
        return not (is_small and SCORES in self.fields_needed) and not (is_other and any(scales))

    def lacks_nan_of(self, case: Case) -> bool:
        """Whether a case has NaN or infinity in an input, and the bug is known to show without them."""
        return bool(value_of(case, NAN)) and not value_of(self.failure.case, NAN)

    def end_of(self, case: Case) -> Finding | None:
        """Return the finding with which a case would end the process because of this bug; None if it would not."""
        finding = self.failure.finding
        return finding if finding.ends_process and self.needs and self.is_met(case) else None

    def ends_parts(self, finding: Finding) -> bool:
        """Whether the bug may have ended the process in a law that calls the kernel with parts of a case.

        Its conditions are on sizes alone, which a part may have though the case does not: half of 130 is below 100.
        """
        return bool(self.needs) and all(need.is_of_parts for need in self.needs) and self.ends_as(finding)

    def ends_as(self, finding: Finding) -> bool:
        """Whether the bug ends the process in the same words as a finding."""
        mine = self.failure.finding
        return mine.ends_process and mine.claim == finding.claim

    def could_break(self, finding: Finding) -> bool:
        """Whether the bug can be blamed for a failure, by its kind and by its tensors.

        An exception raised at another line of the kernel is another bug, since each check of arguments raises its own.
        So is a breach of the contract in other words.
        """
        if self.is_huge:
            return True
        mine = self.failure.finding
        if not mine.is_akin(finding) or mine.origin != finding.origin:
            return False
        return mine.kind not in NUMBERS or bool(set(self.tensors) & wrong_tensors(finding))

    def is_kin(self, other: "Bug") -> bool:
        """Whether two bugs can be duplicates, by the kinds of their failures and by their wrong tensors."""
        if self.is_beside(other) or other.is_beside(self):
            return False
        mine, theirs = self.failure.finding, other.failure.finding
        are_related = mine.kind not in NUMBERS or are_kindred(set(self.tensors), set(other.tensors))
        return mine.is_akin(theirs) and are_related

    @property
    def is_certified(self) -> bool:
        """Whether it is certified of all calls what the kernel computes because of it."""
        return bool(self.failure.finding.alternatives) and not self.failure.finding.of_some

    @property
    def is_certified_exactly(self) -> bool:
        """Whether it is certified of all calls, so that others can be judged against what the kernel computes."""
        return self.is_certified and not self.failure.finding.has_fitted_numbers

    def is_beside(self, other: "Bug") -> bool:
        """Whether it was judged against what the kernel computes because of ``other``, so that it is wrong besides."""
        certificate = {*other.failure.finding.alternatives}
        return bool(certificate) and certificate <= {*self.failure.alternatives}

    @property
    def always_differs_between(self) -> tuple[str, ...]:
        """What calls its law compares, if they differ in every case as far as known, as ("repeats",); else nothing."""
        is_always = self.failure.finding.kind in NUMBERS and not any(need.is_telling for need in self.needs)
        return law_named(self.failure.law).compares if is_always else ()

    @property
    def keeps_state(self) -> bool:
        """Whether it needs earlier calls, which its case has, or makes repeated calls differ in every case."""
        return self.needs_other_calls or "repeats" in self.always_differs_between

    @property
    def needs_earlier_calls(self) -> bool:
        """Whether it was found by a law that makes earlier calls, and its case has some."""
        return law_named(self.failure.law).has_earlier_calls and bool(self.failure.case.earlier)

    @property
    def needs_other_calls(self) -> bool:
        """Whether it shows after other calls alone: of its case, of its way of calling, or any of its process."""
        is_of_way = any(need.name == "way" and WAYS[need.fails[0]].calls_again for need in self.needs)
        return self.needs_earlier_calls or is_of_way or self.failure.finding.kind == AFTER_OTHERS

    def may_spoil_later(self, finding: Finding) -> bool:
        """Whether what it keeps from call to call may have made numbers wrong that are right in a new process.

        What is kept of a forward spoils the gradients too, and what is kept of a backward spoils these alone. A later
        call may also raise because of it, as where a tensor that was kept in inference mode is written to.
        """
        may_fail = finding.kind == AFTER_OTHERS or (finding.kind in NUMBERS and finding.actual is not None)
        forward, wrong = {"out", "lse"}, wrong_tensors(finding)
        may_reach = bool(forward & {*self.tensors}) or not forward & wrong
        return self.needs_other_calls and may_fail and may_reach

    def keeps_state_as(self, other: "Bug") -> bool:
        """Whether this bug keeps something from call to call, and ``other`` does so too or comes and goes.

        What an earlier call left behind, or a race, may make any tensor wrong in any law that compares calls. So two
        that show after the same calls are one, and a failure that comes and goes is this bug if it may make all of
        the wrong tensors so and the case meets its conditions, unless it needs earlier calls or is right in a new
        process. So is one that shows after other calls alone, if this bug needs such calls and may spoil its tensors,
        and what a call writes over, if it reuses returned memory.
        """
        if other.failure.finding.kind == AFTER_OTHERS:
            return self.may_spoil_later(other.failure.finding)
        if self.keeps_state and (other.keeps_state or other.always_differs_between):
            after, also_after = ((x.failure.case.earlier, x.failure.case.way) for x in (self, other))
            return self.is_kin(other) or after == also_after or "repeats" in self.always_differs_between
        theirs, is_right_anew = other.failure.finding, self.failure.finding.kind == AFTER_OTHERS
        is_of_calls = is_right_anew or law_named(self.failure.law).compares
        if not is_of_calls or theirs.kind != INTERMITTENT:
            return self.failure.finding.overwrites_as(theirs)
        may_show = self.is_everywhere or self.needs_earlier_calls or is_right_anew
        may_show = may_show or (bool(self.needs) and self.is_met(other.failure.case))
        return may_show and set() < wrong_tensors(theirs) <= self.may_spoil

    def leaves_unwritten(self, finding: Finding, case: Case) -> bool:
        """Whether it leaves memory unwritten that decides about a tensor, so that NaN of an input may be lost there."""
        may_show = all(need.is_met(case) for need in self.needs if need.is_telling)
        is_lost = finding.of_nan == ("lost",) and wrong_tensors(finding) <= {*self.tensors}
        return OF_MEMORY in self.failure.explanation.sentences and is_lost and may_show

    def is_like(self, other: "Bug") -> bool:
        """Whether two bugs are duplicates, to judge by their records alone.

        The first rule that applies decides:

        1. Duplicates: one makes repeated calls differ, and the other does so too or comes and goes
           (``keeps_state_as``).
        2. A failure that comes and goes: duplicates if the tensors are related, as nothing tells its conditions.
        3. Duplicates: the same exception at the same line, whatever its numbers, the contract broken in the same
           words, or the same computation in place of attention.
        4. Distinct: kinds or tensors differ, or only one of them needs the arguments that its law adds.
        5. Both end the process: duplicates if they share a condition, or end it in the same words and one of them
           always does or neither has a condition.
        6. Duplicates: for both another seed fixes an ordinary case, so that numbers decide.
        7. Duplicates: in the same tensor and dtype, both turn tiny numbers into 0, or both make rounding errors that
           only some ordinary cases show. Their conditions matter by chance.
        8. Distinct: their conditions are on different fields.
        9. Neither has a condition: duplicates if each may make the tensor wrong by which the other was found.
        10. Duplicates: both need head_dim and a length, which is equal to head_dim in both smallest cases.
        11. Duplicates: each smallest case meets the conditions of both bugs, and one is more than lengths, numbers or
            dtype.
        """
        if self.keeps_state_as(other) or other.keeps_state_as(self):
            return True
        if self.failure.finding.kind == INTERMITTENT:
            return self.is_kin(other)
        if self.failure.finding.is_told_as(other.failure.finding):
            return True
        if not self.is_kin(other) or self.needs_arguments_of != other.needs_arguments_of:
            return False
        if self.failure.finding.ends_process:
            return self._ends_like(other)
        if self.by_numbers and other.by_numbers:
            return True
        places = {(bug.failure.finding.tensor, bug.failure.case.dtype) for bug in (self, other)}
        of_numbers = (self.is_flush and other.is_flush) or (self.is_by_chance and other.is_by_chance)
        if of_numbers and len(places) == 1:
            return True
        mine, theirs = ({need.name for need in bug.needs} for bug in (self, other))
        if mine != theirs:
            return False
        if not mine:
            both = ((self, other), (other, self))
            return all(one.failure.finding.tensor in ("", *two.may_make_wrong) for one, two in both)
        cases = (self.failure.case, other.failure.case)
        needed = [name for name in LENGTHS if {name, "head_dim"} <= mine]
        if any(all(getattr(x, name) == x.head_dim for x in cases) for name in needed):
            return True
        return self.needs_the_same(other) and any(x.is_telling for x in self.needs)

    def needs_the_same(self, other: "Bug") -> bool:
        """Whether both have conditions on the same fields, and each smallest case meets those of both."""
        both = (self, other)
        mine, theirs = ({need.name for need in bug.needs} for bug in both)
        return mine == theirs and all(bug.is_met(x.failure.case) for bug in both for x in both)

    def _ends_like(self, other: "Bug") -> bool:
        """Whether two bugs that end the process are duplicates: see rule 5 of ``is_like``."""
        if not self.fields_needed.isdisjoint(other.fields_needed):
            return True
        may_be = not (self.needs or other.needs) or self.is_everywhere or other.is_everywhere
        return may_be and self.ends_as(other.failure.finding)

    def to_dict(self) -> dict[str, Any]:
        """Return a record for JSON; of the explanation, the causes and whether unwritten memory decides."""
        f = self.failure
        return {
            "kernel": f.kernel,
            "run": f.to_dict(),
            "finding": asdict(f.finding),
            "environment": f.environment,
            "number": f.number,
            "tensors": self.tensors,
            "needs": [asdict(need) for need in self.needs],
            "severity": asdict(self.severity),
            "offers": self.offers,
            "by_numbers": self.by_numbers,
            "causes": f.explanation.causes,
            "of_memory": OF_MEMORY in f.explanation.sentences,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Bug":
        """Make a bug from what ``to_dict`` returned, also after JSON, which turns tuples into lists."""
        failure = Failure(
            **vars(run_of(fields["run"])),
            kernel=fields["kernel"],
            finding=Finding(**fields["finding"]),
            environment=fields["environment"],
            number=fields["number"],
            explanation=Explanation(
                sentences=(OF_MEMORY,) if fields.get("of_memory") else (), causes=tuple(fields["causes"])
            ),
        )
        needs = (
            Condition(
                x["name"],
                tuple(map(_as_value, x["fails"])),
                tuple(map(_as_value, x["holds"])),
                x.get("is_certain", False),
                tuple(x.get("untried", ())),
                tuple(map(tuple, x.get("others", ()))),
            )
            for x in fields["needs"]
        )
        return cls(
            failure,
            tensors=tuple(fields["tensors"]),
            needs=tuple(needs),
            severity=Severity(
                **{**fields["severity"], "uses": tuple(map(tuple, fields["severity"].get("uses", ())))}
            ),
            offers=tuple(fields["offers"]),
            by_numbers=fields.get("by_numbers", False),
        )


def _as_value(x: Any) -> Any:
    """Return the value of a field after JSON, which turns tuples into lists."""
    return tuple(x) if isinstance(x, list) else x


def in_parts(bug: Bug) -> Bug:
    """Return the bug without conditions on sizes, since a law may call the kernel with parts of a case, of any sizes.

    A bug that has no other conditions keeps these.
    """
    needs = tuple(need for need in bug.needs if not need.is_of_parts)
    return replace(bug, needs=needs or bug.needs)


def with_tensors(bug: Bug, tensors: Iterable[str]) -> Bug:
    """Return the bug with further tensors known to be wrong."""
    return replace(bug, tensors=tuple(sorted({*bug.tensors, *tensors})))


@dataclass
class Occurrences:
    """Where a bug showed: the number of failing examples by law, dtype and worst tensor, and some of their cases.

    An example is a law that fails on a case as it was drawn. Smaller cases tried while shrinking do not count; they are
    kept in ``shrunk``, because a claim is offered only if it explains them too.
    """

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    cases: list[tuple[str, Case]] = field(default_factory=list)
    shrunk: list[tuple[str, Case]] = field(default_factory=list)

    @property
    def total(self) -> int:
        """The number of examples that failed because of the bug."""
        return self.counts.total()

    def add(self, law: str, case: Case, tensor: str) -> None:
        """Count one failing example."""
        self.counts[law, case.dtype, tensor] += 1
        _keep([(law, case)], self.cases)

    def keep(self, cases: Iterable[tuple[str, Case]]) -> None:
        """Keep failing cases that were tried while a case was shrunk."""
        _keep(cases, self.shrunk)

    def merge(self, other: "Occurrences") -> None:
        """Add the occurrences of another item or process."""
        self.counts.update(other.counts)
        _keep(other.cases, self.cases)
        _keep(other.shrunk, self.shrunk)

    def needed(self, need: Condition) -> Condition:
        """Return a condition on a tuner with all configurations of failing examples, and any other as it is."""
        for _, case in self.cases if is_tuner(need.name) else ():
            value = dict(case.launch).get(need.name)
            if value in (*need.holds, *need.untried) and AT_WORK not in (value, need.fails[0]):
                need = need.seen_with(value)
        return need

    def names(self, place: int) -> tuple[str, ...]:
        """Return the laws (place 0), dtypes (1) or tensors (2), those with the most failures first."""
        counts = Counter(key[place] for key in self.counts.elements() if key[place])
        return tuple(sorted(counts, key=lambda name: (-counts[name], name)))

    def to_dict(self) -> dict[str, Any]:
        """Return a record for JSON."""
        return {
            "counts": [[*key, count] for key, count in self.counts.items()],
            "cases": [[law, to_json(case)] for law, case in self.cases],
            "shrunk": [[law, to_json(case)] for law, case in self.shrunk],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Occurrences":
        """Make occurrences from what ``to_dict`` returned, also after JSON."""
        counts = Counter({(law, dtype, tensor): count for law, dtype, tensor, count in fields["counts"]})
        cases, shrunk = (
            [(law, from_json(case)) for law, case in fields[name]] for name in ("cases", "shrunk")
        )
        return cls(counts, cases, shrunk)


def _keep(cases: Iterable[tuple[str, Case]], kept: list[tuple[str, Case]]) -> None:
    """Add cases to those kept, up to ``MOST_CASES``."""
    for case in cases:
        if len(kept) < MOST_CASES and case not in kept:
            kept.append(case)
