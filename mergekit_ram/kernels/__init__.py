"""One interface to the rule's two fast implementations, and the choice between them.

Compiled kernels serve CPU tensors; torch serves every other device, inputs that require grad,
and environments without numba. Both give the same bits as ``mergekit_ram.reference``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mergekit_ram.kernels import _cpu, _torch
from mergekit_ram.kernels._dtypes import (
    common_dtype,
    empty,
    require,
    rounded_numbers,
    rounded_tensor,
    working_dtype,
)
from mergekit_ram.kernels._staging import pieces, split
from mergekit_ram.overlap import OverlapCounts

# Elements that are hashed at a time.
DIGEST_CHUNK = 1 << 22


@dataclass(frozen=True)
class BadValues:
    """How many elements cannot be merged; falsy where a merge is right.

    Attributes:
        base: changed elements whose base value is NaN or infinite, once per agent.
        agents: changed elements whose value in this agent is NaN or infinite.
        overflow: elements with finite inputs whose result is not a number of the dtype.
    """

    base: int
    agents: tuple[int, ...]
    overflow: int

    def __bool__(self) -> bool:
        return bool(self.base or any(self.agents) or self.overflow)

    @classmethod
    def from_counts(cls, counts: Sequence[int] | np.ndarray) -> BadValues:
        """Read the ``n + 2`` counts of the kernels."""
        base, *agents, overflow = (int(c) for c in counts)
        # A broken input breaks the result as well; that is no news.
        return cls(base, tuple(agents), 0 if base or any(agents) else overflow)


def merge(
    base: torch.Tensor,
    agents: Sequence[torch.Tensor],
    *,
    epsilon: Sequence[float],
    weight: Sequence[float],
    rescale: Sequence[float],
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, BadValues]:
    """Merge one tensor by the rule (``reference.merge``), in bounded scratch memory.

    Args:
        base: the base model's tensor: any shape and strides, bfloat16, float16, float32 or
            float64. Borrowed, as are the agents; never written to.
        agents: one or more tensors of the same shape, on the same device.
        epsilon: per agent, at least 0. Compared in the working dtype.
        weight: per agent factor of the task vector; not 0.
        rescale: per agent factor lambda.
        dtype: inputs are rounded to it first; the dtype they promote to unless given.
        out_dtype: dtype of the result; ``dtype`` unless given.

    Returns:
        A new contiguous tensor, and what is wrong with it. It must not be used if anything is.
        It is differentiable if an input requires grad, then at the cost of full-size scratch.

    Raises:
        UnsupportedInputError: for dtypes and shapes that the rule is not defined for.
    """
    factors = epsilon, weight, rescale
    if _differentiable(base, *agents):
        return _merge_differentiably(base, agents, factors, dtype, out_dtype)
    merged, _, bad = _merge(base, agents, factors, dtype, out_dtype, counting=False)
    return merged, bad


def merge_and_count(
    base: torch.Tensor,
    agents: Sequence[torch.Tensor],
    *,
    epsilon: Sequence[float],
    weight: Sequence[float],
    rescale: Sequence[float],
    names: Sequence[Hashable],
    dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, OverlapCounts, BadValues]:
    """Merge one tensor as ``merge`` does and count as ``count`` does, reading the inputs once.

    Arguments and errors are those of ``merge`` and ``count``. The merged tensor must not be
    used, and the counts have no meaning, if there are bad values.
    """
    factors = epsilon, weight, rescale
    if _differentiable(base, *agents):
        merged, bad = _merge_differentiably(base, agents, factors, dtype, out_dtype)
        counts, _ = count(base, agents, epsilon=epsilon, names=names, dtype=dtype)
        return merged, counts, bad
    merged, table, bad = _merge(base, agents, factors, dtype, out_dtype, counting=True)
    return merged, _overlap_counts(table, base.numel(), names), bad


def bits_sample(tensor: torch.Tensor) -> bytes:
    """Return the bits of a tensor's first elements: unlike tensors rarely have the same."""
    for index in split(tensor.shape, 64):
        return _bytes(tensor.detach()[index]).tobytes()
    return b""


def bits_digest(tensor: torch.Tensor) -> bytes:
    """Return a digest of a tensor's bits, to tell copies."""
    digest = hashlib.blake2b()
    for index in split(tensor.shape, DIGEST_CHUNK):
        digest.update(_bytes(tensor.detach()[index]).data)
    return digest.digest()


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """Bits of a small tensor, in the order of its elements."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def convert(
    tensor: torch.Tensor, dtype: torch.dtype | None, out_dtype: torch.dtype | None
) -> tuple[torch.Tensor, int]:
    """Return a tensor that nothing is merged into, and how many finite values overflow."""
    overflow = 0
    for wanted in (dtype, out_dtype):
        if wanted is not None and wanted != tensor.dtype:
            narrow, lost = rounded_tensor(tensor, wanted)
            tensor, overflow = narrow, overflow + lost
    return tensor, overflow


def count(
    base: torch.Tensor,
    agents: Sequence[torch.Tensor],
    *,
    epsilon: Sequence[float],
    names: Sequence[Hashable],
    dtype: torch.dtype | None = None,
) -> tuple[OverlapCounts, BadValues]:
    """Count how the agents' changes of one tensor overlap.

    Arguments and errors are those of ``merge``; ``names`` identify the agents in the result,
    which has no meaning if there are bad values.
    """
    tensors = (base, *agents)
    dtype = common_dtype(tensors, dtype)
    wide = working_dtype(dtype)
    limits = rounded_numbers(epsilon, wide, clamp=True)
    kernel = _cpu.count_flat if _on_cpu(base, dtype) else _torch.count_flat
    n = len(agents)
    table, bad = np.zeros((2 * n + 2, n), np.int64), np.zeros(n + 2, np.int64)
    for _, inputs, _ in pieces(tensors, dtype, dtype):
        part, faults = kernel(inputs, limits, wide)
        table += part
        bad += faults
    return _overlap_counts(table, base.numel(), names), BadValues.from_counts(bad)


Factors = tuple[Sequence[float], Sequence[float], Sequence[float]]


def _merge(
    base: torch.Tensor,
    agents: Sequence[torch.Tensor],
    factors: Factors,
    dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    *,
    counting: bool,
) -> tuple[torch.Tensor, np.ndarray, BadValues]:
    """Merge without gradients; also the table of ``count_range``, zeros unless ``counting``."""
    tensors = (base, *agents)
    dtype, inner, out_dtype = _dtypes(tensors, dtype, out_dtype)
    wide = working_dtype(dtype)
    numbers = _rounded_factors(factors, wide)
    kernel = _cpu.merge_flat if _on_cpu(base, inner) else _torch.merge_flat
    n = len(agents)
    out = empty(base.shape, out_dtype, base.device)
    table, bad = np.zeros((2 * n + 2, n), np.int64), np.zeros(n + 2, np.int64)
    for index, inputs, overflow in pieces(tensors, dtype, inner):
        target = out[index].view(-1)
        held = target if inner == out_dtype else torch.empty_like(target, dtype=inner)
        part, faults = kernel(held, inputs, *numbers, wide, counting=counting)
        table += part
        bad += faults
        bad[-1] += overflow
        if inner != out_dtype:
            rounded, overflow = rounded_tensor(held, out_dtype)
            target.copy_(rounded)
            bad[-1] += overflow
    return out, table, BadValues.from_counts(bad)


def _merge_differentiably(
    base: torch.Tensor,
    agents: Sequence[torch.Tensor],
    factors: Factors,
    dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, BadValues]:
    tensors = (base, *agents)
    dtype, inner, out_dtype = _dtypes(tensors, dtype, out_dtype)
    wide = working_dtype(dtype)
    inputs = [t.to(dtype).to(inner).reshape(-1) for t in tensors]
    merged, bad = _torch.merge_differentiably(inputs, *_rounded_factors(factors, wide), wide)
    result, overflow = rounded_tensor(merged, out_dtype)
    bad[-1] += overflow
    return result.reshape(base.shape), BadValues.from_counts(bad)


def _differentiable(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _dtypes(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype | None, out_dtype: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Dtypes that inputs are rounded to, that kernels read and write, and of the result."""
    dtype = common_dtype(tensors, dtype)
    out_dtype = dtype if out_dtype is None else require(out_dtype)
    # Inputs are exact in the working dtype, and a result of another dtype is rounded from there.
    return dtype, dtype if out_dtype == dtype else working_dtype(dtype), out_dtype


def _rounded_factors(
    factors: Factors, wide: torch.dtype
) -> tuple[list[float], list[float], list[float]]:
    epsilon, weight, rescale = factors
    return (
        rounded_numbers(epsilon, wide, clamp=True),
        rounded_numbers(weight, wide),
        rounded_numbers(rescale, wide),
    )


def _overlap_counts(table: np.ndarray, elements: int, names: Sequence[Hashable]) -> OverlapCounts:
    """Read the table of ``count_range``."""
    n = table.shape[1]
    pairs = table[n : 2 * n]
    return OverlapCounts(
        agents=tuple(names),
        elements=elements,
        overlap=table[:n],
        pairs=pairs + np.triu(pairs, 1).T,
        below_epsilon=table[2 * n],
        sign_conflicts=int(table[2 * n + 1, 0]),
    )


def _on_cpu(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.device.type == "cpu" and _cpu.takes(dtype)
