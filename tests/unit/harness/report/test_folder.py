"""Reports: their texts, and the files that are written of a failure."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.report import folder as report
from tests.harness.run import Run, read
from tests.harness.verdict import Finding
from tests.unit.support.running import CASE, ENVIRONMENT, SMALL


class TestReport:
    FINDING = Finding(
        claim="out is right",
        kind="error",
        tensor="out",
        index=(0, 1, 2, 3),
        expected=1.0,
        actual="nan",
        allowed=1e-3,
        ratio="inf",
        wrong=2,
        total=7,
        nan=3,
        posinf=4,
        neginf=5,
    )

    @pytest.fixture
    def failure(self) -> report.Failure:
        run = ("toys.py:f", ("lse=false",), "forward", CASE)
        return report.Failure(*run, kernel="toys.f", finding=self.FINDING, environment=ENVIRONMENT)

    def test_the_message_has_everything_a_maintainer_asks_for(self, failure: report.Failure) -> None:
        path = f"reports/toys.f/forward-{failure.digest}"
        assert report.message(failure, Path("reports")).splitlines() == [
            "toys.f: law `forward` is broken, out is wrong (float32)",
            "  claim            out is right",
            "  where            out[0, 1, 2, 3]",
            "  expected         1.0",
            "  actual           nan",
            "  allowed error    0.001",
            "  error / allowed  inf",
            "  wrong elements   2 of 7; in out: 3 NaN, 4 +inf, 5 -inf",
            f"  smallest case    {CASE!r}",
            "  versions         torch 2.0",
            "  device           cpu (abacus)",
            f"  report           {path}/report.md",
            f"  replay           python -m pytest tests/properties --device cpu --replay {path}/case.json",
        ]

    def test_markdown_cannot_be_broken_by_what_a_kernel_says(self, failure: report.Failure) -> None:
        nasty = replace(failure, finding=replace(self.FINDING, claim="a | b\n`c`", detail="```\n# title"))
        text = report.markdown(nasty, Path("reports"), has_script=False)
        assert "| claim | `a \\| b 'c'` |" in text
        assert "    ```\n    # title\n" in text

    def test_what_is_written_is_read(self, failure: report.Failure, tmp_path: Path) -> None:
        report.write(failure, tmp_path)
        replay = read(tmp_path / failure.folder / "case.json")
        assert replay == Run("toys.py:f", ("lse=false",), "forward", CASE)

    def test_a_smaller_case_of_the_same_bug_takes_the_place_of_a_larger(
        self, failure: report.Failure, tmp_path: Path
    ) -> None:
        report.write(failure, tmp_path, "script of the larger case")
        report.write(replace(failure, case=SMALL), tmp_path)
        (folder,) = (tmp_path / "toys.f").iterdir()
        assert read(folder / "case.json").case == SMALL
        assert not (folder / "repro.py").exists()

    def test_the_folder_stays_inside(self, failure: report.Failure) -> None:
        assert replace(failure, kernel="../../up").folder.parts[0] == "_.._up"
