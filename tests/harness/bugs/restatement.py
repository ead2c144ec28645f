"""Report a failure of a law that compares calls as that of a basic law, if one of the calls is wrong by itself."""

from collections.abc import Iterator
from dataclasses import replace

from kernels.contract import GRADIENTS, Capabilities
from strategies.case import SIMPLEST, Case
from strategies.features import NAN, with_no_more_than, with_normal_numbers, with_value
from tests.harness.bugs.attribution import FailingExample
from tests.harness.law import basic_laws, law_named
from tests.harness.running.runs import Try
from tests.harness.symptoms import are_kindred, wrong_tensors
from tests.harness.verdict import NUMBERS

MOST_SCORES = 2**22
"""A case with more scores than this takes long to judge, so it is tried with one head of one sequence."""

EVERYTHING: frozenset[str] = frozenset()
"""Nothing is ignored, because laws that put parts together by lse depend on it even if it is known to be wrong."""


def restate_by_basic_law(broken: FailingExample, run: Try, capabilities: Capabilities) -> FailingExample:
    """Return a basic law's failure on the case, or on one as large as a call that was made; else the failure itself.

    A law that compares calls also makes calls with other lengths or heads than the case has. A bug may show in one of
    those alone, and what it needs is then a matter of that call's sizes. The same holds for an exception that one of
    the calls raises.
    """
    if broken.finding.kind == "exception" and not law_named(broken.law).is_basic:
        calls = _failing_calls(broken, run, capabilities, EVERYTHING)
        raising = (call for call in calls if call.finding.kind == "exception")
        return next((call for call in raising if call.finding.origin == broken.finding.origin), broken)
    is_own = law_named(broken.law).is_never_restated
    if (is_own and not _is_of_batch(broken)) or broken.finding.kind not in NUMBERS:
        return broken
    for call in _wrong_calls(broken, run, capabilities, EVERYTHING):
        of_call = wrong_tensors(call.finding)
        is_alike = not is_own and are_kindred(of_call, wrong_tensors(broken.finding))
        if is_alike or _is_of_lse(broken, call):
            return call
    return broken


def _is_of_batch(broken: FailingExample) -> bool:
    """Whether gradients of a batch element among others, and of it alone, differ."""
    compares_batch = "batch" in law_named(broken.law).compares
    is_alone = compares_batch and bool(broken.finding.other_expression)
    return is_alone and wrong_tensors(broken.finding) <= {*GRADIENTS}


def _is_of_lse(broken: FailingExample, call: FailingExample) -> bool:
    """Whether the case's own lse is wrong, so that equations between gradients do not hold.

    Weights that are made from it may be of any size, and their roundings with them, which differ between calls.
    """
    return call.case == broken.case and "lse" in wrong_tensors(call.finding)


def restate_by_its_calls(broken: FailingExample, run: Try, capabilities: Capabilities) -> FailingExample:
    """Return a basic law's failure in place of one that was found by comparing a batch element with the same one alone.

    It does so if a call is wrong by itself in one of the same tensors; for gradients, a wrong lse of the case tells as
    much. Where batch elements are compared, a bug of any call seems to need several of them. A call that is wrong in
    another way each time depends on earlier calls, which is for the law itself to tell.
    """
    if "batch" not in law_named(broken.law).compares or broken.finding.kind not in NUMBERS:
        return broken
    wrong = wrong_tensors(broken.finding)
    calls = _wrong_calls(broken, run, capabilities, broken.ignored)
    of_lse = _is_of_batch(broken)
    telling = (x for x in calls if wrong & wrong_tensors(x.finding) or (of_lse and _is_of_lse(broken, x)))
    call = next(telling, broken)
    return call if run(call.law, call.case, call.ignored) == call.finding else broken


def restate_by_forward(broken: FailingExample, run: Try) -> FailingExample:
    """Return the forward law's failure on the case if out is wrong in it, since gradients may be wrong because of that.

    The forward law also takes less time.
    """
    if not law_named(broken.law).judges_gradients or "out" not in wrong_tensors(broken.finding):
        return broken
    finding = run("forward", broken.case, broken.ignored)
    if finding is None or finding.kind not in NUMBERS or "out" not in wrong_tensors(finding):
        return broken
    return FailingExample("forward", broken.case, finding, broken.ignored)


def _wrong_calls(
    broken: FailingExample, run: Try, capabilities: Capabilities, ignored: frozenset[str]
) -> Iterator[FailingExample]:
    """Yield what the basic laws find wrong in numbers on the case, or on one as large as a call that was made."""
    calls = _failing_calls(broken, run, capabilities, ignored)
    return (call for call in calls if call.finding.kind in NUMBERS)


def _failing_calls(
    broken: FailingExample, run: Try, capabilities: Capabilities, ignored: frozenset[str]
) -> Iterator[FailingExample]:
    """Yield what the basic laws find on the case, or on one as large as a call that was made."""
    for case in _cases(broken, capabilities):
        for law in basic_laws(gradients=bool(capabilities.backward)):
            finding = run(law, case, ignored)
            if finding is not None:
                yield FailingExample(law, case, finding, ignored)


def _cases(broken: FailingExample, capabilities: Capabilities) -> Iterator[Case]:
    """Yield the case itself without its non-finite entries, and cases with other numbers for each other call size.

    A law that sets large scores in any case is told by ordinary numbers too, with which the same may be wrong. So is a
    call of another size, because without its spikes a case may have no number but 0.
    """
    changed = [with_value(broken.case, NAN, False)]
    changed += [with_no_more_than(SIMPLEST, broken.case)] if "scores" in law_named(broken.law).sets else []
    of_sizes = [replace(broken.case, **size, spikes=()) for size in broken.sizes]
    changed += [case for sized in of_sizes for case in dict.fromkeys((sized, with_normal_numbers(sized)))]
    for case in changed:
        if case.scores > MOST_SCORES:
            case = replace(case, batch=1, heads_kv=1, group=1, spikes=())
        if capabilities.admits(case) and case.scores <= MOST_SCORES:
            yield case
