"""Judge a kernel by the rules of other suites, in a child process because a planted bug may crash it."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.harness.running.child import Child, ChildDied
from tests.harness.worker.main import Worker, main
from tests.mutation.rules import RULES, Rule

SECONDS = 600.0
"""Seconds that one case may take, compilation included."""


@dataclass(frozen=True)
class RuleOutcome:
    """What a rule said of ``tried`` cases: ``failed`` has the positions of those that failed, in the rule's order."""

    rule: str
    failed: tuple[int, ...]
    tried: int


def outcomes(
    spec: str, device: str, *, every: bool = False, without: Mapping[str, Sequence[int]] | None = None
) -> list[RuleOutcome]:
    """Judge a kernel by each rule: on all of its cases (``every``), or up to the first that fails.

    ``without`` has, by rule, the positions of cases to leave out. A crash or a hang fails the case.
    """
    child = Child(device, worker="tests.mutation.compare")
    try:
        return [_outcome(child, spec, rule, every, (without or {}).get(rule.name, ())) for rule in RULES]
    finally:
        child.close()


def _outcome(child: Child, spec: str, rule: Rule, every: bool, without: Sequence[int]) -> RuleOutcome:
    failed, tried = list[int](), 0
    for place in range(len(rule.cases(child.device))):
        if place in without or (failed and not every):
            continue
        tried += 1
        request = {"do": "judge", "spec": spec, "rule": rule.name, "place": place}
        try:
            holds = child.ask(request, SECONDS)["holds"]
        except ChildDied:
            holds = False
        failed += [] if holds else [place]
    return RuleOutcome(rule.name, tuple(failed), tried)


class RuleWorker(Worker):
    """Answers requests to judge a kernel by a rule on one of its cases."""

    def do_judge(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return whether the kernel holds: whatever a test of that suite raises fails it."""
        rule = next(rule for rule in RULES if rule.name == request["rule"])
        kernel, case = self.kernel(request["spec"]), rule.cases(self.device)[request["place"]]
        try:
            rule.judge(kernel, case, self.device)
        except Exception:
            return {"holds": False}
        return {"holds": True}


if __name__ == "__main__":
    main(sys.argv[1], RuleWorker)
