"""The rule in torch operations: any device, any of the four dtypes, differentiable.

Each step is one correctly rounded operation in the working dtype, in the order of the compiled
kernels, so that both give the same bits. Work proceeds in chunks: temporaries stay small.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

# Bytes of temporaries per chunk: about ten of the working dtype, and a mask per agent.
SCRATCH = 48 << 20


def _step(agents: int, wide: torch.dtype) -> int:
    """Elements per chunk."""
    return max(1, SCRATCH // (10 * wide.itemsize + agents))


def _bits_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.view(integer) != b.view(integer)


def _non_finite(
    base: torch.Tensor, agents: Sequence[torch.Tensor], differ: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Count changed elements with a non-finite value: in the base, and in each agent."""
    broken = ~base.isfinite()
    counts = torch.zeros(len(agents) + 1, dtype=torch.int64, device=base.device)
    for i, (agent, changed) in enumerate(zip(agents, differ, strict=True)):
        counts[0] += (changed & broken).sum()
        counts[1 + i] = (changed & ~agent.isfinite()).sum()
    return counts


def _merge(
    base: torch.Tensor,
    agents: Sequence[torch.Tensor],
    epsilon: Sequence[float],
    weight: Sequence[float],
    rescale: Sequence[float],
    wide: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge tensors of one shape and dtype; also counts of what is wrong, as in ``merge_range``."""
    theta = base.to(wide)
    zero = torch.zeros((), dtype=wide, device=base.device)
    total = torch.zeros_like(theta)
    count = torch.zeros_like(theta)
    unique = theta
    differ = [_bits_differ(agent, base) for agent in agents]
    for agent, changed, eps, w, lam in zip(agents, differ, epsilon, weight, rescale, strict=True):
        value = agent.to(wide)
        tau = value - theta
        active = (tau.abs() > eps) & changed
        if w == 1 and lam == 1:
            scaled = tau
        else:
            scaled = tau * w
            value = theta + scaled * lam
        total = total + torch.where(active, scaled, zero)
        count = count + active.to(wide)
        unique = torch.where(active, value, unique)
    # Where nothing is shared the quotient is not used; its gradient must not be NaN either.
    shared = theta + total / count.clamp(min=1)
    merged = torch.where(count >= 2, shared, unique)
    rounded = merged.to(base.dtype)
    # A conversion would quiet an unchanged signalling NaN.
    rounded = torch.where(count == 0, base, rounded)
    overflow = ~rounded.isfinite() & ((count > 0) | base.isfinite())
    bad = torch.cat([_non_finite(base, agents, differ), overflow.sum()[None]])
    return rounded, bad


def merge_differentiably(
    inputs: Sequence[torch.Tensor],
    epsilon: Sequence[float],
    weight: Sequence[float],
    rescale: Sequence[float],
    wide: torch.dtype,
) -> tuple[torch.Tensor, np.ndarray]:
    """Merge tensors of one dtype in one piece; gradients flow to those that require them.

    Returns:
        The merged tensor of the inputs' dtype and counts of what is wrong, int64 ``(n + 2,)``.
    """
    merged, bad = _merge(inputs[0], inputs[1:], epsilon, weight, rescale, wide)
    return merged, bad.cpu().numpy()


def merge_flat(
    out: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    epsilon: Sequence[float],
    weight: Sequence[float],
    rescale: Sequence[float],
    wide: torch.dtype,
    *,
    counting: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Merge flat inputs of the output's dtype; count as well if ``counting``.

    Returns:
        The table of ``count_range``, zeros unless ``counting``, and the faults of ``merge_range``.
    """
    n = len(epsilon)
    # Counts stay on the device: one transfer per tensor, not one per chunk.
    table = torch.zeros((2 * n + 2, n), dtype=torch.int64, device=out.device)
    bad = torch.zeros(n + 2, dtype=torch.int64, device=out.device)
    step = _step(n, wide)
    for low in range(0, out.numel(), step):
        base, *agents = (tensor[low : low + step] for tensor in inputs)
        merged, faults = _merge(base, agents, epsilon, weight, rescale, wide)
        out[low : low + step] = merged
        bad += faults
        if counting:
            del merged
            _count(base, agents, epsilon, wide, table)
    return table.cpu().numpy(), bad.cpu().numpy()


def count_flat(
    inputs: Sequence[torch.Tensor], epsilon: Sequence[float], wide: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Count flat inputs of one dtype: the table and the faults of ``count_range``."""
    n = len(epsilon)
    device = inputs[0].device
    table = torch.zeros((2 * n + 2, n), dtype=torch.int64, device=device)
    bad = torch.zeros(n + 2, dtype=torch.int64, device=device)
    step = _step(n, wide)
    for low in range(0, inputs[0].numel(), step):
        base, *agents = (tensor[low : low + step] for tensor in inputs)
        _count(base, agents, epsilon, wide, table)
        differ = [_bits_differ(agent, base) for agent in agents]
        bad[:-1] += _non_finite(base, agents, differ)
    return table.cpu().numpy(), bad.cpu().numpy()


def _count(
    base: torch.Tensor,
    agents: Sequence[torch.Tensor],
    epsilon: Sequence[float],
    wide: torch.dtype,
    table: torch.Tensor,
) -> None:
    """Add the counts of tensors of one shape and dtype to the table of ``count_range``."""
    n = len(epsilon)
    theta = base.to(wide)
    active: list[torch.Tensor] = []
    up = torch.zeros_like(base, dtype=torch.bool)
    down = torch.zeros_like(up)
    for i, (agent, eps) in enumerate(zip(agents, epsilon, strict=True)):
        tau = agent.to(wide) - theta
        on = tau.abs() > eps
        active.append(on)
        up |= on & (tau > 0)
        down |= on & (tau < 0)
        table[2 * n, i] += (_bits_differ(agent, base) & ~on).sum()
    table[2 * n + 1, 0] += (up & down).sum()
    number = torch.zeros_like(base, dtype=torch.int64)
    for on in active:
        number += on
    for i, on in enumerate(active):
        table[i] += torch.bincount(number[on], minlength=n + 1)[1:]
        for j in range(i, n):
            table[n + i, j] += (on & active[j]).sum()
