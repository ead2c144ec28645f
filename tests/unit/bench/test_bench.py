"""The bench: its arithmetic, and its way from shapes to tables, on the CPU with clocks of the test's own."""

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bench import clocks, files, roofline
from tests.bench.__main__ import Bench, main, options, seconds_left
from tests.bench.clocks import Clocks, extremes
from tests.bench.files import write
from tests.bench.measuring import compile_ahead, time_all
from tests.bench.processes import CONTEXT
from tests.bench.providers import OTHERS, in_order, ours, through_autograd
from tests.bench.roofline import Ceiling
from tests.bench.shapes import QUICK, Shape, shapes
from tests.bench.tables import LEGEND, heading, left_out, legend, refusals, row_line, tables
from tests.bench.timings import DIED, INTERRUPTED, TIME_UP, Row, Times, Timing, best_of_others, not_reached
from tests.harness.clock import Clock

SMALL = Shape("tiny", 1, 2, 1, 4, 8, 16)
LONGER = Shape("tiny", 1, 2, 1, 4, 16, 16)
WARM = Clocks(1755, 61, 640)
CEILING = Ceiling(tflops=800.0, terabytes_per_second=4.0)


def steady(milliseconds: float) -> Times:
    return Times(milliseconds, milliseconds, milliseconds, 30, WARM)


def timed(provider: str, milliseconds: float, shape: Shape = SMALL, direction: str = "forward") -> Timing:
    return Timing(shape, direction, provider, steady(milliseconds))


def row(provider: str, forward: float, backward: float, shape: Shape = SMALL) -> Row:
    return timed(provider, forward, shape), timed(provider, backward, shape, "backward")


class TestTimes:
    def test_median_and_quartiles(self) -> None:
        assert Times.of([5.0, 1.0, 2.0, 4.0, 3.0], WARM) == Times(3.0, 2.0, 4.0, 5, WARM)
        assert Times.of([2.0], None) == Times(2.0, 2.0, 2.0, 1)

    def test_the_spread_is_half_of_the_middle_half(self) -> None:
        assert Times(10.0, 9.0, 12.0, 30).spread == pytest.approx(0.15)

    @pytest.mark.parametrize(
        ("times", "uncertain"),
        [
            (Times(100.0, 98.0, 102.0, 30), False),
            (Times(100.0, 96.0, 104.0, 30), True),
            (Times(100.0, 100.0, 100.0, 5), False),
            (Times(100.0, 100.0, 100.0, 4), True),
        ],
    )
    def test_a_large_spread_and_few_calls_are_uncertain(self, times: Times, uncertain: bool) -> None:
        assert times.is_uncertain is uncertain

    def test_tflops(self) -> None:
        shape = Shape("", 4, 48, 48, 4096, 4096, 128, True)
        operations = 4 * 4 * 48 * 4096**2 * 128 / 2
        assert timed("x", 2.0, shape).tflops == pytest.approx(operations / 2 / 1e9)
        assert timed("x", 1.0, shape, "backward").tflops == pytest.approx(2.5 * operations / 1e9)
        assert Timing(shape, "forward", "x", None).tflops == 0

    def test_the_best_of_others(self) -> None:
        best = best_of_others([timed("flash_v2", 0.1), timed("SDPA cuDNN", 2.0), timed("SDPA flash", 1.0)])
        assert best == timed("", 1.0).tflops
        assert best_of_others([timed("flash_v2", 1.0)]) == 0


class TestShapes:
    def test_every_shape_is_there_once(self) -> None:
        assert len(set(shapes())) == len(shapes())
        assert {s.head_dim for s in shapes()} == {16, 64, 128, 256}

    def test_quick_shapes_are_some_of_all(self) -> None:
        assert set(QUICK) < set(shapes())

    def test_bytes_are_those_of_the_tensors(self) -> None:
        q = torch.empty(1, 2, 4, 16, dtype=torch.bfloat16).nbytes
        k = torch.empty(1, 1, 8, 16, dtype=torch.bfloat16).nbytes
        lse = torch.empty(1, 2, 4).nbytes
        assert SMALL.least_bytes("forward") == (q + 2 * k) + (q + lse)
        assert SMALL.least_bytes("backward") == (q + 2 * k) + (q + q + lse) + (q + 2 * k)


class TestRoofline:
    def test_many_operations_for_a_byte_reach_the_product(self) -> None:
        assert CEILING.attainable(Shape("", 4, 48, 48, 4096, 4096, 128), "forward") == 800.0

    def test_decoding_is_bound_by_memory(self) -> None:
        shape = Shape("", 32, 32, 8, 1, 4096, 128)
        bytes_of_keys = 2 * 2 * 32 * 8 * 4096 * 128
        assert CEILING.attainable(shape, "forward") == pytest.approx(
            4.0 * shape.flops("forward") / bytes_of_keys, rel=0.01
        )

    def test_it_is_measured_with_the_timer(self) -> None:
        made = []

        def timer(call: Callable[[], Any]) -> Times:
            made.append(call())
            return steady(4.0 if len(made) == 1 else 2.0)

        found = roofline.measured("cpu", timer, side=32, copied=64)
        assert found.tflops == pytest.approx(2 * 32**3 / 2e9)
        assert found.terabytes_per_second == pytest.approx(2 * 64 / 4e9)
        copy, product = made
        assert product.shape == (32, 32)
        assert product.abs().max() > 0
        assert copy.tolist() == [0] * 64


class TestClocks:
    def test_the_first_way_that_works_is_taken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails() -> Clocks:
            raise ModuleNotFoundError("no nvidia-ml-py")

        monkeypatch.setattr(clocks, "WAYS", (fails, lambda: WARM))
        read, reason = clocks.reader()
        assert (read(), reason) == (WARM, "")
        monkeypatch.setattr(clocks, "WAYS", (fails,))
        read, reason = clocks.reader()
        assert (read(), reason) == (None, "ModuleNotFoundError: no nvidia-ml-py")

    def test_a_reading_that_fails_later_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        readings = iter([WARM])
        monkeypatch.setattr(clocks, "WAYS", (lambda: next(readings),))
        read, _ = clocks.reader()
        assert read() is None

    def test_torch_tells_milliwatts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"clock_rate": 1755, "temperature": 61, "power_draw": 640_123}.items():
            monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
        assert clocks.by_torch() == WARM

    def test_nvidia_smi_is_asked_for_this_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = []

        def run(command: list[str], **_: Any) -> Any:
            asked.extend(command)
            return subprocess.CompletedProcess(command, 0, "1755, 61, 639.87\n", "")

        properties = type("Properties", (), {"uuid": "1234-abcd"})
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(subprocess, "run", run)
        assert clocks.by_nvidia_smi() == WARM
        assert "--id=GPU-1234-abcd" in asked

    def test_extremes(self) -> None:
        told = extremes([WARM, None, Clocks(1980, 40, 90)])
        assert told == "1755 to 1980 MHz, 40 to 61 °C, 90 to 640 W"
        assert extremes([None]) == ""


def math_attention(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def refusing(*_: Any) -> torch.Tensor:
    raise RuntimeError("not this shape")


class TestTimingAll:
    @pytest.mark.skipif(torch.cuda.is_available(), reason="calls a kernel in this process, interpreted")
    def test_from_shapes_to_a_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(OTHERS, "math", through_autograd(math_attention))
        providers = {
            "math": OTHERS["math"],
            "flash_v2": ours("flash_v2"),
            "other": through_autograd(refusing),
        }
        called = []

        def timer(call: Callable[[], Any]) -> Times:
            called.append(call())
            return steady(1.0 if len(called) < 3 else 2.0)

        rows = list(time_all([SMALL], providers, "cpu", timer))
        refused = "RuntimeError: not this shape"
        assert rows == [
            row("math", 1.0, 1.0),
            row("flash_v2", 2.0, 2.0),
            tuple(Timing(SMALL, d, "other", None, refused) for d in ("forward", "backward")),
        ]
        assert called[2][0].shape == (1, 2, 4, 16)
        assert len(called[3]) == 3
        timings = [t for each in rows for t in each]
        forward, _ = tables(timings, list(providers), None)
        assert forward[0] == "forward: batch 1, heads 2 on 1, head_dim 16, no mask"
        assert forward[1].split() == ["TFLOPS", "(ratio)", "(4,", "8)"]
        assert [line.split()[0] for line in forward[2:]] == ["math", "flash_v2"]
        assert forward[3].endswith("(0.50)")
        assert list(refusals(timings)) == [
            f"other {direction}: not everywhere, {refused}" for direction in ("forward", "backward")
        ]

    def test_others_come_first_and_slow_kernels_last(self) -> None:
        assert in_order(["flash_v1", "mine", "ring"], ["SDPA flash"]) == [
            "SDPA flash",
            "mine",
            "flash_v1",
            "ring",
        ]

    def test_processes_share_what_is_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        called: list[str] = []
        monkeypatch.setattr("tests.bench.measuring.tensors", lambda shape, device: ())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

        def provider(name: str) -> Callable[..., Any]:
            def calls(shape: Shape) -> Any:
                if name == "refusing":
                    raise RuntimeError
                return partial(called.append, f"{name} forward"), None

            return calls

        monkeypatch.setattr("tests.bench.measuring.provider", provider)
        counter = CONTEXT.Value("i", 0)
        jobs = [(SMALL, "a"), (SMALL, "refusing"), (SMALL, "b")]
        one, other = compile_ahead(jobs, counter), compile_ahead(jobs, counter)
        assert [next(one), next(other), next(one)] == [0, 1, 2]
        assert [*one, *other] == []
        assert called == ["a forward", "b forward"]


class TestText:
    def test_a_row_as_it_is_printed(self) -> None:
        others, mine = row("SDPA cuDNN", 1e-6, 2e-6), row("flash_v2", 2e-6, 2e-6)
        spread = Timing(SMALL, "forward", "flash_v2", Times(2e-6, 1.8e-6, 2e-6, 30, Clocks(1980, 1, 1)))
        told = row_line((spread, mine[1]), [*others, spread, mine[1]], 102.9)
        assert " ".join(told.split()) == (
            "flash_v2 forward 2.05~ (0.50) ±5.0% backward 5.12 (1.00) ±0.0% 1755 MHz about 1:42 left"
        )

    def test_a_row_of_a_refusal(self) -> None:
        refused = Timing(SMALL, "forward", "x", None, "RuntimeError: no")
        assert " ".join(row_line((refused,), [refused], 3.0).split()) == "x forward - about 0:03 left"

    def test_the_heading_tells_the_roofline(self) -> None:
        told = heading(Shape("large", 1, 8, 8, 4096, 4096, 128), CEILING)
        assert told.startswith("large, (4096, 4096): batch 1, heads 8, head_dim 128, no mask; ")
        assert told.endswith("; in TFLOPS (ratio), roofline 800 forward, 800 backward")

    def test_the_roofline_is_the_last_row_of_each_table(self) -> None:
        (table,) = tables([timed("SDPA cuDNN", 1e-6)], ["SDPA cuDNN"], CEILING)
        assert table[-1].split() == ["roofline", f"{CEILING.attainable(SMALL, 'forward'):.1f}"]

    def test_the_mark_is_explained_where_there_is_one(self) -> None:
        uncertain = Timing(SMALL, "forward", "SDPA flash", Times(1.0, 0.9, 1.1, 30))
        assert list(legend([timed("SDPA cuDNN", 1.0), uncertain])) == [LEGEND]
        assert list(legend([timed("SDPA cuDNN", 1.0)])) == []

    def test_what_the_time_was_too_short_for_is_told(self) -> None:
        measured = list(row("SDPA cuDNN", 1.0, 1.0))
        names = ["SDPA cuDNN", "flash_v2"]
        timings = [*measured, *not_reached([SMALL, LONGER], names, measured, TIME_UP)]
        assert [(t.shape, t.provider, t.direction) for t in timings[2:]] == [
            (shape, name, direction)
            for shape, name in [(SMALL, "flash_v2"), (LONGER, "SDPA cuDNN"), (LONGER, "flash_v2")]
            for direction in ("forward", "backward")
        ]
        forward, _ = tables(timings, names, None)
        assert forward[1].split() == ["TFLOPS", "(ratio)", "(4,", "8)"]
        assert forward[-1].split() == ["flash_v2", "time", "up"]
        assert list(left_out(timings, names)) == [
            "not measured, time up: tiny, (4, 8): flash_v2",
            "not measured, time up: tiny, (4, 16): all",
        ]
        assert list(refusals(timings)) == []


class TestFiles:
    def test_spread_clocks_and_roofline_are_written(self, tmp_path: Path) -> None:
        uncertain = Timing(SMALL, "forward", "flash_v2", Times(1.0, 0.9, 1.1, 30, WARM))
        late = Timing(SMALL, "forward", "ring", None, TIME_UP)
        write(tmp_path / "new", {"device": "none"}, CEILING, [uncertain, late])
        content = json.loads((tmp_path / "new" / "bench.json").read_text())
        assert content["environment"] == {"device": "none"}
        assert content["ceiling"] == {"tflops": 800.0, "terabytes_per_second": 4.0}
        first, second = content["timings"]
        assert first["spread"] == pytest.approx(0.1)
        assert first["times"] == {
            "median": 1.0,
            "lower": 0.9,
            "upper": 1.1,
            "calls": 30,
            "clocks": {"sm_mhz": 1755, "celsius": 61, "watts": 640},
        }
        assert first["roofline_tflops"] == CEILING.attainable(SMALL, "forward")
        assert (second["times"], second["refusal"]) == (None, "time up")

    def test_a_series_of_lengths_has_a_plot_with_the_roofline(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        drawn = []
        pyplot = pytest.importorskip("matplotlib.pyplot")
        monkeypatch.setattr(pyplot, "close", lambda figure: drawn.extend(figure.axes[0].lines))
        timings = [timed("flash_v2", 1.0, LONGER), timed("flash_v2", 1.0), timed("SDPA flash", 1.0)]
        write(tmp_path, {"device": "none"}, CEILING, timings)
        assert [path.name for path in tmp_path.glob("*.png")] == ["bench_forward_tiny.png"]
        lines = {line.get_label(): list(line.get_ydata()) for line in drawn}
        assert list(lines) == ["flash_v2", "SDPA flash", "roofline"]
        assert lines["roofline"] == [CEILING.attainable(shape, "forward") for shape in (SMALL, LONGER)]

    def test_one_length_has_no_plot(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "_plot", lambda *_: pytest.fail("drawn"))
        write(tmp_path, {"device": "none"}, CEILING, [timed("flash_v2", 1.0)])


class TestTheRun:
    def test_the_time_left_is_that_of_the_rest_or_of_the_limit(self) -> None:
        assert seconds_left(elapsed=10.0, done=2, total=6, limit=math.inf) == 20.0
        assert seconds_left(elapsed=10.0, done=2, total=6, limit=15.0) == 15.0

    @pytest.mark.parametrize(
        ("typed", "minutes"),
        [("", math.inf), ("--quick", 2.0), ("--quick --time-limit 5", 5.0), ("--time-limit 0.5", 0.5)],
    )
    def test_time_limit(self, typed: str, minutes: float, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.argv", ["bench", *typed.split()])
        assert options("bench")[0].time_limit == minutes

    def test_what_ours_are_compared_with_may_be_chosen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.argv", ["bench"])
        assert options("bench")[0].other == list(OTHERS)
        monkeypatch.setattr("sys.argv", ["bench", "--other", "SDPA flash", "--other", "SDPA cuDNN"])
        assert options("bench")[0].other == ["SDPA flash", "SDPA cuDNN"]

    @pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
    def test_a_time_limit_is_positive(
        self, minutes: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.argv", ["bench", f"--time-limit={minutes}"])
        with pytest.raises(SystemExit):
            options("bench")
        assert f"--time-limit: got {minutes}, expected a positive number" in capsys.readouterr().err

    def test_a_series_that_is_not_there_is_named(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.argv", ["bench", "-k", "training"])
        with pytest.raises(SystemExit):
            main()
        assert "-k: got 'training', expected a part of one of these names: head_dim 16, full, " in (
            capsys.readouterr().err
        )

    def test_without_a_gpu_it_says_so(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr("sys.argv", ["bench", "--quick"])
        main()
        assert "no GPU" in capsys.readouterr().out

    def test_the_heading_of_a_shape_is_printed_once(self, capsys: pytest.CaptureFixture[str]) -> None:
        bench = Bench([SMALL, LONGER], ["SDPA cuDNN", "flash_v2"], Clock())
        bench.ceiling = CEILING
        bench.add(row("SDPA cuDNN", 1.0, 1.0), elapsed=2.0)
        bench.add(row("flash_v2", 1.0, 1.0), elapsed=4.0)
        bench.add(row("SDPA cuDNN", 1.0, 1.0, LONGER), elapsed=6.0)
        first, *rows, last, _ = capsys.readouterr().out.splitlines()
        assert (first, last) == (heading(SMALL, CEILING), heading(LONGER, CEILING))
        assert [(line.split()[0], line[-15:]) for line in rows] == [
            ("SDPA", "about 0:06 left"),
            ("flash_v2", "about 0:04 left"),
        ]

    def test_compiling_ends_with_its_share_of_the_time(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lefts = []

        def gathered(parts: list[Callable[[], Any]], left: Callable[[], float]) -> Iterator[int]:
            lefts.append(left())
            yield 0

        monkeypatch.setattr("tests.bench.__main__.gather", gathered)
        Bench([SMALL, LONGER], ["SDPA cuDNN"], Clock(0.0)).compile()
        Bench([SMALL], ["SDPA cuDNN"], Clock()).compile()
        assert lefts == [0.0, math.inf]
        assert capsys.readouterr().out.count("the other 1 compile when they are timed") == 1


def measured_and(end: Callable[[], None]) -> Callable[..., Iterator[Any]]:
    """Return a ``gather`` that compiles nothing, measures one row, and then does what ``end`` does."""

    def gathered(parts: list[partial[Any]], left: Callable[[], float]) -> Iterator[Any]:
        if parts[0].func is compile_ahead:
            return
        yield CEILING
        yield row("SDPA flash", 1.0, 1.0, parts[0].args[0][0])
        end()

    return gathered


@pytest.fixture
def on_an_abacus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let ``main`` find a GPU, and return the folder that it writes to."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an abacus")
    monkeypatch.setattr(clocks, "WAYS", (lambda: WARM,))
    typed = ["-k", "head_dim 128", "--quick", "--kernel", "flash_v2", "--report-dir", f"{tmp_path}/x"]
    monkeypatch.setattr("sys.argv", ["bench", *typed])
    return tmp_path / "x"


class TestEnds:
    def test_an_interrupted_run_keeps_what_it_has(
        self, on_an_abacus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("tests.bench.__main__.gather", measured_and(interrupt))
        with pytest.raises(KeyboardInterrupt):
            main()
        self.check(on_an_abacus, capsys, INTERRUPTED)

    def test_a_run_whose_time_is_up_tells_what_is_missing(
        self, on_an_abacus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tests.bench.__main__.gather", measured_and(lambda: None))
        monkeypatch.setattr("tests.bench.__main__.OUTSIDE_SECONDS", 120.0)
        main()
        self.check(on_an_abacus, capsys, TIME_UP)

    def test_a_process_that_dies_is_told(
        self, on_an_abacus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tests.bench.__main__.gather", measured_and(lambda: None))
        main()
        self.check(on_an_abacus, capsys, DIED)

    def test_files_and_output_say_that_calls_were_in_graphs(
        self, on_an_abacus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tests.bench.__main__.gather", measured_and(lambda: None))
        monkeypatch.setattr("sys.argv", [*sys.argv, "--graph"])
        main()
        content = json.loads((on_an_abacus / "bench.json").read_text())
        assert content["environment"]["calls"] == "in a CUDA graph"
        assert "calls in a CUDA graph" in capsys.readouterr().out.splitlines()[0]

    def check(self, folder: Path, capsys: pytest.CaptureFixture[str], why: str) -> None:
        content = json.loads((folder / "bench.json").read_text())
        assert content["environment"]["clocks before"] == "1755 MHz, 61 °C, 640 W"
        assert content["environment"]["clocks while timed"].startswith("1755 to 1755 MHz")
        assert content["ceiling"]["tflops"] == 800
        forward, backward, *rest = content["timings"]
        assert (forward["provider"], forward["direction"], forward["refusal"]) == (
            "SDPA flash",
            "forward",
            "",
        )
        assert backward["direction"] == "backward"
        assert {t["refusal"] for t in rest} == {why}
        assert len(rest) == 2 * (2 * len([*OTHERS, "flash_v2"]) - 1)
        out = capsys.readouterr().out
        assert "  SDPA flash " in out
        assert f"not measured, {why}: head_dim 128, causal, (1024, 1024): all" in out
