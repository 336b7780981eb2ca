"""What a merge does to its agents' changes, as data: for tables, figures, files and model cards."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mergekit_ram
from mergekit_ram.kinds import KINDS, kind_of, layer_of
from mergekit_ram.overlap import (
    ModelOverlap,
    OverlapCounts,
    overlap_unique_ratio,
    rescale_factors,
)

FORMAT, FORMAT_VERSION = "mergekit-ram overlap", 1
PAPER = "arXiv:2601.13572"

Range = tuple[float, float]


@dataclass(frozen=True)
class OverlapReport:
    """Counts of a merge together with what the merge makes of them.

    Attributes:
        method: name of the merge method.
        tensor_local: whether the method counts rho in each tensor.
        base_models: as the config names them; more than one only where slices name their own.
        overlap: the counts.
        settings: per tensor and agent, the values of ``epsilon``, ``weight``, ``r``, ``alpha``.
    """

    method: str
    tensor_local: bool
    base_models: tuple[str, ...]
    overlap: ModelOverlap
    settings: Mapping[str, Mapping[Hashable, Mapping[str, float]]]

    @property
    def total(self) -> OverlapCounts:
        """Counts over the whole model."""
        return self.overlap.total

    @property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents, in the order of the config."""
        return tuple(str(agent) for agent in self.overlap.agents)

    def takes_part(self, i: int) -> bool:
        """Whether agent ``i`` takes part in any tensor; a weight of 0 leaves it out."""
        agent = self.overlap.agents[i]
        return any(agent in counts.agents for counts in self.overlap.tensors.values())

    def rho(self, i: int) -> float | None:
        """Overlap-unique ratio of agent ``i`` over the whole model."""
        return overlap_unique_ratio(int(self.total.shared[i]), int(self.total.unique[i]))

    def setting(self, name: str, agent: Hashable) -> Range:
        """Smallest and largest value of a parameter over the merged tensors."""
        values = {
            of_tensor[agent][name]
            for tensor, of_tensor in self.settings.items()
            if tensor in self.overlap.tensors and agent in of_tensor
        }
        return (min(values), max(values)) if values else (math.nan, math.nan)

    @functools.cached_property
    def rescale_factors(self) -> dict[Hashable, Range]:
        """Smallest and largest factor lambda of each agent over the merged tensors."""
        found: dict[Hashable, set[float]] = {agent: set() for agent in self.overlap.agents}
        for tensor, counts in self.overlap.tensors.items():
            of_tensor = self.settings[tensor]
            r, alpha = ({a: of_tensor[a][key] for a in counts.agents} for key in ("r", "alpha"))
            whole = counts if self.tensor_local else self.total
            for agent, factor in rescale_factors(whole, r, alpha).items():
                found[agent].add(factor)
        return {a: (min(f), max(f)) if f else (1.0, 1.0) for a, f in found.items()}

    def by_kind(self) -> dict[str, OverlapCounts]:
        """Counts per kind of weight, those that occur, in the order of ``KINDS``."""
        groups = self.overlap.grouped(kind_of)
        return {kind: groups[kind] for kind in KINDS if kind in groups}

    def by_layer(self) -> dict[str, OverlapCounts]:
        """Counts per layer, in the order of their names; weights outside of layers have none."""
        return {str(k): v for k, v in self.overlap.grouped(layer_of).items()}

    def by_layer_and_kind(self) -> dict[tuple[str, str], OverlapCounts]:
        """Counts per layer and kind of weight; layer "" for weights outside of layers."""
        groups = self.overlap.grouped(lambda name: (layer_of(name) or "", kind_of(name)))
        return {key: counts for key, counts in groups.items() if isinstance(key, tuple)}

    def to_json(self) -> str:
        """Return everything as JSON, the same text for the same merge; README, "The record"."""
        base = self.base_models
        document: dict[str, Any] = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "plugin": f"mergekit-ram {mergekit_ram.__version__}",
            "paper": PAPER,
            "method": self.method,
            "base_model": base[0] if len(base) == 1 else list(base),
            "elements": _elements(self.total),
            "agents": [
                {"model": str(agent)}
                | counts
                | {"rho": self.rho(i)}
                | _from_range("rescale_factor", self.rescale_factors[agent])
                | {
                    "parameters": {
                        name: _one_or_both(self.setting(name, agent))
                        for name in ("epsilon", "weight", "r", "alpha")
                    }
                }
                for i, (agent, counts) in enumerate(
                    zip(self.overlap.agents, _agents(self.total), strict=True)
                )
            ],
            "pairs": self.total.pairs.tolist(),
            "groups": {
                "kind": {k: _group(c) for k, c in self.by_kind().items()},
                "layer": {k: _group(c) for k, c in self.by_layer().items()},
            },
            "tensors": {
                name: {
                    "kind": kind_of(name),
                    "layer": layer_of(name),
                    "copy_of": self.overlap.copies.get(name),
                }
                | _group(_spread(counts, self.overlap.agents))
                for name, counts in self.overlap.tensors.items()
            },
        }
        return _dump(document) + "\n"


def share(part: int, whole: int) -> str:
    """A share in percent, for people: a few are not none, and nearly all are not all."""
    if not whole:
        return "-"
    value = 100 * part / whole
    if 0 < value < 0.05:
        return "<0.1"
    return ">99.9" if 99.95 <= value < 100 else f"{value:.1f}"


def _spread(counts: OverlapCounts, agents: Sequence[Hashable]) -> OverlapCounts:
    """Counts with a row for every agent of the merge."""
    return OverlapCounts.zero(agents) + counts


def _elements(counts: OverlapCounts) -> dict[str, int]:
    return {
        "total": counts.elements,
        "unchanged": counts.unchanged_elements,
        "unique": counts.unique_elements,
        "shared": counts.shared_elements,
        "sign_conflicts": counts.sign_conflicts,
    }


def _agents(counts: OverlapCounts) -> list[dict[str, Any]]:
    return [
        {
            "changed": int(counts.changed[i]),
            "density": counts.density[i],
            "unique": int(counts.unique[i]),
            "shared": int(counts.shared[i]),
            "overlap": counts.overlap[i].tolist(),
            "below_epsilon": int(counts.below_epsilon[i]),
        }
        for i in range(len(counts.agents))
    ]


def _group(counts: OverlapCounts) -> dict[str, Any]:
    return {
        "elements": _elements(counts),
        "agents": _agents(counts),
        "pairs": counts.pairs.tolist(),
    }


def _number(value: float) -> float | str | None:
    """A number as JSON has it: infinity, which alpha may be, becomes a string."""
    if math.isnan(value):
        return None
    return value if math.isfinite(value) else str(value)


def _one_or_both(values: Range) -> Any:
    low, high = values
    return _number(low) if low == high or math.isnan(low) else [_number(low), _number(high)]


def _from_range(name: str, values: Range) -> dict[str, Any]:
    """One number where all tensors agree; else null, and the range."""
    low, high = values
    return {
        name: _number(low) if low == high else None,
        f"{name}_range": [_number(low), _number(high)],
    }


def _dump(value: Any, depth: int = 0) -> str:
    """JSON with one agent, group or tensor per line: readable, and fit for comparing."""
    if isinstance(value, dict) and value and depth < 3:
        pad = " " * (depth + 1)
        inner = (
            f"{pad}{json.dumps(key, ensure_ascii=False)}: {_dump(item, depth + 1)}"
            for key, item in value.items()
        )
        if depth < 1 or all(isinstance(item, dict) for item in value.values()):
            return "{\n" + ",\n".join(inner) + "\n" + " " * depth + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict) and depth == 1:
        inner = ("  " + json.dumps(item, ensure_ascii=False, allow_nan=False) for item in value)
        return "[\n" + ",\n".join(inner) + "\n ]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
