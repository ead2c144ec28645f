"""Timings shown as tables, and written as a JSON file and plots."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.bench.providers import OTHERS
from tests.bench.shapes import BACKWARD_FLOPS, Shape
from tests.harness.report import write_whole
from tests.harness.table import table


@dataclass(frozen=True)
class Timing:
    """One provider at one shape: its median time in milliseconds, or why there is none."""

    shape: Shape
    direction: str
    provider: str
    milliseconds: float | None
    refusal: str = ""

    @property
    def tflops(self) -> float:
        """10^12 floating-point operations per second; 0 if it was not timed."""
        if not self.milliseconds:
            return 0.0
        return (
            self.shape.flops
            * (BACKWARD_FLOPS if self.direction == "backward" else 1)
            / self.milliseconds
            / 1e9
        )


def best_of_others(timings: Sequence[Timing]) -> float:
    """Return the TFLOPS of the fastest provider that is not ours; 0 if none was timed."""
    return max((t.tflops for t in timings if t.provider in OTHERS), default=0.0)


def tables(timings: Sequence[Timing], providers: Sequence[str]) -> list[list[str]]:
    """Make a table, as lines, for each series and direction: TFLOPS, and for ours the ratio to the best other."""
    made = []
    for series, direction in dict.fromkeys((t.shape.series, t.direction) for t in timings):
        columns: dict[Shape, dict[str, Timing]] = {}
        for t in timings:
            if (t.shape.series, t.direction) == (series, direction) and t.milliseconds:
                columns.setdefault(t.shape, {})[t.provider] = t
        if columns:
            rows = [
                (
                    name,
                    *(
                        _cell(column.get(name), best_of_others([*column.values()]))
                        for column in columns.values()
                    ),
                )
                for name in providers
                if any(name in column for column in columns.values())
            ]
            title = f"{direction}: {next(iter(columns)).sizes}"
            made.append([title, *table(("TFLOPS (ratio)", *(shape.lengths for shape in columns)), rows)])
    return made


def _cell(timing: Timing | None, best: float) -> str:
    if timing is None or not timing.milliseconds:
        return "-"
    digits = 0 if timing.tflops >= 100 else 2 if timing.tflops < 10 else 1
    ratio = f" ({timing.tflops / best:.2f})" if best and timing.provider not in OTHERS else ""
    return f"{timing.tflops:.{digits}f}{ratio}"


def write(folder: Path, environment: dict[str, str], timings: Sequence[Timing]) -> None:
    """Write bench.json, and a plot for each direction of each series of lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = [{**asdict(t), "tflops": t.tflops} for t in timings]
    content = {"environment": environment, "timings": rows}
    write_whole(folder / "bench.json", json.dumps(content, indent=1) + "\n")
    for series in dict.fromkeys(t.shape.series for t in timings):
        for direction in ("forward", "backward"):
            lines = [
                t for t in timings if t.shape.series == series and t.direction == direction and t.milliseconds
            ]
            if len({t.shape.seqlen_k for t in lines}) > 1 and len({t.shape.seqlen_q for t in lines}) in (
                1,
                len({t.shape.seqlen_k for t in lines}),
            ):
                name = f"bench {direction} {series}".replace(",", "").replace(" ", "_")
                _plot(folder / f"{name}.png", f"{series}, {direction}, {environment['device']}", lines)


def _plot(path: Path, title: str, timings: Sequence[Timing]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for provider in dict.fromkeys(t.provider for t in timings):
        line = sorted((t.shape.seqlen_k, t.tflops) for t in timings if t.provider == provider)
        style = "--" if provider in OTHERS else "-"
        axes.plot(*zip(*line, strict=True), style, marker="o", label=provider)
    axes.set(xscale="log", xlabel="seqlen_k", ylabel="TFLOPS", title=title, ylim=(0, None))
    lengths = sorted({t.shape.seqlen_k for t in timings})
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def show(timings: Sequence[Timing], providers: Sequence[str]) -> None:
    """Print the tables."""
    for lines in tables(timings, providers):
        print(*lines, "", sep="\n")
