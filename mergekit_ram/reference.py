"""The rule of Reinforced Agent Merging (arXiv 2601.13572), readable. Tests compare against it.

It holds whole arrays in memory and shares no code with the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def _values(tensor: torch.Tensor) -> np.ndarray:
    """Exact values: float64 for float64, float32 for the rest."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.detach().cpu().to(wide).numpy()


def _active(
    base: torch.Tensor, agents: Sequence[torch.Tensor], epsilon: Sequence[float]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Task vectors, and where each is larger than its epsilon."""
    task_vectors = [_values(agent) - _values(base) for agent in agents]
    active = [
        np.abs(tau) > np.asarray(eps).astype(tau.dtype)
        for tau, eps in zip(task_vectors, epsilon, strict=True)
    ]
    return task_vectors, active


def merge(
    base: torch.Tensor,
    agents: Sequence[torch.Tensor],
    *,
    epsilon: Sequence[float],
    weight: Sequence[float] | None = None,
    rescale: Sequence[float] | None = None,
) -> torch.Tensor:
    """Merge one tensor.

    Args:
        base: the base model's tensor, any shape, bfloat16, float16, float32 or float64, finite
            wherever an agent differs from it.
        agents: the agents' tensors, of the same shape and dtype.
        epsilon: per agent; an element is active where ``|agent - base| > epsilon``.
        weight: per agent factor of its task vector, not zero; 1 unless given.
        rescale: per agent factor lambda of what only it changed; 1 unless given.

    Returns:
        A tensor of the base's shape and dtype.
    """
    weight = [1.0] * len(agents) if weight is None else weight
    rescale = [1.0] * len(agents) if rescale is None else rescale
    theta = _values(base)
    number = theta.dtype.type
    with np.errstate(all="ignore"):
        task_vectors, active = _active(base, agents, epsilon)
        count = sum((a.astype(np.int64) for a in active), np.zeros(theta.shape, np.int64))

        total = np.zeros_like(theta)
        unique = theta.copy()
        for agent, tau, on, w, lam in zip(
            agents, task_vectors, active, weight, rescale, strict=True
        ):
            scaled = number(w) * tau
            total = np.where(on, total + scaled, total)
            if number(w) == 1 and number(lam) == 1:
                alone = _values(agent)
            else:
                alone = theta + number(lam) * scaled
            unique = np.where(on & (count == 1), alone, unique)
        shared = theta + total / count.astype(theta.dtype)

    merged = np.where(count >= 2, shared, unique)
    rounded = torch.from_numpy(np.asarray(merged)).to(base.dtype).reshape(base.shape)
    # Unchanged is the base bit for bit, even where it holds NaN.
    unchanged = torch.from_numpy(np.asarray(count == 0)).reshape(base.shape)
    return torch.where(unchanged, base.detach().cpu(), rounded)


def count(
    base: torch.Tensor, agents: Sequence[torch.Tensor], *, epsilon: Sequence[float]
) -> dict[str, Any]:
    """Count classes and overlaps of one tensor, one element after the other.

    Returns:
        ``elements``, ``unchanged``, ``unique``, ``shared``, ``sign_conflicts`` (int);
        ``changed``, ``below_epsilon`` (list per agent); ``overlap`` (list per agent of the
        number of elements active in it and in exactly 0, 1, ... others); ``pairs`` (list per
        agent of the elements active in both).
    """
    n = len(agents)
    with np.errstate(all="ignore"):
        task_vectors, active = _active(base, agents, epsilon)
    raw_base = base.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    size = base.element_size()
    result: dict[str, Any] = {
        "elements": base.numel(),
        "unchanged": 0,
        "unique": 0,
        "shared": 0,
        "sign_conflicts": 0,
        "changed": [0] * n,
        "below_epsilon": [0] * n,
        "overlap": [[0] * n for _ in range(n)],
        "pairs": [[0] * n for _ in range(n)],
    }
    raw = [a.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for a in agents]
    taus = [tau.reshape(-1) for tau in task_vectors]
    masks = [on.reshape(-1) for on in active]
    for j in range(base.numel()):
        here = slice(j * size, (j + 1) * size)
        on = [i for i in range(n) if masks[i][j]]
        result[("unchanged", "unique", "shared")[min(len(on), 2)]] += 1
        signs = {bool(taus[i][j] > 0) for i in on}
        result["sign_conflicts"] += len(signs) == 2
        for i in range(n):
            if i in on:
                result["changed"][i] += 1
                result["overlap"][i][len(on) - 1] += 1
                for other in on:
                    result["pairs"][i][other] += 1
            elif not np.array_equal(raw[i][here], raw_base[here]):
                result["below_epsilon"][i] += 1
    return result
