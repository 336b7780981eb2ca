"""What several test modules need: comparing bits, and making values that are hard to merge."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor as integers: -0 differs from 0, and NaN equals itself."""
    return tensor.detach().contiguous().reshape(-1).view(_INTEGER[tensor.element_size()])


def assert_same_bits(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    differ = (bits(got) != bits(wanted)).nonzero().flatten()
    assert not len(differ), (
        f"{len(differ)} of {got.numel()} elements differ, the first at {int(differ[0])}: "
        f"{got.flatten()[differ[0]]!r} instead of {wanted.flatten()[differ[0]]!r}"
    )


def random_bits(shape: Sequence[int], dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    """Finite values of all magnitudes, subnormals and both zeros among them."""
    size = int(np.prod(shape))
    itemsize = torch.empty((), dtype=dtype).element_size()
    raw = rng.integers(0, 2 ** (8 * itemsize - 1), size, dtype=np.uint64) * 2 + rng.integers(
        0, 2, size, dtype=np.uint64
    )
    integer = torch.from_numpy(raw.astype(np.dtype(f"u{itemsize}")).view(f"i{itemsize}"))
    values = integer.view(dtype)
    return torch.where(values.isfinite(), values, torch.zeros((), dtype=dtype)).reshape(
        tuple(shape)
    )


def changed_agents(
    base: torch.Tensor, n: int, rng: np.random.Generator, density: float = 0.5
) -> list[torch.Tensor]:
    """Agents that differ from ``base`` in some elements: by a step, a little, or altogether."""
    agents = []
    for _ in range(n):
        step = (base.view(_INTEGER[base.element_size()]) ^ 1).view(base.dtype)
        step = torch.where(step.isfinite(), step, base)
        factor = torch.as_tensor(1 + rng.normal(0, 1e-2, tuple(base.shape)))
        small = (base.double() * factor).to(base.dtype)
        small = torch.where(small.isfinite(), small, base)
        other = random_bits(base.shape, base.dtype, rng)
        kind = torch.as_tensor(rng.integers(0, 3, tuple(base.shape)))
        changed = torch.where(kind == 0, step, torch.where(kind == 1, small, other))
        keep = torch.as_tensor(rng.random(tuple(base.shape)) >= density)
        agents.append(torch.where(keep, base, changed))
    return agents


def ordinary(
    shape: Sequence[int], n: int, dtype: torch.dtype, seed: int = 0, density: float = 0.4
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A base and agents of the magnitudes of a language model's weights."""
    generator = torch.Generator().manual_seed(seed)
    base = (torch.randn(tuple(shape), generator=generator) * 0.02).to(dtype)
    agents = []
    for _ in range(n):
        change = torch.randn(tuple(shape), generator=generator) * 2e-3
        on = torch.rand(tuple(shape), generator=generator) < density
        agents.append(torch.where(on, (base.float() + change).to(dtype), base))
    return base, agents
