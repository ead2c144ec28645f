"""The matrix of verdicts: it fits a screen, says for each dtype what it found, and hides no worse verdict."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest

from kernels.contract import DTYPES, Capabilities
from kernels.registry import REGISTERED
from strategies.case import Case
from tests.harness.bugs.bug import Occurrences
from tests.harness.bugs.imprecise import Imprecise, ImpreciseCall
from tests.harness.law import LAWS, by_place
from tests.harness.report.conclusion import DistinctBug
from tests.harness.report.results import Results
from tests.harness.report.screen import FEW, MARKS, matrix
from tests.harness.running.tally import Tally
from tests.unit.support.bugs import bug
from tests.unit.support.reports import info, item

KERNELS = tuple(REGISTERED)[:11]


def plain(text: str, **colour: bool) -> str:
    return text


def imprecise(claim: str = "tf32=true") -> dict[str, object]:
    """Return the record of one call that is less precise than claimed."""
    calls = Imprecise()
    calls.add(ImpreciseCall("forward", Case(), "out", (claim,), 3.0, 2.0))
    return calls.to_dict()


def test_laws_about_gradients_do_not_hold_for_a_kernel_that_gives_none() -> None:
    results = Results([info("f"), info("g")])
    for kernel, judged in (("f", {"out": 1}), ("g", {"out": 1, "dq": 1, "dk": 1, "dv": 1})):
        for law in ("forward", "backward", "additivity"):
            results.add(item(kernel, law, "float16", examples=1, judged=judged))
    marks = {kernel: [results.mark(kernel, law, "float16") for law in results.laws] for kernel in "fg"}
    assert marks == {"f": ["held", "not claimed", "not claimed"], "g": ["held"] * 3}


@pytest.mark.parametrize(("tensor", "mark"), [("out", "broken"), ("dq", "less precise")])
def test_less_precise_calls_that_a_bug_explains_break_their_law(tensor: str, mark: str) -> None:
    results = Results([info("k")])
    results.add(item("k", "forward", "float32", examples=1) | {"imprecise": imprecise()})
    results.conclude([DistinctBug(bug(Case(), (tensor,)), Occurrences())])
    assert results.mark("k", "forward", "float32") == mark
    assert bool(results.less_precise_told()) == (mark == "less precise")


def test_less_precise_calls_that_no_design_explains_together_break_their_law() -> None:
    results = Results([info("k")])
    results.add(item("k", "forward", "float32", examples=1) | {"imprecise": imprecise()})
    results.add(item("k", "backward", "float32", examples=1) | {"imprecise": imprecise("exp_error=1e-4")})
    assert [results.verdict(("k", law, "float32")) for law in ("forward", "backward")] == ["broken", "broken"]
    assert "calls are wrong" in results.less_precise_told()["k"]


def seen(law: str, dtype: str) -> dict[str, object]:
    """Return the record of a bug that was seen once."""
    return {"k/forward-0": Occurrences(Counter([(law, dtype, "out")])).to_dict()}


def shown(results: Results) -> list[str]:
    return matrix(results.kernels, results.laws, results.dtypes, results.mark, plain)


def test_eleven_kernels_by_all_laws_and_three_dtypes_fit_a_screen() -> None:
    results = Results([info(name) for name in KERNELS])
    verdicts = itertools.cycle(({"examples": 9}, {}, {"refusals": 9}, {"known": 2, "examples": 9}))
    assert len(KERNELS) == 11 <= len(LAWS)
    for kernel, law, dtype in itertools.product(KERNELS, LAWS, DTYPES):
        results.add(item(kernel, law, dtype, **next(verdicts)))
    lines = shown(results)
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    cells = [line.split()[1:] for line in lines if line.startswith(LAWS)]
    assert [len(row) for row in cells] == [11] * len(LAWS)
    assert {len(cell) for row in cells for cell in row} == {3}


def test_a_long_name_loses_its_middle_and_the_matrix_fits_in_two_parts() -> None:
    names = [f"a_module_of_my_own.flash_attention_{n}" for n in range(18)]
    results = Results([info(name) for name in names])
    for kernel, law, dtype in itertools.product(names, LAWS, DTYPES):
        results.add(item(kernel, law, dtype, examples=1))
    lines = shown(results)
    assert max(map(len, lines)) <= 80
    half = -(-len(LAWS) // 2)
    assert lines[half].startswith("a_module..ttention_0 +++")
    assert lines[half - 1].endswith(f"|   {results.laws[half - 1]}")
    rest = lines[half + len(names) + 1 :]
    assert rest[0].strip() == results.laws[half]
    assert rest[len(LAWS) - half].startswith("a_module..ttention_0 ")


def test_few_kernels_stand_side_by_side() -> None:
    results = Results([info("mine.f", ("float16", "float32")), info("mine.g")])
    for kernel, law, dtype in itertools.product(("mine.f", "mine.g"), ("backward", "forward"), DTYPES):
        if (kernel, dtype) != ("mine.f", "bfloat16"):
            results.add(item(kernel, law, dtype, examples=1))
    results.add(item("mine.g", "backward", "float32") | {"seen": seen("backward", "float32")})
    assert shown(results) == [
        "         mine.f",
        "         |   mine.g",
        "forward  +.+ +++",
        "backward +.+ ++X",
        "",
        "in each cell: float16, bfloat16, float32",
        "X broken   + held   . not claimed",
    ]


@pytest.mark.parametrize("kernels", [1, FEW + 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ({"tally": Tally(examples=99).to_dict()}, "held"),
        ({"tally": Tally().to_dict()}, "not tried"),
        ({"tally": Tally(examples=99, known=1).to_dict()}, "known"),
        ({"tally": Tally(known=1).to_dict()}, "known"),
        ({"tally": Tally(examples=1, refusals=99).to_dict()}, "refused"),
        ({"tally": Tally(examples=99, known=1).to_dict(), "imprecise": imprecise()}, "less precise"),
        ({"tally": Tally(examples=99).to_dict(), "seen": "a bug", "imprecise": imprecise()}, "broken"),
        ({"tally": Tally(refusals=99).to_dict(), "seen": "a bug"}, "broken"),
    ],
)
def test_the_worst_verdict_is_shown(found: dict[str, object], verdict: str, dtype: str, kernels: int) -> None:
    names = KERNELS[:kernels]
    laws = LAWS if kernels == 1 else ("exact", "forward", "special")
    results = Results([info(name) for name in names])
    for kernel, law, other in itertools.product(names, laws, DTYPES):
        results.add(
            item(kernel, law, other, examples=1 if (kernel, law, other) != (names[0], "exact", dtype) else 0)
        )
    if "seen" in found:
        found = found | {"seen": seen("exact", dtype)}
    results.add(item(names[0], "exact", dtype) | found)
    lines = shown(results)
    row = next(line for line in lines if line.startswith("exact " if kernels == 1 else f"{names[0]} "))
    cell = row.split()[1 if kernels == 1 else 1 + sorted(laws, key=by_place).index("exact")]
    assert cell[DTYPES.index(dtype)] == MARKS[verdict].character
    assert f"{MARKS[verdict].character} {MARKS[verdict].meaning}" in lines[-1]
    assert cell.count("+") >= 2


def test_a_bug_of_an_item_that_was_never_reported_is_shown() -> None:
    results = Results([info("f")])
    results.add(item("f", "forward", "float32", examples=1) | {"seen": seen("backward", "float16")})
    assert "backward X?" in shown(results)


def test_what_a_kernel_does_not_claim_is_told_apart_from_what_was_not_tried() -> None:
    without = Capabilities(backward=False)
    results = Results([replace(info("f"), capabilities=without)])
    for law in ("backward", "forward"):
        results.add(item("f", law, "float32"))
    assert shown(results)[1:3] == ["forward  ?", "backward ."]


def test_marks_are_painted_and_do_not_shift_what_follows() -> None:
    painted = matrix(["f"], ["forward"], ["float32"], lambda *_: "broken", lambda text, **colour: f"<{text}>")
    assert painted[1] == "forward <X>"
    assert painted[-1] == "<X> broken"
