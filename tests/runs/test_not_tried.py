"""However a run ends, it says which laws it has not tried, and a kernel with bugs or such laws has not plainly held."""

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness.files import append_line
from tests.harness.programs.verdict import verdict_of
from tests.harness.report.ledger import BEGUN, Ledger
from tests.harness.report.page import page
from tests.harness.report.results import Results
from tests.harness.report.screen import notes
from tests.harness.session.item import names_of
from tests.unit.support.reports import RUN, Page, bug, info, item
from tests.unit.support.running import ENVIRONMENT, TOYS, pytest_run, summary_in

TWO = "(forward or memory) and float32"
"""Selects two laws at a dtype, of which ``forward`` comes first."""
STOPPING = """
import os, signal

def pytest_runtest_makereport(call):
    if call.when == "call":
        {stop}
"""
"""A plugin of pytest that ends the run as the first item has run, and before it is told what the item has found."""
SLOW = """
import time
from tests.unit.support.toys import sound

def attention(q, k, v, *, causal, sm_scale):
    time.sleep(2)
    return sound(q, k, v, causal=causal, sm_scale=sm_scale)
"""


def content(results: Results, status: int | None = 0) -> Any:
    """Return the content of a summary.json."""
    return json.loads(json.dumps({**results.to_dict(ENVIRONMENT, []), "run": {**RUN, "exit": status}}))


def told_by(results: Results, folder: Path, status: int | None = 0) -> str:
    """Return what the page of a run says."""
    return Page(page(content(results, status), folder)).text


def tried(*keys: tuple[str, str], kernel: str = "k.f") -> Results:
    """Return results of a run that was to try two laws at two dtypes, and has tried these."""
    results = Results([info(kernel, ("float16", "float32"))])
    results.selected = {
        (kernel, law, dtype) for law in ("forward", "exact") for dtype in ("float16", "float32")
    }
    for law, dtype in keys:
        results.add(item(kernel, law, dtype, examples=2))
    return results


def test_the_names_in_an_id() -> None:
    nodeid = "tests/properties/test_forward.py::test_forward[my-file.f-float16{}]"
    assert (
        names_of(nodeid.format("")) == names_of(nodeid.format("-12")) == ("my-file.f", "forward", "float16")
    )
    assert names_of("tests/unit/test_forward.py::test_forward[my-file.f-float16]") is None


def test_laws_are_told_by_name_and_with_dtypes_where_they_were_tried_at_others() -> None:
    assert tried().untried() == {"k.f": "forward, exact"}
    assert tried(("forward", "float16")).untried() == {"k.f": "forward (float32), exact"}
    assert tried(*((law, x) for law in ("forward", "exact") for x in ("float16", "float32"))).untried() == {}


def test_what_is_not_claimed_and_what_a_user_leaves_out_is_not_told() -> None:
    results = tried(("forward", "float16"), ("forward", "float32"))
    results.selected = {("k.f", "forward", x) for x in ("float16", "bfloat16", "float32")}
    assert results.untried() == {}


def test_cases_that_were_refused_or_known_to_fail_are_no_silence() -> None:
    results = tried(("exact", "float16"), ("exact", "float32"))
    results.add(item("k.f", "forward", "float16", refusals=4))
    results.add(item("k.f", "forward", "float32", known=4))
    assert results.untried() == {"k.f": "forward (float16)"}  # so few say nothing
    results.add(item("k.f", "forward", "float16", refusals=1))
    assert results.untried() == {}


def test_a_kernel_of_which_forward_was_not_judged_does_not_hold() -> None:
    of_forward = ["k.f: no example of law `forward` was judged, so the run does not say that it holds"]
    results = tried(("exact", "float16"), ("exact", "float32"))
    assert (results.unjudged(), results.exit_status) == (of_forward, 5)
    results.add(item("k.f", "forward", "float16", refusals=4))
    assert (results.unjudged(), results.exit_status) == (of_forward, 5)
    told = content(results, 5)
    assert told["unjudged"] == of_forward
    verdict = verdict_of(told, Path())
    assert (verdict["status"], verdict["kernels"]["k.f"]["status"]) == ("not tried", "not tried")
    assert verdict["notes"] == of_forward
    results.add(item("k.f", "forward", "float32", examples=1))
    assert (results.unjudged(), results.exit_status) == ([], 0)


@pytest.mark.parametrize("counts", [{"known": 1}, {"refusals": 5}])
def test_a_kernel_of_which_forward_gave_an_answer_has_no_such_line(counts: dict[str, int]) -> None:
    results = tried(("exact", "float16"))
    results.add(item("k.f", "forward", "float16", **counts))
    assert results.unjudged() == []


def test_where_a_user_leaves_forward_out_any_law_will_do() -> None:
    results = tried()
    results.selected = {("k.f", "exact", "float16"), ("k.f", "memory", "float16")}
    (line,) = results.unjudged()
    assert line == "k.f: no example of any law was judged, so the run does not say that it holds"
    results.add(item("k.f", "memory", "float16", examples=1))
    assert (results.unjudged(), results.exit_status) == ([], 0)


def test_a_complaint_says_it_alone() -> None:
    results = tried()
    results.add(item("k.f", "forward", "float16", skipped=2, skip_reasons=Counter({"no GPU": 2})))
    assert (results.unjudged(), results.exit_status) == ([], 1)


def test_cases_that_could_not_be_run_are_told_with_the_reason() -> None:
    results = tried()
    results.add(item("k.f", "exact", "float16", skipped=2, skip_reasons=Counter({"no GPU": 2})))
    assert list(notes(results, 80)) == ["not run here: 2 cases (k.f 2)", "not run here of k.f: no GPU"]
    assert results.untried() == {"k.f": "forward, exact"}


def test_the_page_says_held_only_of_what_was_tried_by_a_run_that_has_ended(tmp_path: Path) -> None:
    some = tried(("forward", "float16"))
    everything = tried(*((law, x) for law in ("forward", "exact") for x in ("float16", "float32")))
    found = told_by(some, tmp_path)
    assert "No bug, but laws that were not tried" in found
    assert "k.f held, not all tried" in found
    assert "not tried: forward (float32), exact" in found
    assert "k.f held so far" in told_by(everything, tmp_path, None)
    assert "k.f held 0 8" in told_by(everything, tmp_path)


def test_a_bug_of_which_no_item_has_told_is_on_the_page(tmp_path: Path) -> None:
    results, found = tried(("exact", "float16")), bug().bug
    ledger = Ledger(tmp_path / "bugs.jsonl")
    ledger.append({BEGUN: found.to_dict()})
    results.add_unreported(ledger, is_over=False)
    assert not results.bugs  # it may turn out to be none
    results.add_unreported(ledger, is_over=True)
    assert "k.f broken 1" in told_by(results, tmp_path)


def test_a_bug_counts_once_if_its_item_tells_of_it_later(tmp_path: Path) -> None:
    results, found = tried(), bug().bug
    f = found.failure
    append_line(tmp_path / "bugs.jsonl", {"process": 1, **found.to_dict()})
    results.add_unreported(Ledger(tmp_path / "bugs.jsonl"), is_over=False)
    assert content(results, None)["bugs"][0]["failures"] == 1
    told = {found.key: {"counts": [[f.law, f.case.dtype, "out", 3]], "cases": [], "shrunk": []}}
    results.add(item("k.f", f.law, f.case.dtype, examples=4) | {"bugs": [found.to_dict()], "seen": told})
    assert content(results)["bugs"][0]["failures"] == 3


@pytest.mark.parametrize(
    ("stop", "status"),
    [
        ("raise KeyboardInterrupt", pytest.ExitCode.INTERRUPTED),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
    ids=["interrupted", "killed"],
)
def test_a_run_that_is_cut_short_tells_what_it_left_out(tmp_path: Path, stop: str, status: int) -> None:
    (tmp_path / "stopping.py").write_text(STOPPING.format(stop=stop))
    options = ["-p", "stopping", "-k", TWO, "--examples=2"]
    run = pytest_run(tmp_path, "--kernel", f"{TOYS}:sound", *options, status=status, PYTHONPATH=str(tmp_path))
    assert summary_in(tmp_path)["not_tried"] == {"toys.sound": "forward, memory"}
    assert ">held<" not in (tmp_path / "reports/index.html").read_text()
    is_told = "\ntoys.sound: not tried: forward, memory\n" in run.stdout
    assert is_told == (status == pytest.ExitCode.INTERRUPTED)


@pytest.mark.nightly
def test_a_run_that_ends_with_the_first_failure_tells_what_it_left_out(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text(
        "def f(q, k, v, *, causal, sm_scale):\n    raise RuntimeError('planted')\n"
    )
    options = ["-x", "-n1", "-k", TWO, "--examples=2", "--shrink-seconds=0.1"]
    run = pytest_run(tmp_path, "--kernel", "raising.py:f", *options, status=None)
    assert "\nraising.f: not tried: " in run.stdout
    assert ">broken<" in (tmp_path / "reports/index.html").read_text()


def test_a_slow_kernel_is_green_with_a_line_that_says_what_was_not_tried(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    options = ["-k", "(forward or memory or exact) and float32", "--time-limit=0.03"]
    run = pytest_run(tmp_path, "--kernel", "slow.py:attention", *options)
    told = summary_in(tmp_path)["not_tried"]["slow.attention"]
    assert f"\nslow.attention: not tried: {told}\n" in run.stdout
    text = (tmp_path / "reports/index.html").read_text()
    assert ">held<" not in text
    assert "Every law held" not in text
