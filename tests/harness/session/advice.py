"""Find claims for a kernel that refuses much of what it claims, and try them before they are offered as advice."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, zip_longest

from kernels.contract import LAYOUTS, RAGGED_KEYWORDS, Capabilities
from kernels.contract.parsing import parse_claims
from strategies.case import Case
from strategies.cases import cases
from tests.harness.clock import BudgetSpent
from tests.harness.law import basic_laws, by_place, law_named
from tests.harness.running.child import HarnessError
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.running.learned_claims import narrowing, usual, varied
from tests.harness.running.refusals import NO_ADVICE, Advice, Claims, Seen
from tests.harness.running.runs import Runs
from tests.harness.running.tally import plain
from tests.harness.session.subject import drawn

FEW = 0.05
"""Claims are advice if the kernel refuses no more than this share of the cases that are drawn from them.

If no claims keep all answered cases, each claim may exclude this share of them. Example: many kernels answer empty
sequences, whatever else they refuse.
"""

TRIED, TRIED_BESIDE = 24, 8
"""How many cases are drawn to try claims: under each basic law, and under each other law.

They are few because drawing a case takes longer than most kernels take to refuse it.
"""

LEAST_TRIED = 12
"""Claims are no advice if fewer of the cases drawn from them can be run on this machine."""

ROUNDS = 5
"""How often claims are changed for a law, each time by the cases that the kernel has answered and refused so far."""

ANSWERED = ("held", "broken")
"""Statuses of a verdict on a case that the kernel has answered, right or wrong."""

WITHOUT_GRADIENTS = "backward=false"


def advised(
    runs: Runs, refusing: Mapping[str, Seen], spend: Callable[[], None], kinds: Callable[[], Sequence[str]]
) -> Advice:
    """Return claims under which a kernel answers nearly all cases; none if there are none, or no time to try them.

    Args:
        runs: runs cases of the kernel.
        refusing: the laws under which the kernel refuses much, each with some refused and answered cases.
        spend: called before each case; raises BudgetSpent if there is no more time.
        kinds: returns kinds of the claim ``ragged`` that the kernel may be meant for. It is called only if the kernel
            refuses all dense calls.
    """
    asking = Asking(runs, spend)
    advice = NO_ADVICE
    with suppress(BudgetSpent, HarnessError):
        claims, tried = asking.opening(refusing, kinds), Seen()
        for law in dict.fromkeys((*basic_laws(), *sorted(refusing, key=by_place))):
            settled, seen = asking.settled(law, claims, refusing.get(law, Seen()))
            if settled is None:
                return Advice(seen=seen)
            claims, tried = settled, tried + seen
            if law not in basic_laws(gradients=False) and claims and tried.asked >= LEAST_TRIED:
                advice = Advice(claims, len(tried.answered), tried.asked)
    return advice


def kinds_taken(runs: Runs) -> list[str]:
    """Return the kinds of the claim ``ragged`` whose keywords the kernel can be called with."""
    taken = []
    for kind in RAGGED_KEYWORDS:
        with suppress(ValueError):
            KernelInfo.ask(runs.child, runs.info.spec, (*runs.info.claims, f"ragged={kind}"))
            taken.append(kind)
    return taken


@dataclass
class Asking:
    """Asks a kernel which cases it refuses, as long as there is time to ``spend``."""

    runs: Runs
    spend: Callable[[], None]

    def claimed(self, claims: Claims) -> Capabilities:
        """Return the kernel's capabilities with these claims in place of its own."""
        return parse_claims(claims, self.runs.info.capabilities)

    def status(self, law: str, case: Case, claims: Claims) -> str:
        """Return the status of the verdict on a case under a law and claims. Raises BudgetSpent."""
        self.spend()
        return self.runs.status(law, case, claims)

    def seen(self, law: str, asked: Iterable[Case], claims: Claims) -> Seen:
        """Return which of the cases the kernel refuses, and which it answers. Others can't be run on this machine."""
        found = {case: self.status(law, case, claims) for case in asked}
        return Seen(
            tuple(plain(case) for case, status in found.items() if status == "refused"),
            tuple(plain(case) for case, status in found.items() if status in ANSWERED),
        )

    def first_answered(self, law: str, claims: Claims) -> Case | None:
        """Return the first of the usual cases that the kernel answers, or None."""
        claimed = self.claimed(claims)
        asked = chain.from_iterable(usual(dtype, claimed) for dtype in claimed.dtypes)
        return next((case for case in asked if self.status(law, case, claims) in ANSWERED), None)

    def opening(self, refusing: Mapping[str, Seen], kinds: Callable[[], Sequence[str]]) -> Claims:
        """Return claims without dense calls, if the kernel refuses all of these and answers ragged ones; else none.

        Example: ``ragged=packed`` and ``dense=false``.
        """
        if any(seen.answered for seen in refusing.values()) or self.first_answered("forward", ()) is not None:
            return ()
        claimed = self.runs.info.capabilities.ragged
        found = tuple(kind for kind in claimed or kinds() if self._answers(kind))
        if not found:
            return ()
        return ("dense=false",) if found == claimed else (f"ragged={','.join(found)}", "dense=false")

    def _answers(self, kind: str) -> bool:
        """Whether the kernel answers a usual call of a kind of the claim ``ragged`` with numbers, right or wrong."""
        claims = (f"ragged={kind}", "dense=false")
        case = self.first_answered("forward", claims)
        finding = None if case is None else self.runs.judged("forward", case, claims=claims)
        return case is not None and not (finding and finding.hides_numbers)

    def settled(self, law: str, claims: Claims, seen: Seen) -> tuple[Claims | None, Seen]:
        """Add claims until the kernel answers nearly all cases of a law; return all claims and the cases tried.

        Each round adds other claims (``truer``), which follow from all cases answered and refused so far. If all rounds
        fail, a law of gradients is tried without gradients; if that fails too, None is returned in place of claims.
        ``seen`` has cases that were run before, under the kernel's own claims.
        """
        claimed, is_known = self.claimed(claims), bool(seen.refused) and not claims
        added: Claims = ()
        failed: list[Claims] = []
        while added not in failed and len(failed) < ROUNDS:
            if failed or not is_known:
                tried = self.seen(law, self.drawn(law, (*claims, *added)), (*claims, *added))
                if len(tried.refused) <= max(1, FEW * tried.asked):
                    return (*claims, *added), tried
                seen += tried
            seen += self.varied(law, claims) if not failed else Seen()
            failed.append(added)
            if not seen.answered:
                break
            added = truer(law, seen.within(claimed), claimed, failed)
        if not law_named(law).judges_gradients or WITHOUT_GRADIENTS in claims:
            return None, seen.within(claimed)
        return self.settled(law, (*claims, WITHOUT_GRADIENTS), Seen())

    def drawn(self, law: str, claims: Claims) -> Iterator[Case]:
        """Draw cases of a law from claims, of each dtype in turn; none if the law does not apply."""
        declared, claimed = law_named(law), self.claimed(claims)
        dtypes = [dtype for dtype in claimed.dtypes if declared.applies_to(claimed, dtype)]
        number = TRIED if law_named(law).is_basic else TRIED_BESIDE
        drawn_of = partial(cases, claimed, device_type=self.runs.device_type, **declared.draws)
        in_turn = zip_longest(*(drawn(drawn_of(dtype=x), x, -(-number // len(dtypes))) for x in dtypes))
        return islice(filter(None, chain.from_iterable(in_turn)), number)

    def varied(self, law: str, claims: Claims) -> Seen:
        """Return which variants of an answered usual case, each with one field changed, the kernel answers or refuses.

        Nothing is returned if it answers no usual case.
        """
        first, claimed = self.first_answered(law, claims), self.claimed(claims)
        if first is None:
            return Seen()
        others = [replace(first, dtype=dtype) for dtype in claimed.dtypes]
        others += [replace(first, q_layout=x, k_layout=x, v_layout=x) for x in LAYOUTS if x != "huge"]
        return self.seen(law, chain(varied(first, claimed), filter(claimed.admits, others)), claims)


def truer(law: str, seen: Seen, claimed: Capabilities, failed: Sequence[Claims]) -> Claims:
    """Return claims that exclude the refused cases and keep all answered ones or, if no claims do, nearly all.

    Claims that have ``failed`` are returned only if there are no others.
    """
    claims: Claims = ()
    for may_lose in (0.0, FEW):
        found = dict(narrowing(seen.refused, seen.answered, claimed, may_lose))
        claims = tuple(found)
        if law_named(law).judges_gradients and claimed.backward is True:
            claims = tuple("backward=causal" if claim == "causal=true" else claim for claim in claims)
        left = len(seen.refused) - sum(found.values())
        if left <= FEW * (left + len(seen.answered)) and claims not in failed:
            break
    return claims
