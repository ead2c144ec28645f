"""The journal of launched cases: a case that did not come to its end can be replayed."""

from pathlib import Path

from tests.harness.journal import Journal, examples_done, set_aside_unfinished
from tests.harness.run import Run, read
from tests.unit.running import CASE


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
        (path,) = set_aside_unfinished(folder)
        assert path == tmp_path / "unfinished-gw0.json"
        assert read(path).case == CASE
        assert list(folder.iterdir()) == []

    def test_half_a_line_is_skipped(self, tmp_path: Path) -> None:
        (tmp_path / "gw0.json").write_text('{"done": 3, "ke')
        assert examples_done(tmp_path) == 0
