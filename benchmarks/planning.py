"""Time planning of a merge of 18,000 tensors, ram beside ram_plus.

Three agents of a synthetic mixture-of-experts checkpoint with tiny tensors; planning and
scheduling as mergekit-pytorch does it, nothing is merged.

    python -m benchmarks.planning
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from mergekit.graph import Executor
from mergekit.options import MergeOptions
from mergekit.scripts import merge_raw_pytorch as script
from safetensors.torch import save_file


def plan_and_schedule(config: Any, folder: Path) -> float:
    """Seconds to plan a merge and put its tasks in order."""
    start = time.perf_counter()
    tasks = script.plan_flat_merge(config, str(folder / "out"), False, False, MergeOptions())
    Executor(tasks)
    return time.perf_counter() - start


@click.command()
@click.option("--tensors", default=18_000, show_default=True)
@click.option("--runs", default=3, show_default=True)
def main(tensors: int, runs: int) -> None:
    """Print median times and their ratio."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = []
        for i in range(4):
            state = {f"model.layers.0.mlp.experts.{j}.w": torch.ones(2) for j in range(tensors)}
            files.append(str(folder / f"model{i}.safetensors"))
            save_file(state, files[-1])
        times: dict[str, list[float]] = {"ram": [], "ram_plus": []}
        for _ in range(runs):
            for method, measured in times.items():
                config = script.RawPyTorchMergeConfig(
                    merge_method=method,
                    base_model=files[0],
                    models=[{"model": file} for file in files[1:]],  # type: ignore[list-item]
                )
                measured.append(plan_and_schedule(config, folder))
    ram, plus = (statistics.median(times[m]) for m in ("ram", "ram_plus"))
    print(f"{tensors:,} tensors: ram {ram:.1f} s, ram_plus {plus:.1f} s, ratio {plus / ram:.2f}")


if __name__ == "__main__":
    main()
