"""Whole runs of pytest, as a user types them."""

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from strategies.case import Case, Spike
from tests.harness.commands import merge
from tests.harness.files import ROOT
from tests.harness.run import Run, read
from tests.unit.support.running import CASE, SEVERAL, TOYS, pytest_run, summary_in
from tests.unit.support.toys import ROWS


class TestCommandLine:
    def test_a_usage_error_with_workers_is_status_4_and_one_line(self, tmp_path: Path) -> None:
        run = pytest_run(
            tmp_path, "-n2", "--examples", "0", "-p", "no:cacheprovider", status=pytest.ExitCode.USAGE_ERROR
        )
        assert (run.stdout + run.stderr).strip() == "ERROR: --examples: got 0, expected a positive number"
        assert list(tmp_path.iterdir()) == []

    def test_a_run_that_is_killed_while_shrinking_has_a_whole_report(self, tmp_path: Path) -> None:
        (tmp_path / "toys.py").write_text(TOYS.read_text())
        command = [sys.executable, "-m", "pytest", str(ROOT / "tests/properties/test_forward.py")]
        options = ["--device=cpu", "--kernel=toys.py:wrong", "--shrink-seconds=600"]
        run = subprocess.Popen([*command, *options], cwd=tmp_path, stdout=subprocess.DEVNULL)
        while not (found := list(tmp_path.glob("reports/toys.wrong/*/case.json"))):
            assert run.poll() is None, "it ended without a report"
            time.sleep(0.05)  # wait for the first report, however long it takes
        run.kill()
        run.wait()
        kept = read(found[0])
        assert (kept.spec, kept.law) == ("toys.py:wrong", "forward")
        assert kept.case.seqlen_q >= ROWS

    def test_a_run_its_report_and_its_replay(self, tmp_path: Path) -> None:
        toys = tmp_path / "toys.py"
        toys.write_text(TOYS.read_text())
        kernels = ["--kernel", "toys.py:sound", "--kernel", "toys.py:wrong", "-k", "test_forward and float32"]
        options = ["--time-limit=10", "--examples=20", "-n2", "--hypothesis-seed=1", "--junitxml=junit.xml"]
        run = pytest_run(
            tmp_path,
            *kernels,
            *options,
            CI="1",
            GITHUB_ACTIONS="true",
            GITHUB_WORKSPACE=str(tmp_path),
            status=pytest.ExitCode.TESTS_FAILED,
        )
        text = run.stdout
        assert re.search(r"flashproof: cpu \(.*\), torch .*, triton .*, hypothesis ", text)
        assert "profile: dev, 20 examples, seed: 1, at most 10 minutes (--time-limit)" in text
        assert "\nkernel toys.wrong: default claims of a plain function\n" in text
        assert "\n        toys.sound\n        | toys.wrong\nforward + X\n" in text
        bug = "toys.wrong: law `forward` is broken, out is wrong (float32)"
        assert "\nfound: toys.wrong: out is wrong (forward, float32), only with seqlen_q above 2\n" in text
        assert f"\n1. {bug}\n" in text
        assert re.search(r"^   needs     only with seqlen_q above 2$", text, re.MULTILINE)
        title = r"^::error file=toys.py,line=\d+,title=(.*?)::\d+ failures, only with seqlen_q above 2%0Asmallest: Case"
        (annotation,) = re.findall(title, text, re.MULTILINE)
        assert annotation == bug.replace(":", "%3A").replace(",", "%2C")
        assert not re.search(r"^\S+\.py:\d+: ", text, re.MULTILINE), "a frame of a traceback"

        # Both workers have met the bug, and one of them has shrunk it.
        (smallest,) = re.findall(r"   smallest  (.*(?:\n {13}.*)*)", text)
        case = eval(smallest, {"Case": Case, "Spike": Spike})
        assert case.seqlen_q == ROWS
        assert bug in (tmp_path / "junit.xml").read_text()
        summary = summary_in(tmp_path)
        assert summary["environment"]["device"] == "cpu"
        assert summary["kernels"]["toys.sound"]["claims"]["lse"] == "true"
        rows = {row["kernel"]: row for row in summary["results"]}
        verdicts = {name: row["verdict"] for name, row in rows.items()}
        assert verdicts == {"toys.sound": "held", "toys.wrong": "broken"}
        assert rows["toys.wrong"]["examples"] > rows["toys.wrong"]["broken"] > 0
        assert rows["toys.sound"]["worst_case"].startswith("Case(")

        assert merge.main([str(tmp_path / "reports"), "--report-dir", str(tmp_path / "merged")]) == 1
        merged = json.loads((tmp_path / "merged/summary.json").read_text())
        assert merged.pop("shards") == {"ended": [str(tmp_path / "reports")], "cut short": [], "missing": []}
        for told in (merged, summary):  # the summary is written after the line that ends the run
            assert told["run"].pop("seconds") > 0
        assert merged == summary

        (report_folder,) = rows["toys.wrong"]["reports"]
        folder = tmp_path / "reports" / report_folder
        written = {path.name for path in folder.iterdir()}
        assert written - {"error.png"} == {"case.json", "report.md", "repro.py"}
        assert "seqlen_q: fails with 3, 4" in (folder / "report.md").read_text()
        (line,) = re.findall("^replay: python -m pytest tests/properties (.*)", text, re.MULTILINE)
        replay = pytest_run(tmp_path, *line.split(), "-q", status=pytest.ExitCode.TESTS_FAILED)
        assert smallest in replay.stdout
        corpus = ["--corpus", "reports", "--examples=1", *kernels[2:]]
        toys.write_text(TOYS.read_text().replace("MENDED = False", "MENDED = True"))
        assert "1 passed" in pytest_run(tmp_path, *line.split(), "-q").stdout
        pytest_run(tmp_path, *corpus)
        (gone,) = summary_in(tmp_path)["notices"]
        assert gone.startswith(
            "gone: law `forward` of toys.wrong, out was wrong (float32): the case that showed it"
        )
        assert (folder / "case.json").exists()

    @pytest.mark.nightly
    def test_a_run_by_the_clock_tries_everything_and_ends(self, tmp_path: Path) -> None:
        laws = "(test_forward or test_exact) and float32"
        kernels = [f"--kernel={TOYS}:sound", f"--kernel={TOYS}:wrong", "-k", laws]
        options = ["--minutes=0.1", "-n2", "--shrink-seconds=0.1"]
        text = pytest_run(tmp_path, *kernels, *options, status=None).stdout
        assert re.search(r"profile: fuzz, .*, for 0.1 minutes", text)
        # The time may be up before a failing gradient is told to follow from out, so that `backward` is broken too.
        every = summary_in(tmp_path)["results"]
        rows = [row for row in every if row["property"] in ("forward", "exact")]
        assert len(rows) == 2 * 2
        assert {(x["kernel"], x["property"]) for x in every if x not in rows} <= {("toys.wrong", "backward")}
        tried = {row["verdict"] for row in rows}
        assert "held" in tried
        assert tried <= {"held", "broken"} or re.search("the time of the (run|kernel) was up", text)

    def test_what_the_time_was_up_for_is_told(self, tmp_path: Path) -> None:
        options = ["--kernel", f"{TOYS}:sound", "-k", "test_forward", "--examples=9000", "--time-limit=0.05"]
        run = pytest_run(tmp_path, *options, "-v")
        rows = summary_in(tmp_path)["results"]
        for row in rows:
            assert row["examples"] + row["undrawn"] == 9000
            assert row["verdict"] == ("held" if row["examples"] else "not tried")
            assert f"(+{row['undrawn']} time up)" in run.stdout
        undrawn = sum(row["undrawn"] for row in rows)
        assert f"not drawn, the time was up: {undrawn} cases (toys.sound {undrawn})" in run.stdout

    @pytest.mark.nightly
    def test_every_case_of_a_corpus_is_run(self, tmp_path: Path) -> None:
        spec = f"{TOYS}:raising_on_one_key"
        (tmp_path / "cases").mkdir()
        for i, case in enumerate((CASE, replace(CASE, seqlen_k=1))):
            (tmp_path / f"cases/{i}.json").write_text(json.dumps(Run(spec, (), "forward", case).to_dict()))
        options = ["--kernel", spec, "-k", "forward and float32", "--examples=1", "--hypothesis-seed=1"]
        text = pytest_run(tmp_path, "--corpus=cases", *options, status=pytest.ExitCode.TESTS_FAILED).stdout
        assert re.findall(r"^\d\. \S+ law `forward` is broken, (.*) \(float32\)$", text, re.MULTILINE) == [
            "out is wrong",
            "exception",
        ]
        # With one key the kernel raises, so no number shows whether the other bug needs more than one key.
        matters = {bug["tensor"]: bug["matters"] for bug in summary_in(tmp_path)["bugs"]}
        assert matters == {"out": ["seqlen_q"], "": ["seqlen_q", "seqlen_k"]}

    @pytest.mark.nightly
    def test_three_bugs_are_three_reports(self, tmp_path: Path) -> None:
        """Each of three bugs has one report, although it breaks several laws, dtypes and tensors."""
        options = ["--kernel", f"{SEVERAL}:three", "--examples=20", "-n2", "--shrink-seconds=20"]
        chosen = ["-k", "forward or backward"]
        pytest_run(tmp_path, *options, *chosen, "--hypothesis-seed=2", status=pytest.ExitCode.TESTS_FAILED)
        summary = summary_in(tmp_path)
        needs = {tuple(sorted(bug["matters"])) for bug in summary["bugs"] if bug["rank"] == "numbers"}
        assert needs == {("causal",), ("group", "heads_kv"), ("seqlen_k",)}
        assert len(summary["bugs"]) == 3
        for bug in summary["bugs"]:
            text = (tmp_path / "reports" / bug["folder"] / "report.md").read_text()
            assert "### How bad, and where else" in text
            assert f"{bug['failures']} failing example" in text
        folders = {f"several.three/{path.name}" for path in (tmp_path / "reports/several.three").iterdir()}
        assert folders == {bug["folder"] for bug in summary["bugs"]}
        broken = [row for row in summary["results"] if row["verdict"] == "broken"]
        assert all(row["reports"] for row in broken)

    @pytest.mark.nightly
    def test_the_claim_that_would_be_true_is_offered(self, tmp_path: Path) -> None:
        options = ["--kernel", f"{SEVERAL}:top_left", "--examples=10", "-k", "forward and float32"]
        text = pytest_run(
            tmp_path, *options, "--hypothesis-seed=1", status=pytest.ExitCode.TESTS_FAILED
        ).stdout
        assert "\nbugs, the worst first: 1\n" in text
        assert re.search(r"or claim  --claims causal_alignment=top_left: all \d+ failing cases hold", text)
        pytest_run(tmp_path, *options, "--claims=causal_alignment=top_left")
