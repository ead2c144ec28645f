"""What tests of reports share: results and bugs that are made up, and a reader of the page of a run."""

import json
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from kernels.contract import DTYPES, Capabilities
from strategies.case import Case, Spike
from tests.harness.bugs.bug import Bug, Condition, Occurrences, Severity
from tests.harness.bugs.failure import Explanation, Failure
from tests.harness.bugs.imprecise import Imprecise
from tests.harness.report.conclusion import DistinctBug
from tests.harness.report.results import Results
from tests.harness.running.kernel_info import KernelInfo
from tests.harness.running.tally import Tally
from tests.harness.verdict import Finding
from tests.unit.support.running import ENVIRONMENT

NUMBERS = Finding(
    claim="out is within the rounding bound of float64",
    kind="error",
    tensor="out",
    index=(0, 0, 2, 15),
    expected=1.0,
    actual=1.5,
    allowed=0.001,
    ratio=511.59394250644044,
    ulps=512.0,
    relative=0.29,
    wrong=1,
    total=48,
    nan=3,
)
CASE = Case(seqlen_q=3, dtype="float16", v_values="zeros", spikes=(Spike("v", (0, 0, 0, 15), 1.0),))
SEEN = Occurrences(Counter({("forward", "float16", "out"): 9, ("backward", "float32", "dq"): 5}))
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


def info(name: str, dtypes: tuple[str, ...] = DTYPES) -> KernelInfo:
    return KernelInfo(f"kernels:{name}", (), name, Capabilities(dtypes=dtypes), {})


def item(kernel: str, law: str, dtype: str, **tally: Any) -> dict[str, object]:
    """Return what an item that found nothing sends to the summary."""
    counts = Tally(**tally).to_dict()
    none: dict[str, object] = {"bugs": [], "seen": {}, "imprecise": Imprecise().to_dict()}
    return {"kernel": kernel, "law": law, "dtype": dtype, "tally": counts, **none}


def found(*bugs: Bug, law: str = "forward", times: int = 1, **tally: Any) -> dict[str, Any]:
    """Return what an item sends to the summary that has seen these bugs, each so many times."""
    seen = {
        one.key: Occurrences(
            Counter({(law, "float16", one.tensors[0]): times}), [(law, one.failure.case)]
        ).to_dict()
        for one in bugs
    }
    counts = item("k", law, "float16", **{"examples": 5, "broken": len(bugs), **tally})
    return {**counts, "bugs": [one.to_dict() for one in bugs], "seen": seen}


def concluded(finding: Finding = NUMBERS, case: Case = CASE, **fields: Any) -> DistinctBug:
    """Return a bug of which everything is known that can be."""
    explanation = Explanation(causes=("q_layout",))
    told: dict[str, Any] = {"finding": finding, "environment": {"device": "cpu"}, "explanation": explanation}
    failure = Failure("k.py:f", (), "forward", case, kernel="k.f", **told)
    needs = (Condition("seqlen_q", (3,), (2,)), Condition("causal", (True,), (False,)))
    bug = Bug(failure, tensors=("out",), needs=needs, severity=Severity(17, 20))
    return DistinctBug(bug, SEEN, **fields)


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
