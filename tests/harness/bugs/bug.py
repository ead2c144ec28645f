"""A bug: its smallest case, what it needs, the tensors that it makes wrong, how bad it is, and where it showed."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from kernels.contract import GRADIENTS
from strategies.case import Case, from_json, to_json
from strategies.features import (
    HUGE,
    LENGTHS,
    NAN,
    SCORES,
    SIZES_OF_TILES,
    UNEQUAL,
    VALUES_OF,
    feature,
    has_small_scores,
    made_of,
    value_of,
)
from tests.harness.bugs.failure import Explanation, Failure
from tests.harness.law import law_named
from tests.harness.run import run_of
from tests.harness.symptoms import are_kindred, is_flushed, is_small, wrong_tensors
from tests.harness.verdict import INTERMITTENT, NUMBERS, Finding

SMALLEST_TILE = 16
"""A length below this is not taken for that of a tile."""

ONE_ABOVE = "one above a multiple of"
"""The lengths that show a bug which leaves out a last tile of a single row or key."""
BEYOND = "above and no multiple of"
"""The lengths that show a bug of the last tile, if that is not full and other tiles come before it."""


ENOUGH = 8
"""At least this many ordinary cases must be run to say that a bug shows in all of them."""
FEW_CRASHES = 3
"""So many are run, and are enough, if each ends a process."""

MOST_CASES = 200
"""The most failing cases of a bug that are kept, so that other claims can be tried on them."""


@dataclass(frozen=True)
class Condition:
    """A field that must have a certain value for a bug to show; ``name`` is that of a feature of a case.

    ``fails`` are values with which the bug was seen, that of the smallest case first; ``holds`` are values without it.
    With ``is_certain``, ordinary numbers in many rows have confirmed the need.
    """

    name: str
    fails: tuple[Any, ...]
    holds: tuple[Any, ...]
    is_certain: bool = False

    @property
    def is_numeric(self) -> bool:
        """Whether the field has many values, of which only few were tried."""
        return self.name in LENGTHS or self.name in VALUES_OF

    @property
    def is_telling(self) -> bool:
        """Whether the field tells one bug from another.

        Lengths, numbers and the dtype do not, because they may matter in a small case by chance.
        """
        return not self.is_numeric and self.name != "dtype"

    @property
    def is_irregular(self) -> bool:
        """Whether some lengths fail and others hold, although no end of a tile lies between them."""
        return self.name in LENGTHS and self.is_certain and len(self.fails) > 1

    @property
    def is_of_parts(self) -> bool:
        """Whether a part of a case may have what the case itself has not."""
        return feature(self.name).is_of_parts

    @property
    def cures_by_all(self) -> bool:
        """Whether all other values must cure a case: of equal lengths, short ones may cure it by being short."""
        return self.name == UNEQUAL

    @property
    def side(self) -> tuple[str, int] | None:
        """How failing lengths differ from those that hold, with the length that divides them; None if that is unknown.

        They are "above" or "below" it if all that hold are on the other side, and "no multiple of" a tile's length or,
        if that is certain, ``ONE_ABOVE`` or ``BEYOND`` one. It is unknown if lengths fail by no such rule, or if none
        is known to hold.
        """
        if self.name not in LENGTHS or self.is_irregular or not self.holds:
            return None
        if max(self.holds) < min(self.fails):
            return "above", max(self.holds)
        tile = min(filter(None, self.holds), default=0)
        if (
            tile >= SMALLEST_TILE
            and not any(x % tile for x in self.holds)
            and all(x % tile for x in self.fails)
        ):
            return "no multiple of", tile
        if max(self.fails) < min(self.holds):
            return "below", min(self.holds)
        if self.is_certain:
            return next(filter(self._is_side, product((BEYOND, ONE_ABOVE), SIZES_OF_TILES)), None)
        return None

    def _is_side(self, side: tuple[str, int]) -> bool:
        """Whether ``side`` may be this one: the failing length lies on it, and no length that holds does."""
        return _is_on(self.fails[0], side) and not any(_is_on(x, side) for x in self.holds)

    @property
    def begins(self) -> tuple[int, int] | None:
        """The last length below the smallest case's that holds, and that case's; None if it is no length or none holds.

        A length of 0 tells nothing, as nothing is wrong in an empty tensor.
        """
        below = [x for x in self.holds if 0 < x < self.fails[0]] if self.name in LENGTHS else []
        return (max(below), self.fails[0]) if below else None

    def seen_with(self, value: Any) -> "Condition":
        """Return the need after the bug was seen with another value."""
        return replace(self, fails=(*self.fails, value), holds=tuple(x for x in self.holds if x != value))

    def is_met(self, case: Case) -> bool:
        """Whether a case may show the bug, as far as this field decides it.

        Where other sizes decide which lengths fail, any length may show it.
        """
        if self.is_irregular:
            return True
        value = value_of(case, self.name)
        if self.side:
            return _is_on(value, self.side)
        return value not in self.holds


def _is_on(length: int, side: tuple[str, int]) -> bool:
    """Whether a length is one at which a bug shows, by a rule such as ("above", 32): see ``Need.side``."""
    match side:
        case "above", tile:
            return length > tile
        case "below", tile:
            return length < tile
        case kind, tile if kind == ONE_ABOVE:
            return length % tile == 1
        case kind, tile if kind == BEYOND:
            return length > tile and length % tile != 0
    return length % side[1] != 0


@dataclass(frozen=True)
class Severity:
    """How bad a bug is: it showed in ``shown`` of ``tried`` ordinary cases; both are 0 if a search was cut short.

    ``missed`` of those that did not show it have all that it is known to need, so it needs something else as well.
    """

    shown: int = 0
    tried: int = 0
    missed: int = 0

    @property
    def share(self) -> float | None:
        """The share of ordinary cases in which it shows."""
        return self.shown / self.tried if self.tried else None


@dataclass(frozen=True)
class Bug:
    """A bug of a kernel, found in one law and dtype.

    Attributes:
        failure: its smallest case, as it is reported.
        tensors: all tensors that are wrong because of it; none if its failure names no tensor.
        needs: the fields without which it does not show; none if it always shows.
        severity: how often ordinary cases show it.
        offers: claims under which its failing cases hold, or that exclude them.
        by_numbers: whether other ordinary numbers cure an ordinary case that shows it, so that its numbers decide.
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
        """Whether it needs huge strides. Everything that these break counts as one bug."""
        return any(need.name == HUGE for need in self.needs)

    @property
    def may_spoil(self) -> set[str]:
        """The tensors that it makes wrong, and the gradients if out is among these, as they follow from it."""
        return {*self.tensors, *(GRADIENTS if "out" in self.tensors else ())}

    @property
    def needs_no_more_than_dtype(self) -> bool:
        """Whether nothing but the dtype is known to decide whether it shows."""
        return all(need.name == "dtype" for need in self.needs)

    @property
    def fields_needed(self) -> set[str]:
        """The names of the fields that it needs, and of those that they follow from, as unequal lengths from both."""
        names = {need.name for need in self.needs}
        return names | made_of(names)

    @property
    def is_everywhere(self) -> bool:
        """Whether it shows in every case of the dtypes that it needs, judged by the ordinary ones."""
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
        """Whether nothing is known to decide whether it shows but the numbers that its law sets in every case."""
        sets_numbers = "numbers" in law_named(self.failure.law).sets
        return sets_numbers and not any(need.is_telling for need in self.needs)

    def may_show_under(self, law: str) -> bool:
        """Whether calls of a law may have what the bug needs, if that is more than fields of a case."""
        return law == self.failure.law or not (self.needs_own_numbers or self.needs_arguments_of)

    @property
    def needs_numbers(self) -> bool:
        """Whether it needs special numbers, so that it does not show with ordinary ones."""
        return any(need.name in (*VALUES_OF, SCORES, NAN) for need in self.needs)

    @property
    def is_flush(self) -> bool:
        """Whether a number smaller than those of full precision has become 0."""
        return is_flushed(self.failure.finding, self.failure.case.dtype)

    @property
    def is_by_chance(self) -> bool:
        """Whether it makes small errors in some ordinary cases only, so that their numbers decide where it shows."""
        s = self.severity
        return is_small(self.failure.finding) and s.shown < s.tried

    def is_met(self, case: Case) -> bool:
        """Whether a case has all that the bug needs."""
        return all(need.is_met(case) for need in self.needs)

    def is_of_scores_in(self, case: Case) -> bool:
        """Whether the scores of a case may show the bug, as far as what it needs of them says.

        A bug that needs large scores was not seen with scores that are no larger than ordinary ones. One that needs
        an sm_scale, and not any but the default, was not seen with a scale of 0. Its smallest case may be like this.
        """
        own = self.failure.case
        is_small = has_small_scores(case) and not has_small_scores(own)
        is_other = (case.sm_scale == 0) != (own.sm_scale == 0)
        return not any(
            (is_small and need.name == SCORES)
            or (is_other and need.name == "sm_scale" and {*need.holds} > {None})
            for need in self.needs
        )

    def lacks_nan_of(self, case: Case) -> bool:
        """Whether a case has NaN or infinity in an input, and the bug is known to show without them."""
        return bool(value_of(case, NAN)) and not value_of(self.failure.case, NAN)

    def end_of(self, case: Case) -> Finding | None:
        """Return the finding with which a case would end the process because of this bug; None if it would not."""
        finding = self.failure.finding
        return finding if finding.ends_process and self.needs and self.is_met(case) else None

    def ends_parts(self, finding: Finding) -> bool:
        """Whether it may have ended the process in a law that calls the kernel with parts of a case.

        It ends the process in the same words, and needs only sizes, which such a part may have whatever the case has.
        """
        is_of_sizes = bool(self.needs) and all(need.is_of_parts for need in self.needs)
        return is_of_sizes and self.ends_as(finding)

    def ends_as(self, finding: Finding) -> bool:
        """Whether it ends the process in the same words as a finding."""
        mine = self.failure.finding
        return mine.ends_process and mine.claim == finding.claim

    def could_break(self, finding: Finding) -> bool:
        """Whether the bug can be blamed for a failure, by the kind of failure and by its tensors.

        An exception that is raised elsewhere is another one: each line that checks its arguments is told. So is what
        breaks the contract in other words.
        """
        if self.is_huge:
            return True
        mine = self.failure.finding
        if not mine.is_akin(finding) or mine.origin != finding.origin:
            return False
        return mine.kind not in NUMBERS or bool(set(self.tensors) & wrong_tensors(finding))

    def is_kin(self, other: "Bug") -> bool:
        """Whether both can be one bug, by the kind of their failures and by the tensors that are wrong."""
        mine, theirs = self.failure.finding, other.failure.finding
        if not mine.is_akin(theirs):
            return False
        return mine.kind not in NUMBERS or are_kindred(set(self.tensors), set(other.tensors))

    @property
    def always_differs_between(self) -> tuple[str, ...]:
        """What its law compares, if numbers differ there whatever is called, as far as known; else nothing."""
        is_always = self.failure.finding.kind in NUMBERS and not any(need.is_telling for need in self.needs)
        return law_named(self.failure.law).compares if is_always else ()

    def keeps_state_as(self, other: "Bug") -> bool:
        """Whether this bug makes repeated calls differ, and the other one does so too or comes and goes.

        What an earlier call has left behind, or a race, may spoil any tensor in any law of several calls. If this bug
        was found by such a law, it explains a failure that comes and goes in tensors that it may spoil, in a case that
        has what it needs.
        """
        theirs = other.failure.finding
        if "repeats" in self.always_differs_between and other.always_differs_between:
            return True
        if not law_named(self.failure.law).compares or theirs.kind != INTERMITTENT:
            return False
        may_show = self.is_everywhere or (bool(self.needs) and self.is_met(other.failure.case))
        return may_show and set() < wrong_tensors(theirs) <= self.may_spoil

    def is_like(self, other: "Bug") -> bool:
        """Whether both are one bug, to judge by their records alone.

        They are if they need the same fields and the case of each meets the needs of both, or has a length that is
        equal to head_dim; or if neither needs any, as far as is known, and the tensor that is most wrong in each is
        among the wrong ones of the other; or if the same exception, whatever its numbers, was raised at the same line,
        or the contract is broken in the same words; or if both end the process and have a need in common, or end it in
        the same words and one does so in every case or neither needs anything. They are also one if numbers decide
        whether they show: in ordinary cases, or, in the same tensor and dtype, if both make tiny numbers 0, or small
        errors that few cases show. What seems to matter beside the numbers does so by accident. What comes and goes in
        a kernel counts as one bug, since nothing tells what it needs, and is one with what makes repeats of any call
        differ in the same tensors.
        """
        if self.keeps_state_as(other) or other.keeps_state_as(self):
            return True
        if self.failure.finding.kind == INTERMITTENT:
            return self.is_kin(other)
        if (origin := self.failure.finding.origin) and origin == other.failure.finding.origin:
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
            return all(one.failure.finding.tensor in (*two.tensors, "") for one, two in both)
        cases = (self.failure.case, other.failure.case)
        if any(
            {name, "head_dim"} <= mine and all(getattr(x, name) == x.head_dim for x in cases)
            for name in LENGTHS
        ):
            return True
        return self.needs_the_same(other) and any(x.is_telling for x in self.needs)

    def needs_the_same(self, other: "Bug") -> bool:
        """Whether both need the same fields, and the smallest case of each has what both need."""
        both = (self, other)
        mine, theirs = ({need.name for need in bug.needs} for bug in both)
        return mine == theirs and all(bug.is_met(x.failure.case) for bug in both for x in both)

    def _ends_like(self, other: "Bug") -> bool:
        """Whether two bugs that end the process are one: what is known of their needs does not tell them apart."""
        if not self.fields_needed.isdisjoint(other.fields_needed):
            return True
        of_nothing = not (self.needs or other.needs)
        always = self.is_everywhere or other.is_everywhere
        return self.ends_as(other.failure.finding) and (of_nothing or always)

    def to_dict(self) -> dict[str, Any]:
        """Return a record for JSON, without what only the report needs; of the explanation it has the causes."""
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
            explanation=Explanation(causes=tuple(fields["causes"])),
        )
        needs = (
            Condition(x["name"], tuple(x["fails"]), tuple(x["holds"]), x.get("is_certain", False))
            for x in fields["needs"]
        )
        return cls(
            failure,
            tensors=tuple(fields["tensors"]),
            needs=tuple(needs),
            severity=Severity(**fields["severity"]),
            offers=tuple(fields["offers"]),
            by_numbers=fields.get("by_numbers", False),
        )


def in_parts(bug: Bug) -> Bug:
    """Return the bug without needs of sizes, because a law that calls the kernel with parts of a case may meet any."""
    needs = tuple(need for need in bug.needs if not need.is_of_parts)
    return replace(bug, needs=needs or bug.needs)


def met_again(known: Bug, again: Bug) -> Bug:
    """Return a known bug after it was found again.

    It has the tensors of both, and only those needs that are certain or that the second case meets. If none is left,
    lengths stay a need as long as some hold, since a bug that needs nothing would explain whatever is wrong in its
    tensors. Roundings keep their need of a dtype, because in others they show with some numbers alone. If nothing would
    be left of a bug that some ordinary cases do not show, it keeps its needs.
    """
    case = again.failure.case
    needs = [need for need in known.needs if need.is_certain or need.is_met(case)]
    if is_small(known.failure.finding):
        of_dtype = (need for need in known.needs if need.name == "dtype" and need not in needs)
        needs += [x if is_small(again.failure.finding) else x.seen_with(case.dtype) for x in of_dtype]
    if not needs:
        lengths = [need for need in known.needs if need.name in LENGTHS]
        needs = [need.seen_with(value_of(case, need.name)) for need in lengths]
    kept = tuple(need for need in needs if need.name not in (*LENGTHS, "dtype") or any(need.holds))
    hides = known.severity.shown < known.severity.tried
    return replace(with_tensors(known, again.tensors), needs=kept or (known.needs if hides else ()))


def with_tensors(bug: Bug, tensors: Iterable[str]) -> Bug:
    """Return the bug with further tensors known to be wrong."""
    return replace(bug, tensors=tuple(sorted({*bug.tensors, *tensors})))


@dataclass
class Occurrences:
    """Where a bug showed: the number of failing examples by law, dtype and worst tensor, and some of their cases.

    A sighting is a law that fails on a case as it was drawn. Smaller cases tried while shrinking do not count; they are
    in ``shrunk``, because a claim under which one of them fails is not true.
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
        """Keep failing cases that were met while one was shrunk."""
        _keep(cases, self.shrunk)

    def merge(self, other: "Occurrences") -> None:
        """Add the sightings of another item or process."""
        self.counts.update(other.counts)
        _keep(other.cases, self.cases)
        _keep(other.shrunk, self.shrunk)

    def names(self, place: int) -> tuple[str, ...]:
        """Return the laws (place 0), dtypes (1) or tensors (2), the one with the most failures first."""
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
        """Make sightings from what ``to_dict`` returned, also after JSON."""
        counts = Counter({(law, dtype, tensor): count for law, dtype, tensor, count in fields["counts"]})
        cases, shrunk = (
            [(law, from_json(case)) for law, case in fields[name]] for name in ("cases", "shrunk")
        )
        return cls(counts, cases, shrunk)


def _keep(cases: Iterable[tuple[str, Case]], kept: list[tuple[str, Case]]) -> None:
    """Add cases to those that are kept, up to ``MOST_CASES``."""
    for case in cases:
        if len(kept) < MOST_CASES and case not in kept:
            kept.append(case)
