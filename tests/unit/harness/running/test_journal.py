"""The journal of launched cases: a case that did not come to its end can be replayed."""

from pathlib import Path

from tests.harness.run import Run, read
from tests.harness.running.journal import Journal, examples_done, set_aside_unfinished, unfinished_in
from tests.unit.support.running import CASE


class TestJournal:
    RECORD = Run("toys.py:f", (), "forward", CASE).to_dict()

    def test_a_case_that_was_not_finished_can_be_replayed(self, tmp_path: Path) -> None:
        folder = tmp_path / "journals"
        folder.mkdir()
        journal = Journal(folder / "gw0.json")
        journal.examples = 1  # the second case is run to investigate a failure, and counts as no example
        journal.note(self.RECORD | {"kernel": "a much longer name than that of the last one"})
        journal.note(self.RECORD)
        journal.sync()
        finished = Journal(folder / "gw1.json")
        finished.examples = 2
        finished.note(self.RECORD)
        finished.close()
        assert examples_done(folder) == 3
        set_aside_unfinished(folder)
        (path,) = unfinished_in(tmp_path)
        assert read(path).case == CASE
        assert list(folder.iterdir()) == []

    def test_a_failing_case_is_kept_until_it_is_counted_or_reported(self, tmp_path: Path) -> None:
        folder = tmp_path / "journals"
        folder.mkdir()
        journal = Journal(folder / "gw0.json")
        other = self.RECORD | {"law": "backward"}
        journal.keep(self.RECORD)
        journal.keep(other)
        journal.drop(other)
        assert examples_done(folder) == 0
        set_aside_unfinished(folder)
        (path,) = unfinished_in(tmp_path)
        assert read(path) == Run("toys.py:f", (), "forward", CASE)

    def test_cases_of_several_runs_that_were_cut_off_are_all_there(self, tmp_path: Path) -> None:
        folder = tmp_path / "journals"
        folder.mkdir()
        for law in ("forward", "backward", "backward"):
            journal = Journal(folder / "main.json")
            journal.note(self.RECORD | {"law": law})
            set_aside_unfinished(folder)
        assert sorted(read(path).law for path in unfinished_in(tmp_path)) == ["backward", "forward"]

    def test_half_a_line_is_skipped(self, tmp_path: Path) -> None:
        (tmp_path / "gw0.json").write_text('{"done": 3, "ke')
        assert examples_done(tmp_path) == 0
