"""Shards of a night become one result: nothing counts twice, no bug is lost, and what is missing is told."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.contract import Capabilities
from kernels.registry import load
from tests.harness.bugs.bug import Bug, Occurrences
from tests.harness.commands.merge import main
from tests.harness.files import JOURNALS, own_version
from tests.harness.report.conclusion import DistinctBug
from tests.harness.report.folder import write
from tests.harness.report.ledger import BEGUN, LEDGER, WITHDRAWN, Ledger
from tests.harness.report.record import FORMAT, RECORD, Recorder, last_line, read_run
from tests.harness.report.results import Results
from tests.harness.running.kernel_info import KernelInfo
from tests.unit.support.bugs import CASE, CAUSAL, GROUP, LONG, bug
from tests.unit.support.reports import found, item

INFO = KernelInfo(
    "k.py:f", (), "k", Capabilities(launch={"block_m": (64, 128)}), {"head_dims": "64", "lse": "true"}
)
IN_CAUSAL = bug(CASE, ("out",), CAUSAL)
IN_GROUPS = bug(CASE, ("out",), GROUP)
IN_LONG = bug(CASE, ("lse",), LONG)
ENVIRONMENT = {"device": "cpu", "device_name": "abacus"}
RUN = {
    "started": "2026-01-02T03:04:05+00:00",
    "seconds": 0.0,
    "exit": None,
    "time": "1 minute",
    "profile": "fuzz",
    "seed": None,
    "replay": False,
}
Shard = Callable[..., Path]


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    """Return a function that writes the report directory of a shard with some items, and returns its path."""

    def make(
        name: str,
        *items: dict[str, Any],
        status: int | None = 1,
        bugs: list[DistinctBug] | None = None,
        info: KernelInfo = INFO,
        **about: Any,
    ) -> Path:
        folder = tmp_path / name.replace("/", "-")
        (folder / JOURNALS).mkdir(parents=True)
        first = {
            "flashproof": FORMAT,
            "version": own_version(),
            "shard": name if "/" in name else None,
            "report_dir": str(folder),
            "run": RUN,
            "environment": ENVIRONMENT,
            "kernels": [info.to_dict()],
            "not_run": [],
        }
        recorder = Recorder(folder / JOURNALS / RECORD, first | about)
        for counts in items:
            recorder.add({"item": counts})
            for one in map(Bug.from_dict, counts["bugs"]):
                write(one.failure, folder)
        if status is not None:
            recorder.add(last_line(status, 60.0, [] if bugs is None else bugs))
        return folder

    return make


def concluded(*bugs: Bug) -> list[DistinctBug]:
    return [DistinctBug(one, Occurrences()) for one in bugs]


def merged(*folders: Path, status: int = 1) -> Any:
    """Merge some runs, which must end with ``status``, and return the summary."""
    into = folders[0].parent / "merged"
    assert main([*map(str, folders), "--report-dir", str(into)]) == status
    return json.loads((into / "summary.json").read_text())


def add_line(folder: Path, text: str) -> None:
    path = folder / JOURNALS / RECORD
    path.write_text(path.read_text() + text)


class TestCounts:
    ITEMS = tuple(
        item(
            *("k", law, dtype), examples=n, refusals=n % 2, worst=0.1 * n, worst_tensor="out", judged={"out": n},
            noted={"leaks in {}": n}, shown={"leaks in {}": n},
        )
        for n, (law, dtype) in enumerate([("forward", "float16"), ("forward", "float32"), ("exact", "float16")], 1)
    )  # fmt: skip

    def test_the_summary_is_that_of_one_run_with_the_items_of_all(self, shard: Shard) -> None:
        one, two, three = self.ITEMS
        summary = merged(
            shard("1/2", one, two, status=0), shard("2/2", two, three, three, status=0), status=0
        )
        assert summary.pop("shards") == {"ended": ["1/2", "2/2"], "cut short": [], "missing": []}
        assert summary.pop("run") == {**RUN, "seconds": 60.0, "exit": 0}
        whole = Results([INFO])
        for counts in (one, two, two, three, three):
            whole.add(counts)
        assert summary == json.loads(json.dumps(whole.to_dict(ENVIRONMENT, [])))
        assert summary["notices"] == ["k: leaks in 11 of 11 such examples"]
        assert {row["property"]: row["examples"] for row in summary["results"]} == {"exact": 6, "forward": 4}

    def test_runs_of_different_kernels_are_merged(self, shard: Shard) -> None:
        other = replace(INFO, name="other")
        runs = (
            shard("a", found(), status=0),
            shard("b", found() | {"kernel": "other"}, status=0, info=other),
        )
        summary = merged(*runs, status=0)
        assert list(summary["kernels"]) == ["k", "other"]
        assert [row["examples"] for row in summary["results"]] == [5, 5]

    def test_environments_that_differ_are_all_told(self, shard: Shard) -> None:
        runs = [
            shard(f"{i}/2", found(), status=0, environment=ENVIRONMENT | {"device": f"cuda:{i}"})
            for i in (1, 2)
        ]
        assert merged(*runs, status=0)["environment"] == {"device": "cuda:1, cuda:2", "device_name": "abacus"}


class TestBugs:
    def test_the_same_bug_of_two_shards_is_one(self, shard: Shard) -> None:
        runs = [
            shard(f"{i}/2", found(IN_LONG, times=i), bugs=[DistinctBug(IN_LONG, Occurrences())])
            for i in (1, 2)
        ]
        summary = merged(*runs)
        assert [(one["folder"], one["failures"]) for one in summary["bugs"]] == [(IN_LONG.key, 3)]
        (row,) = summary["results"]
        assert (row["verdict"], row["reports"], row["broken"]) == ("broken", [IN_LONG.key], 2)

    def test_two_bugs_of_a_shard_stay_two_although_their_records_are_alike(self, shard: Shard) -> None:
        """The run has told them apart by running the kernel."""
        twin = replace(IN_LONG, failure=replace(IN_LONG.failure, number=1))
        both = [shard(f"{i}/2", found(IN_LONG, twin), bugs=concluded(IN_LONG, twin)) for i in (1, 2)]
        summary = merged(*both)
        assert {one["folder"] for one in summary["bugs"]} == {IN_LONG.key, twin.key}
        assert [one["failures"] for one in summary["bugs"]] == [2, 2]

    def test_what_a_run_found_to_be_one_bug_is_one(self, shard: Shard) -> None:
        one = DistinctBug(IN_CAUSAL, Occurrences(), twins=(IN_LONG.key,))
        summary = merged(shard("1/1", found(IN_CAUSAL, IN_LONG), bugs=[one]))
        assert [bug["folder"] for bug in summary["bugs"]] == [IN_CAUSAL.key]
        assert [row["reports"] for row in summary["results"]] == [[IN_CAUSAL.key]]

    def test_two_bugs_in_folders_of_one_name_have_two_reports(self, shard: Shard, tmp_path: Path) -> None:
        assert IN_CAUSAL.key == IN_GROUPS.key
        runs = [
            shard("1/2", found(IN_CAUSAL), bugs=concluded(IN_CAUSAL)),
            shard("2/2", found(IN_GROUPS, law="exact"), bugs=concluded(IN_GROUPS)),
        ]
        marks = {run: run / IN_CAUSAL.key / "error.png" for run in runs}
        for run, mark in marks.items():
            mark.write_text(run.name)
        summary = merged(*runs)
        folders = {tuple(one["matters"]): one["folder"] for one in summary["bugs"]}
        assert folders.keys() == {("causal",), ("group",)}
        assert len({*folders.values()}) == 2
        reports = {row["property"]: row["reports"] for row in summary["results"]}
        assert reports == {"forward": [folders["causal",]], "exact": [folders["group",]]}
        for run, name in zip(runs, (folders["causal",], folders["group",]), strict=True):
            copied = tmp_path / "merged" / name
            assert (copied / "error.png").read_text() == run.name
            assert f"--replay {copied}/case.json`" in (copied / "report.md").read_text()

    def test_a_report_that_is_not_there_is_written_from_what_is_known(
        self, shard: Shard, tmp_path: Path
    ) -> None:
        run = shard("1/1", found(IN_CAUSAL), bugs=concluded(IN_CAUSAL))
        for path in (run / IN_CAUSAL.key).iterdir():
            path.unlink()
        merged(run)
        text = (tmp_path / "merged" / IN_CAUSAL.key / "report.md").read_text()
        assert "law `forward` is broken" in text
        assert "only with causal True" in text

    @pytest.mark.parametrize("agreed", [True, False])
    def test_a_claim_is_offered_if_all_that_found_the_bug_offer_it(self, shard: Shard, agreed: bool) -> None:
        offers = ("--claims causal=false: all 3 failing cases are excluded",)
        runs = [
            shard("1/2", found(IN_CAUSAL), bugs=[DistinctBug(IN_CAUSAL, Occurrences(), offers)]),
            shard("2/2", found(IN_CAUSAL), bugs=[DistinctBug(IN_CAUSAL, Occurrences(), offers * agreed)]),
        ]
        (one,) = merged(*runs)["bugs"]
        assert one["offers"] == ["--claims causal=false: offered by all 2 runs that found it"] * agreed


class TestKilled:
    def test_what_was_written_counts_and_half_a_line_does_not(
        self, shard: Shard, capsys: pytest.CaptureFixture[str]
    ) -> None:
        killed = shard("1/3", found(IN_CAUSAL), status=None)
        add_line(killed, '{"item": {"kernel": "k", "la')
        summary = merged(killed, shard("3/3", found(IN_CAUSAL), bugs=concluded(IN_CAUSAL)))
        assert summary["shards"] == {"ended": ["3/3"], "cut short": ["1/3"], "missing": ["2/3"]}
        assert [one["failures"] for one in summary["bugs"]] == [2]
        assert [row["examples"] for row in summary["results"]] == [10]
        told = capsys.readouterr().out
        assert "\nruns that came to their end: 1 of 3\n" in told
        assert "\ncut short, counted as far as they came: 1/3\n" in told
        assert "\nmissing, nothing of them is counted: 2/3\n" in told

    @pytest.mark.parametrize("record", [IN_CAUSAL.to_dict(), {BEGUN: IN_CAUSAL.to_dict()}])
    def test_a_bug_whose_item_had_not_ended_is_there(self, shard: Shard, record: dict[str, Any]) -> None:
        """The process is killed after it has found out all of the bug, or before."""
        killed = shard("1/1", found() | {"dtype": "float32"}, status=None)
        Ledger(killed / JOURNALS / LEDGER).append(record)
        write(IN_CAUSAL.failure, killed)
        summary = merged(killed)
        assert [(one["folder"], one["failures"]) for one in summary["bugs"]] == [(IN_CAUSAL.key, 1)]
        assert [row["verdict"] for row in summary["results"]] == ["broken"]

    def test_a_failure_that_turned_out_to_be_none_is_not_there(self, shard: Shard) -> None:
        killed = shard("1/1", found(), status=None)
        for record in ({BEGUN: IN_CAUSAL.to_dict()}, {WITHDRAWN: IN_CAUSAL.key}):
            Ledger(killed / JOURNALS / LEDGER).append(record)
        assert not merged(killed, status=0)["bugs"]

    @pytest.mark.parametrize("text", [None, "", '{"flashproof": 1, "vers'])
    def test_one_that_wrote_nothing_is_missing(self, shard: Shard, tmp_path: Path, text: str | None) -> None:
        silent = tmp_path / "silent"
        (silent / JOURNALS).mkdir(parents=True)
        if text is not None:
            (silent / JOURNALS / RECORD).write_text(text)
        alone = merged(shard("mine", found(), status=0), silent, status=0)["shards"]
        assert alone == {"ended": [str(tmp_path / "mine")], "cut short": [], "missing": [str(silent)]}
        of_shards = merged(shard("2/2", found(), status=0), silent, status=0)["shards"]
        assert of_shards == {"ended": ["2/2"], "cut short": [], "missing": ["1/2"]}
        assert "shards missing: 1/2" in (tmp_path / "merged/index.html").read_text()

    def test_an_interrupted_run_is_cut_short(self, shard: Shard) -> None:
        run = shard("1/1", found(), status=pytest.ExitCode.INTERRUPTED)
        assert merged(run, status=0)["shards"]["cut short"] == ["1/1"]


class TestStatus:
    def test_a_failure_that_is_no_bug_is_told_and_fails(
        self, shard: Shard, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = shard("1/1", found(), status=None)
        add_line(run, json.dumps({"failed": "test_x", "told": "a known failure is gone"}) + "\n")
        merged(run)
        assert "\n1/1: FAILED test_x\na known failure is gone\n" in capsys.readouterr().out

    def test_what_the_screen_says_is_not_repeated(
        self, shard: Shard, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = shard("1/1", found(IN_CAUSAL), status=None)
        text = {"failed": "test_x", "told": f"law broken: {IN_CAUSAL.key}/report.md"}
        add_line(run, json.dumps(text) + "\n")
        merged(run)
        assert "FAILED" not in capsys.readouterr().out

    def test_a_kernel_that_refuses_everything_fails(self, shard: Shard) -> None:
        assert merged(shard("1/1", found(examples=0, refusals=9), status=0))["complaints"]


class TestBadInput:
    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"version": "0.0"}, r"got Flashproof \S+ in \S+1-2 and 0.0 in \S+2-2, expected one version"),
            ({"shard": "1/2"}, "got shard 1/2 in .* and 1/2 in .*, expected different shards of one number"),
            ({"shard": "2/3"}, "got shard 1/2 in .* and 2/3 in .*, expected different shards of one number"),
            ({"flashproof": 2}, r"\S+results.jsonl: can't be read \(ValueError: got format 2, expected 1\)"),
            ({"kernels": [{}]}, r"\S+results.jsonl: can't be read \(KeyError: .*"),
            (
                {"info": replace(INFO, printed={"head_dims": "128", "lse": "true"})},
                "got the claim head_dims of k as 64 in .* and 128 in .*, expected one claim",
            ),
        ],
    )
    def test_shards_that_are_unlike_are_refused(self, shard: Shard, change: Any, told: str) -> None:
        folders = shard("1/2", found()), shard("2/2", found(), **change)
        self.refused(told, *map(str, folders))

    def test_what_is_no_run_is_refused(self, shard: Shard, tmp_path: Path) -> None:
        expected = "got '.*', expected a report directory with the folder .journal"
        self.refused(expected, str(tmp_path / "missing"))
        (tmp_path / "other").mkdir()
        self.refused(expected, str(tmp_path / "other"))
        run = shard("run", found())
        self.refused(f"got {run} twice, expected each run once", str(run), str(run))
        self.refused("the following arguments are required: DIR")
        add_line(run, "7\n")
        self.refused(r"\S+results.jsonl: can't be read \(TypeError: .*", str(run))
        (run / JOURNALS / RECORD).unlink()
        self.refused("got no run with a result, expected at least one", str(run))
        self.refused("got no run with a result, expected at least one", str(shard("2/2")))

    def test_where_the_result_cannot_go_is_refused(self, shard: Shard, tmp_path: Path) -> None:
        run = str(shard("run", found(), status=0))
        self.refused("--report-dir: got .*, expected a folder that is not merged", run, "--report-dir", run)
        (tmp_path / "file").touch()
        told = r"--report-dir: got .*, expected a folder that can be written \(.*\)"
        self.refused(told, run, "--report-dir", str(tmp_path / "file"))

    def refused(self, told: str, *arguments: str) -> None:
        with pytest.raises(ValueError, match=rf"^{told}$") as refused:
            main(arguments)
        assert "\n" not in str(refused.value)


class TestRecord:
    def test_a_line_that_could_not_be_written_is_written_later(self, tmp_path: Path) -> None:
        folder = tmp_path / "full"
        recorder = Recorder(folder / RECORD, {"n": 1})
        recorder.add({"n": 2})
        folder.mkdir()
        (folder / RECORD).write_text('{"n": ')
        recorder.add({"n": 3})
        assert (folder / RECORD).read_text().split() == ['{"n":', '{"n":1}', '{"n":2}', '{"n":3}']

    def test_a_new_run_begins_a_new_file(self, tmp_path: Path) -> None:
        for n in (1, 2):
            Recorder(tmp_path / RECORD, {"n": n})
        assert (tmp_path / RECORD).read_text() == '{"n":2}\n'

    def test_a_kernel_is_read_as_it_was_written(self, shard: Shard) -> None:
        info = replace(INFO, claims=("lse=true",), known_failures=load("sdpa_math").known_failures)
        run = read_run(shard("run", info=info))
        assert run is not None
        read = run.results.infos["k"]
        assert (read.claims, read.capabilities) == (info.claims, info.capabilities)
        assert json.dumps(read.to_dict()) == json.dumps(info.to_dict())
