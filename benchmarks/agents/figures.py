"""Tables and figures of the measured merges: ``python -m benchmarks.agents.figures``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import click
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import PowerNorm

Result = dict[str, Any]
Results = dict[str, list[Result]]

REGIMES = {
    "E": "E: SGD on bfloat16, sparse",
    "A": "A: AdamW on float32, dense",
    "U": "U: unlike densities",
}
TASKS = ("sort", "cumsum", "reverse")
DPI = 120
SEED_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
SHARE_COLOURS = ("#3f007d", "#9e9ac8", "#dadaeb")
RAM = "ram"


def read(folder: Path) -> Results:
    """The results by regime, seeds in order."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*-seed*.json")]
    found.sort(key=lambda result: result["seed"])
    by_regime = {regime: [r for r in found if r["regime"] == regime] for regime in REGIMES}
    return {regime: results for regime, results in by_regime.items() if results}


def average(result: Result, label: str) -> float:
    """Mean over the tasks, in percent."""
    return mean(result["exact_match_percent"][label].values())


def leads(results: Iterable[Result], label: str) -> list[float]:
    """RAM's mean score minus a method's, seed by seed."""
    return [average(result, RAM) - average(result, label) for result in results]


def merges(result: Result) -> list[str]:
    """All that was merged, in the order of the file."""
    return [name for name in result["exact_match_percent"] if name not in ("base", *TASKS)]


def markdown(results: Results) -> str:
    """A summary, and per regime one table of scores and one of overlap."""
    parts = ["## Summary", "", *_summary(results), ""]
    for regime, of_regime in results.items():
        seeds = [str(result["seed"]) for result in of_regime]
        parts += [f"## {REGIMES[regime]}", "", f"Means over seeds {', '.join(seeds)}.", ""]
        parts += [*_scores(of_regime, seeds), "", *_overlap(of_regime), ""]
    return "\n".join(parts)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _summary(results: Results) -> list[str]:
    head = [""]
    for regime in results:
        head += [f"{regime}: score", "RAM's lead", "by seed"]
    lines = [_row(head), "|---|" + "---:|" * (len(head) - 1)]
    lines.append(
        _row([f"**{RAM}**"] + [c for of in results.values() for c in (_mean(of, RAM), "", "")])
    )
    for label in merges(next(iter(results.values()))[0]):
        if label != RAM:
            cells = [label]
            for of_regime in results.values():
                cells += [_mean(of_regime, label), *_leads(leads(of_regime, label))]
            lines.append(_row(cells))
    cells = ["each agent on its own task"]
    for of_regime in results.values():
        own = [result["oracle"] for result in of_regime]
        ahead = [average(r, RAM) - oracle for r, oracle in zip(of_regime, own, strict=True)]
        cells += [f"{mean(own):.1f}", *_leads(ahead)]
    return [*lines, _row(cells)]


def _mean(results: Iterable[Result], label: str) -> str:
    return f"{mean(average(result, label) for result in results):.1f}"


def _leads(ahead: Sequence[float]) -> list[str]:
    # Adding zero turns -0.0 into 0.0.
    rounded = [round(value, 1) + 0.0 for value in (mean(ahead), *ahead)]
    return [f"{rounded[0]:+.1f}", ", ".join(f"{value:+.1f}" for value in rounded[1:])]


def _scores(results: Sequence[Result], seeds: Sequence[str]) -> list[str]:
    head = ["", *TASKS, "mean", *(f"RAM - it, seed {seed}" for seed in seeds), "mean RAM - it"]
    lines = [_row(head), "|---|" + "---:|" * (len(head) - 1)]
    for label in results[0]["exact_match_percent"]:
        scores = [mean(r["exact_match_percent"][label][task] for r in results) for task in TASKS]
        ahead = leads(results, label)
        cells = [f"{value:.1f}" for value in (*scores, mean(scores))]
        told = [f"{value:+.2f}" for value in (*ahead, mean(ahead))]
        lines.append(_row([f"**{label}**" if label == RAM else label, *cells, *told]))
    own = mean(result["oracle"] for result in results)
    ahead = [average(result, RAM) - result["oracle"] for result in results]
    told = [f"{value:+.2f}" for value in (*ahead, mean(ahead))]
    lines.append(_row(["each agent on its own task", *[""] * len(TASKS), f"{own:.1f}", *told]))
    return lines


def _overlap(results: Sequence[Result]) -> list[str]:
    head = ["agent", "seed", "steps", "density", "unique", "shared with 1", "shared with 2", "rho"]
    labels = list(results[0]["overlap"]["agents"][TASKS[0]]["lambda"])
    head += ["lambda of " + label for label in labels]
    lines = [_row(head), "|---|" + "---:|" * (len(head) - 1)]
    for task in TASKS:
        for result in results:
            agent = result["overlap"]["agents"][task]
            shares = [agent["density"], agent["unique"], *agent["shared_with"]]
            rho = "-" if agent["rho"] is None else f"{agent['rho']:.2f}"
            cells = [task, str(result["seed"]), str(result["training"][task]["steps"])]
            cells += [f"{100 * share:.1f} %" for share in shares] + [rho]
            lines.append(_row(cells + [f"{agent['lambda'][label]:.3f}" for label in labels]))
    lines += [
        "",
        "Elements whose merged value is not RAM's, in percent of all (seeds in order):",
        "",
    ]
    for label in [*labels, "ramplus_tl"]:
        shares = [
            100 * result["elements_unlike_ram"][label] / result["overlap"]["elements"]
            for result in results
        ]
        lines.append(f"- {label}: " + ", ".join(f"{share:.2f}" for share in shares))
    return lines


def draw_leads(results: Results, file: Path) -> None:
    """RAM minus each method: a dot per seed, a bar at the mean."""
    labels = [label for label in merges(next(iter(results.values()))[0]) if label != RAM]
    figure, axes = plt.subplots(
        1, len(results), figsize=(3 + 3.2 * len(results), 7.4), sharey=True, squeeze=False
    )
    every = [lead for of_regime in results.values() for x in labels for lead in leads(of_regime, x)]
    low, high = min(-1.0, *every) * 1.3, max(1.0, *every) * 1.3
    ticks = (-20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50)
    for axis, (regime, of_regime) in zip(axes[0], results.items(), strict=True):
        values = np.array([leads(of_regime, label) for label in labels])
        axis.axvline(0, color="black", linewidth=0.8)
        for index, result in enumerate(of_regime):
            rows = np.arange(len(labels)) + 0.16 * (index - (len(of_regime) - 1) / 2)
            axis.scatter(
                values[:, index],
                rows,
                s=24,
                color=SEED_COLOURS[index % len(SEED_COLOURS)],
                label=f"seed {result['seed']}",
                zorder=3,
            )
        rows = np.arange(len(labels))
        axis.vlines(values.mean(axis=1), rows - 0.36, rows + 0.36, color="black", linewidth=2.2)
        # Most differences are within a point, and a few are tens.
        axis.set_xscale("symlog", linthresh=1, linscale=1)
        shown = [tick for tick in ticks if low <= tick <= high]
        axis.set_xticks(shown, [f"{tick:g}" for tick in shown])
        axis.minorticks_off()
        axis.set_xlim(low, high)
        axis.grid(axis="x", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.set_title(REGIMES[regime], fontsize=11)
        for spine in ("top", "right"):
            axis.spines[spine].set_visible(False)
    axes[0][0].set_yticks(np.arange(len(labels)), labels, fontsize=10)
    axes[0][0].invert_yaxis()
    longest = max(range(len(results)), key=lambda i: len(list(results.values())[i]))
    handles, names = axes[0][longest].get_legend_handles_labels()
    mean_bar = plt.Line2D([], [], color="black", linewidth=2.2)
    figure.legend(
        [*handles, mean_bar],
        [*names, "mean"],
        title="Score of RAM minus score of the method, percentage points (right: RAM is ahead)",
        title_fontsize=11,
        loc="outside lower center",
        ncols=len(handles) + 1,
        fontsize=10,
        frameon=False,
    )
    _write(figure, file)


def draw_scores(results: Results, file: Path) -> None:
    """Percent exact match of every model on every task, seeds averaged."""
    first = next(iter(results.values()))[0]
    labels = list(first["exact_match_percent"])
    columns = (*TASKS, "mean")
    figure, axes = plt.subplots(
        1, len(results), figsize=(3 + 2.9 * len(results), 8.4), sharey=True, squeeze=False
    )
    for axis, (regime, of_regime) in zip(axes[0], results.items(), strict=True):
        table = np.array(
            [
                [mean(r["exact_match_percent"][label][task] for r in of_regime) for task in TASKS]
                for label in labels
            ]
        )
        table = np.column_stack([table, table.mean(axis=1)])
        # Most scores are near 100, where the colours should tell them apart.
        shade = PowerNorm(3, vmin=30, vmax=100)
        axis.imshow(table, cmap="YlGnBu", norm=shade, aspect="auto")
        for (row, column), value in np.ndenumerate(table):
            axis.text(
                column,
                row,
                f"{value:.1f}",
                ha="center",
                va="center",
                fontsize=9.5,
                color="white" if shade(value) > 0.55 else "black",
                fontweight="bold" if labels[row] == RAM else "normal",
            )
        axis.axhline(0.5, color="white", linewidth=3)
        axis.axhline(len(TASKS) + 0.5, color="white", linewidth=3)
        axis.axvline(len(TASKS) - 0.5, color="white", linewidth=3)
        axis.set_xticks(range(len(columns)), columns, fontsize=10)
        axis.xaxis.tick_top()
        axis.tick_params(length=0)
        axis.set_title(f"{REGIMES[regime]}\n({_seeds(len(of_regime))})", fontsize=11, pad=10)
        axis.spines[:].set_visible(False)
    names = [f"agent: {label}" if label in TASKS else label for label in labels]
    axes[0][0].set_yticks(range(len(labels)), names, fontsize=10)
    _write(figure, file)


def _seeds(n: int) -> str:
    return f"mean of {n} seeds" if n > 1 else "one seed"


def draw_overlap(results: Results, file: Path) -> None:
    """How much each agent changed, and with how many others; bars are agents and seeds."""
    figure, axes = plt.subplots(
        2, len(results), figsize=(1.4 + 3.7 * len(results), 6), squeeze=False, sharey="row"
    )
    for column, (regime, of_regime) in enumerate(results.items()):
        n = len(of_regime)
        for place, task in enumerate(TASKS):
            for index, result in enumerate(of_regime):
                agent = result["overlap"]["agents"][task]
                x = place + 0.8 * ((index + 0.5) / n - 0.5)
                width = 0.74 / n
                colour = SEED_COLOURS[index % len(SEED_COLOURS)]
                height = 100 * agent["density"]
                axes[0][column].bar(
                    x,
                    height,
                    width,
                    color=colour,
                    label=f"seed {result['seed']}" if not place else None,
                )
                axes[0][column].text(x, height + 1.5, f"{height:.0f}", ha="center", fontsize=8.5)
                bottom = 0.0
                for share, fill in zip(
                    (agent["unique"], *agent["shared_with"]), SHARE_COLOURS, strict=True
                ):
                    axes[1][column].bar(x, 100 * share, width, bottom=bottom, color=fill)
                    bottom += 100 * share
        axes[0][column].set_title(REGIMES[regime], fontsize=11)
        for axis in axes[:, column]:
            axis.set_xticks(range(len(TASKS)), TASKS, fontsize=10)
            axis.tick_params(axis="x", length=0)
            axis.set_ylim(0, 112)
            axis.set_yticks(range(0, 101, 25))
            for spine in ("top", "right"):
                axis.spines[spine].set_visible(False)
        axes[1][column].set_ylim(0, 100)
    axes[0][0].set_ylabel("changed,\n% of all elements", fontsize=10)
    axes[1][0].set_ylabel("% of what the agent\nchanged", fontsize=10)
    axes[0][0].legend(fontsize=10, frameon=False, loc="upper left")
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in SHARE_COLOURS],
        ["unique", "shared with one other", "shared with both others"],
        loc="outside lower center",
        ncols=len(SHARE_COLOURS),
        fontsize=10,
        frameon=False,
    )
    _write(figure, file)


def _write(figure: plt.Figure, file: Path) -> None:
    figure.set_layout_engine("constrained")
    figure.savefig(file, dpi=DPI)
    plt.close(figure)


@click.command()
@click.option(
    "--results",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(__file__).parent / "results",
)
def main(folder: Path) -> None:
    """Write tables.md and three figures beside the JSON files of ``benchmarks.agents.evidence``."""
    results = read(folder)
    if not results:
        raise click.ClickException(f"no results in {folder}")
    (folder / "tables.md").write_text(markdown(results), encoding="utf-8")
    draw_leads(results, folder / "differences.png")
    draw_scores(results, folder / "scores.png")
    draw_overlap(results, folder / "overlap.png")
    click.echo(f"wrote tables.md, differences.png, scores.png and overlap.png in {folder}")


if __name__ == "__main__":
    main()
