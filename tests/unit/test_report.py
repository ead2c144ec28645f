"""Reports: their texts, and a case.json that ``record`` did not make, which is refused in one line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness import report
from tests.harness.run import Run, read
from tests.harness.verdict import Finding
from tests.unit.running import CASE, ENVIRONMENT, SMALL


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

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            (lambda text: text[:100], "is not JSON"),
            (lambda text: "[" * 100_000, "is not JSON"),
            (lambda text: "[]", "expected the case.json of a report, got other JSON"),
            (lambda text: '{"case": {}}', "expected the case.json of a report, got other JSON"),
            (
                lambda text: text.replace('"flashproof": 1', '"flashproof": 2'),
                "flashproof: got 2, expected format 1",
            ),
            (
                lambda text: text.replace('"version": 4', '"version": 0'),
                "case.version: got 0, expected 1 to 4",
            ),
            (
                lambda text: text.replace('"law": "forward"', '"law": "murphy"'),
                "law: got 'murphy', expected one of",
            ),
            (
                lambda text: text.replace('"kernel": "toys.py:f"', '"kernel": 3'),
                "kernel: got 3, expected a string",
            ),
            (
                lambda text: text.replace('"lse=false"', "7"),
                r"claims: got \[7\], expected a list of key=value strings",
            ),
            (lambda text: text.replace('"case": {', '"other": {'), "case: got None, expected an object"),
            (
                lambda text: text.replace('"law": ', '"ignored": 7, "law": '),
                "ignored: got 7, expected a list of tensors",
            ),
            (
                lambda text: text.replace('"law": ', '"safety": "wide", "law": '),
                "safety: got 'wide', expected a number above 0",
            ),
            (lambda text: text.replace('"seed": 0', '"seed": -1'), "case.seed: got -1, expected an integer"),
            (
                lambda text: text.replace('"seed": 0', f'"seed": {2**32}'),
                "case.seed: got .*, expected a number",
            ),
            (
                lambda text: text.replace('"k_layout": "contiguous"', '"k_layout": "bhdn"'),
                "case.k_layout: got 'bhdn', expected one of contiguous, ",
            ),
            (
                lambda text: text.replace('"batch": 1', '"batch": 1000000000000'),
                r"case: got q of shape \(1000000000000, .*\), expected at most",
            ),
        ],
    )
    def test_what_was_not_written_by_us_is_refused_in_one_line(
        self, failure: report.Failure, tmp_path: Path, change: Callable[[str], str], complaint: str
    ) -> None:
        report.write(failure, tmp_path)
        path = tmp_path / failure.folder / "case.json"
        path.write_text(change(path.read_text()))
        with pytest.raises(ValueError, match=complaint) as refused:
            read(path)
        assert str(path) in str(refused.value)
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize("path", ["missing.json", "."])
    def test_what_cannot_be_read_is_refused(self, tmp_path: Path, path: str) -> None:
        with pytest.raises(ValueError, match="can't be read"):
            read(tmp_path / path)
