"""The page of a run: what it shows, that it is whole in itself, and how it compares two nights."""

import json
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from strategies.case import Case
from tests.harness.bugs.bug import Condition
from tests.harness.report.conclusion import DistinctBug
from tests.harness.report.page import PAGE
from tests.harness.report.results import Results
from tests.harness.run import Run
from tests.unit.harness.report.test_matrix import info, item
from tests.unit.harness.report.test_screen import NUMBERS, concluded
from tests.unit.support.running import CASE, TOYS, pytest_run

ENVIRONMENT = {"device": "cpu", "device_name": "abacus", "torch": "2.0"}
RUN = {
    "started": "2026-11-22T23:00:00+00:00",
    "seconds": 3671.5,
    "exit": 0,
    "time": "for 60 minutes",
    "profile": "fuzz",
    "seed": None,
    "replay": False,
}
VOID = {"meta", "img", "br", "hr", "input", "link"}


class Page(HTMLParser):
    """The tags and texts of a page. A tag that is closed in the wrong place, or never, fails the test."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.texts += data.split()

    @property
    def text(self) -> str:
        """Return what a reader sees, with single spaces."""
        return " ".join(self.texts)

    def values(self, name: str) -> list[str]:
        """Return all values of an attribute."""
        return [
            value or "" for _, attributes in self.tags for key, value in attributes.items() if key == name
        ]


def summary(*bugs: DistinctBug, kernels: tuple[str, ...] = ("k.f",), **run: Any) -> Any:
    """Return the content of a summary.json of a run in which each kernel had 6 examples of two laws in float16."""
    results = Results([info(name) for name in kernels])
    cells = Counter({"head_dim=64": 5, "head_dim=128": 1, "seqlen_q mod 64=63": 2, "k_layout=gap": 3})
    errors = {"histogram": {"out": Counter({0: 3, 990: 1})}, "largest": {"out": 0.99}}
    for name in kernels:
        results.add(item(name, "forward", "float16", examples=4, cells=cells, **errors))
        results.add(item(name, "backward", "float16", examples=2))
    results.conclude(bugs)
    content = {**results.to_dict(ENVIRONMENT, []), "run": {**RUN, **run}}
    return json.loads(json.dumps(content))


def bug(kernel: str = "k.f", causal: bool = True, **finding: Any) -> DistinctBug:
    """Return a bug that needs a value of causal."""
    one = concluded(replace(NUMBERS, **finding), Case(dtype="float16", causal=causal))
    failure = replace(one.bug.failure, kernel=kernel)
    need = Condition("causal", (causal,), (not causal,))
    return replace(one, bug=replace(one.bug, failure=failure, needs=(need,)))


def test_a_run_compares_itself_with_the_one_before_and_goes_on_without_its_page(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    (reports / "summary.json").write_text(json.dumps(summary(bug(kernel="toys.sound"), exit=1)))
    run = (
        "--kernel",
        f"{TOYS}:sound",
        "--examples",
        "1",
        "-k",
        "forward and float32",
        "-p",
        "no:cacheprovider",
    )
    assert f"page: reports/{PAGE}\n" in pytest_run(tmp_path, *run).stdout
    found = Page((reports / PAGE).read_text()).text
    assert found.startswith("Every law held")
    assert "gone toys.sound: law `forward` is broken" in found
    (reports / PAGE).unlink()
    (reports / PAGE).mkdir()  # not even root can replace a folder by a file
    assert f"page: reports/{PAGE}, not written: Is a directory\n" in pytest_run(tmp_path, *run).stdout


def test_a_replay_leaves_the_page_of_the_night(tmp_path: Path) -> None:
    (tmp_path / "case.json").write_text(json.dumps(Run(f"{TOYS}:sound", (), "forward", CASE).to_dict()))
    assert "page:" not in pytest_run(tmp_path, "--replay", "case.json").stdout
    assert not (tmp_path / "reports" / PAGE).exists()
