"""SARIF: each bug at the line of its kernel."""

import json
from pathlib import Path
from typing import Any

from tests.harness.programs.sarif import sarif_of
from tests.harness.programs.verdict import verdict_of
from tests.unit.support.reports import bug, summary


def results(file: str | None, line: int | None) -> Any:
    verdict = verdict_of(summary(bug(), exit=1), Path("reports"))
    verdict["kernels"]["k.f"] |= {"file": file, "line": line}
    verdict["less_precise"] = {"k.f": "P in float16"}
    told = json.loads(sarif_of(verdict))
    assert told["version"] == "2.1.0"
    (run,) = told["runs"]
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {"law/forward"}
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
