"""The text at the end of a run: what it says of each bug and of cases that were left out."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from strategies.case import Case, Spike
from tests.harness.bugs.bug import Condition, Occurrences
from tests.harness.report.conclusion import DistinctBug
from tests.harness.report.results import Results
from tests.harness.report.screen import MOST_LINES, bug_lines, notes, repeats
from tests.harness.verdict import Finding
from tests.unit.support.reports import CASE, concluded, info, item

REPORTS = Path("reports")


def test_a_bug_is_told_in_the_order_in_which_a_maintainer_asks() -> None:
    one = concluded(offers=("--claims causal=false: all 14 failing cases are excluded",))
    key = one.bug.key
    assert bug_lines(1, one, REPORTS, 110) == [
        "1. k.f: law `forward` is broken, out is wrong (float16)",
        "   claim     out is within the rounding bound of float64",
        "   where     out[0, 0, 2, 15]: expected 1.0, actual 1.5",
        "   error     511.6 times the bound; 1 of 48 elements are wrong; 3 NaN",
        "   how bad   shows in 17 of 20 ordinary cases; 512 ulps off, 0.29 of out's norm",
        "   seen      14 failing examples: forward, backward; float16, float32; out, dq",
        "   needs     only with seqlen_q such as 3, not 2: asked too little, causal True",
        f"   points to {one.bug.failure.explanation.points_to}",
        "   smallest  Case(seqlen_q=3, dtype='float16', v_values='zeros', spikes=(Spike(tensor='v', index=(0, 0, 0,",
        "             15), value=1.0),))",
        "   or claim  --claims causal=false: all 14 failing cases are excluded",
        f"   report    reports/{key}",
    ]


def test_a_long_claim_is_whole_as_it_is_pasted() -> None:
    claim = f"--claims layouts={','.join(['contiguous'] * 9)}"
    lines = bug_lines(1, concluded(offers=(f"{claim}: all 14 failing cases are excluded",)), REPORTS, 80)
    assert len(lines) <= MOST_LINES
    assert f"   or claim  {claim}" in lines


@pytest.mark.parametrize(
    ("detail", "where"),
    [
        (
            'Traceback:\n  File "k.py", line 3, in f\n    raise\nRuntimeError: no\n',
            'File "k.py", line 3, in f',
        ),
        (
            'Traceback:\n  File "k.py", line 3, in f\n  File "/v/site-packages/torch/_ops.py", line 8, in g\n',
            'File "k.py", line 3, in f',
        ),
        ("Fatal Python error\nSegmentation fault\n", "Segmentation fault"),
    ],
)
def test_what_is_no_number_is_told_by_the_last_frame_or_line(detail: str, where: str) -> None:
    claim = "a claimed case runs without an exception, but the kernel raised\nRuntimeError: no"
    raised = Finding(claim=claim, kind="exception", detail=detail)
    lines = bug_lines(2, concluded(raised), REPORTS, 120)
    assert lines[:3] == [
        "2. k.f: law `forward` is broken, exception (float16)",
        "   claim     a claimed case runs without an exception, but the kernel raised RuntimeError: no",
        f"   where     {where}",
    ]


def longer(one: DistinctBug) -> DistinctBug:
    """Return the same bug with long texts wherever texts may be long."""
    f = one.bug.failure
    finding = replace(
        f.finding, claim="a claim of many words " * 20, expression="results[0]['dk'].sum(-2) " * 9
    )
    case = replace(f.case, spikes=tuple(Spike("v", (0, 0, 0, i), 1.0) for i in range(12)))
    seen = Occurrences(Counter({(f"law{i}", f"dtype{i}", f"tensor{i}"): i + 1 for i in range(30)}))
    needs = tuple(Condition(f"a_field_of_a_case_{i}", (True,), (False,)) for i in range(30))
    bug = replace(one.bug, failure=replace(f, finding=finding, case=case, kernel="k" * 99), needs=needs)
    return replace(one, bug=bug, seen=seen, offers=tuple(f"--claims claim_{i}=false: all" for i in range(30)))


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("change", [longer, lambda one: one], ids=["longest", "usual"])
def test_no_bug_has_more_than_twelve_lines(width: int, change: Callable[[DistinctBug], DistinctBug]) -> None:
    one = change(concluded(offers=("--claims causal=false: all 14 failing cases are excluded",)))
    lines = bug_lines(1, one, REPORTS, width)
    assert len(lines) <= MOST_LINES
    labels = [line[3:13].strip() for line in lines[1:] if line[3:13].strip()]
    expected = "claim, where, error, how bad, seen, needs, points to, smallest, or claim, report"
    assert labels == expected.split(", ")
    if change is not longer:
        assert max(map(len, lines)) <= width
    assert one.bug.key in lines[-1]


def test_the_case_is_whole_where_others_can_be_shortened() -> None:
    one = concluded(case=replace(CASE, q_values="zeros", k_values="zeros", dout_values="zeros"))
    lines = bug_lines(1, replace(one, seen=longer(one).seen), REPORTS, 80)
    assert len(lines) <= MOST_LINES
    start = next(at for at, line in enumerate(lines) if "smallest" in line)
    text = " ".join([lines[start].removeprefix("   smallest"), *lines[start + 1 : -1]])
    assert eval(text.strip(), {"Case": Case, "Spike": Spike}) == one.bug.failure.case


def test_nothing_is_shortened_where_all_is_asked_for() -> None:
    one = longer(concluded())
    lines = bug_lines(1, one, REPORTS, 80, most=None)
    assert len(lines) > MOST_LINES
    text = " ".join(" ".join(lines).split())
    assert repr(one.bug.failure.case) in text
    assert " ".join(one.bug.failure.finding.claim.split()) in text
    assert "..." not in text


def test_cases_that_were_left_out_are_told_by_kernel() -> None:
    results = Results([info("f"), info("g"), info("h")])
    for kernel, left_out in {
        "f": {"refusals": 3},
        "g": {"refusals": 4, "skipped": 5},
        "h": {"undrawn": 6},
    }.items():
        results.add(item(kernel, "forward", "float32", **left_out))
        results.add(item(kernel, "forward", "float16", **left_out))
    assert list(notes(results, 80)) == [
        "refused: 14 cases (f 6, g 8)",
        "not run here: 10 cases (g 10)",
        "not drawn, the time was up: 12 cases (h 12)",
    ]


def test_a_note_is_told_once_for_a_kernel_that_shows_it() -> None:
    results = Results([info("f"), info("g")])
    for kernel, shown in (("f", 2), ("g", 0)):
        for dtype in ("float16", "float32"):
            results.add(
                item(kernel, "special", dtype, noted={"leaks {x} in {}": 3}, shown={"leaks {x} in {}": shown})
            )
    assert list(notes(results, 80)) == ["f: leaks {x} in 4 of 6 such examples"]
    assert results.to_dict({}, [])["notices"] == ["f: leaks {x} in 4 of 6 such examples"]


def test_designs_are_told_as_far_as_they_fit_two_lines() -> None:
    results = Results([info("f")])
    designs = {
        "P cast before the division": 9,
        "dS unscaled at its cast, delta from out": 8,
        "delta " * 20: 7,
    }
    counts = item("f", "forward", "float32")
    results.add(counts | {"tally": {**counts["tally"], "designs": designs}})  # type: ignore[dict-item]  # a dictionary
    first, second = notes(results, 80)
    assert first.startswith("f is consistent with: P cast before the division (9 examples); dS unscaled")
    assert second.endswith(" ...")
    assert max(len(first), len(second)) <= 80


def test_the_text_of_an_item_is_repeated_if_each_line_names_a_report_or_a_less_precise_call() -> None:
    one = concluded()
    bug = f"k.f: law `forward` is broken, out is wrong (float16): reports/{one.bug.key}/report.md"
    call = "k.f: law `forward`: out is less precise than FlashAttention-2; the summary tells of all calls"
    assert repeats([one], f"{bug}\n{call}")
    assert repeats([], call)
    assert not repeats([], bug)
    assert not repeats([one], f"{bug}\nreport not written: reports: no space")
