"""Failing cases outlast a run, machines share them, and a database that is lost is told and ends nothing."""

import html
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from strategies.case import Case
from tests.faults.killing import start
from tests.harness.bugs.bug import Bug, Severity
from tests.harness.bugs.failure import Failure
from tests.harness.law import law_named
from tests.harness.report.database import Finds, Kept, Near, finds_at
from tests.harness.report.results import Results
from tests.harness.report.screen import notes
from tests.harness.run import Run
from tests.harness.session.subject import TimeUp
from tests.harness.verdict import INTERMITTENT, LEAK
from tests.unit.support import running
from tests.unit.support.bugs import CASE, CAUSAL
from tests.unit.support.finds import BUG, SMALLER, WITHOUT_REDIS, cases_of, local_folder, near, on, values_in
from tests.unit.support.reports import info, item
from tests.unit.support.running import TOYS, SubjectOf, finding_of, pytest_run, summary_in

SERVER = shutil.which("redis-server")
RARE = """
from toys import sound


def rare(q, k, v, *, causal, sm_scale):
    out, lse = sound(q, k, v, causal=causal, sm_scale=sm_scale)
    return (out + 1 if (q.shape[2], k.shape[2]) == (171, 93) else out), lse
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Start a Redis server, and yield its URL and its process."""
    pytest.importorskip("redis", reason=WITHOUT_REDIS)
    if SERVER is None:
        pytest.skip("there is no redis-server here")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    process = subprocess.Popen([SERVER, *options], stdout=subprocess.DEVNULL)
    while not is_open(port):
        assert process.poll() is None, "redis-server ended"
        time.sleep(0.05)
    yield f"redis://127.0.0.1:{port}/3", process
    process.kill()
    process.wait()


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def at_once(do: Callable[[int, Finds], object], all_finds: list[Finds]) -> None:
    """Let several processes' finds do something at the same time."""
    with ThreadPoolExecutor(len(all_finds)) as pool:
        list(pool.map(do, range(len(all_finds)), all_finds))


def keep_many(at: int, finds: Finds) -> None:
    """Keep cases that come nearer and nearer to a bound, each at another length."""
    for i in range(20):
        finds.keep_nearest("k", [near((8 * i + at) / 1000, seqlen_q=i)])


def keep_often(at: int, finds: Finds) -> None:
    """Keep one case again and again, each time with another finding."""
    for i in range(10):
        finds.keep(on(CASE, finding=replace(BUG.failure.finding, total=8 * i + at)))


class TestShared:
    def test_another_machine_gets_what_one_has_found(
        self, server: tuple[str, object], tmp_path: Path
    ) -> None:
        for place in (server[0], str(tmp_path / "folder")):
            one, other = (finds_at(place, check=True) for _ in range(2))
            assert other.of("k") == ()
            one.keep(BUG)
            assert other.of("k") == (Kept(Run("k", (), "forward", CASE), BUG.failure.finding, (CAUSAL,)),)
            assert other.of("another") == ()
            assert other.notices == one.notices == []


class TestNearest:
    def test_of_each_law_dtype_and_tensor_the_nearest_case_of_all_processes_is_kept(
        self, server: tuple[str, object], tmp_path: Path
    ) -> None:
        for place in (server[0], str(tmp_path / "folder")):
            one, other = (finds_at(place, check=True) for _ in range(2))
            one.keep_nearest("k", [near(0.5), near(0.2, tensor="lse"), near(0.3, dtype="float16")])
            assert len(other.near("k")) == 3
            other.keep_nearest("k", [near(0.4, seqlen_q=1), near(0.6, seqlen_q=2)])
            one.keep_nearest("k", [near(0.55, seqlen_q=3)])
            assert {(x.tensor, x.run.case.dtype): x.ratio for x in one.near("k")} == {
                ("out", "float32"): 0.6,
                ("lse", "float32"): 0.2,
                ("out", "float16"): 0.3,
            }
            assert len(values_in(one, b"flashproof near k")) == 3
            assert one.near("another") == one.of("k") == ()
            assert other.notices == one.notices == []

    def test_many_that_replace_one_at_once_leave_the_nearest(
        self, server: tuple[str, object], tmp_path: Path
    ) -> None:
        for place in (server[0], str(tmp_path / "folder")):
            all_finds = [finds_at(place, check=True) for _ in range(8)]
            at_once(keep_many, all_finds)
            assert all_finds[0].near("k") == (near(0.159, seqlen_q=19),)
            assert len(values_in(all_finds[0], b"flashproof near k")) == 1
            assert not any(finds.notices for finds in all_finds)


class TestGone:
    @pytest.mark.parametrize(
        ("kernel", "case", "changed", "is_gone"),
        [
            ("sound", running.CASE, {}, True),
            ("sound", running.CASE, {"spec": "/another/machine/toys.py:sound"}, True),
            ("sound", running.CASE, {"spec": "toys.py:wrong"}, False),
            ("sound", running.CASE, {"kind": INTERMITTENT}, False),
            ("sound", running.CASE, {"kind": LEAK}, False),
            ("wrong", running.CASE, {"spec": "toys.wrong"}, False),
            ("refusing_all", running.CASE, {"spec": "toys.refusing_all"}, False),
        ],
    )
    def test_a_bug_is_gone_if_its_case_holds_and_nothing_else_may_be_the_reason(
        self, subject_of: SubjectOf, kernel: str, case: Case, changed: dict[str, str], is_gone: bool
    ) -> None:
        subject = subject_of(kernel, shrink=False)
        run = Run(changed.get("spec", "toys.sound"), (), "forward", case)
        finding = replace(BUG.failure.finding, kind=changed.get("kind", "error"))
        subject.corpus = [Kept(run, finding), Kept(run)]
        for _ in range(2):
            subject.uphold_corpus(law_named("forward"))
        assert len(subject.gone) == 2 * is_gone
        assert len(subject.results()["gone"]) == 2 * is_gone

    def test_a_tensor_that_was_not_judged_does_not_hold(self, subject_of: SubjectOf) -> None:
        subject = subject_of("wrong", shrink=False)
        everywhere = Bug(
            replace(BUG.failure, kernel="toys.wrong", case=running.CASE), ("out",), severity=Severity(20, 20)
        )
        subject.known.bugs[everywhere.key] = everywhere
        assert subject.known.ignored("forward", running.CASE) == {"out"}
        run = Run("toys.wrong", (), "forward", running.CASE)
        subject.corpus = [Kept(run, BUG.failure.finding)]
        subject.uphold_corpus(law_named("forward"))
        assert subject.tally.examples == 1
        assert subject.tally.broken == 0
        assert subject.gone == []

    def test_the_case_of_a_bug_that_is_gone_is_removed(
        self, server: tuple[str, object], tmp_path: Path
    ) -> None:
        for place in (server[0], str(tmp_path / "folder")):
            one, other = (finds_at(place, check=True) for _ in range(2))
            for each in (BUG, SMALLER):
                one.keep(replace(each, failure=replace(each.failure, number=len(each.failure.case.launch))))
            other.forget([replace(BUG, needs=())])
            other.forget([BUG])
            assert cases_of(one) == [repr(SMALLER.failure.case)]

    def test_nothing_is_lost_where_many_keep_one_case_at_once(
        self, server: tuple[str, object], tmp_path: Path
    ) -> None:
        for place in (server[0], str(tmp_path / "folder")):
            all_finds = [finds_at(place, check=True) for _ in range(8)]
            at_once(keep_often, all_finds)
            assert cases_of(all_finds[0]) == [repr(CASE)]
            assert not any(finds.notices for finds in all_finds)
            at_once(lambda at, finds: finds.forget([BUG]) if at % 2 else finds.keep(SMALLER), all_finds)
            assert cases_of(all_finds[0]) == [repr(SMALLER.failure.case)]


class TestLost:
    def test_the_summary_says_so_once(self, subject_of: SubjectOf) -> None:
        subject = subject_of("sound")
        subject.known.finds.notices.append("lost")
        results = Results([info("f")])
        for _ in range(2):
            results.add(item("f", "forward", "float32") | {"notices": subject.results()["notices"]})
        assert list(notes(results, 80)) == ["lost"]
        assert results.to_dict({}, [])["notices"] == ["lost"]

    def test_a_server_that_ends_is_replaced_by_a_folder_and_told(
        self, server: tuple[str, "subprocess.Popen[bytes]"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        place, process = server
        local = local_folder(tmp_path, monkeypatch)
        finds = finds_at(place, check=True)
        finds.keep(BUG)
        finds.keep_nearest("k", [near(0.5)])
        process.kill()
        process.wait()
        finds.keep(on(CASE, number=1))
        finds.keep(on(replace(CASE, causal=False), number=2))
        finds.keep_nearest("k", [near(0.4)])
        for kept in (finds, finds_at(str(local), check=False)):
            assert cases_of(kept) == sorted([repr(CASE), repr(replace(CASE, causal=False))], key=len)
            assert kept.near("k") == (near(0.4),)
        (told,) = finds.notices
        assert told.startswith(f"the database {place} was lost (")
        assert told.endswith(f"): finds go on to {local}")

    def test_a_run_goes_on_with_a_folder_tells_so_once_and_loses_no_bug(
        self,
        server: tuple[str, "subprocess.Popen[bytes]"],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        place, process = server
        monkeypatch.setenv("HYPOTHESIS_STORAGE_DIRECTORY", str(tmp_path / "local"))
        reports, shared, first = tmp_path / "reports", finds_at(place, check=True), "planted.corrupting"
        run = start(reports, 0.7, ["corrupting", "exiting_politely"], "-n", "2", "--database", place)
        while run.poll() is None and not shared.of(first):
            time.sleep(0.1)  # wait for the first bug that is kept, however long it takes
        process.kill()
        printed, _ = run.communicate()
        assert run.returncode == 1, printed
        summary = json.loads((reports / "summary.json").read_text())
        found = [Bug.from_dict(bug["record"]).failure for bug in summary["bugs"]]
        kinds = {first: "memory", "planted.exiting_politely": "died"}
        assert {failure.kernel: failure.finding.kind for failure in found} == kinds, printed
        assert len(found) == len(kinds), printed
        folder = tmp_path / "local" / "examples"
        (told,) = summary["notices"]
        assert told.startswith(f"the database {place} was lost ("), told
        assert told.endswith(f"): finds go on to {folder}")
        assert " ".join(printed.split()).count(f"the database {place} was lost") == 1
        local = finds_at(str(folder), check=False)
        for failure in found:
            assert repr(failure.case) in cases_of(local, failure.kernel)


class TestRuns:
    def test_a_report_is_kept_as_it_is_written(self, subject_of: SubjectOf, tmp_path: Path) -> None:
        subject = subject_of("wrong", shrink=False)
        subject.known.finds = finds_at(str(tmp_path / "folder"), check=True)
        finding_of(subject, "forward", running.CASE)
        (failure,) = subject.known.failures.values()
        assert [kept.run.case for kept in subject.known.finds.of(subject.info.name)] == [failure.case]

    def test_all_are_run_although_the_time_of_the_turn_is_over(self, subject_of: SubjectOf) -> None:
        subject = subject_of("sound")
        lengths = [replace(CASE, seqlen_q=n, dtype="float32", causal=False, launch=()) for n in (1, 2, 3)]
        subject.corpus = [Kept(Run("k", (), "forward", case)) for case in lengths]
        subject.begin(seconds=0.0)
        subject.uphold_corpus(law_named("forward"))
        assert subject.tally.examples == 3

    def test_cases_that_came_near_are_run_until_the_turn_is_over_and_kept_as_they_are_today(
        self, subject_of: SubjectOf, tmp_path: Path
    ) -> None:
        subject, law = subject_of("sound"), law_named("forward")
        finds = subject.known.finds = finds_at(str(tmp_path / "folder"), check=True)
        plain = [replace(CASE, seqlen_q=n, causal=False, launch=()) for n in (1, 2, 3)]
        stored = [Near(Run("toys.sound", (), "forward", case), "out", 0.999) for case in plain]
        others = [near(0.9, dtype="float16"), near(0.9, law="backward"), near(0.9, launch=(("block_m", 64),))]
        finds.keep_nearest("toys.sound", [*stored, *others])
        subject.near = [*stored, replace(stored[0], tensor="lse"), *others]
        subject.begin(seconds=0.0)
        with pytest.raises(TimeUp):
            subject.uphold_near(law)
        assert subject.tally.examples == 1
        subject.begin()
        subject.uphold_near(law)
        assert subject.tally.examples == subject.generated == 3
        subject.keep_nearest(law)
        kept = {
            x.tensor: x
            for x in finds.near("toys.sound")
            if x.run.law == "forward" and x.run.case.dtype == "float32"
        }
        assert {tensor: x.ratio for tensor, x in kept.items()} == subject.tally.largest
        assert kept["out"].ratio < 0.999
        assert repr(kept[subject.tally.worst_tensor].run.case) == subject.tally.worst_case
        subject.near = list(kept.values())
        subject.begin()
        subject.uphold_near(law)
        assert subject.changed == []

    @pytest.mark.nightly
    def test_the_nearest_case_of_one_run_is_the_first_of_the_next(self, tmp_path: Path) -> None:
        options = ["--kernel", f"{TOYS}:sound", "--database=kept", "-k", "test_forward and float32"]
        pytest_run(tmp_path, *options, "--examples=30")
        (before,) = summary_in(tmp_path)["results"]
        pytest_run(tmp_path, *options, "--examples=1")
        (now,) = summary_in(tmp_path)["results"]
        assert now["largest"] == before["largest"]
        assert now["worst_case"] == before["worst_case"]
        kept = finds_at(str(tmp_path / "kept"), check=True).near("toys.sound")
        assert now["examples"] == len({near.run for near in kept})

    def test_a_mended_bug_is_told_as_gone_once(self, server: tuple[str, object], tmp_path: Path) -> None:
        for at, place in enumerate((server[0], "folder")):
            folder = tmp_path / str(at)
            folder.mkdir()
            toys = folder / "toys.py"
            toys.write_text(TOYS.read_text())
            chosen = [
                "-k",
                "test_forward and float",
                "--examples=12",
                "--hypothesis-seed=1",
                "--shrink-calls=20",
            ]
            options = ["--kernel=toys.py:wrong", "--database", place, *chosen]
            pytest_run(folder, *options, status=1)
            (found,) = summary_in(folder)["bugs"]
            toys.write_text(TOYS.read_text().replace("MENDED = False", "MENDED = True"))
            text = pytest_run(folder, *options).stdout
            (told,) = summary_in(folder)["notices"]
            case = Bug.from_dict(found["record"]).failure.case
            assert told == (
                f"gone: law `forward` of toys.wrong, out was wrong ({case.dtype}): "
                f"the case that showed it holds now: {case!r}"
            )
            assert told in " ".join(text.split())
            assert told in html.unescape((folder / "reports/index.html").read_text())
            assert "gone: " not in pytest_run(folder, *options).stdout

    def test_the_find_of_one_machine_is_the_first_case_of_another(
        self, server: tuple[str, object], tmp_path: Path
    ) -> None:
        toys = TOYS.read_text()
        (tmp_path / "toys.py").write_text(toys)
        (tmp_path / "mine.py").write_text(RARE)
        options = [
            "--kernel=mine.py:rare",
            "--examples=1",
            "--shrink-calls=1",
            "-k",
            "test_forward and float32",
        ]
        pytest_run(tmp_path, *options, "--database", server[0])
        rare = replace(CASE, seqlen_q=171, seqlen_k=93, dtype="float32", causal=False, launch=())
        found = Failure(
            "/elsewhere/mine.py:rare", (), "forward", rare,
            kernel="mine.rare", finding=BUG.failure.finding, environment={},
        )  # fmt: skip
        finds_at(server[0], check=True).keep(Bug(found))
        text = pytest_run(tmp_path, *options, "--database", server[0], status=1).stdout
        assert f"\nfailing cases are kept in {server[0]}\n" in text
        (seen,) = summary_in(tmp_path)["bugs"]
        assert seen["folder"].startswith("mine.rare/forward-")
