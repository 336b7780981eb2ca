"""Check and time the torch path on an accelerator: bits, bandwidth, whole merges.

    python -m benchmarks.gpu                  # CUDA; ends with an error where there is none
    python -m benchmarks.gpu --device cpu     # the same steps without one, to try the script

Three parts: merges and counts of many kinds of values have the same bits as the CPU kernels';
time of a merge beside the device's bandwidth; mergekit-yaml with each of MergeKit's options for
accelerators writes the same bytes as without them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import click
import torch
import yaml
from safetensors import safe_open

from benchmarks.merge import SIZES, make_models
from mergekit_ram import kernels
from mergekit_ram.kernels import _cpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}
OPTIONS: tuple[tuple[str, ...], ...] = (
    ("--cuda",),
    ("--cuda", "--low-cpu-memory"),
    ("--cuda", "--read-to-gpu"),
    ("--cuda", "--low-cpu-memory", "--read-to-gpu"),
    ("--cuda", "--multi-gpu"),
)


def values(elements: int, n: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """A base and agents with every kind of finite bits: subnormals, both zeros, all exponents."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    bits = torch.randint(-(2 ** (8 * size - 1)), 2 ** (8 * size - 1) - 1, (n + 1, elements))
    raw = bits.to(INTEGER[size]).view(dtype)
    raw = torch.where(raw.isfinite(), raw, torch.zeros((), dtype=dtype))
    small = (torch.randn(n + 1, elements, generator=generator) * 0.02).to(dtype)
    base = torch.where(torch.rand(elements, generator=generator) < 0.5, raw[0], small[0])
    agents = []
    for i in range(n):
        kind = torch.rand(elements, generator=generator)
        near = (base.double() * (1 + 1e-2 * small[i + 1].double())).to(dtype)
        near = torch.where(near.isfinite(), near, base)
        agents.append(torch.where(kind < 0.4, base, torch.where(kind < 0.8, near, raw[i + 1])))
    return [base, *agents]


def check_bits(device: str, elements: int) -> int:
    """Merge and count on both; the number of comparisons made."""
    done = 0
    for dtype in DTYPES:
        for n in (1, 2, 3, 8):
            base, *agents = values(elements, n, dtype, seed=n)
            for weight, rescale in ((1.0, 1.0), (0.3, 1.02)):
                settings = {
                    "epsilon": [1e-5] * n,
                    "weight": [weight] * n,
                    "rescale": [rescale] * n,
                    "names": range(n),
                }
                here = kernels.merge_and_count(base, agents, **settings)  # type: ignore[arg-type]
                with mock.patch.object(_cpu, "available", return_value=False):  # for --device cpu
                    there = kernels.merge_and_count(
                        base.to(device),
                        [agent.to(device) for agent in agents],
                        **settings,  # type: ignore[arg-type]
                    )
                bits = (t.cpu().view(INTEGER[t.element_size()]) for t in (here[0], there[0]))
                same = torch.equal(*bits) and here[2] == there[2]
                if not same or here[1].key() != there[1].key():
                    raise SystemExit(f"{device} differs from the CPU: {dtype}, {n} agents")
                done += 1
    return done


def seconds(device: str, work: Callable[[], object], repeat: int = 10) -> float:
    """Shortest time of a call, the device's queue emptied before and after."""

    def ready() -> None:
        if device != "cpu":
            torch.get_device_module(device).synchronize()

    times = []
    for _ in range(repeat + 1):
        ready()
        start = time.perf_counter()
        work()
        ready()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def bandwidth(device: str, rows: int) -> list[str]:
    """Merge, count and both against reading all inputs and writing one output on the device."""
    lines = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [torch.randn(rows, 3584, device=device).mul_(0.02).to(dtype)]
        for _ in range(3):
            on = torch.rand(rows, 3584, device=device) < 0.4
            change = torch.randn(rows, 3584, device=device) * 2e-3
            inputs.append(torch.where(on, (inputs[0].float() + change).to(dtype), inputs[0]))
        base, *agents = inputs
        numbers = [t.view(torch.int32) for t in inputs]
        bound = seconds(
            device, lambda numbers=numbers, base=base: ([v.max() for v in numbers], base.clone())
        ) - seconds(device, lambda numbers=numbers: numbers[0].max())
        settings = {"epsilon": [1e-5] * 3, "weight": [1.0] * 3, "rescale": [1.0] * 3}
        merge = seconds(device, lambda b=base, a=agents, s=settings: kernels.merge(b, a, **s))
        count = seconds(
            device, lambda b=base, a=agents: kernels.count(b, a, epsilon=[1e-5] * 3, names="abc")
        )
        size = sum(t.numel() * t.element_size() for t in (*inputs, base)) / 1e9
        lines.append(
            f"{str(dtype).removeprefix('torch.')}: merge {1e3 * merge:.2f} ms "
            f"({size / merge:,.0f} GB/s, {bound / merge:.2f} of the bound of "
            f"{1e3 * bound:.2f} ms), count {1e3 * count:.2f} ms"
        )
    return lines


def weights(folder: Path) -> dict[str, bytes]:
    """Bits of all tensors in a folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                found[name] = (
                    opened.get_tensor(name).contiguous().view(torch.uint8).numpy().tobytes()
                )
    return found


def check_commands(folder: Path, size: str, device: str) -> list[str]:
    """Merge by mergekit-yaml with every option; the lines to print."""
    models = folder / size
    make_models(models, SIZES[size], 3)
    lines = []
    for method in ("ram", "ram_plus", "ramplus_tl"):
        config = folder / f"{method}.yml"
        agents = [{"model": str(models / f"agent{i}")} for i in (1, 2, 3)]
        config.write_text(
            yaml.safe_dump(
                {"merge_method": method, "base_model": str(models / "base"), "models": agents}
            )
        )
        wanted: dict[str, bytes] = {}
        for options in ((), *OPTIONS):
            given = [o.replace("--cuda", f"--device={device}") for o in options]
            if device == "cpu" and "--multi-gpu" in options:
                continue
            out = folder / "out"
            program = Path(sys.executable).parent / "mergekit-yaml"
            start = time.perf_counter()
            subprocess.run(
                [program, config, out, "--quiet", "--no-copy-tokenizer", *given],
                check=True,
                stderr=subprocess.DEVNULL,
            )
            took = time.perf_counter() - start
            got = weights(out)
            wanted = wanted or got
            if got != wanted:
                raise SystemExit(f"{method} with {' '.join(options)} differs from the CPU's merge")
            lines.append(f"{method} {' '.join(given) or 'CPU'}: {took:.1f} s, the same bits")
    return lines


@click.command()
@click.option("--device", default="cuda", show_default=True)
@click.option("--elements", default=1_000_003, show_default=True, help="of each tensor compared")
@click.option("--rows", default=18944, show_default=True, help="of the tensor timed")
@click.option("--size", type=click.Choice(list(SIZES)), default="0.5B", show_default=True)
def main(device: str, elements: int, rows: int, size: str) -> None:
    """Run all three parts."""
    if device != "cpu" and not torch.get_device_module(device).is_available():
        raise SystemExit(f"There is no {device} device here.")
    name = torch.get_device_module(device).get_device_name() if device != "cpu" else "CPU"
    click.echo(f"{name}, torch {torch.__version__}")
    click.echo(f"{check_bits(device, elements)} merges and counts have the CPU kernels' bits")
    for line in bandwidth(device, rows):
        click.echo(line)
    with tempfile.TemporaryDirectory() as folder:
        for line in check_commands(Path(folder), size, device):
            click.echo(line)


if __name__ == "__main__":
    main()
