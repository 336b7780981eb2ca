"""Drives the compiled kernels: tensors as addresses, threads, machine code kept on disk."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from mergekit_ram.errors import warn_once
from mergekit_ram.kernels._dtypes import LIMIT, STORAGE
from mergekit_ram.kernels._threads import over_chunks


@functools.cache
def _compiled() -> ModuleType | None:
    try:
        from mergekit_ram.kernels import _numba
    except Exception as error:  # numba fails in many ways: missing, built for another numpy, ...
        warn_once(
            f"numba cannot be used ({error}): RAM merges with torch operations, with the same "
            "results but several times slower. `pip install numba` mends it.",
            key="numba",
        )
        return None
    return _numba


def available() -> bool:
    """Whether numba can be imported; if not, a warning says so once."""
    return _compiled() is not None


def merge_flat(
    out: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    epsilon: Sequence[float],
    weight: Sequence[float],
    rescale: Sequence[float],
    wide: torch.dtype,
) -> np.ndarray:
    """Merge flat contiguous inputs of the output's dtype; what is wrong, int64 ``(n + 2,)``."""
    like, addresses = _as_memory(inputs)
    number = STORAGE[wide]
    factors = [np.array(f, number) for f in (epsilon, weight, rescale)]
    limits = np.array([LIMIT[out.dtype], LIMIT[wide]], number)

    def work(start: int, stop: int, held: Any = (out, inputs)) -> np.ndarray:
        bad = np.zeros(len(inputs) + 1, np.int64)
        address = held[0].data_ptr()
        _call("merge_range", like, addresses, *factors, limits, address, start, stop, bad)
        return bad

    return sum(over_chunks(work, out.numel()), np.zeros(len(inputs) + 1, np.int64))


def count_flat(
    inputs: Sequence[torch.Tensor], epsilon: Sequence[float], wide: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Count flat contiguous inputs of one dtype: the table and the faults of ``count_range``."""
    like, addresses = _as_memory(inputs)
    number = STORAGE[wide]
    limits = np.array(epsilon, number)
    largest = np.array([LIMIT[wide]], number)
    n = len(epsilon)

    def work(start: int, stop: int, held: Any = inputs) -> tuple[np.ndarray, np.ndarray]:
        table, bad = np.zeros((2 * n + 2, n), np.int64), np.zeros(n + 2, np.int64)
        _call("count_range", like, addresses, limits, largest, start, stop, table, bad)
        return table, bad

    total, faults = np.zeros((2 * n + 2, n), np.int64), np.zeros(n + 2, np.int64)
    for table, bad in over_chunks(work, inputs[0].numel()):
        total += table
        faults += bad
    return total, faults


def _as_memory(inputs: Sequence[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    like = np.empty(0, STORAGE[inputs[0].dtype])
    return like, np.array([t.data_ptr() for t in inputs], np.int64)


def _call(name: str, *arguments: Any) -> None:
    kernels = _compiled()
    assert kernels is not None
    # Only the uncompiled bodies (NUMBA_DISABLE_JIT=1) heed numpy's error state.
    with np.errstate(all="ignore"):
        kernels.call(getattr(kernels, name), *arguments)
