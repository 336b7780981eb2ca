"""Exact match of models on the held-out prompts: ``python -m benchmarks.agents.evaluate``."""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from benchmarks.agents.model import write_answers
from benchmarks.agents.tasks import TASKS, test_digits

Scores = dict[str, float]
Models = dict[str, Path]


def load(folder: Path) -> PreTrainedModel:
    """The model in ``folder``, computed in float32 so that machines agree; weights as stored."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return model.float().eval()


def score(model: PreTrainedModel) -> Scores:
    """Percent of the test prompts that greedy decoding answers exactly, by task."""
    digits = test_digits()
    scores = {}
    for task in TASKS.values():
        right = (write_answers(model, task.prompts(digits)) == task.answer(digits)).all(dim=1)
        scores[task.name] = 100 * right.float().mean().item()
    return scores


def mean(scores: Scores) -> float:
    """The mean over the tasks."""
    return sum(scores.values()) / len(scores)


def table(results: dict[str, Scores]) -> Table:
    """Models by tasks; ``*`` marks the best of each column, ties included."""
    rows = {name: [*scores.values(), mean(scores)] for name, scores in results.items()}
    best = [max(column) for column in zip(*rows.values(), strict=True)]
    shown = Table(box=box.SIMPLE_HEAD, padding=0, collapse_padding=True)
    shown.add_column("", overflow="fold", min_width=max(map(len, TASKS)))
    for heading in (*TASKS, "mean"):
        shown.add_column(heading + " ", justify="right", no_wrap=True)
    for name, values in rows.items():
        cells = [
            Text(f" {value:.1f}*", style="bold") if value == top else Text(f" {value:.1f} ")
            for value, top in zip(values, best, strict=True)
        ]
        shown.add_row(Text(name), *cells)
    return shown


def remark(results: dict[str, Scores]) -> str:
    """What the table says of the models that are neither the base nor a task's agent."""
    agents = {name: scores for name, scores in results.items() if name in TASKS}
    merges = [name for name in results if name not in TASKS and name != "base"]
    if len(agents) < len(TASKS) or not merges:
        top = max(results, key=lambda name: mean(results[name]))
        return f"Best on average: {top}, {mean(results[top]):.1f} %."
    own = sum(agents[name][name] for name in TASKS) / len(TASKS)
    single = max(agents, key=lambda name: mean(agents[name]))
    told = " and ".join(f"{name} {mean(results[name]):.1f} %" for name in merges)
    return (
        f"Averages over the three tasks: {told}; each agent on its own task {own:.1f} %; "
        f"the best agent on all three ({single}) {mean(agents[single]):.1f} %."
    )


def _named(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> Models:
    models: Models = {}
    for value in values:
        name, _, folder = value.partition("=")
        if not name or not folder:
            raise click.BadParameter(f"'{value}' is not NAME=FOLDER.")
        if name in models:
            raise click.BadParameter(f"the name '{name}' is given twice.")
        if not (Path(folder) / "config.json").is_file():
            raise click.BadParameter(f"no model at '{folder}' (it has no config.json).")
        models[name] = Path(folder)
    return models


@click.command()
@click.argument("models", metavar="NAME=FOLDER...", nargs=-1, required=True, callback=_named)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Scores, as JSON."
)
def main(models: Models, json_file: Path | None) -> None:
    """Score each model on the 512 held-out prompts of each task.

    A model named "base", or after a task, counts as the base or as that task's agent.
    """
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Models this small gain little from threads, which stall where the cores have other work.
    torch.set_num_threads(1)
    results = {name: score(load(folder)) for name, folder in models.items()}
    console = Console(highlight=False)
    # Narrower than this, rich would cut digits off.
    console.width = max(console.width, 40)
    console.print(table(results))
    note = "* best of its column. Percent of 512 held-out prompts answered exactly."
    console.print(note, remark(results), sep="\n", markup=False)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
