"""The bench: its arithmetic, and its way from shapes to a table, on the CPU with a clock of the test's own."""

import json

import pytest
import torch

from tests.bench import results
from tests.bench.__main__ import main, time_all
from tests.bench.providers import OTHERS, ours, through_autograd
from tests.bench.results import Timing, best_of_others, tables
from tests.bench.shapes import Shape, shapes

SMALL = Shape("tiny", 1, 2, 1, 4, 8, 16)


def math(shape, q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def refusing(shape, q, k, v):
    raise RuntimeError("not this shape")


def test_tflops() -> None:
    shape = Shape("", 4, 48, 48, 4096, 4096, 128, True)
    assert shape.flops == 4 * 4 * 48 * 4096**2 * 128 / 2
    assert Timing(shape, "backward", "x", 1.0).tflops == pytest.approx(2.5 * shape.flops / 1e9)
    assert Timing(shape, "forward", "x", None).tflops == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="calls a kernel in this process, interpreted")
def test_from_shapes_to_a_table(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(OTHERS, "math", through_autograd(math))
    providers = {"flash_v2": ours("flash_v2"), "math": OTHERS["math"], "other": through_autograd(refusing)}
    called = []

    def timer(call) -> float:
        called.append(call())
        return 2.0 if len(called) < 3 else 1.0

    timings = list(time_all([SMALL], providers, "cpu", timer))
    assert [(t.provider, t.direction, t.milliseconds) for t in timings] == [
        ("flash_v2", "forward", 2.0),
        ("flash_v2", "backward", 2.0),
        ("math", "forward", 1.0),
        ("math", "backward", 1.0),
        ("other", "forward", None),
        ("other", "backward", None),
    ]
    assert timings[-1].refusal == "RuntimeError: not this shape"
    forward, _ = tables(timings, list(providers))
    assert forward[0] == "forward: batch 1, heads 2 on 1, head_dim 16, no mask"
    assert forward[1].split() == ["TFLOPS", "(ratio)", "(4,", "8)"]
    assert [line.split()[0] for line in forward[2:]] == ["flash_v2", "math"]
    assert forward[2].endswith("(0.50)")
    assert best_of_others(timings[:2]) == 0
    plots = []
    monkeypatch.setattr(results, "_plot", lambda path, title, lines: plots.append((path.name, len(lines))))
    longer = [Timing(Shape("tiny", 1, 2, 1, 4, 16, 16), "forward", "math", 1.0)]
    results.write(tmp_path, {"device": "none"}, [*timings, *longer])
    assert plots == [("bench_forward_tiny.png", 3)]
    assert len(json.loads((tmp_path / "bench.json").read_text())["timings"]) == 7


def test_shapes_asked_for() -> None:
    every = shapes(quick=False)
    assert len(set(every)) == len(every)
    assert {s.head_dim for s in every} == {16, 64, 128, 256}
    assert len(shapes(quick=True)) < 20


def test_without_a_gpu_it_says_so(capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench", "--quick"])
    main()
    assert "no GPU" in capsys.readouterr().out


def test_an_interrupted_run_keeps_what_it_has(tmp_path, capsys, monkeypatch) -> None:
    def interrupted(chosen, providers, device, timer):
        yield Timing(chosen[0], "forward", "SDPA flash", 1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an abacus")
    monkeypatch.setattr("tests.bench.__main__.time_all", interrupted)
    monkeypatch.setattr(
        "sys.argv", ["bench", "-k", "decode", "--kernel", "flash_v2", "--report-dir", f"{tmp_path}/x"]
    )
    with pytest.raises(KeyboardInterrupt):
        main()
    (timing,) = json.loads((tmp_path / "x" / "bench.json").read_text())["timings"]
    assert timing["shape"]["series"] == "decode, batch 1"
    assert "SDPA flash" in capsys.readouterr().out


def test_a_series_that_is_not_there_is_named(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "-k", "training"])
    with pytest.raises(SystemExit):
        main()
    assert "-k: got 'training', expected a part of one of these names: head_dim 16, full, " in (
        capsys.readouterr().err
    )
