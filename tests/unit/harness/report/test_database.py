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
from typing import Any

import pytest
from hypothesis import settings
from hypothesis._settings import local_settings
from hypothesis.database import DirectoryBasedExampleDatabase

from strategies.case import Case
from tests.faults.killing import start
from tests.harness.bugs.bug import Bug
from tests.harness.bugs.failure import Failure
from tests.harness.report.database import Finds, Kept, Near, finds_at
from tests.harness.run import Run
from tests.harness.verdict import INTERMITTENT
from tests.unit.support.bugs import CASE, CAUSAL, bug
from tests.unit.support.running import TOYS, pytest_run, summary_in


def on(case: Case, **changed: Any) -> Bug:
    """Return the same bug on another case."""
    one = bug(CASE, ("out",), CAUSAL)
    return replace(one, failure=replace(one.failure, case=case, **changed))


SERVER = shutil.which("redis-server")
WITHOUT_REDIS = "the package redis is not installed here"
BUG = bug(CASE, ("out",), CAUSAL)
SMALLER = on(replace(CASE, seqlen_q=1))

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
    monkeypatch.setattr(
        "tests.harness.report.database.local_database", lambda: DirectoryBasedExampleDatabase(folder)
    )
    return folder


def near(ratio: float, tensor: str = "out", law: str = "forward", **case: Any) -> Near:
    fields = {"dtype": "float32", "causal": False, "launch": (), **case}
    return Near(Run("k", (), law, replace(CASE, **fields)), tensor, ratio)


def values_in(finds: Finds, key: bytes) -> set[bytes]:
    (database, *_) = finds.databases.values()
    return {*database.fetch(key)}


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


def cases_of(finds: Finds, kernel: str = "k") -> list[str]:
    return [repr(kept.run.case) for kept in finds.of(kernel)]


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

    def test_a_smaller_case_replaces_a_larger_one_of_the_same_failure(self, tmp_path: Path) -> None:
        finds = finds_at(str(tmp_path), check=True)
        for one in (BUG, SMALLER, SMALLER):
            finds.keep(one)
        assert cases_of(finds) == [repr(SMALLER.failure.case)]
        finds.keep(on(CASE, number=1))
        assert cases_of(finds) == [repr(SMALLER.failure.case), repr(CASE)]

    def test_where_the_file_of_a_kernel_is_makes_no_difference(self, tmp_path: Path) -> None:
        for spec in ("/home/a/k.py:f", "k.py:f"):
            finds_at(str(tmp_path), check=True).keep(on(CASE, spec=spec))
        assert cases_of(finds_at(str(tmp_path), check=True)) == [repr(CASE)]

    def test_what_cannot_be_read_is_left_out(self, tmp_path: Path) -> None:
        finds = finds_at(str(tmp_path), check=True)
        finds.keep(BUG)
        for value in (b"\xff", b"7", b'{"flashproof": 99}'):
            DirectoryBasedExampleDatabase(tmp_path).save(b"flashproof k", value)
        assert cases_of(finds) == [repr(CASE)]

    def test_without_an_option_the_profile_decides(self, local: Path) -> None:
        finds_at(None, check=True).keep(BUG)
        assert cases_of(finds_at(str(local), check=True)) == [repr(CASE)]

    def test_fresh_random_cases_are_kept_where_a_database_is_given(self, tmp_path: Path) -> None:
        with local_settings(settings.get_profile("fuzz")):
            assert not finds_at(None, check=True).databases
            assert finds_at(str(tmp_path), check=True).databases


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

    def test_a_case_that_is_farther_from_its_bound_today_is_kept_as_it_is_today(self, tmp_path: Path) -> None:
        finds = finds_at(str(tmp_path), check=True)
        finds.keep_nearest("k", [near(0.9), near(0.5, tensor="lse")])
        finds.keep_nearest(
            "k", [near(0.1), near(0.3, seqlen_q=1)], changed=[near(0.9), near(0.5, tensor="lse")]
        )
        assert finds.near("k") == (near(0.3, seqlen_q=1),)

    def test_many_that_replace_one_at_once_leave_the_nearest(
        self, server: tuple[str, object], tmp_path: Path
    ) -> None:
        for place in (server[0], str(tmp_path / "folder")):
            all_finds = [finds_at(place, check=True) for _ in range(8)]
            at_once(keep_many, all_finds)
            assert all_finds[0].near("k") == (near(0.159, seqlen_q=19),)
            assert len(values_in(all_finds[0], b"flashproof near k")) == 1
            assert not any(finds.notices for finds in all_finds)

    def test_what_cannot_be_read_is_left_as_it_is(self, tmp_path: Path) -> None:
        DirectoryBasedExampleDatabase(tmp_path).save(b"flashproof near k", b'{"flashproof": 99}')
        finds = finds_at(str(tmp_path), check=True)
        finds.keep_nearest("k", [near(0.5)])
        assert finds.near("k") == (near(0.5),)
        assert b'{"flashproof": 99}' in values_in(finds, b"flashproof near k")


class TestGone:
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

    def test_a_case_that_turns_out_to_come_and_go_is_not_kept_as_another(self, tmp_path: Path) -> None:
        finds = finds_at(str(tmp_path), check=True)
        finds.keep(BUG)
        finds.withdraw(BUG.key)
        assert finds.of("k") == ()
        finds.keep(BUG)
        finds.keep(on(CASE, finding=replace(BUG.failure.finding, kind=INTERMITTENT)))
        (kept,) = finds.of("k")
        assert not kept.is_gone_if_it_holds


class TestLost:
    def test_a_server_that_ends_is_replaced_by_a_folder_and_told(
        self, server: tuple[str, "subprocess.Popen[bytes]"], local: Path
    ) -> None:
        place, process = server
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

    def test_where_nothing_can_be_written_the_reports_remain(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        broken = DirectoryBasedExampleDatabase(tmp_path / "file")
        finds = Finds({"a": broken, "b": broken})
        finds.keep(BUG)
        assert finds.of("k") == ()
        assert finds.notices == [
            "the database a was lost (it can't be written): finds go on to b",
            "the database b was lost (it can't be written): finds go on to the reports alone",
        ]


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
