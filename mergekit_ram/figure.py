"""The overlap of agents as a figure: densities, overlap shares, and where in the model they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mergekit_ram.errors import RamError
from mergekit_ram.kinds import KINDS, layer_labels
from mergekit_ram.report import OverlapReport

SUFFIXES = (".png", ".svg")


def check(path: Path) -> None:
    """Say what would keep a figure from being drawn, before hours of counting.

    Raises:
        RamError: the file's suffix is not supported, or matplotlib is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise RamError(f"--plot {path}: the file's suffix must be .png or .svg.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise RamError("--plot needs matplotlib: pip install 'mergekit-ram[plot]'.") from None


def draw(report: OverlapReport, path: Path) -> None:
    """Draw density bars, stacked overlap shares and a layer x kind heat map per agent.

    The same report gives the same bytes.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    agents = [_label(i, name) for i, name in enumerate(report.agents)]
    n = len(agents)
    columns = min(n, 4)
    rows = -(-n // columns) if n else 0
    layers = len(report.by_layer()) + 1
    top = 1.1 + 0.36 * max(n, 2)
    map_height = min(9.0 if rows == 1 else 5.0, max(2.6, 0.8 + 0.17 * layers))
    size = (max(9.0, 3.0 * columns + 1.0), top + rows * map_height + 0.3)
    with mpl.rc_context({"svg.hashsalt": "mergekit-ram", "font.size": 9}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        parts: Any = figure.subfigures(2, 1, height_ratios=[top, max(rows, 1) * map_height])
        upper, lower = parts
        upper.suptitle(
            f"{report.method}: {', '.join(_tail(base) for base in report.base_models)} and "
            f"{n} agent{'s' if n != 1 else ''}, {report.total.elements:,} elements",
            fontsize=10,
        )
        left, right = upper.subplots(1, 2, sharey=True, width_ratios=[1, 1.6])
        _densities(left, report, agents)
        _shares(right, report, agents)
        if n:
            _heat_maps(lower, report, agents, rows, columns)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
        figure.savefig(path, dpi=150, metadata=metadata)


def _tail(name: str) -> str:
    """The last part of a model's name, which tells models apart."""
    tail = name.rstrip("/").rpartition("/")[2] or name
    return tail if len(tail) <= 28 else tail[:13] + "…" + tail[-14:]


def _label(i: int, name: str) -> str:
    return f"{i + 1}  {_tail(name)}"


def _densities(axes: Any, report: OverlapReport, agents: list[str]) -> None:
    values = [100 * d for d in report.total.density]
    bars = axes.barh(range(len(agents)), values, color="#4c72b0", height=0.6)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_yticks(range(len(agents)), agents)
    axes.set_ylim(len(agents) - 0.5, -0.5)
    axes.set_xlim(0, max([1.0, *values]) * 1.18)
    axes.set_xlabel("density, % of all elements")
    _bare(axes)


def _shares(axes: Any, report: OverlapReport, agents: list[str]) -> None:
    """Of each agent's changes, how many others made them too (the paper's figure 2)."""
    from matplotlib import colormaps

    total, n = report.total, len(agents)
    colours = colormaps["viridis"](np.linspace(0.85, 0.1, max(n, 1)))
    start = np.zeros(n)
    for k in range(n):
        share = np.array(
            [100 * int(total.overlap[i, k]) / max(int(total.changed[i]), 1) for i in range(n)]
        )
        label = "unique" if k == 0 else f"shared with {k}"
        bars = axes.barh(range(n), share, left=start, height=0.6, color=colours[k], label=label)
        dark = np.dot(colours[k][:3], (0.3, 0.6, 0.1)) < 0.5
        axes.bar_label(
            bars,
            [f"{value:.0f}" if value >= 5 else "" for value in share],
            label_type="center",
            color="white" if dark else "black",
        )
        start += share
    axes.set_xlim(0, 100)
    axes.set_xlabel("share of the agent's changes, %")
    axes.tick_params(left=False)
    if n:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=min(n, 4), frameon=False, fontsize=8
        )
    _bare(axes)


def _heat_maps(
    figure: Any, report: OverlapReport, agents: list[str], rows: int, columns: int
) -> None:
    """Density of each agent by layer and kind of weight."""
    counts = report.by_layer_and_kind()
    kinds = [kind for kind in KINDS if any(k == kind for _, k in counts)]
    layers = (
        [*report.by_layer(), ""] if any(not layer for layer, _ in counts) else [*report.by_layer()]
    )
    values = np.full((len(agents), len(layers), len(kinds)), np.nan)
    for (layer, kind), group in counts.items():
        values[:, layers.index(layer), kinds.index(kind)] = [100 * d for d in group.density]
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    top = max(1.0, float(np.nanmax(values))) if values.size else 1.0
    image = None
    for i, axes in enumerate(grid.flat):
        if i >= len(agents):
            axes.set_axis_off()
            continue
        image = axes.imshow(
            values[i], aspect="auto", cmap="viridis", vmin=0, vmax=top, interpolation="nearest"
        )
        axes.set_title(agents[i], fontsize=9)
        axes.set_facecolor("#e6e6e6")
        axes.set_xticks(range(len(kinds)), kinds, rotation=40, ha="right")
        axes.set_yticks(range(len(layers)), _ticks(layers))
        axes.tick_params(labelbottom=i + columns >= len(agents), length=0, labelsize=8)
    if image is not None:
        bar = figure.colorbar(image, ax=grid, shrink=0.8, pad=0.01, aspect=12 * rows + 18)
        bar.set_label("density, % (grey: no such weight)")


def _ticks(layers: list[str]) -> list[str]:
    """Every layer of few, some of many; the weights outside of layers always."""
    labels = layer_labels([layer for layer in layers if layer])
    step = -(-len(layers) // 20)
    return [
        "outside" if not layer else "" if i % step else labels[layer]
        for i, layer in enumerate(layers)
    ]


def _bare(axes: Any) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
