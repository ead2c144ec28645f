"""The record of a run: it is read as it was written, and anything else is refused in one line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from strategies.case import VERSION
from tests.harness.run import ONE_DESIGN, Run, read, run_of
from tests.unit.support.running import CASE

RUN = Run("toys.py:f", ("lse=false",), "forward", CASE)


def test_a_request_says_how_the_run_is_judged() -> None:
    judged = replace(RUN, ignored=frozenset({"lse", "dq"}), safety=8.0, designs=ONE_DESIGN)
    assert run_of(json.loads(json.dumps(judged.request("run", more=1)))) == judged


def test_a_file_says_what_is_ignored_and_a_file_without_that_is_read(tmp_path: Path) -> None:
    path = tmp_path / "case.json"
    ignoring = replace(RUN, ignored=frozenset({"lse"}))
    for run, key in ((ignoring, True), (RUN, False)):
        path.write_text(json.dumps(replace(run, safety=8.0).to_dict()))
        assert ("ignored" in path.read_text()) == key
        assert read(path) == run


TEXT = json.dumps(RUN.to_dict())


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (TEXT[100:], "", "is not JSON"),
        (TEXT, "[" * 100_000, "is not JSON"),
        (TEXT, "[]", "expected the case.json of a report, got other JSON"),
        (TEXT, '{"case": {}}', "expected the case.json of a report, got other JSON"),
        ('"flashproof": 1', '"flashproof": 2', "flashproof: got 2, expected format 1"),
        (f'"version": {VERSION}', '"version": 0', f"case.version: got 0, expected 1 to {VERSION}"),
        ('"law": "forward"', '"law": "murphy"', "law: got 'murphy', expected one of"),
        ('"kernel": "toys.py:f"', '"kernel": 3', "kernel: got 3, expected a string"),
        ('"lse=false"', "7", r"claims: got \[7\], expected a list of key=value strings"),
        ('"case": {', '"other": {', "case: got None, expected an object"),
        ('"law": ', '"ignored": 7, "law": ', "ignored: got 7, expected a list of tensors"),
        ('"law": ', '"safety": "wide", "law": ', "safety: got 'wide', expected a number above 0"),
        ('"law": ', '"designs": "few", "law": ', "designs: got 'few', expected one of none, whole, one, all"),
        ('"seed": 0', '"seed": -1', "case.seed: got -1, expected an integer"),
        ('"seed": 0', f'"seed": {2**32}', "case.seed: got .*, expected a number"),
        (
            '"k_layout": "contiguous"',
            '"k_layout": "bhdn"',
            "case.k_layout: got 'bhdn', expected one of contiguous, ",
        ),
        (
            '"batch": 1',
            '"batch": 1000000000000',
            r"case: got q of shape \(1000000000000, .*\), expected at most",
        ),
    ],
)
def test_what_was_not_written_by_us_is_refused_in_one_line(
    tmp_path: Path, old: str, new: str, complaint: str
) -> None:
    assert TEXT.count(old) == 1
    path = tmp_path / "case.json"
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(ValueError, match=complaint) as refused:
        read(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("path", ["missing.json", "."])
def test_what_cannot_be_read_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match="can't be read"):
        read(tmp_path / path)
