"""The page of a run: what it shows, that it is whole in itself, and how it compares two nights."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness.bugs.bug import Condition
from tests.harness.report.changes import changes, read_night, told_gone
from tests.harness.report.folder import write
from tests.harness.report.page import LAST, bars, compared, page, tables, verdict
from tests.harness.report.results import Results
from tests.harness.report.screen import notes
from tests.unit.support.reports import RUN, Page, bug, info, item, summary
from tests.unit.support.running import ENVIRONMENT

PICTURE = {"tensor": "out", "side": "query", "ratio": [[0.5, 2.0]]}
NASTY = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


def test_the_page_is_whole_in_itself(tmp_path: Path) -> None:
    one = bug()
    explanation = replace(one.bug.failure.explanation, pictures=(PICTURE,))
    write(replace(one.bug.failure, explanation=explanation, environment=ENVIRONMENT), tmp_path)
    found = Page(page(summary(one), tmp_path, summary()))
    folder = one.bug.key
    assert found.values("src")[0].startswith("data:image/png;base64,")
    assert [x for x in found.values("href") if not x.startswith("#")] == [
        f"./{folder}/{name}" for name in ("report.md", "case.json", "error.png")
    ]
    text = page(summary(one), tmp_path)
    assert not any(x in text for x in ("http:", "https:", "url(", "@import", "<link", "<script"))
    ids = found.values("id")
    assert len(ids) == len(set(ids))
    assert {x[1:] for x in found.values("href") if x.startswith("#")} <= set(ids)


def test_each_bug_is_shown_once_with_its_facts(tmp_path: Path) -> None:
    bugs = [bug(), bug(causal=False, tensor="lse")]
    found = Page(page(summary(*bugs, exit=1), tmp_path)).text
    assert found.startswith("2 bugs - Flashproof 2 bugs 2026-11-22 23:00 UTC, 61 min 11 s on cpu (abacus)")
    for number, one in enumerate(bugs, 1):
        headline = f"{number}. {summary(one)['bugs'][0]['headline']}"
        assert found.count(headline) == 1
        for label, fact in one.facts():
            assert f"{label} {' '.join(fact.split())}" in found


def test_what_others_have_written_is_text(tmp_path: Path) -> None:
    content = summary(bug(kernel=NASTY, claim=NASTY), kernels=(NASTY,))
    content["kernels"][NASTY] |= {"claims": {NASTY: NASTY}, "known_failures": [NASTY], "spec": NASTY}
    content |= {"complaints": [NASTY], "less_precise": {NASTY: NASTY}, "consistent_with": {NASTY: NASTY}}
    content |= {"not_run": [NASTY], "notices": [NASTY]}
    found = Page(page(content, tmp_path, content))
    assert not {"script", "img"} & {tag for tag, _ in found.tags}
    assert not found.values("onerror")
    assert found.text.count(NASTY) >= 11


def test_cells_that_were_never_drawn_come_before_those_of_few_examples(tmp_path: Path) -> None:
    found = Page(page(summary(), tmp_path)).text
    coverage = summary()["coverage"]["k.f"]
    cells = [count for values in coverage.values() for count in values.values()]
    assert f"Never drawn: {cells.count(0)} of {len(cells)} cells." in found
    never, fewest = found.index(" head_dim=16 "), found.index("head_dim=128: 1")
    assert never < found.index("Fewest:") < fewest < found.index("seqlen_q mod 64=63: 2")
    assert "16: 0 32: 0 64: 5 128: 1" in found


def test_remainders_are_a_table_by_tile_and_what_each_tensor_has_is_one_by_tensor() -> None:
    given = {
        "causal": {"False": 3, "True": 1},
        "seqlen_q mod 16": {"0": 16, "15": 0},
        "q_layout": {"contiguous": 2, "gap": 2},
        "v_layout": {"gap": 2, "packed": 2},
    }
    assert [(x.title, x.columns, x.rows) for x in tables(given) if x.rows] == [
        ("seqlen_q modulo tile", ("0", "1", LAST, "other"), {"16": {"0": (16, "some"), LAST: (0, "never")}}),
        (
            "layout",
            ["q", "v"],
            {
                "contiguous": {"q": (2, "some")},
                "gap": {"q": (2, "some"), "v": (2, "some")},
                "packed": {"v": (2, "some")},
            },
        ),
        ("causal", ["False", "True"], {"": {"False": (3, "some"), "True": (1, "some")}}),
    ]
    assert [kind for _, kind in compared({"a": 0, "b": 2, "c": 3, "d": 31}).values()] == [
        *("never", "few", "some", "some")
    ]


def test_a_night_is_compared_with_the_one_before(tmp_path: Path) -> None:
    then = summary(bug(), bug(causal=False), bug(kernel="k.g"), kernels=("k.f", "k.g"))
    now = summary(bug(index=(0, 0, 1, 1)), bug(kernel="k.h"), kernels=("k.f", "k.h"))
    found = changes(now, then)
    assert {state: [row["kernel"] for row in rows] for state, rows in found.items()} == {
        "new": ["k.h"],
        "still there": ["k.f"],
        "gone": ["k.f"],
        "not tried again": ["k.g"],
    }
    shown = Page(page(now, tmp_path, then)).text
    assert "2 bugs, 1 new" in shown
    assert "(1 new, 1 still there, 1 gone)" in shown
    assert "gone k.f: law `forward` is broken, out is wrong (float16) only with causal False; " in shown
    assert "; not found again in 6 examples" in shown
    assert "6 (6)" in shown


def test_one_bug_with_another_smallest_case_is_no_new_one() -> None:
    one = bug()
    other = replace(one.bug, needs=(*one.bug.needs, Condition("seqlen_q", (1,), (0,))))
    found = changes(summary(replace(one, bug=other)), summary(one))
    assert [len(rows) for rows in found.values()] == [0, 1, 0, 0]


def test_a_bug_is_told_as_gone_once_and_not_if_another_case_shows_it() -> None:
    shown, other = bug().bug, bug(causal=False).bug
    again = replace(shown, failure=replace(shown.failure, case=replace(shown.failure.case, seqlen_q=5)))
    case = shown.failure.case
    assert list(told_gone([shown, shown, again, other], [])) == [
        "gone: law `forward` of k.f, out was wrong (float16): the 2 cases that showed it hold now, such as "
        f"{case!r}",
        "gone: law `forward` of k.f, out was wrong (float16): the case that showed it holds now: "
        f"{other.failure.case!r}",
    ]
    assert [line.endswith(repr(case)) for line in told_gone([shown, other], [other])] == [True]
    assert len(list(told_gone([shown], [bug(kernel="k.g").bug]))) == 1


def test_the_end_of_a_run_its_summary_and_its_page_say_what_is_gone(tmp_path: Path) -> None:
    gone = bug().bug
    results = Results([info("k.f")])
    for _ in range(2):
        results.add(
            {**item("k.f", "forward", "float16", examples=4), "gone": [gone.to_dict()], "notices": ["lost"]}
        )
    (line,) = told_gone([gone], [])
    content = {**results.to_dict(ENVIRONMENT, []), "run": RUN}
    assert content["notices"] == ["lost", line]
    assert " ".join(notes(results, 80)).split() == f"lost {line}".split()
    text = Page(page(content, tmp_path)).text
    assert "lost" in text
    assert line in text
    results.conclude([bug()])
    assert results.told == ["lost"]


def test_any_text_can_be_written(tmp_path: Path) -> None:
    text = page(summary(bug(claim="1 \u2264 2, \ud800 is no character")), tmp_path)
    assert text.isascii()
    assert "claim 1 \u2264 2, \ufffd is no character" in Page(text).text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (summary(), ("good", "Every law held")),
        (summary(bug(), exit=1), ("bad", "1 bug")),
        (summary(bug(), exit=None), ("bad", "1 bug")),
        (summary(exit=None), ("unclear", "No bug so far: the run has not ended")),
        (summary(exit=1), ("unclear", "No bug, but exit status 1: the log of the run says why")),
        (summary(kernels=()), ("unclear", "Nothing was tried")),
        ({**summary(exit=1), "complaints": ["k"]}, ("bad", "No bug, but claims that do not hold")),
    ],
)
def test_the_page_is_green_only_if_every_law_held(
    content: Any, expected: tuple[str, str], tmp_path: Path
) -> None:
    assert verdict(content) == expected
    assert Page(page(content, tmp_path)).text.startswith(expected[1])


def test_a_histogram_shows_every_bar_that_is_not_empty() -> None:
    assert bars([1000, 0, 0, 1]) == "M0 20h25v-20.00h-25zM75 20h25v-1.00h-25z"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"bugs": [{}], "run": {"replay": false}}', json.dumps(summary(replay=True))],
)
def test_only_a_whole_night_is_compared_with(text: str, tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    assert read_night(path) is None
    path.write_text(text)
    assert read_night(path) is None
    path.write_text(json.dumps(summary(bug())))
    assert read_night(path) == summary(bug())


def test_laws_dtypes_and_tensors_are_in_the_order_of_the_run(tmp_path: Path) -> None:
    names = ("lse", "dv", "out")
    errors = {
        "histogram": {name: Counter({0: 3}) for name in names},
        "largest": dict.fromkeys(names, 0.5),
    }
    results = Results([info("k.f")])
    for law in ("backward", "composition", "forward"):
        for dtype in ("bfloat16", "float16"):
            results.add(item("k.f", law, dtype, examples=1, **(errors if law == "forward" else {})))
    content = json.loads(json.dumps({**results.to_dict(ENVIRONMENT, []), "run": RUN}))
    found = Page(page(content, tmp_path)).text
    laws = [found.index(f" {law} + ") for law in ("forward", "backward", "composition")]
    assert laws == sorted(laws)
    tensors = [
        found.index(f"{dtype} {name} ") for dtype in ("float16", "bfloat16") for name in ("out", "lse", "dv")
    ]
    assert tensors == sorted(tensors)
