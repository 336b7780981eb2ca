"""Time the kernels against the memory bandwidth and MergeKit's built-in methods.

The bound is the time to read all inputs and to write one freshly allocated output, measured in
the same process with torch's own operations, in turn with what is compared with it. It is given
twice: with memory as torch allocates it, and with the huge pages that the kernels ask for, which
are faster to touch first. Every result that is timed is compared, bit for bit, with the reference.

    python -m benchmarks.kernel                       # the tensor of the README's figures
    python -m benchmarks.kernel --agents 8 --dtype float32 --no-built-in
    python -m benchmarks.kernel --shape 152064x3584 --no-built-in      # Qwen2.5-7B's embedding
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version

import click
import numpy as np
import torch
from mergekit.merge_methods.base import TensorGroup
from mergekit.merge_methods.ram import ram_merge, ramplus_tl_merge
from rich.console import Console
from rich.table import Table

from mergekit_ram import kernels, reference
from mergekit_ram.methods import RAM, RAMPLUS_TL
from mergekit_ram.overlap import rescale_factor

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Rows of the reference at a time, to verify large tensors in little memory.
SLICE = 1 << 20


def make_inputs(
    elements: int, agents: int, dtype: torch.dtype, density: float
) -> list[torch.Tensor]:
    """A base and agents of a language model's magnitudes; a block of 2**20 values repeats."""
    generator = torch.Generator().manual_seed(0)
    block = 1 << 20
    base = (torch.randn(block, generator=generator) * 0.02).to(dtype)
    tensors = [base]
    for _ in range(agents):
        change = torch.randn(block, generator=generator) * 2e-3
        on = torch.rand(block, generator=generator) < density
        tensors.append(torch.where(on, (base.float() + change).to(dtype), base))
    result = []
    for tensor in tensors:
        whole = torch.empty(elements, dtype=dtype)
        for low in range(0, elements, block):
            part = whole[low : low + block]
            part.copy_(tensor[: len(part)])
        result.append(whole)
    return result


def timed(works: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """Median seconds of each, called in turn, so that the machine's moods meet all alike.

    The first, untimed, round compiles and warms up.
    """
    times: dict[str, list[float]] = {key: [] for key in works}
    for turn in range(repeat + 1):
        for key, work in works.items():
            start = time.perf_counter()
            work()
            if turn:
                times[key].append(time.perf_counter() - start)
    return {key: statistics.median(values) for key, values in times.items()}


def bounds_of(inputs: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Reading all inputs, and writing one output into fresh memory of either kind."""
    views = [t.view(torch.int32) for t in inputs]
    size = inputs[0].numel() * inputs[0].element_size()
    return {
        "read": lambda: [v.max() for v in views],
        "write": lambda: torch.empty_like(inputs[0]).fill_(1),
        "write, huge pages": lambda: torch.from_numpy(np.empty(size // 4, np.int32)).fill_(1),
    }


def verify(merged: torch.Tensor, inputs: list[torch.Tensor], factors: list[float]) -> None:
    """Compare every bit with the reference."""
    integer = torch.int16 if merged.element_size() == 2 else torch.int32
    epsilon = [1e-5] * len(factors)
    for low in range(0, merged.numel(), SLICE):
        part = [t[low : low + SLICE] for t in inputs]
        wanted = reference.merge(part[0], part[1:], epsilon=epsilon, rescale=factors)
        got = merged[low : low + SLICE]
        if not torch.equal(got.view(integer), wanted.view(integer)):
            raise SystemExit("a timed result differs from the reference")


@click.command()
@click.option("--shape", default="18944x3584", show_default=True, help="of the tensor")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bfloat16", show_default=True)
@click.option("--agents", default=3, show_default=True)
@click.option("--density", default=0.4, show_default=True, help="of each task vector")
@click.option("--repeat", default=7, show_default=True, help="timed calls, of which the median")
@click.option("--threads", type=int, help="CPU threads  [default: all]")
@click.option("--built-in/--no-built-in", default=True, help="time MergeKit's methods too (slow)")
def main(
    shape: str,
    dtype: str,
    agents: int,
    density: float,
    repeat: int,
    threads: int | None,
    built_in: bool,
) -> None:
    """Time merges and counts of one tensor."""
    if threads:
        torch.set_num_threads(threads)
    sizes = [int(s) for s in shape.split("x")]
    elements = int(np.prod(sizes))
    inputs = make_inputs(elements, agents, DTYPES[dtype], density)
    names = list(range(1, agents + 1))
    group = TensorGroup.from_tensors([t.view(*sizes) for t in inputs], base_index=0)
    console = Console()
    console.print(
        f"{shape} {dtype}, {agents} agents of density {density:g}; {platform.machine()}, "
        f"{os.cpu_count()} CPUs, {torch.get_num_threads()} threads; Python "
        f"{platform.python_version()}, "
        + ", ".join(f"{p} {version(p)}" for p in ("torch", "numba", "mergekit"))
    )

    counts, _ = kernels.count(inputs[0], inputs[1:], epsilon=[1e-5] * agents, names=names)
    local = [
        rescale_factor(int(s), int(u), 0.1, 0.2)
        for s, u in zip(counts.shared, counts.unique, strict=True)
    ]
    before = peak_memory()
    held: dict[str, torch.Tensor] = {}

    def merging(method: object, key: str) -> Callable[[], object]:
        def work() -> None:
            held.pop(key, None)
            (held[key],) = method((group,))  # type: ignore[operator]

        return work

    ours: dict[str, Callable[[], object]] = {
        "ram": merging(RAM, "ram"),
        "ramplus_tl": merging(RAMPLUS_TL, "ramplus_tl"),
        "count": lambda: kernels.count(inputs[0], inputs[1:], epsilon=[1e-5] * agents, names=names),
    }
    for work in ours.values():
        work()
    outputs = 2 * inputs[0].numel() * inputs[0].element_size()
    scratch = max(0, peak_memory() - before - outputs)
    seconds = timed(ours | bounds_of(inputs), repeat)
    verify(held["ram"].view(-1), inputs, [1.0] * agents)
    verify(held["ramplus_tl"].view(-1), inputs, local)
    held.clear()
    read = seconds["read"]
    bounds = {
        key: (read + seconds["write"] * writes, read + seconds["write, huge pages"] * writes)
        for key, writes in (("ram", 1), ("ramplus_tl", 1), ("count", 0))
    }
    theirs: dict[str, float] = {}
    if built_in:
        for key, method in (("ram", ram_merge), ("ramplus_tl", ramplus_tl_merge)):
            start = time.perf_counter()
            method((group,))
            theirs[key] = time.perf_counter() - start

    table = Table()
    for column in ("", "ms", "bound / time", "huge pages", "built-in, ms", "times faster"):
        table.add_column(column, justify="left" if not column else "right")
    for key in ours:
        built = theirs.get(key)
        table.add_row(
            key,
            f"{seconds[key] * 1e3:.0f}",
            *(f"{bound / seconds[key]:.2f}" for bound in bounds[key]),
            f"{built * 1e3:,.0f}" if built else "-",
            f"{built / seconds[key]:.0f}" if built else "-",
        )
    console.print(table)
    console.print(
        f"Bound: read all inputs, {read * 1e3:.0f} ms, and write one fresh output, "
        f"{seconds['write'] * 1e3:.0f} ms ({seconds['write, huge pages'] * 1e3:.0f} ms in huge "
        "pages); a count writes nothing. Every merge equals the reference bit for bit. "
        f"Scratch memory beyond inputs and outputs: {scratch / 2**20:.0f} MB. "
        "Built-in methods are called once."
    )


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if platform.system() == "Darwin" else 1024)


if __name__ == "__main__":
    main()
