"""``error.png``: error over bound of each wrong tensor, by row and column, with the borders of tiles."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

LOWEST, HIGHEST = 1e-3, 1e3
"""The range of error over bound that is told apart by colours."""
PANEL = 4.5
"""Size of a panel in inches."""


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
