"""Failing cases outlast a run, machines share them, and a database that is lost is told and ends nothing."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strategies.case import Case
from tests.harness.bugs.bug import Bug, Severity
from tests.harness.law import law_named
from tests.harness.report.database import Kept, Near, finds_at
from tests.harness.report.results import Results
from tests.harness.report.screen import notes
from tests.harness.run import Run
from tests.harness.session.subject import TimeUp
from tests.harness.verdict import INTERMITTENT, LEAK
from tests.unit.support import running
from tests.unit.support.bugs import CASE, CAUSAL, bug
from tests.unit.support.reports import info, item
from tests.unit.support.running import TOYS, SubjectOf, finding_of, pytest_run, summary_in

SERVER = shutil.which("redis-server")
WITHOUT_REDIS = "the package redis is not installed here"
BUG = bug(CASE, ("out",), CAUSAL)


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


def near(ratio: float, tensor: str = "out", law: str = "forward", **case: Any) -> Near:
    fields = {"dtype": "float32", "causal": False, "launch": (), **case}
    return Near(Run("k", (), law, replace(CASE, **fields)), tensor, ratio)


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
        assert subject.known.ignored(running.CASE) == {"out"}
        run = Run("toys.wrong", (), "forward", running.CASE)
        subject.corpus = [Kept(run, BUG.failure.finding)]
        subject.uphold_corpus(law_named("forward"))
        assert subject.tally.examples == 1
        assert subject.tally.broken == 0
        assert subject.gone == []


class TestLost:
    def test_the_summary_says_so_once(self, subject_of: SubjectOf) -> None:
        subject = subject_of("sound")
        subject.known.finds.notices.append("lost")
        results = Results([info("f")])
        for _ in range(2):
            results.add(item("f", "forward", "float32") | {"notices": subject.results()["notices"]})
        assert list(notes(results, 80)) == ["lost"]
        assert results.to_dict({}, [])["notices"] == ["lost"]


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
