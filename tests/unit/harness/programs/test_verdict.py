"""``verdict.json``: each field of its schema is there, as the schema has it, and files of earlier versions are read."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.harness.files import ROOT
from tests.harness.law import LAWS
from tests.harness.programs.verdict import FORMAT, no_verdict, read_verdict, schema, text_of, verdict_of
from tests.unit.support.reports import bug, summary
from tests.unit.support.schemas import unlike

KEPT = sorted(Path(__file__).parent.glob("verdict_*.json"))
"""A file of each version of the schema, as it was written then: such a file is never changed."""


def fields_of(of: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each field of a schema with its place, such as "bugs[].severity.rank"."""
    for name, inner in of.get("properties", {}).items():
        yield f"{place}{name}", inner
        yield from fields_of(inner, f"{place}{name}.")
    if "items" in of:
        yield from fields_of(of["items"], f"{place[:-1]}[].")
    if "additionalProperties" in of:
        yield from fields_of(of["additionalProperties"], f"{place}*.")


def values_at(value: Any, place: str) -> list[Any]:
    """Return the values of a verdict at a place of ``fields_of``."""
    found = [value]
    for step in place.replace("[]", ".[]").split("."):
        if step in ("[]", "*"):
            found = [x for each in found for x in (each.values() if step == "*" else each)]
        else:
            found = [each[step] for each in found]
    return found


def made(**run: Any) -> dict[str, Any]:
    """Return the verdict of a run with two bugs, as a program reads it."""
    content = summary(bug(), bug(causal=False, tensor="lse"), **{"exit": 1, "seed": "7", **run})
    rows = {row["property"]: row for row in content["results"]}
    rows["forward"] |= {"mark": "broken", "broken": 1, "reports": [row["folder"] for row in content["bugs"]]}
    content["kernels"]["k.f"]["spec"] = "absent.py:f"
    content["bugs"][0]["offers"] = ["--claims 'dtypes=not float16': all 9 failing cases are excluded"]
    content["tried"] = {
        "k.f": {"levels": [1, 2], "pairs": [3, 9], "triples": [4, 40], "missing": [["way", "vmap"]]}
    }
    verdict: dict[str, Any] = json.loads(text_of(verdict_of(content, Path("reports"))))
    return verdict


EXPECTED: Mapping[str, list[Any]] = {
    "schema": [1],
    "status": ["broken"],
    "complete": [True],
    "score": [0.4375],
    "exit": [1],
    "error": [None],
    "seconds": [3671.5],
    "seed": [7],
    "time": ["for 60 minutes"],
    "environment": [{"device": "cpu", "device_name": "abacus", "torch": "2.0"}],
    "report_dir": ["reports"],
    "kernels.*.spec": ["absent.py:f"],
    "kernels.*.status": ["broken"],
    "kernels.*.examples": [6],
    "kernels.*.file": [None],
    "kernels.*.line": [None],
    "bugs[].kernel": ["k.f", "k.f"],
    "bugs[].law": ["forward", "forward"],
    "bugs[].laws": [["forward", "backward"]] * 2,
    "bugs[].dtypes": [["float16", "float32"]] * 2,
    "bugs[].tensors": [["out"], ["out"]],
    "bugs[].certificate": [None, None],
    "bugs[].claim": ["out is within the rounding bound of float64"] * 2,
    "bugs[].failures": [14, 14],
    "bugs[].severity.rank": ["numbers", "numbers"],
    "bugs[].severity.shown": [17, 17],
    "bugs[].severity.tried": [20, 20],
    "bugs[].case": ["Case(dtype='float16', causal=True)", "Case(dtype='float16')"],
    "bugs[].claims_that_hold": [["dtypes=not float16"], []],
    "bugs[].script": [None, None],
    "less_precise": [{}],
    "coverage.*.values.tried": [1],
    "coverage.*.values.claimed": [2],
    "coverage.*.pairs.tried": [3],
    "coverage.*.pairs.claimed": [9],
    "coverage.*.triples.tried": [4],
    "coverage.*.triples.claimed": [40],
    "coverage.*.never": [["way=vmap"]],
    "coverage.*.laws_not_tried": [""],
    "notes": [[]],
}
"""What ``made`` has in fields that no other test is about."""


@pytest.mark.parametrize("place", [place for place, _ in fields_of(schema())])
def test_every_field_has_a_value(place: str) -> None:
    found = values_at(made(), place)
    assert found
    assert found == EXPECTED.get(place, found)


def test_what_is_written_is_as_the_schema_has_it(tmp_path: Path) -> None:
    for verdict in (made(), made(exit=None), no_verdict("--budget: got 0", 4, tmp_path)):
        assert list(unlike(verdict, schema())) == []


def test_what_is_not_as_the_schema_has_it_is_seen() -> None:
    wrong = {**made(), "score": 2, "more": 1}
    del wrong["seed"]
    wrong["bugs"][0]["law"] = 3
    assert list(unlike(wrong, schema())) == [
        "root.seed is missing",
        "root.score: 2",
        "root.bugs[0].law: 3 is no string",
        "root.more is not in the schema",
    ]


def test_each_law_is_told_whether_or_not_the_run_tried_it() -> None:
    laws = {row["law"]: row for row in made()["laws"]}
    assert {*laws} == {*LAWS}
    assert laws["forward"]["dtypes"] == {"float16": "broken"}
    assert (laws["forward"]["status"], laws["backward"]["status"]) == ("broken", "held")
    left_out = laws["memory"]
    assert (left_out["status"], left_out["reason"]) == ("not tried", "left out of the run")
    assert left_out["dtypes"] == {}


def test_why_a_law_has_no_answer_is_told() -> None:
    content = summary(exit=1)
    rows = {row["property"]: row for row in content["results"]}
    rows["forward"] |= {"mark": "refused", "refusals": 8, "reasons": {"few rows": 2, "no float16": 6}}
    rows["backward"] |= {"mark": "not tried", "examples": 0, "skipped": 3, "skip_reasons": {"no memory": 3}}
    laws = {row["law"]: row for row in verdict_of(content, Path("r"))["laws"]}
    assert (laws["forward"]["status"], laws["forward"]["reason"]) == ("refused", "no float16")
    assert laws["backward"]["status"] == "error of the environment"
    assert laws["backward"]["reason"] == "no memory"
    assert not verdict_of(content, Path("r"))["complete"]


def test_a_bug_has_a_line_that_runs_its_case_again() -> None:
    first, second = made()["bugs"]
    assert first["replay"].endswith(f"--replay reports/{first['id']}/case.json")
    assert first["report"] == f"reports/{first['id']}" != second["report"]
    assert first["needs"] == "only with causal True"
    (forward,) = (row for row in made()["laws"] if row["law"] == "forward")
    assert forward["bugs"] == sorted([first["id"], second["id"]])


def test_a_wrong_command_line_is_told_as_such(tmp_path: Path) -> None:
    told = no_verdict("--budget: got 0", 4, tmp_path)
    assert (told["status"], told["exit"], told["score"]) == ("usage error", 4, 0.0)
    assert told["error"] == "--budget: got 0"


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_a_file_of_each_version_is_read(path: Path) -> None:
    found = read_verdict(path)
    assert found["bugs"][0]["certificate"] == "the causal mask is aligned top-left"
    if found["schema"] == FORMAT:
        assert list(unlike(found, schema())) == []


def test_a_file_of_each_version_is_kept() -> None:
    assert [path.stem for path in KEPT] == [f"verdict_{number}" for number in range(1, FORMAT + 1)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "got no verdict, expected a verdict.json .*"),
        ("[]", "got no verdict, expected a verdict.json .*"),
        ('{"schema": 99}', f"got schema 99, expected one from 1 to {FORMAT}"),
        ('{"schema": "1"}', f"got schema '1', expected one from 1 to {FORMAT}"),
    ],
)
def test_any_other_file_is_refused_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "verdict.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"\A.*verdict.json: {told}\Z"):
        read_verdict(path)


def test_the_page_tells_what_each_field_is() -> None:
    page = (ROOT / "docs/verdict.md").read_text()
    rows = [f"| `{place}` | {of['description']} |" for place, of in fields_of(schema())]
    assert "\n".join(rows) in page
