"""Time whole mergekit-yaml commands, side by side, on synthetic Qwen2.5-shaped checkpoints.

Checkpoints are made on the first run (a base and three agents: 4 GB for the default size) and kept
in ``--folder``. Methods take turns; each is a fresh process of the real command. MergeKit's
built-in methods are run with MERGEKIT_RAM_DISABLE=1.

    python -m benchmarks.merge
    python -m benchmarks.merge --size 1.5B --runs 1 --method ram --method ram_plus
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import click
import torch
import yaml
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

AGENTS = 3
DENSITIES = (0.05, 0.45, 0.5)


@dataclass(frozen=True)
class Size:
    """Shape of a Qwen2.5 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool


SIZES = {
    "tiny": Size(64, 128, 2, 4, 2, 512, True),
    "0.5B": Size(896, 4864, 24, 14, 2, 151936, True),
    "1.5B": Size(1536, 8960, 28, 12, 2, 151936, True),
    "7B": Size(3584, 18944, 28, 28, 4, 152064, False),
}


@dataclass(frozen=True)
class Method:
    """A method as it is run: its name, parameters, and whether the plugin is switched off."""

    name: str
    parameters: dict[str, float]
    built_in: bool = False


METHODS = {
    "ram": Method("ram", {}),
    "ram_plus": Method("ram_plus", {}),
    "ramplus_tl": Method("ramplus_tl", {}),
    "linear": Method("linear", {"weight": 1.0}, built_in=True),
    "task_arithmetic": Method("task_arithmetic", {"weight": 0.5}, built_in=True),
    "built-in ram": Method("ram", {}, built_in=True),
    "built-in ramplus_tl": Method("ramplus_tl", {}, built_in=True),
}


def shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's tensors."""
    kv = size.hidden // size.heads * size.kv_heads
    result: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size.vocabulary, size.hidden),
        "model.norm.weight": (size.hidden,),
    }
    if not size.tied:
        result["lm_head.weight"] = (size.vocabulary, size.hidden)
    for i in range(size.layers):
        prefix = f"model.layers.{i}."
        result |= {
            f"{prefix}input_layernorm.weight": (size.hidden,),
            f"{prefix}post_attention_layernorm.weight": (size.hidden,),
            f"{prefix}self_attn.q_proj.weight": (size.hidden, size.hidden),
            f"{prefix}self_attn.q_proj.bias": (size.hidden,),
            f"{prefix}self_attn.k_proj.weight": (kv, size.hidden),
            f"{prefix}self_attn.k_proj.bias": (kv,),
            f"{prefix}self_attn.v_proj.weight": (kv, size.hidden),
            f"{prefix}self_attn.v_proj.bias": (kv,),
            f"{prefix}self_attn.o_proj.weight": (size.hidden, size.hidden),
            f"{prefix}mlp.gate_proj.weight": (size.intermediate, size.hidden),
            f"{prefix}mlp.up_proj.weight": (size.intermediate, size.hidden),
            f"{prefix}mlp.down_proj.weight": (size.hidden, size.intermediate),
        }
    return result


def make_models(folder: Path, size: Size, *, shard: int = 1 << 30) -> None:
    """Write a base and agents in bfloat16; a block of 2**20 random values repeats."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randn(1 << 20, generator=generator) * 0.02
    blocks = [block.bfloat16()]
    for density in DENSITIES:
        change = torch.randn(1 << 20, generator=generator) * 2e-3
        on = torch.rand(1 << 20, generator=generator) < density
        blocks.append(torch.where(on, (block + change).bfloat16(), blocks[0]))
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "vocab_size": size.vocabulary,
        "tie_word_embeddings": size.tied,
        "torch_dtype": "bfloat16",
    }
    for i, values in enumerate(blocks):
        model = folder / ("base" if i == 0 else f"agent{i}")
        if (model / "config.json").exists():
            continue
        shutil.rmtree(model, ignore_errors=True)
        model.mkdir(parents=True)
        weight_map: dict[str, str] = {}
        held: dict[str, torch.Tensor] = {}

        def flush(model: Path, held: dict[str, torch.Tensor], weight_map: dict[str, str]) -> None:
            name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
            save_file(held, model / name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(held, name)
            held.clear()

        for name, shape in shapes(size).items():
            count = torch.Size(shape).numel()
            held[name] = values.repeat(-(-count // len(values)))[:count].reshape(shape)
            if sum(t.numel() * 2 for t in held.values()) > shard:
                flush(model, held, weight_map)
        if held:
            flush(model, held, weight_map)
        index = {"metadata": {}, "weight_map": weight_map}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        # Last: a model without it is made anew.
        (model / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class Run:
    """What one command took: seconds, and the largest anonymous memory in bytes."""

    wall: float
    cpu: float
    anonymous: int


def run(method: Method, folder: Path, out: Path, arguments: tuple[str, ...]) -> Run:
    """Run one command and watch its memory; mapped file pages do not count."""
    shutil.rmtree(out, ignore_errors=True)
    config = {
        "merge_method": method.name,
        "base_model": str(folder / "base"),
        "models": [{"model": str(folder / f"agent{i + 1}")} for i in range(AGENTS)],
        "parameters": method.parameters,
        "dtype": "bfloat16",
    }
    if method.name == "linear":
        del config["base_model"]
    recipe = folder / "config.yml"
    recipe.write_text(yaml.safe_dump(config))
    command = [Path(sys.executable).parent / "mergekit-yaml", recipe, out, "--quiet"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if method.built_in:
        environment["MERGEKIT_RAM_DISABLE"] = "1"
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--no-copy-tokenizer", *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    peak = 0
    ended = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                return
            for line in status.splitlines():
                if line.startswith("RssAnon:"):
                    peak = max(peak, int(line.split()[1]) * 1024)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - start
    ended.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{method.name} failed:\n{errors[-2000:]}")
    return Run(wall, usage.ru_utime + usage.ru_stime, peak)


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--size", type=click.Choice(list(SIZES)), default="0.5B", show_default=True)
@click.option("--method", "methods", multiple=True, type=click.Choice(list(METHODS)))
@click.option("--runs", default=3, show_default=True, help="of each method, of which the median")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("build/benchmark"))
@click.argument("arguments", nargs=-1)
def main(
    size: str, methods: tuple[str, ...], runs: int, folder: Path, arguments: tuple[str, ...]
) -> None:
    """Time merges; further ARGUMENTS are handed to mergekit-yaml."""
    folder = folder.resolve() / size
    make_models(folder, SIZES[size])
    chosen = {name: METHODS[name] for name in methods or METHODS}
    results: dict[str, list[Run]] = {name: [] for name in chosen}
    for _ in range(runs):
        for name, method in chosen.items():
            results[name].append(run(method, folder, folder / "out", arguments))
    shutil.rmtree(folder / "out", ignore_errors=True)

    console = Console()
    parameters = sum(torch.Size(s).numel() for s in shapes(SIZES[size]).values())
    console.print(
        f"{AGENTS} agents of {parameters / 1e9:.2f} billion parameters, bfloat16; "
        f"{platform.machine()}, {os.cpu_count()} CPUs; Python {platform.python_version()}, "
        + ", ".join(f"{p} {version(p)}" for p in ("torch", "numba", "mergekit"))
        + f"; median of {runs}"
    )
    table = Table()
    for column in ("", "wall, s", "CPU, s", "anonymous, MB"):
        table.add_column(column, justify="left" if not column else "right")
    for name, measured in results.items():
        table.add_row(
            name,
            f"{statistics.median(r.wall for r in measured):.1f}",
            f"{statistics.median(r.cpu for r in measured):.1f}",
            f"{statistics.median(r.anonymous for r in measured) / 2**20:,.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
