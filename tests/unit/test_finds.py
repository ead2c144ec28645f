"""Failing cases outlast a run, machines share them, and a database that is lost is told and ends nothing."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis._settings import local_settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.harness.finds import Finds, finds_at
from tests.harness.law import law_named
from tests.harness.report import Failure
from tests.harness.results import Results
from tests.harness.run import Run
from tests.harness.screen import notes
from tests.unit import running
from tests.unit.bugs import CASE, CAUSAL, bug
from tests.unit.running import SubjectOf, finding_of, pytest_run, summary_in
from tests.unit.test_matrix import info, item

SERVER = shutil.which("redis-server")
WITHOUT_REDIS = "the package redis is not installed here"
FAILURE = bug(CASE, ("out",), CAUSAL).failure
SMALLER = replace(FAILURE, case=replace(CASE, seqlen_q=1))

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


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put Hypothesis's own database into a folder of the test's, and return the folder."""
    folder = tmp_path / "local"
    monkeypatch.setattr("tests.harness.finds.local_database", lambda: DirectoryBasedExampleDatabase(folder))
    return folder


def cases_of(finds: Finds, kernel: str = "k") -> list[str]:
    return [repr(run.case) for run in finds.of(kernel)]


class TestShared:
    def test_another_machine_gets_what_one_has_found(
        self, server: tuple[str, object], tmp_path: Path
    ) -> None:
        for place in (server[0], str(tmp_path / "folder")):
            one, other = (finds_at(place, check=True) for _ in range(2))
            assert other.of("k") == ()
            one.keep(FAILURE)
            assert other.of("k") == (Run("k", (), FAILURE.law, FAILURE.case),)
            assert other.of("another") == ()
            assert other.notices == one.notices == []

    def test_a_smaller_case_replaces_a_larger_one_of_the_same_failure(self, tmp_path: Path) -> None:
        finds = finds_at(str(tmp_path), check=True)
        for failure in (FAILURE, SMALLER, SMALLER):
            finds.keep(failure)
        assert cases_of(finds) == [repr(SMALLER.case)]
        finds.keep(replace(FAILURE, number=1))
        assert cases_of(finds) == [repr(SMALLER.case), repr(CASE)]

    def test_where_the_file_of_a_kernel_is_makes_no_difference(self, tmp_path: Path) -> None:
        for spec in ("/home/a/k.py:f", "k.py:f"):
            finds_at(str(tmp_path), check=True).keep(replace(FAILURE, spec=spec))
        assert cases_of(finds_at(str(tmp_path), check=True)) == [repr(CASE)]

    def test_what_cannot_be_read_is_left_out(self, tmp_path: Path) -> None:
        finds = finds_at(str(tmp_path), check=True)
        finds.keep(FAILURE)
        for value in (b"\xff", b"7", b'{"flashproof": 99}'):
            DirectoryBasedExampleDatabase(tmp_path).save(b"flashproof k", value)
        assert cases_of(finds) == [repr(CASE)]

    def test_without_an_option_the_profile_decides(self, local: Path) -> None:
        finds_at(None, check=True).keep(FAILURE)
        assert cases_of(finds_at(str(local), check=True)) == [repr(CASE)]

    def test_fresh_random_cases_are_kept_where_a_database_is_given(self, tmp_path: Path) -> None:
        with local_settings(settings.get_profile("fuzz")):
            assert not finds_at(None, check=True).databases
            assert finds_at(str(tmp_path), check=True).databases


class TestLost:
    def test_a_server_that_ends_is_replaced_by_a_folder_and_told(
        self, server: tuple[str, "subprocess.Popen[bytes]"], local: Path
    ) -> None:
        place, process = server
        finds = finds_at(place, check=True)
        process.kill()
        process.wait()
        finds.keep(FAILURE)
        assert cases_of(finds) == [repr(CASE)]
        assert cases_of(finds_at(str(local), check=False)) == [repr(CASE)]
        (told,) = finds.notices
        assert told.startswith(f"the database {place} was lost (")
        assert told.endswith(f"): finds go on to {local}")

    def test_where_nothing_can_be_written_the_reports_remain(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        broken = DirectoryBasedExampleDatabase(tmp_path / "file")
        finds = Finds({"a": broken, "b": broken})
        finds.keep(FAILURE)
        assert finds.of("k") == ()
        assert finds.notices == [
            "the database a was lost (it can't be written): finds go on to b",
            "the database b was lost (it can't be written): finds go on to the reports alone",
        ]

    def test_the_summary_says_so_once(self, subject_of: SubjectOf) -> None:
        subject = subject_of("sound")
        subject.known.finds.notices.append("lost")
        results = Results([info("f")])
        for _ in range(2):
            results.add(item("f", "forward", "float32") | {"notices": subject.results()["notices"]})
        assert list(notes(results, 80)) == ["lost"]
        assert results.to_dict({}, [])["notices"] == ["lost"]


class TestPlaces:
    @pytest.mark.parametrize(
        ("place", "told"),
        [
            ("", "got '', expected a folder or redis://host:port/number"),
            ("mysql://host/0", "got 'mysql://host/0', expected a folder or redis://host:port/number"),
            (
                "redis://u:secret@127.0.0.1:1/0",
                r"got 'redis://127.0.0.1:1/0', expected a database that can be reached \(.* refused.*\)",
            ),
            (
                "redis://127.0.0.1:port/0",
                r"got 'redis://127.0.0.1:port/0', expected redis://host:port/number \(.*\)",
            ),
            (
                "{tmp}/file/folder",
                r"got '.*/file/folder', expected a database that can be reached \(it can't be written\)",
            ),
        ],
    )
    def test_one_that_cannot_be_used_is_refused_in_one_line(
        self, tmp_path: Path, place: str, told: str
    ) -> None:
        if place.startswith("redis:"):
            pytest.importorskip("redis", reason=WITHOUT_REDIS)
        (tmp_path / "file").touch()
        with pytest.raises(ValueError, match=rf"^{told}$") as refused:
            finds_at(place.replace("{tmp}", str(tmp_path)), check=True)
        assert "\n" not in str(refused.value)
        assert "secret" not in str(refused.value)


class TestRuns:
    def test_a_report_is_kept_as_it_is_written(self, subject_of: SubjectOf, tmp_path: Path) -> None:
        subject = subject_of("wrong", shrink=False)
        subject.known.finds = finds_at(str(tmp_path / "folder"), check=True)
        finding_of(subject, "forward", running.CASE)
        (failure,) = subject.known.failures.values()
        assert [run.case for run in subject.known.finds.of(subject.info.name)] == [failure.case]

    def test_all_are_run_although_the_time_of_the_turn_is_over(self, subject_of: SubjectOf) -> None:
        subject = subject_of("sound")
        lengths = [replace(CASE, seqlen_q=n, dtype="float32", causal=False, launch=()) for n in (1, 2, 3)]
        subject.corpus = [Run("k", (), "forward", case) for case in lengths]
        subject.begin(seconds=0.0)
        subject.uphold_corpus(law_named("forward"))
        assert subject.tally.examples == 3

    def test_the_find_of_one_machine_is_the_first_case_of_another(
        self, server: tuple[str, object], tmp_path: Path
    ) -> None:
        toys = Path(__file__).with_name("toys.py").read_text()
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
            kernel="mine.rare", finding=FAILURE.finding, environment={},
        )  # fmt: skip
        finds_at(server[0], check=True).keep(found)
        text = pytest_run(tmp_path, *options, "--database", server[0], status=1).stdout
        assert f"\nfailing cases are kept in {server[0]}\n" in text
        (seen,) = summary_in(tmp_path)["bugs"]
        assert seen["folder"].startswith("mine.rare/forward-")
