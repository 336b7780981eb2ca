"""Train agents of several seeds and regimes, merge them, score: ``benchmarks.agents.evidence``."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file

from benchmarks.agents.cache import DESIGNS, WORKERS, Job, start_worker, train
from benchmarks.agents.evaluate import Scores, load, score
from benchmarks.agents.make_checkpoints import processor
from benchmarks.agents.merges import RAM, Method, all_merges, matched_weight, merge, overlap
from benchmarks.agents.tasks import TASKS

RESULTS = Path(__file__).parent / "results"


def measure(root: Path, seed: int, regime: str, results: Path, *, commands: bool) -> Path:
    """Merge and score one seed's agents of one regime; write what came out.

    Args:
        root: of the trained checkpoints.
        seed: which base and agents; also what DARE draws from.
        regime: a name in ``DESIGNS``.
        results: the folder for the JSON file.
        commands: also merge by the real ``mergekit-yaml``, and demand the same bits.
    """
    began = time.perf_counter()
    base = Job(root, seed)
    jobs = {"base": base} | {task: Job(root, seed, regime, task) for task in TASKS}
    states = {name: load_file(job.folder / "model.safetensors") for name, job in jobs.items()}
    design = DESIGNS[regime]
    model = load(base.folder)

    def scored(state: Mapping[str, torch.Tensor]) -> Scores:
        model.load_state_dict(state)
        return {task: round(value, 2) for task, value in score(model).items()}

    scores = {name: scored(state) for name, state in states.items()}
    seconds, differing = {}, {}
    ram = merge(states, RAM, design.dtype, seed)
    for label, merged in all_merges(states, design.dtype, seed).items():
        start = time.perf_counter()
        state = merged()
        seconds[label] = round(time.perf_counter() - start, 3)
        scores[label] = scored(state)
        differing[label] = sum(int((state[key] != ram[key]).sum()) for key in ram)
    checked = []
    if commands:
        for name in ("ram", "ram_plus"):
            out = root / "commands" / f"seed{seed}-{regime}-{name}"
            _check_command(jobs, Method(name), design.dtype, out, states)
            checked.append(name)
    result: dict[str, Any] = {
        "seed": seed,
        "regime": regime,
        "date": date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "mergekit")},
            "mergekit-ram": version("mergekit-ram"),
        },
        "hardware": {"cpu": processor(), "cpus": os.cpu_count(), "threads_per_job": 1},
        "saved_dtype": str(design.dtype).removeprefix("torch."),
        "design": {
            task: asdict(settings)
            | {
                "dtype": str(settings.dtype).removeprefix("torch."),
                "optimizer": settings.optimizer.__name__.strip("_"),
            }
            for task, settings in design.agents.items()
        },
        "training": {name: job.record() for name, job in jobs.items()},
        "overlap": overlap(states),
        "matched_weight": matched_weight(states),
        "oracle": round(sum(scores[task][task] for task in TASKS) / len(TASKS), 2),
        "exact_match_percent": scores,
        "elements_unlike_ram": differing,
        "merge_seconds": seconds,
        "same_bits_by_mergekit_yaml": checked,
        "seconds": round(time.perf_counter() - began, 1),
    }
    results.mkdir(parents=True, exist_ok=True)
    file = results / f"{regime}-seed{seed}.json"
    file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return file


def _check_command(
    jobs: Mapping[str, Job],
    method: Method,
    dtype: torch.dtype,
    out: Path,
    states: Mapping[str, dict[str, torch.Tensor]],
) -> None:
    """Merge by ``mergekit-yaml``; fail unless the bits are those of the merge in process."""
    config = {
        "merge_method": method.name,
        "base_model": str(jobs["base"].folder),
        "models": [{"model": str(jobs[task].folder)} for task in TASKS],
        "dtype": str(dtype).removeprefix("torch."),
    }
    out.mkdir(parents=True, exist_ok=True)
    file = out / "config.yml"
    # JSON is YAML.
    file.write_text(json.dumps(config), encoding="utf-8")
    program = Path(sys.executable).parent / "mergekit-yaml"
    subprocess.run([program, file, out / "merged", "--quiet"], check=True)
    wanted = merge(states, method, dtype, seed=0)
    got: dict[str, torch.Tensor] = {}
    for part in (out / "merged").glob("*.safetensors"):
        got |= load_file(part)
    assert got.keys() == wanted.keys()
    for key, tensor in wanted.items():
        bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        assert torch.equal(got[key].view(bits.dtype), bits), f"{method.name}: {key} differs"


@click.command()
@click.argument("seeds", type=int, nargs=-1)
@click.option(
    "--regime",
    "regimes",
    type=click.Choice(list(DESIGNS)),
    multiple=True,
    default=list(DESIGNS),
    show_default=True,
)
@click.option("--cache", type=click.Path(path_type=Path), default=Path("build/evidence"))
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS)
def main(seeds: tuple[int, ...], regimes: tuple[str, ...], cache: Path, results: Path) -> None:
    """Train, merge and score SEEDS (0 1 2 unless given), and write one JSON file of each."""
    seeds = seeds or (0, 1, 2)
    train(cache, seeds, regimes)
    with ProcessPoolExecutor(WORKERS, get_context("spawn"), start_worker) as pool:
        futures = [
            # One run of the real command per method is enough: the tests have the rest.
            pool.submit(
                measure,
                cache,
                seed,
                regime,
                results,
                commands=(seed, regime) == (seeds[0], regimes[0]),
            )
            for seed in seeds
            for regime in regimes
        ]
        for future in futures:
            click.echo(f"wrote {future.result()}")


if __name__ == "__main__":
    main()
