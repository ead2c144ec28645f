"""Runs of one kernel in one child: each case is journaled before it is launched, and counted."""

import math
from collections.abc import Mapping
from typing import Any

from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness import report
from tests.harness.bugs import Bug
from tests.harness.child import Child
from tests.harness.explain import Seen
from tests.harness.journal import Journal
from tests.harness.kernel_info import KernelInfo
from tests.harness.tally import Tally
from tests.harness.verdict import Finding, Verdict


class Runs:
    """Everything that can be asked of a kernel. ``tally`` counts the cases; a new item gets a new one.

    ``bugs`` are the known ones: a case known to end the process is not run just to find out about something else.
    """

    def __init__(
        self, info: KernelInfo, child: Child, journal: Journal, bugs: Mapping[str, Bug] | None = None
    ) -> None:
        self.info = info
        self.child = child
        self.journal = journal
        self.bugs = {} if bugs is None else bugs
        self.begin()

    def begin(self) -> None:
        """Start counting anew."""
        self.tally = Tally()

    def verdict(
        self,
        law: str,
        case: Case,
        *,
        ignored: frozenset[str] = frozenset(),
        claims: tuple[str, ...] = (),
        safety: float = SAFETY,
        seconds: float = math.inf,
    ) -> Verdict:
        """Run a law on a case without judging tensors in ``ignored``, with ``claims`` added to those of the kernel.

        Raises OutOfTime if it takes longer than ``seconds``.
        """
        record = self.record(law, case, claims)
        self.journal.note(record)
        return self.child.run(
            {**record, "ignored": sorted(ignored), "safety": safety}, self.journal.sync, seconds
        )

    def drawn(self, law: str, case: Case, ignored: frozenset[str], seconds: float) -> Verdict:
        """Run a case that the search has drawn, and count it. Raises OutOfTime if it takes longer than ``seconds``."""
        self.journal.examples += 1
        verdict = self.verdict(law, case, ignored=ignored, seconds=seconds)
        self.tally.add(verdict, case)
        return verdict

    def hard(
        self,
        law: str,
        case: Case,
        ignored: frozenset[str] = frozenset(),
        claims: tuple[str, ...] = (),
        safety: float = SAFETY,
        *,
        explained: bool = False,
    ) -> Finding | None:
        """Return what is found in a run outside the search. With ``explained``, less precise results count as well."""
        ends = next(filter(None, (bug.end_of(case) for bug in self.bugs.values())), None)
        if ends is not None and not claims:
            return ends
        verdict = self.verdict(law, case, ignored=ignored, claims=claims, safety=safety)
        self.tally.add_seconds(verdict.seconds)
        finding = self.info.finding(verdict)
        return finding if finding and (explained or not finding.explained_by) else None

    def holds(self, law: str, case: Case) -> bool:
        """Whether a case did not fail and could be run at all, for which a device may have too little memory."""
        verdict = self.verdict(law, case)
        return verdict.status != "skipped" and self.info.finding(verdict) is None

    def look(self, law: str, case: Case, ignored: frozenset[str]) -> Seen:
        """Say what the wrong elements of a case look like. Raises ChildDied."""
        request = {"do": "look", **self.record(law, case), "ignored": sorted(ignored), "safety": SAFETY}
        answer = self.child.ask(request, self.child.run_seconds)
        return Seen(tuple(answer["sentences"]), tuple(answer["pictures"]))

    def script(self, law: str, case: Case, finding: dict[str, Any], title: str, seconds: float) -> str | None:
        """Return a stand-alone script, or None if the calls can't be made again. Raises ChildDied, DeviceLost."""
        request = {
            "do": "repro",
            **self.record(law, case),
            "safety": SAFETY,
            "title": title,
            "seconds": seconds,
        }
        text: str | None = self.child.ask({**request, "finding": finding}, seconds)["text"]
        return text

    @property
    def script_seconds(self) -> float:
        """Seconds that a script may take, compilation included."""
        return min(self.child.run_seconds, self.child.start_seconds)

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.child.device.partition(":")[0]

    def record(self, law: str, case: Case, claims: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the record that identifies a run."""
        return report.record(self.info.spec, (*self.info.claims, *claims), law, case)
