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

# The table and the faults of ``count_range``.
Counts = tuple[np.ndarray, np.ndarray]


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
    *,
    counting: bool,
) -> Counts:
    """Merge flat contiguous inputs of the output's dtype; count as well if ``counting``."""
    like, addresses = _as_memory(inputs)
    number = STORAGE[wide]
    factors = [np.array(f, number) for f in (epsilon, weight, rescale)]
    limits = np.array([LIMIT[out.dtype], LIMIT[wide]], number)
    name = "merge_and_count_range" if counting else "merge_range"

    def work(start: int, stop: int, held: Any = (out, inputs)) -> Counts:
        table, bad = _no_counts(len(epsilon))
        found = (table, bad) if counting else (bad,)
        _call(name, like, addresses, *factors, limits, held[0].data_ptr(), start, stop, *found)
        return table, bad

    return _total(over_chunks(work, out.numel()), len(epsilon))


def count_flat(
    inputs: Sequence[torch.Tensor], epsilon: Sequence[float], wide: torch.dtype
) -> Counts:
    """Count flat contiguous inputs of one dtype."""
    like, addresses = _as_memory(inputs)
    number = STORAGE[wide]
    limits = np.array(epsilon, number)
    largest = np.array([LIMIT[wide]], number)

    def work(start: int, stop: int, held: Any = inputs) -> Counts:
        table, bad = _no_counts(len(epsilon))
        _call("count_range", like, addresses, limits, largest, start, stop, table, bad)
        return table, bad

    return _total(over_chunks(work, inputs[0].numel()), len(epsilon))


def _no_counts(n: int) -> Counts:
    return np.zeros((2 * n + 2, n), np.int64), np.zeros(n + 2, np.int64)


def _total(parts: Sequence[Counts], n: int) -> Counts:
    table, bad = _no_counts(n)
    for part, faults in parts:
        table += part
        bad += faults
    return table, bad


def _as_memory(inputs: Sequence[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    like = np.empty(0, STORAGE[inputs[0].dtype])
    return like, np.array([t.data_ptr() for t in inputs], np.int64)


def _call(name: str, *arguments: Any) -> None:
    kernels = _compiled()
    assert kernels is not None
    # Only the uncompiled bodies (NUMBA_DISABLE_JIT=1) heed numpy's error state.
    with np.errstate(all="ignore"):
        kernels.call(getattr(kernels, name), *arguments)
