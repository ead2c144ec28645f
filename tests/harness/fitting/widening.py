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


@dataclass(frozen=True)
class Asked:
    """Cases of one kind that a kernel is asked, and ``further`` ones that are asked where they tell more."""

    cases: Sequence[Case]
    further: Sequence[Case] = ()


def calls_of(cases: Iterable[Case], trial_of: Callable[[Case], Trial], until: float) -> list[Known]:
    """Call a kernel on these cases until ``until``, by ``time.process_time``; return none if that is enough for a few.

    A case that can't be run tells nothing.
    """
    calls = list[Known]()
    for number, case in enumerate(cases):
        with suppress(Exception):
            call = known_call(trial_of(case))
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
    for number, asked in enumerate(kinds):
        more = calls_of(asked.cases, trial_of, time.process_time() + seconds / len(kinds))
        if not more:
            return found, False
        calls += more
        first, start = calls[0] if calls[0].trial.case == kinds[0].cases[0] else None, time.process_time()
        search = Search(calls, start + left / 2, asked.further, trial_of, first=first)
        wider = Certificate()
        if found.alternatives:
            told = (found.alternatives, *(x for tied in found.tied.values() for x in tied))
            drawn = dict.fromkeys(x.everywhere for each in told for x in each)
            wider = replace(search, drawn=[*drawn]).certificate().of_bug(tensor)
            if not wider.alternatives and (number > 1 or not _refuted(found.alternatives, more, tensor)):
                return (found if _is_shown(found.alternatives, calls, tensor) else Certificate()), False
        found = wider if wider.alternatives else search.certificate().of_bug(tensor)
        left -= time.process_time() - start
    return found, True


def _is_shown(told: Collection[Alternative], calls: Iterable[Known], tensor: str) -> bool:
    """Whether what is told explains a tensor in several of the calls in which it is wrong."""
    named = of_tensors((*told,), (tensor,))
    wrong = (call for call in calls if tensor in call.wrong)
    return sum(not call.unexplained(named, (tensor,)) for call in wrong) >= LEAST_SHOWN


def _refuted(told: Collection[Alternative], calls: Iterable[Known], tensor: str) -> bool:
    """Whether a tensor is right in one of these calls, although it is something else by what is told.

    Gradients are not judged where out or lse is not finite, so that they are taken for right if nothing is wrong.
    """
    named = of_tensors((*told,), (tensor,))
    judged = {tensor} if tensor in OUT_AND_LSE else {*EVERY}
    right = (call for call in calls if tensor in call.outputs.named() and judged.isdisjoint(call.wrong))
    return any(call.missed(named, (tensor,)) for call in right)
