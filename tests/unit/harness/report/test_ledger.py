"""The ledger of a run: what one process writes of a bug, all others read."""

from dataclasses import replace
from pathlib import Path

import pytest

from strategies.case import Spike
from tests.harness.bugs.attribution import FailingExample
from tests.harness.bugs.restatement import restate_by_basic_law
from tests.harness.report.ledger import Ledger
from tests.unit.support.bugs import CASE, CLAIMS, finding, runner


class TestLedger:
    def test_processes_read_what_others_wrote(self, tmp_path: Path) -> None:
        one, two = Ledger(tmp_path / "x" / "bugs.jsonl"), Ledger(tmp_path / "x" / "bugs.jsonl")
        one.append({"kernel": "k"})
        assert [record["kernel"] for record in two.news()] == ["k"]
        assert two.news() == []

    def test_half_a_line_is_read_when_it_is_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "bugs.jsonl"
        path.write_text('{"a": 1, "process": 1}\n{"a": 2, ')
        ledger = Ledger(path)
        assert [record["a"] for record in ledger.news()] == [1]
        path.write_text('{"a": 1, "process": 1}\n{"a": 2, "process": 1}\n')
        assert [record["a"] for record in ledger.news()] == [2]

    def test_an_investigation_of_another_process_is_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, two = Ledger(tmp_path / "bugs.jsonl"), Ledger(tmp_path / "bugs.jsonl")
        with one.investigating("k", "forward"):
            two.news()
            assert not two.is_busy("k")  # the investigation is this process's own
            monkeypatch.setattr("tests.harness.report.ledger.os.getpid", lambda: 1)
            assert two.is_busy("k")
            assert two.is_busy("k", "forward")
            assert not two.is_busy("k", "gradients")
            assert not two.is_busy("another")
            monkeypatch.undo()
        two.news()
        monkeypatch.setattr("tests.harness.report.ledger.os.getpid", lambda: 1)
        assert not two.is_busy("k")

    def test_a_folder_that_cannot_be_written_is_no_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        ledger = Ledger(tmp_path / "file" / "bugs.jsonl")
        ledger.append({})
        assert ledger.news() == []

    def test_a_law_of_large_scores_is_told_with_ordinary_numbers_if_these_fail(self) -> None:
        case = replace(CASE, q_values="zeros", spikes=(Spike("v", (0, 0, 0, 0), 4.0),))
        failed = finding({"out"})
        assert failed is not None
        ordinarily = runner(lambda case: {"out"} if case.q_values == "normal" else set())
        told = restate_by_basic_law(FailingExample("exact", case, failed), ordinarily, CLAIMS)
        assert (told.law, told.case) == ("forward", replace(case, q_values="normal", spikes=()))
        assert (
            restate_by_basic_law(FailingExample("identities", case, failed), ordinarily, CLAIMS).law
            == "identities"
        )
