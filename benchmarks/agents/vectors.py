"""How dense the agents' task vectors are, and how much of each is its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

EPSILON = 1e-5


@dataclass(frozen=True)
class Support:
    """Shares of one task vector: active among all elements, unique among the active ones."""

    density: float
    unique: float


def _active(agent: PreTrainedModel, base: PreTrainedModel, epsilon: float) -> Tensor:
    """(parameters,) bool: where agent - base, in float32, exceeds epsilon in magnitude."""
    pairs = zip(agent.parameters(), base.parameters(), strict=True)
    moved = [((a.float() - b.float()).abs() > epsilon).flatten() for a, b in pairs]
    return torch.cat(moved)


@torch.no_grad()
def supports(
    base: PreTrainedModel, agents: dict[str, PreTrainedModel], epsilon: float = EPSILON
) -> dict[str, Support]:
    """Each agent's support, by its name; unique elements are active in that agent only."""
    active = {name: _active(agent, base, epsilon) for name, agent in agents.items()}
    overlap = torch.stack(list(active.values())).sum(dim=0)
    return {
        name: Support(
            density=round(mask.float().mean().item(), 4),
            unique=round((overlap[mask] == 1).sum().item() / max(1, int(mask.sum())), 4),
        )
        for name, mask in active.items()
    }
