"""Report a failure of a law that compares calls as that of a basic law, if one of the calls is wrong by itself."""

from collections.abc import Iterator
from dataclasses import replace

from kernels.contract import GRADIENTS, Capabilities
from strategies.case import SIMPLEST, Case
from strategies.features import LENGTHS, NAN, with_no_more_than, with_normal_numbers, with_value
from tests.harness.bugs.attribution import FailingExample
from tests.harness.law import basic_laws, law_named
from tests.harness.running.runs import Try
from tests.harness.symptoms import are_kindred, wrong_tensors
from tests.harness.verdict import NUMBERS

MOST_SCORES = 2**22
"""A case with more scores takes long to judge, so it is tried with one head of one sequence."""

EVERYTHING: frozenset[str] = frozenset()
"""Nothing is ignored: laws that put parts together by lse depend on it, even if it is known to be wrong."""


def restate_by_basic_law(broken: FailingExample, run: Try, capabilities: Capabilities) -> FailingExample:
    """Return a basic law's failure on the case or on one of the calls that were made; else the failure itself.

    A law that compares calls also makes calls with other lengths or heads than the case has. A bug may show in one of
    these alone, and its conditions are then on the sizes of that call. Example: a law cuts 130 queries into 64 and 66,
    and the call with 66 is wrong by itself. The same goes for an exception that one of the calls raises.
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
    """Whether the gradients of one batch element alone differ from its gradients in the whole batch."""
    compares_batch = "batch" in law_named(broken.law).compares
    is_alone = compares_batch and bool(broken.finding.other_expression)
    return is_alone and wrong_tensors(broken.finding) <= {*GRADIENTS}


def _is_of_lse(broken: FailingExample, call: FailingExample) -> bool:
    """Whether lse is wrong on the case, or some of its heads or sequences, so that equations between gradients fail.

    Weights that follow from a wrong lse may be of any size, and so may their rounding errors, which differ between
    calls.
    """
    of_same_lengths = all(getattr(call.case, name) == getattr(broken.case, name) for name in LENGTHS)
    return of_same_lengths and "lse" in wrong_tensors(call.finding)


def restate_by_its_calls(broken: FailingExample, run: Try, capabilities: Capabilities) -> FailingExample:
    """Return a basic law's failure in place of one found by comparing a batch element with the same one alone.

    A bug of any call looks there like one that requires several batch elements. A call replaces the failure if

    1. it is wrong by itself in one of the same tensors or, if gradients differ, in lse;
    2. it is wrong in the same way when it is repeated. Else it depends on earlier calls, which the law itself reports.
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
    """Return the forward law's failure on the case if out is wrong in it, since gradients follow from out.

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
    """Yield what the basic laws find wrong in numbers on the case, or on a case with the sizes of one of the calls."""
    calls = _failing_calls(broken, run, capabilities, ignored)
    return (call for call in calls if call.finding.kind in NUMBERS)


def _failing_calls(
    broken: FailingExample, run: Try, capabilities: Capabilities, ignored: frozenset[str]
) -> Iterator[FailingExample]:
    """Yield what the basic laws find on the case, or on a case with the sizes of one of the calls."""
    for case in _cases(broken, capabilities):
        for law in basic_laws(gradients=bool(capabilities.backward)):
            finding = run(law, case, ignored)
            if finding is not None:
                yield FailingExample(law, case, finding, ignored)


def _cases(broken: FailingExample, capabilities: Capabilities) -> Iterator[Case]:
    """Yield the cases on which basic laws may show the failure of a law that compares calls.

    1. The case without NaN and infinity.
    2. The case with normal numbers, if the law sets its own numbers: it may have found in the mean of all elements
        what single ones show. If it makes scores large in every case, the simplest case of its lengths as well.
    3. For each size of call that differs from the case: a case of that size, and the same with normal numbers, since
       without its set entries a case may have no number but 0.
    """
    changed = [with_value(broken.case, NAN, False)]
    sets = law_named(broken.law).sets
    changed += [with_normal_numbers(broken.case)] if "numbers" in sets else []
    changed += [with_no_more_than(SIMPLEST, broken.case)] if "scores" in sets else []
    of_sizes = [replace(broken.case, **size, spikes=()) for size in broken.sizes]
    changed += [case for sized in of_sizes for case in dict.fromkeys((sized, with_normal_numbers(sized)))]
    for case in changed:
        if case.scores > MOST_SCORES:
            case = replace(case, batch=1, heads_kv=1, group=1, spikes=())
        if capabilities.admits(case) and case.scores <= MOST_SCORES:
            yield case
