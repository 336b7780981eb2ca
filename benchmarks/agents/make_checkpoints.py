"""Train a base model and its three agents: ``python -m benchmarks.agents.make_checkpoints``."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import logging

from benchmarks.agents.evaluate import Scores, load, score
from benchmarks.agents.model import save
from benchmarks.agents.tasks import TASKS
from benchmarks.agents.training import REGIMES, Regime, train_agent, train_base
from benchmarks.agents.vectors import EPSILON, supports

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Entry:
    """What became of one model: ``steps`` of training, and ``final``, its last reward or loss."""

    steps: int
    final: float
    seconds: float


def make(
    out: Path,
    *,
    seed: int,
    regimes: Mapping[str, Regime],
    base_steps: int = 1000,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Train and save base and agents, one regime for each task; give their provenance.

    The base is bfloat16 whatever ``dtype`` the agents are saved in. All that is measured is
    measured on the saved files.
    """
    entries: dict[str, Entry] = {}

    def finish(
        name: str,
        model: PreTrainedModel,
        dtype: torch.dtype,
        began: float,
        steps: int,
        final: float,
    ) -> None:
        save(model, out / name, dtype)
        entries[name] = Entry(steps, round(final, 4), round(time.perf_counter() - began, 1))

    loss = 0.0

    def report_base(step: int, value: float) -> None:
        nonlocal loss
        loss = value
        if step % 100 == 0:
            click.echo(f"base: step {step}, loss {value:.3f}")

    began = time.perf_counter()
    base = train_base(seed, steps=base_steps, report=report_base)
    finish("base", base, torch.bfloat16, began, base_steps, loss)
    for task in TASKS.values():

        def report(step: int, reward: float, name: str = task.name) -> None:
            if step % 25 == 0:
                click.echo(f"{name}: step {step}, reward {reward:.3f}")

        began = time.perf_counter()
        agent = train_agent(base, task, regime=regimes[task.name], seed=seed, report=report)
        finish(task.name, agent.model, dtype, began, agent.steps, agent.reward)

    models = {name: load(out / name) for name in entries}
    scores: dict[str, Scores] = {name: score(model) for name, model in models.items()}
    base = models.pop("base")
    return {
        "seed": seed,
        "regimes": {name: _told(regime) for name, regime in regimes.items()},
        "saved_dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "cpu": processor(),
        "training": {name: asdict(entry) for name, entry in entries.items()},
        "exact_match_percent": {
            name: {task: round(value, 2) for task, value in row.items()}
            for name, row in scores.items()
        },
        "task_vectors": {
            "epsilon": EPSILON,
            **{name: asdict(support) for name, support in supports(base, models).items()},
        },
    }


def _told(regime: Regime) -> dict[str, Any]:
    settings = asdict(regime)
    settings["dtype"] = str(regime.dtype).removeprefix("torch.")
    settings["optimizer"] = regime.optimizer.__name__.strip("_")
    return settings


def processor() -> str:
    """The processor's name, and the vector instructions torch uses on it."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


@click.command()
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--regime", type=click.Choice(list(REGIMES)), default="E", show_default=True)
@click.option("--learning-rate", type=float, help="Of the agents; else the regime's.")
@click.option("--max-steps", type=int, help="Of each agent; else the regime's.")
@click.option("--target", type=float, help="Mean reward at which an agent is done.")
@click.option("--base-steps", type=int, default=1000, show_default=True)
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bfloat16", show_default=True)
@click.option("--threads", type=int, default=1, show_default=True)
def main(
    out: Path,
    seed: int,
    regime: str,
    learning_rate: float | None,
    max_steps: int | None,
    target: float | None,
    base_steps: int,
    dtype: str,
    threads: int,
) -> None:
    """Write OUT/base, OUT/sort, OUT/cumsum, OUT/reverse and OUT/provenance.json."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    given = {"learning_rate": learning_rate, "max_steps": max_steps, "target": target}
    overrides: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    chosen = replace(REGIMES[regime], **overrides)
    provenance = make(
        out,
        seed=seed,
        regimes=dict.fromkeys(TASKS, chosen),
        base_steps=base_steps,
        dtype=DTYPES[dtype],
    )
    text = json.dumps(provenance, indent=2)
    (out / "provenance.json").write_text(text + "\n", encoding="utf-8")
    click.echo(text)


if __name__ == "__main__":
    main()
