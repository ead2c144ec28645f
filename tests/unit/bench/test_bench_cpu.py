"""The bench of kernels on the CPU: its cases, comparisons and times, with kernels and clocks of the test's own."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import registry
from kernels.contract import Capabilities
from tests.bench import both_ways, cpu
from tests.bench.both_ways import AFTER, BEFORE, Task, measured, timed_in_turn
from tests.bench.cpu_lines import COLUMNS, SIZES, WIDTHS, Ended, Line, case_of, difference, line_of, summary
from tests.bench.timings import DIED
from tests.harness.interpreter.installation import INTERPRET
from tests.harness.interpreter.ttir.store import FOLDER
from tests.harness.trial.problem import Outputs

LINE = Line("one", "drawn", (2, 4, 128, 128, 64), "float16", False, "forward")


def timed(before: float, after: float, **fields: Any) -> Line:
    return replace(LINE, milliseconds={BEFORE: before, AFTER: after}, **fields)


def made(claims: Capabilities, size: str = "small", causal: bool = False) -> Any:
    found = case_of(claims, SIZES[size], "float16", causal=causal)
    assert found is not None
    return found


class TestCaseOf:
    def test_it_has_the_size_where_the_claims_let_it(self) -> None:
        case = made(Capabilities(), "median", causal=True)
        assert case.shape("q") == (1, 2, 65, 64)
        assert case.shape("k") == (1, 2, 63, 64)
        assert case.causal

    def test_lengths_are_rounded_up_to_what_is_claimed(self) -> None:
        assert made(Capabilities(seqlen_multiple=128)).shape("q")[2] == 128
        assert made(Capabilities(unequal_lengths=False, min_seqlen_k=40)).shape("q")[2] == 40
        of_continued = made(Capabilities(seqlens="q_at_most_k"), "median")
        assert (of_continued.seqlen_q, of_continued.seqlen_k) == (65, 65)
        of_decode = made(Capabilities(max_seqlen_q=1), "drawn")
        assert (of_decode.seqlen_q, of_decode.seqlen_k) == (1, 128)

    def test_other_claims_are_met_too(self) -> None:
        case = made(
            Capabilities(
                head_dims=(16, 80, 128), v_head_dim=(32, 128), layouts=("bnhd",), launch={"block": (8, 4)}
            )
        )
        assert (case.head_dim, case.v_head_dim, case.launch) == (80, 32, (("block", 8),))
        assert set(case.layouts) == {"bnhd"}
        of_packed = made(Capabilities(dense=False, ragged=("cache", "packed"), layouts=("contiguous",)))
        assert of_packed.ragged == "packed"  # of which gradients are claimed

    def test_there_is_none_of_what_is_not_claimed(self) -> None:
        assert case_of(Capabilities(causal=(False,)), SIZES["small"], "float16", causal=True) is None
        assert case_of(Capabilities(dtypes=("float32",)), SIZES["small"], "float16", causal=False) is None

    @pytest.mark.parametrize("size", SIZES)
    def test_every_kernel_that_is_timed_has_one(self, size: str) -> None:
        for spec, claims in cpu.specs():
            made(registry.load(spec, claims).capabilities, size)


class TestDifference:
    def test_the_same_bits_are_no_difference(self) -> None:
        x = torch.tensor([1.0, float("nan"), -0.0], dtype=torch.bfloat16)
        assert difference({"out": x}, {"out": x.clone()}) == ""

    def test_one_unit_is_told_with_its_place(self) -> None:
        x = torch.ones(2, 3, dtype=torch.float16)
        y = x.clone()
        y[1, 2] += 2.0**-10
        told = difference({"out": x, "lse": x}, {"out": x, "lse": y})
        assert told == (
            "lse: 1 of 6 differ, first (1, 2): 1.0 before, 1.0009765625 after; "
            "at most 0.000977, 1 units in the last place"
        )

    def test_units_are_counted_across_zero(self) -> None:
        x = torch.tensor([2.0**-149, 0.0])
        assert "2 units" in difference({"out": x}, {"out": -x})

    def test_nan_has_no_distance(self) -> None:
        nan = float("nan")
        x = torch.zeros(3)
        told = difference({"out": x}, {"out": torch.tensor([0.0, nan, 1.0])})
        assert told.startswith("out: 2 of 3 differ, first (1,): 0.0 before, nan after; at most 1, ")
        assert told.endswith("; 1 are NaN in one alone")
        assert difference({"out": x}, {"out": torch.tensor([0.0, 0.0, nan])}).endswith(
            "; 1 are NaN in one alone"
        )

    def test_nan_of_other_bits_is_told_apart(self) -> None:
        x = torch.tensor([float("nan"), 1.0])
        negative = x.view(torch.int32).bitwise_or(-(2**31)).view(torch.float32)
        other = torch.cat([negative[:1], x[1:]])
        assert difference({"out": x}, {"out": other}) == "out: 1 of 2 are NaN of other bits"
        assert difference({"out": x}, {"out": negative}).endswith("place, 1 of 2 are NaN of other bits")

    def test_other_kinds_of_tensors_are_told(self) -> None:
        x = torch.zeros(2)
        assert difference({"out": x}, {"out": x.half()}) == "out: (2,) float32 before, (2,) float16 after"
        assert difference({"out": x, "lse": x}, {"out": x}) == "lse is missing after"


class TestLines:
    def test_the_ratio_is_that_of_the_times(self) -> None:
        assert timed(60.0, 2.0).ratio == 30
        assert LINE.ratio == 0
        assert timed(60.0, 2.0).record()["ratio"] == 30

    def test_cells_and_columns_are_as_many(self) -> None:
        for line in (LINE, timed(1.0, 1.0)):
            assert len(line.cells) == len(COLUMNS) == len(WIDTHS) + 1
        assert line_of(COLUMNS).index("size") == line_of(timed(1.0, 1.0).cells).index("drawn")

    def test_a_summary_has_the_median_and_the_least_of_each_size(self) -> None:
        lines = [timed(10.0, 1.0), timed(90.0, 1.0), timed(2.0, 1.0, kernel="two", causal=True), LINE]
        lines.append(timed(5.0, 1.0, size="small"))
        told = list(summary(lines, []))
        assert told[0] == "drawn: 3 ratios, median 10.0, least 2.0 (two float16 causal forward)"
        assert told[1] == "small: 1 ratios, median 5.0, least 5.0 (one float16 none forward)"

    def test_a_summary_has_what_differs_fails_and_falls_back(self) -> None:
        lines = [timed(1.0, 1.0, differs="out: all"), replace(LINE, problem="refused"), timed(1.0, 1.0)]
        ended = [Ended("one", {"_forward": "tt.gather at line 3"}), Ended("two", problem="no such file")]
        _, same, *rest = summary(lines, ended)
        about = "one drawn (2, 4, 128, 128, 64) float16 none forward"
        assert same == "same bits in 1 of 2"
        assert rest == [
            f"differs: {about}: out: all",
            f"not timed: {about}: refused",
            "fell back: one: _forward: tt.gather at line 3",
            "not timed: two: no such file",
        ]


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Return a function that tells in which way a call is made, for kernels that launch nothing."""
    found = [AFTER]

    @contextmanager
    def interpreted() -> Iterator[None]:
        found[0] = BEFORE
        yield
        found[0] = AFTER

    monkeypatch.setattr(both_ways, "interpreted", interpreted)
    return lambda: found[0]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list of one number, the time in seconds that the bench reads."""
    now = [0.0]
    monkeypatch.setattr("tests.bench.both_ways.time.process_time", lambda: now[0])
    return now


class TestTimedInTurn:
    def test_the_least_time_counts_and_the_first_does_not(
        self, way: Callable[[], str], clock: list[float]
    ) -> None:
        seconds = {BEFORE: iter([0.5, 4.0, 3.0]), AFTER: iter([0.25, 0.5, 0.75])}

        def call() -> Outputs:
            clock[0] += next(seconds[way()])
            return Outputs(torch.ones(1), None)

        line = timed_in_turn(LINE, call, repeats=2, seconds=99.0)
        assert line.milliseconds == {BEFORE: 3000.0, AFTER: 500.0}
        assert (line.first, line.differs, line.ratio) == (250.0, "", 6.0)

    def test_what_is_slow_is_not_repeated(self, way: Callable[[], str], clock: list[float]) -> None:
        calls = []

        def call() -> Outputs:
            calls.append(way())
            clock[0] += 5.0 if way() == BEFORE else 1.0
            return Outputs(torch.ones(1), None)

        line = timed_in_turn(LINE, call, repeats=9, seconds=3.0)
        assert calls == [BEFORE, AFTER, AFTER, AFTER]
        assert line.milliseconds == {BEFORE: 5000.0, AFTER: 1000.0}

    def test_a_later_call_that_differs_is_told(self, way: Callable[[], str]) -> None:
        values = iter([1.0, 1.0, 1.0, 2.0])
        line = timed_in_turn(
            LINE, lambda: Outputs(torch.tensor([next(values)]), None), repeats=1, seconds=99.0
        )
        assert line.differs.startswith("out: 1 of 1 differ, first (0,): 1.0 before, 2.0 after")

    @pytest.mark.parametrize(
        ("error", "problem", "has_trace"),
        [
            (NotImplementedError("no\nsuch"), "refused, executed: no", False),
            (ValueError("bad"), "executed: ValueError: bad", True),
        ],
    )
    def test_what_is_raised_is_told(
        self, error: Exception, problem: str, has_trace: bool, way: Callable[[], str]
    ) -> None:
        def call() -> Outputs:
            if way() == AFTER:
                raise error
            return Outputs(torch.ones(1), None)

        line = timed_in_turn(LINE, call, repeats=1, seconds=99.0)
        assert (line.problem, bool(line.trace)) == (problem, has_trace)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    if q.dtype == torch.bfloat16:
        raise NotImplementedError("no bfloat16")
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what the process of a kernel sets for itself."""
    for name in (INTERPRET, FOLDER):
        monkeypatch.setenv(name, "")


@pytest.mark.usefixtures("environment")
class TestMeasured:
    TASK = Task(f"{__name__}:attention", (), ("small",), ("float16", "bfloat16"), 1, 9.0)

    def test_each_call_has_a_line_and_then_the_end_comes(self) -> None:
        *lines, end = measured(replace(self.TASK, claims=("causal=false",)))
        assert [(x.dtype, x.call, x.problem) for x in lines if isinstance(x, Line)] == [
            ("float16", "forward", ""),
            ("float16", "gradients", ""),
            ("bfloat16", "forward", "refused, interpreted: no bfloat16"),
            ("bfloat16", "gradients", "refused, interpreted: no bfloat16"),
        ]
        assert isinstance(end, Ended)
        assert (end.kernel, end.problem) == (f"{__name__.rpartition('.')[2]}.attention", "")

    def test_gradients_are_those_that_are_claimed(self) -> None:
        *lines, _ = measured(replace(self.TASK, claims=("backward=causal",), dtypes=("float16",)))
        assert [(x.causal, x.call) for x in lines if isinstance(x, Line)] == [
            (False, "forward"),
            (True, "forward"),
            (True, "gradients"),
        ]

    @pytest.mark.parametrize(
        ("fields", "problem"),
        [
            ({"spec": "no_such"}, "expected flash_v1"),
            ({"claims": ("dtypes=float32",)}, "claims no call of these sizes and dtypes"),
        ],
    )
    def test_a_kernel_that_can_not_be_measured_is_told(self, fields: dict[str, Any], problem: str) -> None:
        (end,) = measured(replace(self.TASK, **fields))
        assert isinstance(end, Ended)
        assert problem in end.problem


class TestMain:
    def test_kernels_of_triton_are_the_default(self) -> None:
        chosen = dict(cpu.specs())
        assert {"flash_v2", "decode", "tests.panel.triton_v2:attention"} <= chosen.keys()
        assert not {"flash_v3_gluon", "sdpa_math", "tests.panel.flash:v2"} & chosen.keys()

    @pytest.mark.parametrize(
        ("typed", "told"),
        [("--sizes small,huge", "got 'huge', expected some of small, median"), ("--only", "got no SPEC")],
    )
    def test_options_are_checked(self, typed: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            cpu.options(typed.split())
        assert told in capsys.readouterr().err

    def test_lines_are_printed_and_written(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def gathered(parts: list[partial[Any]], left: Callable[[], float]) -> Iterator[Line | Ended]:
            (task,) = parts[0].args
            if task.spec == "a":
                yield timed(60.0, 2.0, kernel="a")
                yield Ended("a", {"_f": "no tt.gather"})

        monkeypatch.setattr(cpu, "gather", gathered)
        monkeypatch.setattr(cpu, "environment_of", lambda device: {})
        cpu.main(["a", "b", "--only", "--json", f"{tmp_path}/x.json"])
        out = capsys.readouterr().out
        assert "drawn: 1 ratios, median 30.0, least 30.0 (a float16 none forward)" in out
        assert "fell back: a: _f: no tt.gather" in out
        assert f"not timed: b: {DIED}" in out
        content = json.loads((tmp_path / "x.json").read_text())
        assert content["lines"][0]["milliseconds"] == {BEFORE: 60.0, AFTER: 2.0}
        assert content["ended"] == [
            {"kernel": "a", "fallbacks": {"_f": "no tt.gather"}, "problem": ""},
            {"kernel": "b", "fallbacks": {}, "problem": DIED},
        ]
