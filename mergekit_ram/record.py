"""What a merge leaves beside its weights: log lines, ``ram_overlap.json``, the card's section."""

from __future__ import annotations

import logging
from pathlib import Path

import mergekit_ram
from mergekit_ram.advice import warnings
from mergekit_ram.errors import warn_once
from mergekit_ram.overlap import OverlapCounts
from mergekit_ram.report import OverlapReport, Range, share

LOG = logging.getLogger(__name__)

FILE = "ram_overlap.json"
PARAMETERS = ("epsilon", "weight", "r", "alpha")


def announce(report: OverlapReport) -> None:
    """Log the overlap (``-v``), and warn of agents that RAM cannot do much with."""
    total = report.total
    LOG.info(
        "Overlap of the agents over the whole model (%s elements, %s shared with conflicting "
        "signs):\n%s",
        f"{total.elements:,}",
        f"{total.sign_conflicts:,}",
        plain_table(report),
    )
    for message in warnings(report):
        warn_once(message)


def write(report: OverlapReport, folder: Path) -> None:
    """Write ``ram_overlap.json`` into the folder of a merge."""
    (folder / FILE).write_text(report.to_json(), encoding="utf-8")


def plain_table(report: OverlapReport) -> str:
    """Return one line of text per agent; their names come last, since they may be long."""
    rows = [("density", "unique", "shared", "rho", "lambda", "agent")]
    for i, agent in enumerate(report.agents):
        density, unique, shared, _, rho, factor = _cells(report, i)
        rows.append((density, unique, shared, rho, factor, agent))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([cell.rjust(w) for cell, w in zip(row, widths, strict=False)] + [row[-1]])
        for row in rows
    )


def card_section(report: OverlapReport) -> str:
    """Return a section of a model card, in Markdown."""
    total = report.total
    over = "each tensor" if report.tensor_local else "the whole model"
    lines = [
        "### Overlap of the agents",
        "",
        f"Merged by `{report.method}` of mergekit-ram {mergekit_ram.__version__} (Reinforced Agent "
        "Merging, [arXiv:2601.13572](https://arxiv.org/abs/2601.13572)), with "
        f"{_parameters(report)}. ρ, the overlap-unique ratio, is counted over {over}; λ is "
        "the rescale factor of what is unique to an agent.",
        "",
        "| agent | density | unique | shared | below epsilon | ρ | λ |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {agent.replace('|', chr(92) + '|')} | " + " | ".join(_cells(report, i)) + " |"
            for i, agent in enumerate(report.agents)
        ),
        "",
        f"Of {total.elements:,} elements {_percent(total.unchanged_elements, total.elements)} are "
        f"unchanged, {_percent(total.unique_elements, total.elements)} unique to one agent and "
        f"{_percent(total.shared_elements, total.elements)} shared{_conflicts(total)}. Everything "
        f"by kind of weight, by layer and by tensor is in `{FILE}`.",
    ]
    return "\n".join(lines) + "\n"


def _cells(report: OverlapReport, i: int) -> tuple[str, str, str, str, str, str]:
    """Density, unique, shared, below epsilon, rho and lambda of agent ``i``."""
    total = report.total
    changed, unique, shared = (int(c[i]) for c in (total.changed, total.unique, total.shared))
    rho = report.rho(i)
    return (
        _percent(changed, total.elements),
        _percent(unique, changed),
        _percent(shared, changed),
        _percent(int(total.below_epsilon[i]), total.elements),
        f"{rho:.3f}" if rho is not None else "-",
        span(report.rescale_factors[report.overlap.agents[i]], ".4f"),
    )


def _percent(part: int, whole: int) -> str:
    return f"{share(part, whole)} %" if whole else "-"


def _conflicts(total: OverlapCounts) -> str:
    if not total.shared_elements:
        return ""
    part = _percent(total.sign_conflicts, total.shared_elements)
    return f", of which {part} with conflicting signs"


def _parameters(report: OverlapReport) -> str:
    """All parameters in one phrase, per agent where agents differ."""
    phrases = []
    for name in PARAMETERS:
        values = [report.setting(name, agent) for agent in report.overlap.agents]
        texts = [span(value, "g") for value in values]
        phrases.append(f"`{name}` " + (texts[0] if len(set(texts)) == 1 else ", ".join(texts)))
    return "; ".join(phrases)


def span(values: Range, form: str) -> str:
    """One number, or the range of those that tensors have."""
    low, high = (format(value, form) for value in values)
    return low if low == high else f"{low}-{high}"
