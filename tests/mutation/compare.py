"""Judge a kernel by the rules of other suites, in a process of its own because a planted bug may crash it.

``python -m tests.mutation.compare`` reads one request on stdin, and writes a JSON line before each case and
after each rule.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kernels import registry
from tests.harness.home import python_path
from tests.harness.interpreting import repair_interpreter
from tests.mutation.rules import RULES

SECONDS = 600


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
    done: list[RuleOutcome] = []
    while len(done) < len(RULES):
        request = {
            "spec": spec,
            "device": device,
            "every": every,
            "without": dict(without or {}),
            "from": len(done),
        }
        lines = _run(request)
        done += [
            RuleOutcome(line["rule"], tuple(line["failed"]), line["tried"])
            for line in lines
            if "rule" in line
        ]
        if len(done) < len(RULES):  # it ended in the middle of a case, or before the first
            last = lines[-1] if lines and "case" in lines[-1] else {"case": 0, "tried": 1}
            done.append(RuleOutcome(RULES[len(done)].name, (last["case"],), last["tried"]))
    return done


def _run(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    if request["device"] == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", "tests.mutation.compare"],
            input=json.dumps(request),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
            timeout=SECONDS,
        )
        output = process.stdout
    except subprocess.TimeoutExpired as e:
        output = (e.stdout or b"").decode() if not isinstance(e.stdout, str) else e.stdout
    return [json.loads(line) for line in output.splitlines()]


def main() -> None:
    """Read the request from stdin and answer it."""
    request = json.loads(sys.stdin.read())
    torch.set_num_threads(1)
    if request["device"] == "cpu":
        repair_interpreter()
    kernel, device = registry.load(request["spec"]), request["device"]
    for rule in RULES[request["from"] :]:
        failed: list[int] = []
        tried = 0
        for place, case in enumerate(rule.cases(device)):
            if place in request["without"].get(rule.name, ()):
                continue
            tried += 1
            print(json.dumps({"case": place, "tried": tried}), flush=True)
            try:
                rule.judge(kernel, case, device)
            except Exception:  # whatever a test of that suite raises fails it
                failed.append(place)
                if not request["every"]:
                    break
        print(json.dumps(asdict(RuleOutcome(rule.name, tuple(failed), tried))), flush=True)


if __name__ == "__main__":
    main()
