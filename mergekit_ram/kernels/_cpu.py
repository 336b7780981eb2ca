"""Drives the compiled kernels: tensors as addresses, threads, machine code kept on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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


def takes(dtype: torch.dtype) -> bool:
    """Whether there are compiled kernels for a dtype on this machine."""
    return available() and (dtype != torch.float16 or bool(_kernels().converts_float16()))


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
    number = STORAGE[wide]
    thresholds, weights, rescales = (np.array(f, number) for f in (epsilon, weight, rescale))
    factors = thresholds, (weights != 1) | (rescales != 1), weights, rescales
    limits = np.array([LIMIT[out.dtype], LIMIT[wide]], number)

    def groups(memory: Memory, start: int, stop: int) -> Counts:
        scratch, table, bad = _counters(len(epsilon))
        *sources, target = memory.addresses
        where = np.array(sources), *factors, limits, target, start, stop
        _call("merge_range", memory.like, *where, scratch, table if counting else None, bad)
        return table, bad

    return _over_groups(groups, [*inputs, out], len(epsilon))


def count_flat(
    inputs: Sequence[torch.Tensor], epsilon: Sequence[float], wide: torch.dtype
) -> Counts:
    """Count flat contiguous inputs of one dtype."""
    number = STORAGE[wide]
    thresholds = np.array(epsilon, number)
    limits = np.array([LIMIT[inputs[0].dtype], LIMIT[wide]], number)

    def groups(memory: Memory, start: int, stop: int) -> Counts:
        scratch, table, bad = _counters(len(epsilon))
        where = memory.addresses, thresholds, limits, start, stop
        _call("count_range", memory.like, *where, scratch, table, bad)
        return table, bad

    return _over_groups(groups, inputs, len(epsilon))


class Memory:
    """Tensors as kernels see them. It keeps them alive, and is to be kept itself."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self.addresses = np.array([t.data_ptr() for t in tensors], np.int64)
        self.like = np.empty(0, STORAGE[tensors[0].dtype])


def _over_groups(
    work: Callable[[Memory, int, int], Counts], tensors: Sequence[torch.Tensor], n: int
) -> Counts:
    """Add up ``work`` over all elements of flat tensors, which it is given in whole groups.

    The last tensor may be written to.
    """
    kernels = _kernels()
    memory = Memory(tensors)

    def chunk(start: int, stop: int) -> list[Counts]:
        whole = stop - (stop - start) % kernels.LANES
        results = [work(memory, start, whole)]
        if whole < stop:
            # Elements that all agents leave unchanged complete the last group.
            rest = [t[whole:stop] for t in tensors]
            padded = [torch.zeros(kernels.LANES, dtype=t.dtype) for t in tensors]
            for t, p in zip(rest, padded, strict=True):
                p[: len(t)] = t
            results.append(work(Memory(padded), 0, kernels.LANES))
            rest[-1].copy_(padded[-1][: len(rest[-1])])
        return results

    _, table, bad = _counters(n)
    for results in over_chunks(chunk, tensors[0].numel()):
        for part, faults in results:
            table += part
            bad += faults
    return _completed(table), bad


def _completed(table: np.ndarray) -> np.ndarray:
    """Derive what the kernels leave open from what they count."""
    n = table.shape[1]
    overlap, pairs = table[:n], table[n : 2 * n]
    changed = pairs.diagonal()
    meetings = np.triu(pairs, 1).sum(0) + np.triu(pairs, 1).sum(1)
    # An element that is active in i and k others takes part in k of i's meetings.
    if n > 1:
        overlap[:, 1] = meetings - overlap[:, 2:] @ np.arange(2, n)
    overlap[:, 0] = changed - overlap[:, 1:].sum(1)
    return table


def _counters(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scratch memory, table and faults of the kernels, all zero."""
    kernels = _kernels()
    scratch = np.zeros((kernels.scratch_rows(n), kernels.LANES), np.uint64)
    return scratch, np.zeros((2 * n + 2, n), np.int64), np.zeros(n + 2, np.int64)


def _kernels() -> ModuleType:
    kernels = _compiled()
    assert kernels is not None
    return kernels


def _call(name: str, *arguments: Any) -> None:
    kernels = _kernels()
    # Only the uncompiled bodies (NUMBA_DISABLE_JIT=1) heed numpy's error state.
    with np.errstate(all="ignore"):
        kernels.call(getattr(kernels, name), *arguments)
