"""Time whole mergekit-yaml commands, side by side, on synthetic Qwen2.5-shaped checkpoints.

Checkpoints are made on the first run (a base and three agents: 4 GB for the default size) and kept
in ``--folder``. Methods take turns; each is a fresh process of the real command. MergeKit's
built-in methods are run with MERGEKIT_RAM_DISABLE=1.

In the same turns the floor is measured: a command that only starts (``mergekit-yaml --help``), and
reading all inputs and writing one output's worth of bytes to the same disk.

    python -m benchmarks.merge
    python -m benchmarks.merge --size 1.5B --runs 1 --method ram --method ram_plus
    # In a process that cannot have more than 8 GB of anonymous memory, and 4.4 GB of mapped shards:
    python -m benchmarks.merge --size 7B --runs 1 --method ram --method ram_plus --limit 12.4 \\
        -- --out-shard-size 1B
"""

from __future__ import annotations

import functools
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
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
START, FLOOR = "starting", "reading inputs, writing output"
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


def make_models(folder: Path, size: Size, distinct: int, *, shard: int = 1 << 30) -> None:
    """Write a base and agents in bfloat16; a block of 2**20 random values repeats.

    Agents after the first ``distinct`` ones are hard links of the last of those, to save disk.
    """
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
        if i > distinct:
            shutil.copytree(folder / f"agent{distinct}", model, copy_function=os.link)
            continue
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


def start_up() -> Run:
    """A command that does nothing but import MergeKit."""
    program = Path(sys.executable).parent / "mergekit-yaml"
    start = time.perf_counter()
    subprocess.run([program, "--help"], stdout=subprocess.DEVNULL, check=True)
    return Run(time.perf_counter() - start, 0.0, 0)


def input_and_output(folder: Path, out: Path, size: int) -> Run:
    """Read all inputs, and write ``size`` bytes in files of 1 GB, as a merge would."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    buffer = bytearray(1 << 24)
    start = time.perf_counter()
    for file in sorted(folder.glob("*/*.safetensors")):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    for low in range(0, size, 1 << 30):
        with (out / f"{low}").open("wb", buffering=0) as stream:
            for part in range(low, min(size, low + (1 << 30)), len(buffer)):
                stream.write(buffer[: size - part])
    return Run(time.perf_counter() - start, 0.0, 0)


def run(
    method: Method, folder: Path, out: Path, arguments: tuple[str, ...], limit: float | None
) -> Run:
    """Run one command and watch its memory; mapped file pages do not count.

    Args:
        limit: GB (1e9 bytes) of private memory that the process may have. The system counts
            the mapped input files with it, one shard per model, as torch maps them writable.
    """
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

    def limited() -> None:
        most = int((limit or 0) * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))

    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--no-copy-tokenizer", *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=limited if limit else None,
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
@click.option("--limit", type=float, help="GB of memory that a process may have")
@click.option(
    "--distinct", default=AGENTS, help="agents with files of their own", show_default=True
)
@click.argument("arguments", nargs=-1)
def main(
    size: str,
    methods: tuple[str, ...],
    runs: int,
    folder: Path,
    limit: float | None,
    distinct: int,
    arguments: tuple[str, ...],
) -> None:
    """Time merges; further ARGUMENTS are handed to mergekit-yaml."""
    folder = folder.resolve() / size
    out = folder / "out"
    make_models(folder, SIZES[size], distinct)
    parameters = sum(torch.Size(s).numel() for s in shapes(SIZES[size]).values())
    works: dict[str, Callable[[], Run]] = {
        START: start_up,
        FLOOR: lambda: input_and_output(folder, out, 2 * parameters),
    }
    for name in methods or METHODS:
        works[name] = functools.partial(run, METHODS[name], folder, out, arguments, limit)
    results: dict[str, list[Run]] = {name: [] for name in works}
    for _ in range(runs):
        for name, work in works.items():
            results[name].append(work())
    shutil.rmtree(out, ignore_errors=True)

    console = Console()
    walls = {name: statistics.median(r.wall for r in results[name]) for name in results}
    least = walls[START] + walls[FLOOR]
    console.print(
        f"{AGENTS} agents of {parameters / 1e9:.2f} billion parameters, bfloat16; "
        f"{platform.machine()}, {os.cpu_count()} CPUs; Python {platform.python_version()}, "
        + ", ".join(f"{p} {version(p)}" for p in ("torch", "numba", "mergekit"))
        + f"; median of {runs}"
        + (f"; limited to {limit:g} GB" if limit else "")
        + (f"; agents from the {distinct + 1}. on are hard links" if distinct < AGENTS else "")
    )
    table = Table()
    for column in ("", "wall, s", "beyond the floor", "CPU, s", "anonymous, MB"):
        table.add_column(column, justify="left" if not column else "right")
    for name, measured in results.items():
        if name in (START, FLOOR):
            table.add_row(name, f"{walls[name]:.1f}", "", "", "")
            continue
        table.add_row(
            name,
            f"{walls[name]:.1f}",
            f"{100 * (walls[name] / least - 1):+.0f} %",
            f"{statistics.median(r.cpu for r in measured):.1f}",
            f"{statistics.median(r.anonymous for r in measured) / 2**20:,.0f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
