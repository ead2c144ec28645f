"""A verdict as SARIF 2.1.0, which code scanning shows beside the line of a kernel."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness.programs.statuses import FAILING, HELD

PRECISION = "precision"
"""The rule by which results are as precise as is claimed."""
CONCLUSIVE = (*FAILING, "known", HELD)
"""The statuses of a run that tells of each kernel whether something speaks against it."""
VERSION, SCHEMA = "2.1.0", "https://json.schemastore.org/sarif-2.1.0.json"


def sarif_of(verdict: Mapping[str, Any]) -> str:
    """Return a verdict as SARIF: a result for each bug and each kernel that is less precise than it claims.

    A run that did not come to its end says so, since that it has no result does not mean that nothing is wrong.
    """
    laws = sorted({bug["law"] for bug in verdict["bugs"]})
    rules = [_rule(f"law/{law}", f"law `{law}` holds") for law in laws]
    if verdict["less_precise"]:
        rules.append(_rule(PRECISION, "results are as precise as is claimed"))
    driver = {"name": "Flashproof", "version": verdict["flashproof"], "rules": rules}
    results = [_of_bug(bug, verdict["kernels"][bug["kernel"]]) for bug in verdict["bugs"]]
    for name, text in verdict["less_precise"].items():
        of_kernel = verdict["kernels"][name]
        results.append(_result(PRECISION, "warning", f"{name}: {text}", of_kernel, f"{name} precision"))
    run = {"tool": {"driver": driver}, "invocations": [_invocation(verdict)], "results": results}
    return json.dumps({"$schema": SCHEMA, "version": VERSION, "runs": [run]}, indent=1) + "\n"


def _rule(name: str, text: str) -> dict[str, Any]:
    return {"id": name, "shortDescription": {"text": text}}


def _invocation(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether the run came to its end, and what users must know of it."""
    told = [("error", verdict["error"])] if verdict["error"] else []
    told += [("note", text) for text in verdict["notes"]]
    return {
        "executionSuccessful": verdict["status"] in CONCLUSIVE,
        "toolExecutionNotifications": [{"level": level, "message": {"text": text}} for level, text in told],
    }


def _of_bug(bug: Mapping[str, Any], kernel: Mapping[str, Any]) -> dict[str, Any]:
    told = [bug["headline"], f"Smallest case: {bug['case']}", f"Again: {bug['replay']}"]
    return _result(f"law/{bug['law']}", "error", "\n".join(told), kernel, bug["id"])


def _result(rule: str, level: str, text: str, kernel: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a result; ``key`` is the same in the next run. Without a known file it has no place."""
    found: dict[str, Any] = {"ruleId": rule, "level": level, "message": {"text": text}}
    found["partialFingerprints"] = {"flashproof/v1": key}
    if kernel["file"]:
        path = Path(kernel["file"])
        uri = path.as_uri() if path.is_absolute() else path.as_posix()
        region = {"startLine": kernel["line"] or 1}
        found["locations"] = [{"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}]
    return found
