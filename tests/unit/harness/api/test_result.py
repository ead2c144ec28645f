"""A result: what it says of a kernel, and that a kernel which does not hold fails a test with all of that."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.api.result import Result
from tests.harness.programs.verdict import verdict_of
from tests.harness.report.folder import write
from tests.unit.support.reports import bug, summary
from tests.unit.support.running import ENVIRONMENT


def result(*bugs: Any, report_dir: Path = Path("reports"), marks: str = "held", **run: Any) -> Result:
    content = summary(*bugs, **run)
    for row in content["results"]:
        row["mark"] = marks
    return Result(verdict_of(content, report_dir), "log")


def test_one_that_held_passes() -> None:
    one = result()
    one.check()
    assert (one.held, one.status, one.score, one.bugs, one.less_precise, one.notes) == (
        True,
        "held",
        1.0,
        (),
        (),
        (),
    )
    assert str(one) == repr(one) == "k.f: held, score 1, 6 examples in 3672 s"
    assert one.coverage["pairs"] == {"tried": 0, "claimed": 0}
    assert one.report_dir == Path("reports")


def test_one_case_is_one_example() -> None:
    one = result()
    one.verdict["kernels"]["k.f"]["examples"] = 1
    assert str(one) == "k.f: held, score 1, 1 example in 3672 s"


def test_each_bug_has_its_case_its_folder_and_its_text(tmp_path: Path) -> None:
    found = bug(certificate="delta is 0")
    failure = found.bug.failure
    object.__setattr__(failure, "environment", ENVIRONMENT)
    write(failure, tmp_path)
    (one,) = result(found, report_dir=tmp_path, marks="broken", exit=1).bugs
    assert one.case == "Case(dtype='float16', causal=True)"
    assert one.law == "forward"
    assert one.certificate == "delta is 0"
    assert one.report == tmp_path / found.bug.key
    assert one.text == (one.report / "report.md").read_text()
    assert one.case in one.text
    assert one.replay.endswith(f"--replay {one.report}/case.json")


def test_one_that_did_not_hold_fails_with_all_that_a_maintainer_asks_for() -> None:
    one = result(bug(), bug(causal=False, tensor="lse"), marks="broken", exit=1)
    with pytest.raises(AssertionError) as raised:
        one.check()
    text = str(raised.value)
    assert text.startswith(
        "k.f: broken, score 0.5, 6 examples in 3672 s\n\n1. k.f: law `forward` is broken, "
    )
    assert text.count("\n   smallest  Case(") == 2
    assert "\n   claim     out is within the rounding bound of float64\n" in text
    assert "\n   needs     only with causal True\n" in text
    assert "\n   replay    " in text
    assert "instead" not in text


def test_one_that_is_less_precise_or_refuses_says_so() -> None:
    one = result(marks="less precise", exit=1)
    one.verdict["less_precise"]["k.f"] = "as precise as P in float16"
    assert not one.held
    assert one.less_precise == ("as precise as P in float16",)
    assert str(one).endswith("\n\nas precise as P in float16")
    refusing = result(marks="refused", exit=1)
    refusing.verdict["notes"].append("k.f refused all 12 cases")
    assert str(refusing).partition("\n")[2].startswith("\nk.f refused all 12 cases")


def test_one_of_a_run_that_was_interrupted_does_not_hold() -> None:
    assert not result(exit=2).held
