"""The report folder of a failure: writes report.md, case.json, repro.py and the picture, and words the message."""

import importlib
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pytest

from tests.harness.bugs.failure import Failure, headline
from tests.harness.files import IS_INSTALLED, whole, write_whole
from tests.harness.running.exits import SCRIPT
from tests.harness.verdict import Finding

DETAIL_LINES = 12
"""Lines shown of a traceback or a dead process's stderr; case.json has all that was kept."""

PICTURE = "error.png"
NO_PICTURE = f"{PICTURE}: not drawn, matplotlib is not installed"

LOWEST, HIGHEST = 1e-3, 1e3
"""The range of error over bound that is told apart by colours."""
PANEL = 4.5
"""Size of a panel in inches."""


def facts(failure: Failure) -> list[tuple[str, str]]:
    """Return labels and texts that describe the failure, in the order in which a maintainer asks for them."""
    f, env = failure.finding, failure.environment
    rows = [("instead", f.certificate)] if f.certificate else []
    rows.append(("claim", " ".join(f.claim.split())))
    if f.rate:
        rows.append(("comes and goes", shown_in(f)))
    if f.actual is not None:
        rows += [
            ("where", f"{f.expression or f.tensor}[{', '.join(map(str, f.index))}]"),
            ("expected", str(f.expected)),
            ("actual", str(f.actual)),
            ("allowed error", str(f.allowed)),
            ("error / allowed", str(f.ratio)),
            (
                "wrong elements",
                f"{f.wrong} of {f.total}; in {f.tensor}: {f.nan} NaN, {f.posinf} +inf, {f.neginf} -inf",
            ),
        ]
    if f.ulps is not None:
        dtype = "float32" if f.tensor == "lse" else failure.case.dtype
        size = f"{float(f.ulps):.3g} units in the last place of {dtype}"
        rows.append(("how large", f"{size}; {float(f.relative or 0):.2g} of the norm of {f.tensor}"))
    rows += [
        ("smallest case", repr(failure.case)),
        ("versions", ", ".join(f"{k} {v}" for k, v in env.items() if k not in ("device", "device_name"))),
        ("device", f"{env['device']} ({env['device_name']})"),
    ]
    return rows


def shown_in(finding: Finding) -> str:
    """Say how often an intermittent finding showed when its case was repeated."""
    failed, made = finding.rate
    return f"shows in {failed} of {made} repeats of the case, which is as it was drawn"


def last_of_detail(failure: Failure) -> list[str]:
    """Return the last lines of a traceback or a dead process's stderr."""
    return failure.finding.detail.strip().splitlines()[-DETAIL_LINES:]


def replay_line(failure: Failure, report_dir: Path) -> str:
    """Return the command that runs the case of a report again."""
    device = failure.environment["device"].partition(":")[0]
    path = shlex.quote(str(report_dir / failure.folder / "case.json"))
    if IS_INSTALLED:
        return f"flashproof replay {path} --device {device}"
    return f"python -m pytest tests/properties --device {device} --replay {path}"


def message(failure: Failure, report_dir: Path) -> str:
    """Return the text of the failing test."""
    lines = [headline(failure)]
    lines += [f"  {label:16s} {text}" for label, text in facts(failure)]
    if told := failure.explanation.lines():
        lines += ["  what is known", *(f"    {line}" for line in told)]
    if detail := last_of_detail(failure):
        lines += ["  detail", *(f"    {line}" for line in detail)]
    path = report_dir / failure.folder / "report.md"
    return "\n".join(
        [*lines, f"  {'report':16s} {path}", f"  {'replay':16s} {replay_line(failure, report_dir)}"]
    )


def markdown(failure: Failure, report_dir: Path, has_script: bool) -> str:
    """Return the text of ``report.md``: one screen that can be pasted into an issue."""
    lines = [f"### {headline(failure)}", "", "| | |", "| --- | --- |"]
    lines += [f"| {label} | {_code(text)} |" for label, text in facts(failure)]
    if told := failure.explanation.lines():
        lines += ["", *(f"- {_code(line)}" for line in told)]
    if detail := last_of_detail(failure):
        lines += ["", *(f"    {line}" for line in detail)]
    lines += ["", f"Replay: `{replay_line(failure, report_dir)}`"]
    if has_script:
        path = shlex.quote(str(report_dir / failure.folder / SCRIPT))
        lines += ["", f"Without Flashproof: `python {path}` (exits 1 while the bug is there)"]
    if failure.explanation.pictures:
        lines += ["", f"![error over bound]({PICTURE})" if can_draw() else NO_PICTURE]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """Return text as code for a table's cell: on one line, with bars and backquotes escaped."""
    return "`" + " ".join(text.split()).replace("`", "'").replace("|", "\\|") + "`"


def write(failure: Failure, report_dir: Path, script: str | None = None) -> None:
    """Write or replace the report folder. Each file appears whole or not at all.

    A picture is drawn if there is something to see, and matplotlib is installed.
    """
    folder = report_dir / failure.folder
    folder.mkdir(parents=True, exist_ok=True)
    found = {"finding": asdict(failure.finding), "environment": failure.environment}
    write_whole(folder / "case.json", json.dumps({**failure.to_dict(), **found}, indent=1) + "\n")
    write_whole(folder / "report.md", markdown(failure, report_dir, script is not None))
    if script is None:
        (folder / SCRIPT).unlink(missing_ok=True)  # of a larger case
    else:
        write_whole(folder / SCRIPT, script)
    (folder / PICTURE).unlink(missing_ok=True)
    if failure.explanation.pictures and can_draw():
        with whole(folder / PICTURE) as partial:
            draw(partial, headline(failure), failure.explanation.pictures, failure.case.blocks)


SEEN = "\n### How bad, and where else\n\n"
"""The heading of the part of ``report.md`` that is written when the run is over."""


def add_to_report(folder: Path, lines: Iterable[str]) -> None:
    """Write what the whole run has seen of a bug at the end of its ``report.md``, replacing an earlier such part."""
    path = folder / "report.md"
    text = path.read_text().partition(SEEN)[0]
    write_whole(path, text + SEEN + "".join(f"- {_code(line)}\n" for line in lines))


@contextmanager
def report_folder(report_dir: Path, below: str = "") -> Iterator[Path]:
    """Make the report folder or one below it. Raises pytest.UsageError, in one line, if it can't be written."""
    try:
        (report_dir / below).mkdir(parents=True, exist_ok=True)
        yield report_dir / below
    except OSError as e:
        raise pytest.UsageError(
            f"--report-dir: got {str(report_dir)!r}, expected a folder that can be written ({e.strerror})"
        ) from None


def can_draw() -> bool:
    """Whether matplotlib is installed and can be imported."""
    try:
        importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return False
    return True


def draw(path: Path, title: str, pictures: Sequence[Mapping[str, Any]], blocks: Mapping[str, int]) -> None:
    """Write the picture. ``pictures`` are those of ``pattern.picture``; ``blocks`` are rows of tiles, by name."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    size = (PANEL * len(pictures), PANEL)
    figure, panels = plt.subplots(1, len(pictures), figsize=size, squeeze=False, layout="constrained")
    for axes, picture in zip(panels[0], pictures, strict=True):
        ratio = np.asarray(picture["ratio"])
        image = axes.imshow(
            np.clip(ratio, LOWEST, HIGHEST),
            norm=LogNorm(LOWEST, HIGHEST),
            cmap="RdYlBu_r",  # 1, the bound itself, in the middle
            aspect="auto",
            interpolation="nearest",
        )
        block = "block_m" if picture["side"] == "query" else "block_n"
        rows = blocks.get(block, 0)
        for edge in range(rows, len(ratio), rows) if rows else ():
            axes.axhline(edge - 0.5, color="black", linewidth=0.6)
        label = f"{picture['side']} (lines: {block} = {rows})" if rows else picture["side"]
        row, column = np.unravel_index(ratio.argmax(), ratio.shape)
        axes.plot(column, row, "kx", markersize=9)
        axes.set(title=f"{picture['tensor']}, worst at x", xlabel="column", ylabel=label)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.suptitle(fill(title, width=int(14 * size[0])), fontsize=10)
    figure.colorbar(image, ax=panels[0], label="error / bound, largest of all heads")
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)
