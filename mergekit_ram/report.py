"""The overlap of agents as a table for people."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from mergekit_ram.overlap import OverlapCounts, overlap_unique_ratio

COLUMNS = ("density", "unique", "shared", "rho", "lambda", "agent")


def overlap_table(counts: OverlapCounts, factors: Mapping[Hashable, tuple[float, float]]) -> str:
    """Return a plain text table, one line per agent.

    Args:
        counts: over the whole model.
        factors: smallest and largest rescale factor per agent; they differ where r or alpha
            are set per tensor.

    Returns:
        Columns: density, the share of all elements that the agent changed; unique and shared,
        the shares of those that it alone and that others changed too; rho, the overlap-unique
        ratio; lambda, the rescale factor. The agents' names come last, since they may be long.
    """
    rows: list[tuple[str, ...]] = [COLUMNS]
    for i, agent in enumerate(counts.agents):
        changed, unique, shared = (
            int(c[i]) for c in (counts.changed, counts.unique, counts.shared)
        )
        rho = overlap_unique_ratio(shared, unique)
        low, high = factors.get(agent, (1.0, 1.0))
        rows.append(
            (
                _percent(changed, counts.elements),
                _percent(unique, changed),
                _percent(shared, changed),
                f"{rho:.3f}" if rho is not None else "-",
                f"{low:.4f}" if low == high else f"{low:.4f}-{high:.4f}",
                str(agent),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return "\n".join(
        "  ".join([cell.rjust(w) for cell, w in zip(row, widths, strict=False)] + [row[-1]])
        for row in rows
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"
