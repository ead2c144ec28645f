"""Timings as files: bench.json, and a plot for each direction of each series of lengths."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.providers import OTHERS
from tests.bench.roofline import Ceiling
from tests.bench.shapes import DIRECTIONS
from tests.bench.timings import Timing
from tests.harness.files import write_whole


def write(
    folder: Path, environment: Mapping[str, str], ceiling: Ceiling | None, timings: Sequence[Timing]
) -> None:
    """Write the files into a folder. Without a ceiling, none was measured, and there are no timings to plot."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "environment": environment,
        "ceiling": ceiling and asdict(ceiling),
        "timings": [_entry(t, ceiling) for t in timings],
    }
    write_whole(folder / "bench.json", json.dumps(content, indent=1) + "\n")
    for series in dict.fromkeys(t.shape.series for t in timings):
        for direction in DIRECTIONS:
            lines = [t for t in timings if (t.shape.series, t.direction) == (series, direction) and t.times]
            lengths = {t.shape.seqlen_k for t in lines}
            if ceiling and len(lengths) > 1 and len({t.shape.seqlen_q for t in lines}) in (1, len(lengths)):
                name = f"bench {direction} {series}".replace(",", "").replace(" ", "_")
                _plot(
                    folder / f"{name}.png", f"{series}, {direction}, {environment['device']}", lines, ceiling
                )


def _entry(timing: Timing, ceiling: Ceiling | None) -> dict[str, Any]:
    return {
        **asdict(timing),
        "tflops": timing.tflops,
        "spread": timing.times and timing.times.spread,
        "roofline_tflops": ceiling and ceiling.attainable(timing.shape, timing.direction),
    }


def _plot(path: Path, title: str, timings: Sequence[Timing], ceiling: Ceiling) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for provider in dict.fromkeys(t.provider for t in timings):
        line = sorted((t.shape.seqlen_k, t.tflops) for t in timings if t.provider == provider)
        style = "--" if provider in OTHERS else "-"
        axes.plot(*zip(*line, strict=True), style, marker="o", label=provider)
    roof = {t.shape.seqlen_k: ceiling.attainable(t.shape, t.direction) for t in timings}
    lengths = sorted(roof)
    axes.plot(lengths, [roof[n] for n in lengths], ":", color="black", label="roofline")
    axes.set(xscale="log", xlabel="seqlen_k", ylabel="TFLOPS", title=title, ylim=(0, None))
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
