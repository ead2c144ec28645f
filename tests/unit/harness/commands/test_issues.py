"""A run's bugs become issues: one for each cause, updated while it is there, and closed when it is gone."""

from pathlib import Path

import pytest

from tests.harness.commands.issues import main


class TestBadInput:
    @pytest.mark.parametrize(
        ("text", "told"),
        [
            (None, r"\S+summary.json: can't be read \(FileNotFoundError: .*\)"),
            ("{", r"\S+summary.json: can't be read \(JSONDecodeError: .*\)"),
            ('{"flashproof": 2}', r"\S+summary.json: can't be read \(ValueError: got format 2, expected 1\)"),
        ],
    )
    def test_what_is_no_summary_is_refused(self, tmp_path: Path, text: str | None, told: str) -> None:
        if text is not None:
            (tmp_path / "summary.json").write_text(text)
        with pytest.raises(ValueError, match=f"^{told}$"):
            main([str(tmp_path)])
