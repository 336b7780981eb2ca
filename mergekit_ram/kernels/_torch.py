"""The rule in torch operations: any device, any of the four dtypes, differentiable.

Each step is one correctly rounded operation in the working dtype, in the order of the compiled
kernels, so that both give the same bits. Work proceeds in chunks: temporaries stay small.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHUNK = 1 << 20


def _bits_differ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.view(integer) != b.view(integer)


def _non_finite(
    base: torch.Tensor, agents: Sequence[torch.Tensor], differ: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Count changed elements with a non-finite value: in the base, and in each agent."""
    broken = ~base.isfinite()
    counts = [sum((d & broken).sum() for d in differ)]
    counts += [(d & ~a.isfinite()).sum() for a, d in zip(agents, differ, strict=True)]
    return torch.stack([torch.as_tensor(c, device=base.device) for c in counts])


def _merge_flat(
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


def merge_into(
    out: torch.Tensor | None,
    base: torch.Tensor,
    agents: Sequence[torch.Tensor],
    epsilon: Sequence[float],
    weight: Sequence[float],
    rescale: Sequence[float],
    wide: torch.dtype,
) -> tuple[torch.Tensor, list[int]]:
    """Merge flat tensors of one dtype into ``out``, or differentiably where ``out`` is None.

    Returns:
        The merged tensor and counts of what is wrong, ``n + 2`` (see ``merge_range``).
    """
    if out is None:
        merged, bad = _merge_flat(base, agents, epsilon, weight, rescale, wide)
        return merged, bad.tolist()
    # Counts stay on the device: one transfer per tensor, not one per chunk.
    bad = torch.zeros(len(agents) + 2, dtype=torch.int64, device=base.device)
    for low in range(0, base.numel(), CHUNK):
        part = slice(low, low + CHUNK)
        merged, wrong = _merge_flat(
            base[part], [agent[part] for agent in agents], epsilon, weight, rescale, wide
        )
        out[part] = merged
        bad += wrong
    return out, bad.tolist()


def count(
    base: torch.Tensor,
    agents: Sequence[torch.Tensor],
    epsilon: Sequence[float],
    wide: torch.dtype,
) -> tuple[torch.Tensor, list[int]]:
    """Count flat tensors of one dtype.

    Returns:
        The int64 table ``(2 n + 2, n)`` and the ``n + 2`` counts of ``count_range``.
    """
    n = len(agents)
    table = torch.zeros((2 * n + 2, n), dtype=torch.int64, device=base.device)
    bad = torch.zeros(n + 2, dtype=torch.int64, device=base.device)
    for low in range(0, base.numel(), CHUNK):
        part = slice(low, low + CHUNK)
        raw = base[part]
        theta = raw.to(wide)
        parts = [agent[part] for agent in agents]
        differ = [_bits_differ(agent, raw) for agent in parts]
        active = []
        up = torch.zeros_like(raw, dtype=torch.bool)
        down = torch.zeros_like(up)
        for i, (agent, changed, eps) in enumerate(zip(parts, differ, epsilon, strict=True)):
            tau = agent.to(wide) - theta
            on = tau.abs() > eps
            active.append(on)
            up |= on & (tau > 0)
            down |= on & (tau < 0)
            table[2 * n, i] += (changed & ~on).sum()
        table[2 * n + 1, 0] += (up & down).sum()
        number = sum(on.to(torch.int32) for on in active)
        for i, on in enumerate(active):
            table[i] += torch.bincount(number[on], minlength=n + 1)[1:]
            for j in range(i, n):
                table[n + i, j] += (on & active[j]).sum()
        bad[:-1] += _non_finite(raw, parts, differ)
    return table.cpu(), bad.tolist()
