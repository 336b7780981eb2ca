"""One interface to the rule's two fast implementations, and the choice between them.

Compiled kernels serve CPU tensors; torch serves every other device, inputs that require grad,
and environments without numba. Both give the same bits as ``mergekit_ram.reference``.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from mergekit_ram.errors import UnsupportedInputError, warn_once
from mergekit_ram.kernels import _torch
from mergekit_ram.overlap import OverlapCounts

# Elements that a thread takes at a time: enough to make a call's cost vanish, few enough
# that threads finish together.
CHUNK = 1 << 18

# Bytes of copies made at a time of inputs that no kernel reads directly.
STAGING = 32 << 20

# How a dtype looks to the compiled kernels.
_STORAGE = {
    torch.bfloat16: np.dtype(np.uint16),
    torch.float16: np.dtype(np.int16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
# Largest magnitude of the working dtype that rounds to a finite number of the dtype.
_LIMIT = {
    torch.bfloat16: np.uint32(0x7F7F7FFF).view(np.float32),
    torch.float16: np.uint32(0x477FEFFF).view(np.float32),
    torch.float32: np.finfo(np.float32).max,
    torch.float64: np.finfo(np.float64).max,
}


@dataclass(frozen=True)
class BadValues:
    """How many elements cannot be merged; all zero where a merge is right.

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
    def from_counts(cls, counts: Sequence[int]) -> BadValues:
        """Read the ``n + 2`` counts of the kernels."""
        base, *agents, overflow = (int(c) for c in counts)
        # A broken input breaks the result as well; that is no news.
        return cls(base, tuple(agents), 0 if base or any(agents) else overflow)


def supported(dtype: torch.dtype) -> bool:
    """Whether the rule is defined for tensors of this dtype."""
    return dtype in _STORAGE


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

    Raises:
        UnsupportedInputError: for dtypes and shapes that the rule is not defined for.
    """
    dtype, wide = _dtypes(base, agents, dtype)
    out_dtype = out_dtype or dtype
    if not supported(out_dtype):
        raise UnsupportedInputError(f"RAM cannot write {out_dtype}; use a dtype that it reads.")
    # Inputs are exact in the working dtype, and a result of another dtype is rounded from there.
    inner = dtype if out_dtype == dtype else wide
    factors = (_numbers(epsilon, wide, clamp=True), _numbers(weight, wide), _numbers(rescale, wide))

    if torch.is_grad_enabled() and any(t.requires_grad for t in (base, *agents)):
        flat = [t.to(dtype).to(inner).reshape(-1) for t in (base, *agents)]
        merged, counts = _torch.merge_into(None, flat[0], flat[1:], *factors, wide)
        rounded, overflow = _rounded(merged, out_dtype)
        counts[-1] += overflow
        return rounded.reshape(base.shape), BadValues.from_counts(counts)

    out = _empty(base.shape, out_dtype, base.device)
    bad = np.zeros(len(agents) + 2, np.int64)
    for index, inputs in _pieces((base, *agents), dtype, inner, out_dtype):
        target = out[index].view(-1)
        if inner == out_dtype:
            bad += _merge_flat(target, inputs, factors, wide)
        else:
            result = torch.empty(target.shape, dtype=inner, device=target.device)
            bad += _merge_flat(result, inputs, factors, wide)
            target[:], overflow = _rounded(result, out_dtype)
            bad[-1] += overflow
    return out, BadValues.from_counts(bad.tolist())


def count(
    base: torch.Tensor,
    agents: Sequence[torch.Tensor],
    *,
    epsilon: Sequence[float],
    names: Sequence[Hashable],
    dtype: torch.dtype | None = None,
) -> tuple[OverlapCounts, BadValues]:
    """Count how the agents' changes of one tensor overlap.

    Arguments are those of ``merge``; ``names`` identify the agents in the result.
    """
    dtype, wide = _dtypes(base, agents, dtype)
    n = len(agents)
    limits = _numbers(epsilon, wide, clamp=True)
    table = np.zeros((2 * n + 2, n), np.int64)
    bad = np.zeros(n + 2, np.int64)
    for _, inputs in _pieces((base, *agents), dtype, dtype, dtype):
        compiled = _compiled(inputs[0])
        if compiled is None:
            part, wrong = _torch.count(inputs[0], inputs[1:], limits, wide)
            table += part.numpy()
            bad += wrong
            continue
        like, addresses = _as_memory(inputs)
        largest = np.array([_LIMIT[wide]], _STORAGE[wide])
        eps = np.array(limits, _STORAGE[wide])

        def work(
            start: int, stop: int, like: Any = like, addresses: Any = addresses, eps: Any = eps
        ) -> tuple[np.ndarray, np.ndarray]:
            own = np.zeros_like(table), np.zeros_like(bad)
            compiled.call(
                compiled.count_range, like, addresses, eps, largest, start, stop, *own
            )
            return own

        for counts, wrong in _in_threads(work, inputs[0].numel()):
            table += counts
            bad += wrong
    upper = table[n : 2 * n]
    counts = OverlapCounts(
        agents=tuple(names),
        elements=base.numel(),
        overlap=table[:n],
        pairs=upper + np.triu(upper, 1).T,
        below_epsilon=table[2 * n],
        sign_conflicts=int(table[2 * n + 1, 0]) if n else 0,
    )
    return counts, BadValues.from_counts(bad.tolist())


def _dtypes(
    base: torch.Tensor, agents: Sequence[torch.Tensor], dtype: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype in which inputs meet, and the dtype in which arithmetic is done."""
    for tensor in (base, *agents):
        if not supported(tensor.dtype):
            raise UnsupportedInputError(
                f"RAM cannot merge tensors of type {tensor.dtype}: quantised weights must be "
                "dequantised to bfloat16, float16 or float32 first."
            )
        if tensor.shape != base.shape:
            raise UnsupportedInputError(
                f"tensors to merge differ in shape: {[tuple(t.shape) for t in (base, *agents)]}"
            )
    if dtype is None:
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in agents), base.dtype)
    if not supported(dtype):
        raise UnsupportedInputError(f"RAM cannot work in {dtype}.")
    return dtype, torch.float64 if dtype == torch.float64 else torch.float32


def _numbers(values: Sequence[float], wide: torch.dtype, *, clamp: bool = False) -> list[float]:
    """Round factors to the working dtype; an epsilon beyond it becomes its largest number."""
    number = _STORAGE[wide].type
    with np.errstate(over="ignore"):
        rounded = [float(number(v)) for v in values]
    return [min(v, float(_LIMIT[wide])) for v in rounded] if clamp else rounded


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Round from the working dtype, once; also how many finite values become infinite."""
    source = values
    if values.dtype == torch.float64 and dtype in (torch.bfloat16, torch.float16):
        # torch goes by way of float32. Rounding to odd there keeps the second rounding right.
        single = values.to(torch.float32)
        back = single.to(torch.float64)
        bits = single.view(torch.int32)
        toward_zero = torch.where(back.abs() > values.abs(), bits - 1, bits)
        odd = torch.where(back != values, toward_zero | 1, bits).view(torch.float32)
        source = torch.where(single.isfinite() & (single != 0), odd, single)
    result = source.to(dtype)
    return result, int((values.isfinite() & ~result.isfinite()).sum())


def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu" or dtype not in _STORAGE:
        return torch.empty(shape, dtype=dtype, device=device)
    # numpy asks for huge pages, which makes first writing to a large tensor twice as fast.
    storage = np.int16 if dtype.itemsize == 2 else _STORAGE[dtype]
    return torch.from_numpy(np.empty(shape, storage)).view(dtype)


def _pieces(
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype,
    inner: torch.dtype,
    out_dtype: torch.dtype,
) -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """Yield flat contiguous inputs of dtype ``inner``, and the index of the piece they are.

    The whole tensor at once where the inputs are that already; else copies of bounded size.
    """
    direct = inner == dtype == out_dtype and all(
        t.dtype == dtype and t.is_contiguous() for t in tensors
    )
    if direct:
        yield (...,), [t.detach().view(-1) for t in tensors]
        return
    limit = max(1, STAGING // ((len(tensors) + 2) * max(dtype.itemsize, inner.itemsize)))
    for index in _split(tensors[0].shape, limit):
        yield (
            index,
            [t.detach()[index].to(dtype).to(inner).contiguous().view(-1) for t in tensors],
        )


def _split(shape: Sequence[int], limit: int) -> Iterator[tuple[Any, ...]]:
    """Indices of contiguous pieces of at most ``limit`` elements (or one), in order."""
    if not shape:
        yield (...,)
        return
    row = int(np.prod(shape[1:], dtype=np.int64))
    if row > limit:
        for i in range(shape[0]):
            for rest in _split(shape[1:], limit):
                yield (i, *rest)
        return
    step = max(1, limit // max(row, 1))
    for low in range(0, shape[0], step):
        yield (slice(low, low + step), ...)


def _merge_flat(
    out: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    factors: tuple[list[float], list[float], list[float]],
    wide: torch.dtype,
) -> np.ndarray:
    """Merge flat contiguous inputs of the output's dtype into it; what is wrong, ``(n + 2,)``."""
    compiled = _compiled(out)
    if compiled is None:
        _, counts = _torch.merge_into(out, inputs[0], inputs[1:], *factors, wide)
        return np.array(counts, np.int64)
    like, addresses = _as_memory(inputs)
    number = _STORAGE[wide]
    epsilon, weight, rescale = (np.array(f, number) for f in factors)
    limits = np.array([_LIMIT[out.dtype], _LIMIT[wide]], number)
    total = np.zeros(len(inputs) + 1, np.int64)

    def work(start: int, stop: int) -> np.ndarray:
        bad = np.zeros_like(total)
        compiled.call(
            compiled.merge_range,
            like,
            addresses,
            epsilon,
            weight,
            rescale,
            limits,
            out.data_ptr(),
            start,
            stop,
            bad,
        )
        return bad

    for bad in _in_threads(work, out.numel()):
        total += bad
    return total


def _as_memory(inputs: Sequence[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    like = np.empty(0, _STORAGE[inputs[0].dtype])
    return like, np.array([t.data_ptr() for t in inputs], np.int64)


@functools.cache
def _numba_kernels() -> ModuleType | None:
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


def _compiled(tensor: torch.Tensor) -> ModuleType | None:
    return _numba_kernels() if tensor.device.type == "cpu" else None


class _Pools:
    """One pool of helper threads per size, remade in a forked process, where threads are lost."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def get(self, size: int) -> ThreadPoolExecutor:
        with self._lock:
            if size not in self._pools:
                self._pools[size] = ThreadPoolExecutor(size, thread_name_prefix="mergekit-ram")
            return self._pools[size]


_pools = _Pools()


def _renew_pools() -> None:
    global _pools
    _pools = _Pools()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_pools)


def _in_threads(work: Callable[[int, int], Any], elements: int) -> list[Any]:
    """Call ``work(start, stop)`` for all chunks, on as many threads as torch uses."""
    ranges = [(low, min(low + CHUNK, elements)) for low in range(0, elements, CHUNK)]
    threads = min(torch.get_num_threads(), len(ranges))
    if threads <= 1:
        return [work(*r) for r in ranges]
    pending = iter(ranges)
    lock = threading.Lock()

    def drain() -> list[Any]:
        results = []
        while True:
            with lock:
                item = next(pending, None)
            if item is None:
                return results
            results.append(work(*item))

    helpers = [_pools.get(threads - 1).submit(drain) for _ in range(threads - 1)]
    results = drain()
    for helper in helpers:
        results += helper.result()
    return results
