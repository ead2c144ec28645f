"""The search for a certificate in calls near a failing one, and then in calls of more kinds.

Near the failing call a kernel has few other bugs, so that what explains a tensor there is found at once. Calls of more
kinds refute it, restrict it, or show that it is true of them too.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from reference.alternatives import Alternative
from reference.alternatives.declaration import EVERY, OUT_AND_LSE
from strategies.case import Case
from tests.harness.fitting.known import Known, known_call, of_tensors
from tests.harness.fitting.search import LEAST_SHOWN, Certificate, Search
from tests.harness.trial.trial import Trial

FEWEST_ASKED = 10
"""Of how many cases a kernel is asked at least where there is no time for all: a few are explained by too much."""
MOST_TIED = 2
"""How many other kinds of changes may explain the same as what is told: more are told by nothing."""


@dataclass(frozen=True)
class Asked:
    """Cases of one kind that a kernel is asked, and ``further`` ones that are asked where they tell more."""

    cases: Sequence[Case]
    further: Sequence[Case] = ()


def calls_of(
    cases: Iterable[Case], trial_of: Callable[[Case], Trial], until: float, asked: Sequence[bool] = (True,)
) -> list[Known]:
    """Call a kernel on these cases until ``until``, by ``time.process_time``; return none if that is enough for a few.

    ``asked`` says for each call of a case whether gradients are asked for. A case that can't be run tells nothing.
    """
    calls = list[Known]()
    for number, case in enumerate(cases):
        for has_gradients in asked:
            with suppress(Exception):
                call = known_call(trial_of(case), has_gradients=has_gradients)
                calls += [call] if call else []
        if time.process_time() > until:
            return calls if number + 1 >= FEWEST_ASKED else []
    return calls


def certificate(
    kinds: Sequence[Asked],
    trial_of: Callable[[Case], Trial],
    seconds: float,
    tensor: str,
) -> tuple[Certificate, bool]:
    """Return what explains a wrong tensor, and whether it is true of calls of all ``kinds``.

    The kinds begin with the narrowest, of which the first case is the one that failed. The second ones have all that
    the bug is known to need: what a call of these refutes, in which the tensor is right, explained the first ones by
    chance. ``seconds`` are those of the processor, so that other work on the machine changes nothing. The search may
    take so many, half of those left for each kind, and the calls may take as many.
    """
    left, found, calls = seconds, Certificate(), list[Known]()
    in_training = _is_wrong_in_training(kinds[0].cases[0], trial_of, tensor)
    ways = (True,) if in_training else (True, False)
    for number, asked in enumerate(kinds):
        more = calls_of(asked.cases, trial_of, time.process_time() + seconds / len(kinds), ways)
        if not more:
            return _certain(found), False
        calls += more
        failed = (
            x for x in calls if x.trial.case == kinds[0].cases[0] and (in_training or tensor in x.wrong)
        )
        first, start = next(failed, None), time.process_time()
        search = Search(calls, start + left / 2, asked.further, trial_of, first=first)
        wider = Certificate()
        if found.alternatives:
            told = (found.alternatives, *(x for tied in found.tied.values() for x in tied))
            drawn = dict.fromkeys(x.everywhere for each in told for x in each)
            wider = replace(search, drawn=[*drawn]).certificate().of_bug(tensor)
            if not wider.alternatives and (number > 1 or not _refuted(found.alternatives, more, tensor)):
                return _certain(_most_shown(found, calls, tensor)), False
        found = wider if wider.alternatives else search.certificate().of_bug(tensor)
        left -= time.process_time() - start
    return _certain(found), True


def _is_wrong_in_training(case: Case, trial_of: Callable[[Case], Trial], tensor: str) -> bool:
    """Whether a case shows the tensor wrong where gradients are asked for, or is not known to hold there.

    A kernel may have a path for calls without gradients, which the laws of the forward make.
    """
    if tensor not in OUT_AND_LSE:
        return True
    with suppress(Exception):
        call = known_call(trial_of(case))
        return call is None or tensor in call.wrong
    return True


def _certain(found: Certificate) -> Certificate:
    """Return a certificate; an empty one if calls have not told apart changes of many kinds that explain the same."""
    tied = ({told[0].name for told in found.tied.get(x.name, [])} for x in found.alternatives)
    return found if all(len(names) <= MOST_TIED for names in tied) else Certificate()


def _most_shown(found: Certificate, calls: Iterable[Known], tensor: str) -> Certificate:
    """Return the certificate by the change that explains a tensor in most calls, of those that tied in fewer calls.

    Other bugs show in some of these calls, so that no change explains all. An empty one is returned if it is few.
    """
    wrong = [call for call in calls if tensor in call.wrong]

    def shown(told: Collection[Alternative]) -> int:
        return sum(not call.unexplained(of_tensors((*told,), (tensor,)), (tensor,)) for call in wrong)

    first, *more = found.alternatives
    others = [] if more else found.tied.get(first.name, [])
    tied = [tuple(x.of(first.tensors) for x in told) for told in others]
    numbers = {told: shown(told) for told in ((*found.alternatives,), *tied)}
    best, *as_good = (told for told, number in numbers.items() if number == max(numbers.values()))
    if numbers[best] < LEAST_SHOWN:
        return Certificate()
    return found if more else replace(found, alternatives=[*best], tied={best[0].name: as_good})


def _refuted(told: Collection[Alternative], calls: Iterable[Known], tensor: str) -> bool:
    """Whether a tensor is right in one of these calls, although it is something else by what is told.

    Gradients are not judged where out or lse is not finite, so that they are taken for right if nothing is wrong.
    """
    named = of_tensors((*told,), (tensor,))
    judged = {tensor} if tensor in OUT_AND_LSE else {*EVERY}
    right = (call for call in calls if tensor in call.outputs.named() and judged.isdisjoint(call.wrong))
    return any(call.missed(named, (tensor,)) for call in right)
