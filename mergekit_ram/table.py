"""The overlap of agents in a terminal: tables that fit 80 columns, with or without colour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mergekit_ram.advice import advice, warnings
from mergekit_ram.kinds import layer_labels
from mergekit_ram.overlap import OverlapCounts
from mergekit_ram.record import span
from mergekit_ram.report import OverlapReport, share

# Columns that tables have per agent, in characters, and those that they have anyway.
PER_AGENT, PER_PAIR, ALWAYS = 17, 7, 18


def show(report: OverlapReport, console: Console) -> None:
    """Print everything about the overlap of a merge's agents."""
    total = report.total
    names = [("Base", ", ".join(report.base_models))]
    names += [("" if i else "Agents", f"{i + 1}  {agent}") for i, agent in enumerate(report.agents)]
    for label, name in (*names, ("Method", report.method)):
        # Whole, however long: names are for copying.
        console.print(Text.assemble((f"{label:10}", "bold"), name), soft_wrap=True)
    _print(
        console,
        "Overlap in %: density of all elements; unique and shared of the agent's changes",
        _agents(report, console.width),
    )
    if len(report.agents) > 1:
        for table in _pairs(report, console.width):
            title = "Pairwise overlap: % of the row's changes that the column made too"
            _print(console, title, table)
    layers = report.by_layer()
    labels = layer_labels(list(layers))
    groups = {
        "kind": report.by_kind(),
        "layer": {labels[name]: counts for name, counts in layers.items()},
    }
    for heading, counts in groups.items():
        title = f"By {heading} of weight" if heading == "kind" else "By layer"
        for table in _groups(heading, report, counts, console.width):
            _print(console, f"{title}: density and unique share of each agent, in %", table)
    console.print()
    console.print(_lines(_summary(report, total)))


def _summary(report: OverlapReport, total: OverlapCounts) -> list[tuple[str, str, str]]:
    lines = [
        (
            "Elements",
            f"{total.elements:,}: {share(total.unchanged_elements, total.elements)} % "
            f"unchanged, {share(total.unique_elements, total.elements)} % unique to one agent, "
            f"{share(total.shared_elements, total.elements)} % shared{_conflicts(total)}.",
            "bold",
        )
    ]
    if report.overlap.copies:
        copies = ", ".join(f"{copy} (of {of})" for copy, of in report.overlap.copies.items())
        lines.append(("Copies", f"counted once: {copies}", "bold"))
    lines += [("Warning", message, "bold yellow") for message in warnings(report)]
    return [*lines, ("Advice", advice(report), "bold green")]


def _conflicts(total: OverlapCounts) -> str:
    if not total.shared_elements:
        return ""
    part = share(total.sign_conflicts, total.shared_elements)
    return f". Sign conflicts: {total.sign_conflicts:,} ({part} % of the shared)"


def _lines(entries: Sequence[tuple[str, str, str]]) -> Table:
    """Labels, texts that wrap beside them, and the labels' styles."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=9)
    grid.add_column(overflow="fold")
    for label, text, style in entries:
        grid.add_row(Text(label, style=style), Text(text))
    return grid


def _print(console: Console, title: str, table: Table) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    console.print(table)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _agents(report: OverlapReport, width: int) -> Table:
    total, n = report.total, len(report.agents)
    # "Shared with k" for the k that fit; the last column takes the rest.
    separate = min(n - 1, 3, max(1, (width - 55) // 8))
    shared = [f"shared\nwith {k + 1}" for k in range(separate)]
    if n - 1 > separate:
        shared[-1] += "+"
    table = _table(
        "agent",
        "density",
        "unique",
        *shared,
        "below\nepsilon",
        "rho",
        "lambda",
    )
    for i, agent in enumerate(report.overlap.agents):
        changed = int(total.changed[i])
        row = [int(x) for x in total.overlap[i]]
        with_others = [*row[1:separate], sum(row[separate:])] if separate else []
        rho = report.rho(i)
        table.add_row(
            str(i + 1),
            share(changed, total.elements),
            share(int(total.unique[i]), changed),
            *(share(part, changed) for part in with_others),
            share(int(total.below_epsilon[i]), total.elements),
            f"{rho:.2f}" if rho is not None else "-",
            span(report.rescale_factors[agent], ".3f"),
        )
    return table


def _pairs(report: OverlapReport, width: int) -> Iterator[Table]:
    total, n = report.total, len(report.agents)
    for columns in _chunks(n, (width - 8) // PER_PAIR):
        table = _table("agent", *(str(j + 1) for j in columns))
        for i in range(n):
            changed = int(total.changed[i])
            shares = [share(int(total.pairs[i, j]), changed) for j in columns]
            table.add_row(
                str(i + 1),
                *("" if i == j else cell for j, cell in zip(columns, shares, strict=True)),
            )
        yield table


def _groups(
    heading: str, report: OverlapReport, groups: Mapping[str, OverlapCounts], width: int
) -> Iterator[Table]:
    if not groups:
        return
    names = max(len(name) for name in (heading, *groups))
    for agents in _chunks(len(report.agents), (width - names - ALWAYS) // PER_AGENT):
        columns = [f"{what}\n{i + 1}" for i in agents for what in ("density", "unique")]
        table = _table(heading, "elements", "shared", *columns)
        for name, counts in groups.items():
            cells = [_magnitude(counts.elements), share(counts.shared_elements, counts.elements)]
            for i in agents:
                changed = int(counts.changed[i])
                cells += [share(changed, counts.elements)]
                cells += [share(int(counts.unique[i]), changed)]
            table.add_row(name, *cells)
        yield table


def _chunks(n: int, size: int) -> Iterator[range]:
    """Agents that stand side by side in one table."""
    size = max(1, size)
    return (range(low, min(n, low + size)) for low in range(0, n, size))


def _magnitude(number: int) -> str:
    for limit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{suffix}"
    return str(number)
