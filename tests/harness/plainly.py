"""A failure of a law that compares calls, as a plain law tells of it where one of the calls is wrong by itself."""

from collections.abc import Iterator
from dataclasses import replace

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.cases import is_claimed
from tests.harness.attribute import Broken, Try
from tests.harness.bugs import are_kindred, wrong_tensors
from tests.harness.verdict import NUMBERS

PLAIN_LAWS = ("forward", "backward")
"""The laws that are told first of a bug that breaks several: they say what is wrong in the fewest words."""

NO_PLAIN_LAW = ("special", "rejection", "ragged", "determinism", "memory")
"""Laws whose cases mean nothing to the plain ones, or that are about what lies around a call."""

UNTOLD = ("rejection", "ragged", "memory", "determinism")
"""Laws whose failures are always told by themselves. Of a case of ``special`` a plain law runs what is finite."""

MOST_SCORES = 2**22
"""A case with more scores than this takes long to judge, and is tried with one head of one sequence."""

EVERYTHING: frozenset[str] = frozenset()
"""No tensor is ignored: parts are put together by an lse that may be known to be wrong."""


def is_plain(law: str) -> bool:
    """Whether failures of a law are told by itself, and never by a plain law in its place."""
    return law in (*PLAIN_LAWS, *UNTOLD)


def plainly(broken: Broken, run: Try, capabilities: Capabilities) -> Broken:
    """The failure of a plain law on the case, or on one of the size of a call that was made; else the failure itself.

    A law that compares calls also makes calls with other lengths or heads than the case has. A bug may show in one of
    those alone, and what it needs is then a matter of that call's sizes.
    """
    if is_plain(broken.law) or broken.finding.kind not in NUMBERS:
        return broken
    for case in _cases(broken, capabilities):
        for law in PLAIN_LAWS if capabilities.backward else PLAIN_LAWS[:1]:
            finding = run(law, case, EVERYTHING)
            if finding is None or finding.kind not in NUMBERS:
                continue
            wrong = wrong_tensors(finding)
            # Equations between gradients do not hold at an lse that is wrong.
            if are_kindred(wrong, wrong_tensors(broken.finding)) or (case == broken.case and "lse" in wrong):
                return Broken(law, case, finding)
    return broken


def _cases(broken: Broken, capabilities: Capabilities) -> Iterator[Case]:
    """The case itself, where its numbers are finite, and one with other numbers for each call of another size."""
    finite = tuple(spike for spike in broken.case.spikes if not isinstance(spike.value, str))
    for fields in ({"spikes": finite}, *({**size, "spikes": ()} for size in broken.sizes)):
        case = replace(broken.case, **fields)
        if _scores(case) > MOST_SCORES:
            case = replace(case, batch=1, heads_kv=1, group=1, spikes=())
        if is_claimed(case, capabilities) and _scores(case) <= MOST_SCORES:
            yield case


def _scores(case: Case) -> int:
    return case.batch * case.heads_q * case.seqlen_q * case.seqlen_k
