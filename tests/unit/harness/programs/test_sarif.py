"""SARIF: each bug at the line of its kernel."""

import json
from pathlib import Path
from typing import Any

from tests.harness.programs.sarif import sarif_of
from tests.harness.programs.verdict import no_verdict, verdict_of
from tests.unit.support.reports import bug, summary
from tests.unit.support.schemas import unlike


def record(*required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has no other fields than these."""
    return {"type": "object", "required": required, "properties": properties}


def several(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


TEXT, POSITIVE = {"type": "string"}, {"type": "integer", "minimum": 1}
LEVEL = {"type": "string", "enum": ["none", "note", "warning", "error"]}
MESSAGE = record("text", text=TEXT)
PLACE = record(artifactLocation=record(uri=TEXT), region=record(startLine=POSITIVE))
OF_SARIF = record(
    "version",
    "runs",
    **{"$schema": TEXT},
    version={"type": "string", "enum": ["2.1.0"]},
    runs=several(
        record(
            "tool",
            tool=record(
                "driver",
                driver=record(
                    "name",
                    name=TEXT,
                    version=TEXT,
                    rules=several(record("id", id=TEXT, shortDescription=MESSAGE)),
                ),
            ),
            invocations=several(
                record(
                    "executionSuccessful",
                    executionSuccessful={"type": "boolean"},
                    toolExecutionNotifications=several(record("message", level=LEVEL, message=MESSAGE)),
                )
            ),
            results=several(
                record(
                    "message",
                    ruleId=TEXT,
                    level=LEVEL,
                    message=MESSAGE,
                    partialFingerprints={"type": "object", "additionalProperties": TEXT},
                    locations=several(record(physicalLocation=PLACE)),
                )
            ),
        )
    ),
)
"""What SARIF 2.1.0 demands of the fields that are written. The files were valid by its official schema as well."""


def results(file: str | None, line: int | None) -> Any:
    verdict = verdict_of(summary(bug(), exit=1), Path("reports"))
    verdict["kernels"]["k.f"] |= {"file": file, "line": line}
    verdict["status"], verdict["notes"] = "broken", ["k.f: not all was tried"]
    verdict["less_precise"] = {"k.f": "P in float16"}
    told = json.loads(sarif_of(verdict))
    assert [*unlike(told, OF_SARIF)] == []
    (run,) = told["runs"]
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {x["ruleId"] for x in run["results"]}
    (invocation,) = run["invocations"]
    assert invocation["executionSuccessful"]
    (note,) = invocation["toolExecutionNotifications"]
    assert note == {"level": "note", "message": {"text": "k.f: not all was tried"}}
    return run["results"]


def test_a_bug_is_an_error_at_the_line_of_its_kernel_and_a_lack_of_precision_a_warning() -> None:
    first, second = results("package/mine.py", 7)
    assert (first["ruleId"], first["level"]) == ("law/forward", "error")
    assert "\nSmallest case: Case(dtype='float16', causal=True)\n" in first["message"]["text"]
    (place,) = first["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "package/mine.py"
    assert place["physicalLocation"]["region"] == {"startLine": 7}
    assert (second["level"], second["message"]["text"]) == ("warning", "k.f: P in float16")
    assert first["partialFingerprints"] != second["partialFingerprints"]


def test_a_file_elsewhere_is_a_url_and_an_unknown_one_no_place() -> None:
    (place,) = results("/a b/mine.py", None)[0]["locations"]
    assert place["physicalLocation"]["artifactLocation"]["uri"] == "file:///a%20b/mine.py"
    assert place["physicalLocation"]["region"] == {"startLine": 1}
    assert "locations" not in results(None, None)[0]


def test_a_run_without_a_verdict_is_no_run_without_results() -> None:
    told = json.loads(sarif_of(no_verdict("--budget: got 0", 4, Path("reports"))))
    assert [*unlike(told, OF_SARIF)] == []
    (run,) = told["runs"]
    assert run["results"] == []
    (invocation,) = run["invocations"]
    assert not invocation["executionSuccessful"]
    assert invocation["toolExecutionNotifications"] == [
        {"level": "error", "message": {"text": "--budget: got 0"}}
    ]
