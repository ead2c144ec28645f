"""Whether two bugs are one, by running their cases: ``why_same`` for each new bug, the others at the end of a run.

At the end a bug ``is_duplicate`` if another one explains each of its failing cases. It may have been found before that
bug, with conditions that matter only in its smallest case: failing cases that are drawn once a bug is known count for
that bug, but these were drawn before. A read of memory outside of a tensor, and the wrong numbers that come of it, are
one bug too: ``are_one_read``.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from kernels.contract import GRADIENTS, Capabilities
from strategies.case import SIMPLEST, Case, Spike
from strategies.features import (
    EXPANDED,
    LENGTHS,
    NAN,
    SCORES,
    UNEQUAL,
    VALUES_OF,
    feature,
    laid_out,
    value_of,
    with_no_more_than,
)
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs, is_of_other_scores
from tests.harness.bugs.bug import COUNTS, ENOUGH, Bug, Condition, Occurrences, with_tensors
from tests.harness.bugs.counterfactuals import counterfactuals, is_needed, may_be_present
from tests.harness.bugs.dense import are_apart, show_at_same_lengths, symptoms_on_dense_case
from tests.harness.bugs.restatement import restate_by_basic_law
from tests.harness.law import law_named
from tests.harness.running.exits import is_outside
from tests.harness.running.runs import Try
from tests.harness.symptoms import is_small, is_tiny, leaves_roundings
from tests.harness.verdict import AFTER_OTHERS, NUMBERS

MOST_CASES = 3
"""How many failing cases of a bug are tried, beside the smallest."""

WRITES_TO_EXPANDED = "more than one element of the written-to tensor refers to a single memory location"
MODIFIED = "has been modified by an inplace operation"
"""How PyTorch refuses to write where several elements lie in one place, or over what a backward needs."""
OUTSIDE_OF_STORAGE = "are out of bounds for storage of size"
"""How PyTorch refuses a view by strides that reach beyond the end of a tensor's memory."""

OF_FLOAT16 = 2.0**-11
"""The largest relative error of a rounding to float16. The other formats of few bits have a wide exponent range."""

OF_RECORDS = "what they need, and what is wrong, agree"
"""Why two bugs are one that their records tell to be alike (``Bug.is_like``)."""

MOST = 0.75
"""The share of ordinary cases from which on a bug counts as one that shows in most of them."""


def is_duplicate(
    bug: Bug,
    other: Bug,
    seen: Occurrences,
    run: Try,
    capabilities: Capabilities,
    beside: Collection[Bug] = (),
) -> bool:
    """Whether each known failing case of ``bug`` meets the conditions of ``other``, and is explained by it.

    ``seen`` has the drawn cases. ``run`` may raise BudgetSpent, which ends the search.

    0. Distinct if one was judged against what the kernel computes because of the other.
    1. Distinct if either is no error of numbers.
    2. ``other`` has no conditions: duplicate if it makes most ordinary cases wrong by much in all tensors of ``bug``,
       since no run can show what else is wrong there.
    3. Distinct if kinds or tensors differ, or if there are few drawn cases while more ordinary cases show ``bug`` than
       ``other``. A law that compares calls may tell gradients that follow from a wrong out.
    4. Distinct if a case holds when it is run again, as a race may, or if a case does not meet the conditions of
       ``other``.
    5. Distinct if changing a condition of ``other`` does not fix the case. A rounding error may be left of a large
       error.
    6. Such a change may bring in a third bug, one of ``beside``, which may then explain what is left. If the third bugs
       explain the whole case without ``other``, the bugs are distinct. A third bug that is itself a duplicate of
       ``other`` is not tried.
    """
    f = bug.failure
    if bug.is_beside(other) or other.is_beside(bug):
        return False
    if f.finding.kind not in NUMBERS or other.failure.finding.kind not in NUMBERS:
        return False
    if other.needs_arguments_of not in ("", bug.needs_arguments_of):
        return False
    if not other.needs:
        return _hides(other, bug) or _may_need_as(other, bug)
    drawn = [ran for ran in seen.cases if ran != (f.law, f.case)][:MOST_CASES]
    may_spoil = bool(law_named(f.law).compares) and {*bug.tensors} <= other.may_spoil
    if not (bug.is_kin(other) or may_spoil) or (_share(bug) > _share(other) and len(drawn) < MOST_CASES):
        return False
    others = (x for x in beside if x.key not in (bug.key, other.key))
    third = [x for x in others if not (x.is_kin(other) and x.needs_the_same(other))]
    for law, case in ((f.law, f.case), *drawn):
        if not other.is_met(case):
            return False
        finding = run(law, case, f.ignored)
        if finding is None:
            return False
        broken = restate_by_basic_law(FailingExample(law, case, finding, f.ignored), run, capabilities)
        if not _is_explained(broken, [other, *third], run, capabilities):
            return False
        alone = [x for x in third if x.is_met(broken.case)]
        if alone and _is_explained(broken, alone, run, capabilities):
            return False
    return True


def _is_explained(broken: FailingExample, bugs: Sequence[Bug], run: Try, capabilities: Capabilities) -> bool:
    """Whether these bugs explain a failure. A rounding error may be left of a large error."""
    rest = explain_by_known_bugs(broken, bugs, run, capabilities).rest
    return rest is None or leaves_roundings(broken.finding, rest.finding)


def _is_refused_by_pytorch(bug: Bug, other: Bug) -> bool:
    """Whether an exception is PyTorch's refusal of what ``other`` does: write to an input, or use wrong strides.

    Strides that lead beyond the tensor's memory raise an exception; in other cases the same strides give wrong numbers.
    So do those of an expanded input, where they are taken for a tensor that is written to, whichever input that is.
    """
    f, kind = bug.failure, other.failure.finding.kind
    if f.finding.kind != "exception":
        return False
    text = f.finding.claim + f.finding.detail
    of_layout = any(laid_out(need.name, f.case) for need in other.needs if feature(need.name).is_layout)
    if kind == "memory":
        return WRITES_TO_EXPANDED in text or MODIFIED in text
    if WRITES_TO_EXPANDED in text:
        mine, theirs = map(_expanded, (bug, other))
        is_likewise = f.finding.claim == other.failure.finding.claim and bool(theirs)
        return bool(mine) and (is_likewise or not mine.isdisjoint(theirs))
    return OUTSIDE_OF_STORAGE in text and kind in NUMBERS and of_layout and other.is_met(f.case)


def _expanded(bug: Bug) -> set[str]:
    """Return the layouts that a bug needs to be such that several elements lie in one place."""
    return {need.name for need in bug.needs if {*need.fails} & {*EXPANDED}}


def _is_of_wrong_shape(bug: Bug, other: Bug) -> bool:
    """Whether an exception comes of the wrong shape or dtype of an output that ``other`` reports.

    Both have the same conditions. Example: lse of a wrong shape with causal, and an exception where it is used.
    """
    mine, others = ({(need.name, need.fails[0]) for need in one.needs} for one in (bug, other))
    is_known = bug.failure.finding.kind == "exception" and any(need.is_telling for need in bug.needs)
    return other.failure.finding.kind == "contract" and is_known and mine == others


def _hides(other: Bug, bug: Bug) -> bool:
    """Whether ``other`` makes most ordinary cases wrong by much, in all tensors that ``bug`` is known to make wrong.

    If ``other`` shows in all of them, it does not depend on a layout or an option. It then hides no bug that does.
    """
    f = other.failure
    return (
        _share(other) >= max(MOST, _share(bug))
        and not (_is_telling(bug) and _share(other) == 1)
        and not is_small(f.finding)
        and f.finding.kind == bug.failure.finding.kind
        and {*bug.tensors} <= {*other.tensors}
        and not other.needs_own_numbers
    )


def _may_need_as(other: Bug, bug: Bug) -> bool:
    """Whether ``other``, without a known condition although some ordinary cases hold, may have those of ``bug``.

    Both make the same tensor wrong by much, and ``bug`` needs lengths and numbers only, which do not distinguish bugs.
    """
    both, unknown = (other, bug), 0 < _share(other) < 1
    found_by = {one.failure.finding.tensor for one in both}
    by_much = all(one.failure.finding.kind == "error" and not is_small(one.failure.finding) for one in both)
    return by_much and len(found_by) == 1 and unknown and bool(bug.needs) and not _is_telling(bug)


def _is_telling(bug: Bug) -> bool:
    """Whether a bug has a condition besides lengths, numbers and dtype."""
    return any(need.is_telling and need.name != SCORES for need in bug.needs)


def _share(bug: Bug) -> float:
    """Return the share of ordinary cases that show a bug, 0 if none was tried."""
    return bug.severity.share or 0.0


def are_one_read(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether one of two bugs touches memory outside of a tensor, and the other is wrong numbers read there."""
    return any(
        is_outside(read.failure.finding) and _shows(read, numbers, run, capabilities)
        for read, numbers in ((one, other), (other, one))
    )


def _shows(read: Bug, numbers: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether the case of a read outside makes the numbers of another bug wrong, and these depend on what lies outside.

    They depend on it if the law of memory, on the case of the numbers, finds the same tensors wrong or reports the same
    access. The case of the read is run with at least one query, since without queries no number can be wrong.
    """
    f, case = numbers.failure, read.failure.case
    judged = replace(case, seqlen_q=max(1, case.seqlen_q))
    if f.finding.kind not in NUMBERS or not capabilities.admits(judged):
        return False
    finding = run(f.law, judged, frozenset())
    if finding is None or not numbers.could_break(finding):
        return False
    depends = run("memory", f.case, frozenset())
    if depends is None:
        return False
    is_told = bool(depends.origin) and depends.origin == read.failure.finding.origin
    return is_told or numbers.could_break(depends)


def why_same(known: Bug, bug: Bug, run: Try, capabilities: Capabilities, others: Collection[Bug] = ()) -> str:
    """Return why two bugs that were found separately are duplicates, in words for a report; "" if they are distinct.

    ``others`` are the known bugs of the kernel. The first rule that applies decides. Examples are of two bugs A and B.

    1. Duplicates: both need huge strides, or the same is computed in place of attention, or one makes repeated calls
       differ and the other comes and goes, or one keeps state that may spoil what the other was found by, whose
       smallest case holds: it was met after other calls. So are one that leaves memory unwritten, and NaN of an input
       that is lost in its tensor.
    2. Distinct: only one needs the arguments of its law, such as tables of angles.
    3. Duplicates: A rounds most ordinary cases to float16, and B is an overflow of float16.
    4. Duplicates: both are rounding errors that no ordinary case shows, or that are the last bits of two calls which
        are claimed to have the same ones.
    5. Duplicates: for both the same length matters by no tile size, as in a failure at 5, 9 and 12 keys but not at 6,
       or beyond 1,024 keys.
    6. Duplicates: A shows by NaN or infinity alone, B with finite numbers, and both need the same of several sequences
        or heads: what is not finite shows at any length from which of them numbers are taken.
    7. Distinct: kinds or tensors differ, or different tensors are wrong with normal numbers in more rows.
    8. Distinct: A hides the NaN of an input, and B needs certain finite numbers and hides none.
    9. Duplicates: A was found in tensors that were judged without those of B, and B makes them wrong too.
    10. Distinct: the tensors differ, and both need lengths or numbers alone.
    11. Duplicates: their records are alike (``Bug.is_like``), or both show at the same lengths.
    12. Distinct: each has scores that can't show the other.
    13. Duplicates: A needs no more than the large scores that its law sets, and B needs large scores.
    14. Duplicates: A needs nothing but its dtype, and the smallest case of B shows it.
    15. Distinct: the process ends, since each further run would end it again.
    16. Duplicates: what fixes the smallest case of A fixes that of B, and the other way round. One way is enough if B
        needs lengths alone and A shows from the same lengths on. No change counts that brings in a third bug.
    """
    if known.is_huge and bug.is_huge:
        return "both need huge strides"
    if known.keeps_state_as(bug) or bug.keeps_state_as(known):
        return "what the kernel keeps from call to call makes both"
    if known.failure.finding.is_told_as(bug.failure.finding):
        return "the kernel computes the same instead"
    both = ((known, bug), (bug, known))
    if any(_is_refused_by_pytorch(one, other) for one, other in both):
        return "PyTorch refuses what the other does"
    if any(_is_of_wrong_shape(one, other) for one, other in both):
        return "an exception is raised where a tensor of the other's wrong shape is used"
    if any(_is_kept_by(one, other, run) for one, other in both):
        return "one holds by itself, and was met after calls that leave the other behind"
    if any(one.leaves_unwritten(two.failure.finding, two.failure.case) for one, two in both):
        return "NaN is lost where memory is left unwritten"
    if known.needs_arguments_of != bug.needs_arguments_of:
        return ""
    if known.is_kin(bug) and any(_rounds_also(one, other) for one, other in both):
        return "one is an overflow of what the other rounds to float16"
    third = [x for x in others if x.key not in (known.key, bug.key)]
    if known.is_kin(bug) and (_are_roundings_by_chance(known, bug) or _are_bits_of_one_claim(known, bug)):
        return "numbers decide where these rounding errors show"
    if known.is_kin(bug) and not _needs_of_no_rule(known).isdisjoint(_needs_of_no_rule(bug)):
        return "the same length decides, by no size of a tile"
    if known.is_kin(bug) and any(_follows_by_nan(one, other) for one, other in both):
        return "NaN and infinity go where the other takes its numbers from"
    if not known.is_kin(bug) or are_apart(known, bug, run, capabilities, third):
        return ""
    if any(_hides_nan_by_itself(one, other, run, capabilities) for one, other in both):
        return ""
    if any(_is_found_beside(one, other, run, capabilities) for one, other in both):
        return "one was found in tensors that the other makes wrong too"
    if _differ_by_chance(known, bug):
        return ""
    if known.is_like(bug):
        return OF_RECORDS
    if show_at_same_lengths(known, bug, run, capabilities):
        return "both show at the same lengths"
    if all(is_of_other_scores(one, other.failure.law, other.failure.case, run) for one, other in both):
        return ""
    for one, other in both:
        of_scores = SCORES in {need.name for need in other.needs} and {*one.tensors} <= {*other.tensors}
        if one.needs_own_numbers and "scores" in law_named(one.failure.law).sets and of_scores:
            return "both need large scores"
        if one.needs_no_more_than_dtype and _is_shown_by(one, other, run, capabilities):
            return "the smallest case of one shows the other, which needs nothing"
    if bug.failure.finding.ends_process:  # each further run would end a process
        return ""
    cured = partial(_is_cured_as, run=run, capabilities=capabilities, others=third)
    if any(_begins_like(one, other) and cured(one, other) for one, other in both):
        return "what fixes one fixes the other, and both show from the same lengths on"
    return "what fixes one fixes the other" if all(cured(one, other) for one, other in both) else ""


def _follows_by_nan(one: Bug, other: Bug) -> bool:
    """Whether ``one`` shows by NaN or infinity in an input alone, and ``other`` takes its numbers from the same place.

    It does to judge by the conditions of both: beside lengths and numbers they are on several sequences or heads alone,
    and are the same. Example: an element of a batch gets the weights of another one, which differ from its own with
    long sequences alone, or where they are NaN.
    """
    both = (one, other)
    own, others = ({x.name for x in bug.needs if x.is_telling} - {SCORES, NAN} for bug in both)
    is_by_nan = [bool(value_of(bug.failure.case, NAN)) for bug in both]
    is_hidden = one.failure.finding.of_nan == ("lost",)
    return is_by_nan == [True, False] and set() < own == others <= {*COUNTS} and not is_hidden


def _is_kept_by(one: Bug, other: Bug, run: Try) -> bool:
    """Whether ``other`` was met only where an earlier call had left what ``one`` keeps: its smallest case holds."""
    f, finding = other.failure, other.failure.finding
    may_be = one.may_spoil_later(finding) and not other.needs_other_calls
    return may_be and run(f.law, f.case, f.ignored) is None


def tells_more(bug: Bug, known: Bug) -> bool:
    """Whether a bug is to be reported beside a known duplicate: one of unknown calls, or of lost NaN alone."""
    f, lost = known.failure, ("lost",)
    is_of_unknown = bug.needs_earlier_calls and f.finding.kind == AFTER_OTHERS
    return is_of_unknown or (bug.failure.finding.of_nan != lost and bug.leaves_unwritten(f.finding, f.case))


def met_again(known: Bug, again: Bug) -> Bug:
    """Return a known bug after it was found again, with the tensors of both finds.

    Which conditions are left:

    1. Those that are confirmed or that the second case meets.
    2. For a rounding error, also the one on the dtype: other dtypes show it with some numbers alone.
    3. If none is left, those on lengths, as long as some length holds: a bug without conditions would explain any
       failure in its tensors.
    4. If none is left and some ordinary cases do not show the bug, all that it had.
    5. All that it had, if it needs earlier calls and the second case has none: those came from other cases.
    """
    case = again.failure.case
    if known.needs_earlier_calls and not again.needs_earlier_calls:
        return with_tensors(known, again.tensors)
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


def _are_bits_of_one_claim(one: Bug, other: Bug) -> bool:
    """Whether two bugs break one claim that two calls have the same bits, each by rounding errors alone.

    Several laws make the claim that a sequence alone has the same answer: of a batch, and of a ragged call. Numbers
    decide in which cases the last bits differ, so that any field may seem to matter.
    """
    findings = one.failure.finding, other.failure.finding
    claims = {x.claim.removesuffix(x.tensor) for x in findings}
    are_bits = all(is_small(x) and x.allowed == 0 and x.other is not None for x in findings)
    return are_bits and len(claims) == 1


def _are_roundings_by_chance(one: Bug, other: Bug) -> bool:
    """Whether two bugs are rounding errors that no ordinary case shows, without a confirmed condition in either.

    Numbers decide whether such an error exceeds its bound, so that any field may seem to matter.
    """
    return all(
        is_small(bug.failure.finding)
        and not bug.severity.shown
        and not any(need.is_telling and need.is_certain for need in bug.needs)
        for bug in (one, other)
    )


def _needs_of_no_rule(bug: Bug) -> set[tuple[str, int]]:
    """Return the lengths that decide whether a bug shows, but by no tile size. Two bugs hardly share such a length.

    They are those that fail by no rule, and those beyond a power of two that is more than any tile.
    """
    return {(x.name, x.begins_beyond) for x in bug.needs if x.begins_beyond or x.is_irregular}


def _hides_nan_by_itself(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether ``one`` hides the NaN of an input, and ``other``, which needs certain finite numbers, does not do that.

    A kernel that clamps scores does both: it turns NaN into a number, and makes a large score too small. So one row
    with two large scores is run, 2^16 and 2^17 before sm_scale. If ``other`` shows there, it may be such a clamp.
    """
    f = one.failure
    if f.finding.of_nan != ("lost",) or not (other.needs_numbers and other.lacks_nan_of(f.case)):
        return False
    entries = (("q", (0, 0, 0, 0), 2.0**15), ("k", (0, 0, 0, 0), 2.0), ("k", (0, 0, 1, 0), 4.0))
    two_scores = replace(
        with_no_more_than((), f.case),
        seqlen_q=1,
        seqlen_k=2,
        q_values="zeros",
        k_values="zeros",
        spikes=tuple(Spike(*entry) for entry in entries),
    )
    finding = run("forward", two_scores, frozenset()) if capabilities.admits(two_scores) else None
    return finding is None or not other.could_break(finding)


def _differ_by_chance(one: Bug, other: Bug) -> bool:
    """Whether two bugs that need lengths or numbers alone are not found by a tensor which both make wrong.

    Other lengths or numbers may fix any small case, so that a common fix does not make them duplicates.
    """
    found_by = {one.failure.finding.tensor, other.failure.finding.tensor}
    telling = any(need.is_telling for bug in (one, other) for need in bug.needs)
    return not telling and "" not in found_by and found_by.isdisjoint({*one.tensors} & {*other.tensors})


def _begins_like(one: Bug, other: Bug) -> bool:
    """Whether ``one`` may be a second trigger of ``other``, which needs lengths alone.

    ``one`` has further conditions, its tensors are among those of ``other``, and both show from the same length on.
    Example: ``other`` holds with 64 keys and fails with 65; ``one`` needs causal too, holds with 60 and fails with 70.
    """
    begins = ({need.name: need.begins for need in bug.needs} for bug in (one, other))
    mine, others = begins
    if not others or not others.keys() < mine.keys() or not {*one.tensors} <= {*other.tensors}:
        return False
    pairs = ((mine[name], begin) for name, begin in others.items())
    return all(own and begin and own[0] <= begin[0] < begin[1] <= own[1] for own, begin in pairs)


def _is_found_beside(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether ``one`` is really ``other``, first noticed in tensors that ``other`` was not known to make wrong.

    All of these must be true:

    1. ``one`` was found while tensors of ``other`` were not judged.
    2. ``one`` has all conditions of ``other``, and changing these fixes it.
    3. Without the further conditions of ``one``, ``other`` still shows.
    4. The tensors of ``one`` may be wrong there too: ``other`` makes one of them wrong elsewhere, or they are wrong
       with normal numbers in more rows, or all of out is NaN, so that no gradient can be judged.
    """
    f, spoiled = one.failure, {*other.tensors}
    mine, others = ({need.name: need for need in bug.needs} for bug in (one, other))
    telling = any(need.is_telling for need in other.needs) or len(others) > 1
    if f.ignored.isdisjoint(spoiled) or not telling or not others.keys() <= mine.keys():
        return False
    more = [mine[name] for name in mine.keys() - others.keys()]
    without = [case for need in more for case in counterfactuals(need, f.case, capabilities)]
    found = [run(f.law, case, frozenset()) for case in (f.case, *without)]
    if not all(x is not None and other.could_break(x) for x in found):
        return False
    unjudged = bool(without) and all(x is not None and x.is_all_nan for x in found[1:])
    is_its_own = (
        unjudged
        or not spoiled.isdisjoint(one.tensors)
        or any(
            symptoms_on_dense_case(f.law, case, f.finding, run, capabilities) for case in without or (f.case,)
        )
    )
    return is_its_own and _is_cured_as(one, other, run, capabilities)


def _is_shown_by(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether ``one`` (no condition but dtype) already explains the smallest case of ``other``.

    1. ``one`` shows in every ordinary case, and makes the tensor wrong by which ``other`` was found. If both are
       rounding errors, it does. If ``other`` has a condition besides lengths, numbers and dtype, it does not. Else, if
       ``one`` is a rounding error, normal numbers must leave no more than a rounding error of ``other``.
    2. Both are rounding errors, and ``one`` needs a dtype. It does if changing that fixes the case.
    """
    f = other.failure
    are_roundings = is_small(one.failure.finding) and is_small(f.finding)
    if one.is_everywhere and f.finding.tensor in one.tensors and one.is_met(f.case):
        # In a small case lengths and numbers may matter by chance; where errors are small, any field may.
        if are_roundings or any(need.is_telling for need in other.needs):
            return are_roundings
        # A rounding error is large if few numbers are not 0. Normal numbers make it small.
        ordinary = run(f.law, with_no_more_than(SIMPLEST, f.case), f.ignored)
        return not is_small(one.failure.finding) or ordinary is None or is_small(ordinary)
    # In other dtypes the same rounding may stay below its bound with normal numbers. If no ordinary case shows
    # ``other`` and a less precise design explains it, it is such a rounding. Else it may be any bug of small errors.
    is_imprecise = f.finding.explained_by and not other.severity.shown
    if not are_roundings or not one.needs or not (one.is_met(f.case) or is_imprecise):
        return False
    needs = tuple(replace(x, holds=tuple(y for y in x.holds if y != f.case.dtype)) for x in one.needs)
    return _is_cured_as(other, replace(one, needs=needs), run, capabilities)


def _rounds_also(one: Bug, other: Bug) -> bool:
    """Whether ``other`` shows the ends of the range of a format to which ``one`` rounds normal numbers.

    Example: ``one`` rounds the weights to float16 in most ordinary cases; ``other`` turns a weight of 2^-30 into 0.
    Most cases suffice, since it depends on the numbers whether a rounding error exceeds its bound.
    """
    s = one.severity
    is_usual = one.needs_no_more_than_dtype and not one.needs_own_numbers and 2 * s.shown > s.tried >= ENOUGH
    if not (is_usual and is_small(one.failure.finding)):
        return False
    is_of_range = _is_of_range(other) or (_is_of_float16(one) and _is_overflow(other))
    return is_of_range and {*other.tensors} <= one.may_spoil


def _is_of_range(bug: Bug) -> bool:
    """Whether a bug shows only for numbers at the ends of a format's range: large, tiny, or lost by being set to 0.

    Such a format rounds normal numbers as well. Weights are tiny with any sm_scale above the default, whatever the
    lengths are, unless there is one key, whose weight is 1.
    """
    mine, default = bug.failure.finding, replace(bug.failure.case, sm_scale=None).scale
    of_tiny = is_tiny(mine, "float16")
    scales = [x for x in bug.needs if _is_large_scale(x) or (of_tiny and _is_scale_above(default, x))]
    names = {SCORES if need in scales else need.name for need in bug.needs}
    names -= {*LENGTHS, UNEQUAL} if of_tiny else {*LENGTHS}
    at_the_ends = not is_small(mine) or mine.actual == 0 != mine.expected or of_tiny
    of_few = mine.kind == "error" and at_the_ends and not bug.severity.shown
    return of_few and bool(names) and names <= {*VALUES_OF, SCORES}


def _is_of_float16(bug: Bug) -> bool:
    """Whether an error is no larger than a rounding to float16, the only format in kernels with a narrow range."""
    return float(bug.failure.finding.relative or 0.0) <= OF_FLOAT16


def _is_overflow(bug: Bug) -> bool:
    """Whether only large numbers of v and dout make gradients NaN or infinite, as their products do in float16.

    A bug that needs large scores is no overflow of this kind: other mistakes make NaN of large scores too.
    """
    names = {need.name for need in bug.needs} - {*LENGTHS}
    of_products = bool(names) and names <= {"v_values", "dout_values"}
    return (
        bug.failure.finding.kind == "nonfinite"
        and {*bug.tensors} <= {*GRADIENTS}
        and of_products
        and not bug.severity.shown
    )


def _is_cured_as(
    one: Bug, other: Bug, run: Try, capabilities: Capabilities, others: Collection[Bug] = ()
) -> bool:
    """Whether changes that fix ``other`` fix the smallest case of ``one``.

    1. All conditions of ``other`` that distinguish bugs must fix it, such as causal and group; a condition is left out
       if its change brings in a bug of ``others``.
    2. If there is no such condition, any of its lengths, numbers or dtypes is enough.
    3. If no condition of ``one`` is known, the confirmed ones of ``other`` must fix it, or all of rule 1 if none is.
    4. If no condition of ``other`` is known, kind and tensor of the failure decide.
    """
    f = one.failure

    def brings_in_another(need: Condition) -> bool:
        changed = list(counterfactuals(need, f.case, capabilities))
        absent = (x for x in others if x.could_break(f.finding) and not x.is_met(f.case))
        return bool(changed) and any(all(map(x.is_met, changed)) for x in absent)

    if not other.needs:  # no known condition; tensors that it is not known to make wrong may be another bug's
        return other.could_break(f.finding) and f.finding.tensor in (*other.tensors, "")
    telling = [need for need in other.needs if need.is_telling and not brings_in_another(need)]
    if not one.needs:
        telling = [need for need in telling if need.is_certain] or telling
    fails = partial(_shows_again, one, run)
    outcomes = (
        may_be_present(need, f.case) and is_needed(need, f.case, fails, capabilities)
        for need in map(partial(_as_in, one), telling or other.needs)
    )
    return all(outcomes) if telling else any(outcomes)


def _as_in(bug: Bug, need: Condition) -> Condition:
    """Return a condition of another bug in the terms of this one: a large sm_scale becomes this bug's large scores."""
    if not _is_large_scale(need):
        return need
    return next((mine for mine in bug.needs if mine.name == SCORES), need)


def _is_large_scale(need: Condition) -> bool:
    """Whether a condition is an sm_scale larger than every scale that holds: it matters by making large scores."""
    held = need.holds if need.name == "sm_scale" else ()
    return _is_scale_above(max((abs(x or 0.0) for x in held), default=0.0), need)


def _is_scale_above(least: float, need: Condition) -> bool:
    """Whether a condition is an sm_scale of a size above ``least``, such as -3.0 above 1.0."""
    return need.name == "sm_scale" and abs(need.fails[0] or 0.0) > least


def _shows_again(bug: Bug, run: Try, case: Case) -> bool:
    """Whether a case shows a bug again: by its law, in its tensors, and not finite if the bug made NaN or infinity."""
    finding, mine = run(bug.failure.law, case, frozenset()), bug.failure.finding
    if finding is None or not bug.could_break(finding) or leaves_roundings(mine, finding):
        return False
    if finding.explained_by and not (mine.explained_by or is_small(mine)):
        return False  # the error left is that of a less precise design, which may be another bug
    return mine.kind != "nonfinite" or finding.kind == mine.kind
