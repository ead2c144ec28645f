"""Failing cases outlast a run, machines share them, and a database that is lost is told and ends nothing."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis._settings import local_settings
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.harness.report.database import Finds, finds_at
from tests.harness.verdict import INTERMITTENT
from tests.unit.support.bugs import CASE
from tests.unit.support.finds import BUG, SMALLER, WITHOUT_REDIS, cases_of, local_folder, near, on, values_in


class TestShared:
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

    def test_without_an_option_the_profile_decides(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        local = local_folder(tmp_path, monkeypatch)
        finds_at(None, check=True).keep(BUG)
        assert cases_of(finds_at(str(local), check=True)) == [repr(CASE)]

    def test_fresh_random_cases_are_kept_where_a_database_is_given(self, tmp_path: Path) -> None:
        with local_settings(settings.get_profile("fuzz")):
            assert not finds_at(None, check=True).databases
            assert finds_at(str(tmp_path), check=True).databases


class TestNearest:
    def test_a_case_that_is_farther_from_its_bound_today_is_kept_as_it_is_today(self, tmp_path: Path) -> None:
        finds = finds_at(str(tmp_path), check=True)
        finds.keep_nearest("k", [near(0.9), near(0.5, tensor="lse")])
        finds.keep_nearest(
            "k", [near(0.1), near(0.3, seqlen_q=1)], changed=[near(0.9), near(0.5, tensor="lse")]
        )
        assert finds.near("k") == (near(0.3, seqlen_q=1),)

    def test_what_cannot_be_read_is_left_as_it_is(self, tmp_path: Path) -> None:
        DirectoryBasedExampleDatabase(tmp_path).save(b"flashproof near k", b'{"flashproof": 99}')
        finds = finds_at(str(tmp_path), check=True)
        finds.keep_nearest("k", [near(0.5)])
        assert finds.near("k") == (near(0.5),)
        assert b'{"flashproof": 99}' in values_in(finds, b"flashproof near k")


class TestGone:
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
