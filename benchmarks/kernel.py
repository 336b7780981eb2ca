"""Time the kernels against the memory bandwidth and MergeKit's built-in methods.

The bound is the time to read all inputs and to write one freshly allocated output, measured in
the same process with torch's own operations, in turn with what is compared with it. On the CPU it
is given twice: with memory as torch allocates it, and with the huge pages that the kernels ask
for, which are faster to touch first. Every result that is timed is compared with the reference,
bit for bit and count for count.

    python -m benchmarks.kernel                       # the tensor of the README's figures
    python -m benchmarks.kernel --agents 8 --dtype float32 --no-built-in
    python -m benchmarks.kernel --shape 152064x3584 --no-built-in      # Qwen2.5-7B's embedding
    python -m benchmarks.kernel --sweep --json sweep.json --plot sweep.svg
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import click
import numpy as np
import torch
from mergekit.merge_methods.base import TensorGroup
from mergekit.merge_methods.ram import ram_merge, ramplus_tl_merge
from rich.console import Console
from rich.table import Table

from mergekit_ram import kernels, reference
from mergekit_ram.methods import RAM, RAMPLUS_TL
from mergekit_ram.overlap import OverlapCounts, rescale_factor

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
METHODS = ("ram", "ramplus_tl", "count", "merge + count")
# Values repeat after this many, so that the reference has to look at no more.
PERIOD = 1 << 12
EPSILON = 1e-5

SWEEP_AGENTS = (2, 3, 8, 16)
SWEEP_DENSITIES = (0.0, 0.4, 1.0)
# Bytes of all inputs of a case of the sweep: far more than caches hold.
SWEEP_BYTES = 1 << 29


@dataclass(frozen=True)
class Case:
    """What is merged."""

    device: str
    dtype: str
    agents: int
    density: float
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return int(np.prod(self.sizes))


@dataclass(frozen=True)
class Result:
    """Median seconds of each method and of its bounds, and peak scratch memory in bytes."""

    case: Case
    seconds: dict[str, float]
    bounds: dict[str, float]
    bounds_huge_pages: dict[str, float]
    scratch: int

    def ratio(self, method: str) -> float:
        """Share of the bound's speed that a method reaches."""
        return self.bounds_huge_pages[method] / self.seconds[method]


def make_inputs(
    elements: int, agents: int, dtype: torch.dtype, density: float, device: str = "cpu"
) -> list[torch.Tensor]:
    """A base and agents of a language model's magnitudes, repeating after ``PERIOD`` values."""
    generator = torch.Generator().manual_seed(0)
    base = (torch.randn(PERIOD, generator=generator) * 0.02).to(dtype)
    tensors = [base]
    for _ in range(agents):
        change = torch.randn(PERIOD, generator=generator) * 2e-3
        on = torch.rand(PERIOD, generator=generator) < density
        tensors.append(torch.where(on, (base.float() + change).to(dtype), base))
    result = []
    for tensor in tensors:
        whole = torch.empty(elements, dtype=dtype, device=device)
        full = elements - elements % PERIOD
        whole[:full].view(-1, PERIOD).copy_(tensor)
        whole[full:].copy_(tensor[: elements - full])
        result.append(whole)
    return result


def timed(
    works: dict[str, Callable[[], object]], repeat: int, device: str = "cpu"
) -> dict[str, float]:
    """Median seconds of each, called in turn, so that the machine's moods meet all alike.

    The first, untimed, round compiles and warms up.
    """
    times: dict[str, list[float]] = {key: [] for key in works}
    for turn in range(repeat + 1):
        for key, work in works.items():
            synchronize(device)
            start = time.perf_counter()
            work()
            synchronize(device)
            if turn:
                times[key].append(time.perf_counter() - start)
    return {key: statistics.median(values) for key, values in times.items()}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def bounds_of(inputs: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Reading all inputs, and writing one output into fresh memory of either kind."""
    views = [t[: t.numel() // 2 * 2].view(torch.int32) for t in inputs]
    works: dict[str, Callable[[], object]] = {
        "read": lambda: [v.max() for v in views],
        "write": lambda: torch.empty_like(inputs[0]).fill_(1),
    }
    if inputs[0].device.type == "cpu":
        size = inputs[0].numel() * inputs[0].element_size()
        works["write, huge pages"] = lambda: torch.from_numpy(np.empty(size // 4, np.int32)).fill_(
            1
        )
    return works


def verify_merge(merged: torch.Tensor, inputs: list[torch.Tensor], factors: list[float]) -> None:
    """Compare every bit with the reference."""
    part = [t[:PERIOD].cpu() for t in inputs]
    epsilon = [EPSILON] * len(factors)
    period = reference.merge(part[0], part[1:], epsilon=epsilon, rescale=factors)
    integer = torch.int16 if merged.element_size() == 2 else torch.int32
    got, wanted = merged.view(-1).view(integer), period.view(integer).to(merged.device)
    full = len(got) - len(got) % PERIOD
    right = (got[:full].view(-1, PERIOD) == wanted).all() and torch.equal(
        got[full:], wanted[: len(got) - full]
    )
    if not right:
        raise SystemExit("a timed merge differs from the reference")


def verify_counts(found: Sequence[OverlapCounts], inputs: list[torch.Tensor]) -> None:
    """Compare every count with the reference, which is slow and therefore called once."""
    repeats, rest = divmod(inputs[0].numel(), PERIOD)
    part = [t[:PERIOD].cpu() for t in inputs]
    epsilon = [EPSILON] * (len(inputs) - 1)
    period = reference.count(part[0], part[1:], epsilon=epsilon)
    end = reference.count(part[0][:rest], [t[:rest] for t in part[1:]], epsilon=epsilon)
    for key in ("elements", "overlap", "pairs", "below_epsilon", "sign_conflicts"):
        wanted = repeats * np.array(period[key]) + np.array(end[key])
        if not all(np.array_equal(getattr(counts, key), wanted) for counts in found):
            raise SystemExit(f"a timed count differs from the reference: {key}")


def measure(case: Case, repeat: int) -> tuple[Result, list[torch.Tensor]]:
    """Time all methods on one case and verify what they return; also the inputs."""
    inputs = make_inputs(
        case.elements, case.agents, DTYPES[case.dtype], case.density, device=case.device
    )
    group = TensorGroup.from_tensors([t.view(*case.sizes) for t in inputs], base_index=0)
    n = case.agents
    names = list(range(1, n + 1))
    ones = [1.0] * n
    held: dict[str, torch.Tensor] = {}
    counted: dict[str, OverlapCounts] = {}

    def merging(method: object, key: str) -> Callable[[], object]:
        def work() -> None:
            held.pop(key, None)
            (held[key],) = method((group,))  # type: ignore[operator]

        return work

    factors = {"epsilon": [EPSILON] * n, "weight": ones, "rescale": ones}

    def count(*tensors: torch.Tensor) -> None:
        base, *agents = tensors or inputs
        counted["count"], _ = kernels.count(base, agents, epsilon=factors["epsilon"], names=names)

    def both(*tensors: torch.Tensor) -> None:
        base, *agents = tensors or inputs
        held.pop("merge + count", None)
        held["merge + count"], counted["merge + count"], _ = kernels.merge_and_count(
            base, agents, **factors, names=names
        )

    works = dict(
        zip(
            METHODS,
            (merging(RAM, "ram"), merging(RAMPLUS_TL, "ramplus_tl"), count, both),
            strict=True,
        )
    )
    # Loading the machine code takes memory, too.
    few = [t[:PERIOD] for t in inputs]
    kernels.merge(few[0], few[1:], **factors)
    count(*few)
    both(*few)
    before = peak_memory(case.device)
    for work in works.values():
        work()
    outputs = 3 * inputs[0].numel() * inputs[0].element_size()
    scratch = max(0, peak_memory(case.device) - before - outputs)
    seconds = timed(works | bounds_of(inputs), repeat, case.device)

    verify_counts(list(counted.values()), inputs)
    local = [
        rescale_factor(int(s), int(u), 0.1, 0.2)
        for s, u in zip(counted["count"].shared, counted["count"].unique, strict=True)
    ]
    for key, merged in held.items():
        verify_merge(merged, inputs, local if key == "ramplus_tl" else ones)
    read, write = seconds.pop("read"), seconds.pop("write")
    huge = seconds.pop("write, huge pages", write)
    result = Result(
        case,
        seconds,
        bounds={key: read + write * (key != "count") for key in METHODS},
        bounds_huge_pages={key: read + huge * (key != "count") for key in METHODS},
        scratch=scratch,
    )
    return result, inputs


def peak_memory(device: str) -> int:
    """Most memory that this process has used so far, in bytes."""
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if platform.system() == "Darwin" else 1024)


def environment() -> dict[str, object]:
    """The machine and the versions that figures hold for."""
    return {
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "numba", "mergekit")},
    }


def built_in_seconds(case: Case, inputs: list[torch.Tensor]) -> dict[str, float]:
    """Seconds of one call of each of MergeKit's methods."""
    group = TensorGroup.from_tensors([t.view(*case.sizes) for t in inputs], base_index=0)
    theirs = {}
    for key, method in (("ram", ram_merge), ("ramplus_tl", ramplus_tl_merge)):
        start = time.perf_counter()
        method((group,))
        synchronize(case.device)
        theirs[key] = time.perf_counter() - start
    return theirs


def print_case(console: Console, result: Result, theirs: dict[str, float]) -> None:
    """Print one case, method by method, beside the built-in methods."""
    table = Table()
    for column in ("", "ms", "bound / time", "huge pages", "built-in, ms", "times faster"):
        table.add_column(column, justify="left" if not column else "right")
    for key, seconds in result.seconds.items():
        built = theirs.get(key)
        table.add_row(
            key,
            f"{seconds * 1e3:.1f}",
            f"{result.bounds[key] / seconds:.2f}",
            f"{result.ratio(key):.2f}",
            f"{built * 1e3:,.0f}" if built else "-",
            f"{built / seconds:.0f}" if built else "-",
        )
    console.print(table)
    read = result.bounds["count"]
    write = result.bounds["ram"] - read
    huge = result.bounds_huge_pages["ram"] - read
    console.print(
        f"Bound: read all inputs, {read * 1e3:.1f} ms, and write one fresh output, "
        f"{write * 1e3:.1f} ms ({huge * 1e3:.1f} ms in huge pages); a count writes nothing. Every "
        "result equals the reference, bit for bit and count for count. Scratch memory beyond "
        f"inputs and outputs: {result.scratch / 2**20:.0f} MB. Built-in methods are called once."
    )


def sweep_cases(devices: Sequence[str]) -> list[Case]:
    """Every dtype, number of agents and density."""
    cases = []
    for device, dtype, agents, density in itertools.product(
        devices, DTYPES, SWEEP_AGENTS, SWEEP_DENSITIES
    ):
        # Not a multiple of anything: the last chunk and the last group are part of it.
        elements = SWEEP_BYTES // (DTYPES[dtype].itemsize * (agents + 1)) - 1
        cases.append(Case(device, dtype, agents, density, (elements,)))
    return cases


def print_sweep(console: Console, results: list[Result]) -> None:
    """Print a line per case, and the worst of each column."""
    table = Table(caption="milliseconds (bound / time); a count's bound is reading alone")
    for column in ("device", "dtype", "agents", "density", *METHODS, "count costs"):
        table.add_column(column, justify="left" if column in ("device", "dtype") else "right")
    for result in results:
        case = result.case
        extra = result.seconds["merge + count"] / result.seconds["ram"]
        table.add_row(
            case.device,
            case.dtype,
            str(case.agents),
            f"{case.density:g}",
            *(f"{result.seconds[key] * 1e3:.1f} ({result.ratio(key):.2f})" for key in METHODS),
            f"{extra:.2f} x ram",
        )
    table.add_section()
    table.add_row(
        "worst",
        "",
        "",
        "",
        *(f"{min(result.ratio(key) for result in results):.2f}" for key in METHODS),
        f"{max(r.seconds['merge + count'] / r.seconds['ram'] for r in results):.2f} x ram",
    )
    console.print(table)


def plot_sweep(results: list[Result], file: Path) -> None:
    """Draw the share of the bound's speed over the number of agents: a band over densities."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise click.ClickException("--plot needs matplotlib: pip install matplotlib") from error
    devices = sorted({result.case.device for result in results})
    figure, grid = plt.subplots(
        len(devices), len(METHODS), figsize=(13, 3.4 * len(devices)), sharey=True, squeeze=False
    )
    for (row, device), (column, method) in itertools.product(
        enumerate(devices), enumerate(METHODS)
    ):
        axes = grid[row][column]
        for dtype in DTYPES:
            ratios: dict[int, list[float]] = {}
            for result in results:
                if (result.case.device, result.case.dtype) == (device, dtype):
                    ratios.setdefault(result.case.agents, []).append(result.ratio(method))
            agents = sorted(ratios)
            axes.plot(agents, [statistics.median(ratios[n]) for n in agents], "o-", label=dtype)
            lowest, highest = ([f(ratios[n]) for n in agents] for f in (min, max))
            axes.fill_between(agents, lowest, highest, alpha=0.2)
        axes.axhline(1, color="gray", linestyle="--")
        axes.set(title=f"{method}, {device}", xlabel="agents", ylim=(0, None))
    grid[0][0].set_ylabel("bound / time")
    grid[0][0].legend()
    figure.suptitle("Speed against the memory bandwidth; bands span densities 0 to 1")
    figure.tight_layout()
    figure.savefig(file)


@click.command()
@click.option("--shape", default="18944x3584", show_default=True, help="of the tensor")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bfloat16", show_default=True)
@click.option("--agents", default=3, show_default=True)
@click.option("--density", default=0.4, show_default=True, help="of each task vector")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: cpu; in sweeps all]")
@click.option("--repeat", default=7, show_default=True, help="timed calls, of which the median")
@click.option("--threads", type=int, help="CPU threads  [default: all]")
@click.option("--built-in/--no-built-in", default=True, help="time MergeKit's methods too (slow)")
@click.option("--sweep", is_flag=True, help="all dtypes, 2 to 16 agents, several densities")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="write results to it")
@click.option("--plot", type=click.Path(path_type=Path), help="write a sweep's figure to it")
def main(
    shape: str,
    dtype: str,
    agents: int,
    density: float,
    device: str | None,
    repeat: int,
    threads: int | None,
    built_in: bool,
    sweep: bool,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Time merges and counts of one tensor, or of many in a sweep."""
    if plot and not sweep:
        raise click.UsageError("--plot draws a sweep: add --sweep")
    if threads:
        torch.set_num_threads(threads)
    console = Console()
    # Where output is not a terminal, rich would assume 80 columns.
    console.width = max(console.width, 120)
    about = environment()
    console.print(", ".join(f"{key} {value}" for key, value in about.items()))
    theirs: dict[str, float] = {}
    if sweep:
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        cases = sweep_cases([device] if device else devices)
        with click.progressbar(cases, label="cases") as shown:
            results = [measure(case, repeat)[0] for case in shown]
        print_sweep(console, results)
    else:
        sizes = tuple(int(s) for s in shape.split("x"))
        case = Case(device or "cpu", dtype, agents, density, sizes)
        console.print(f"{shape} {dtype}, {agents} agents of density {density:g}, {case.device}")
        result, inputs = measure(case, repeat)
        results = [result]
        theirs = built_in_seconds(case, inputs) if built_in else {}
        print_case(console, result, theirs)
    if json_file:
        content = {
            "environment": about,
            "results": [asdict(result) for result in results],
            "built_in_seconds": theirs,
        }
        json_file.write_text(json.dumps(content, indent=1) + "\n")
    if plot:
        plot_sweep(results, plot)


if __name__ == "__main__":
    main()
