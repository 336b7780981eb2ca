"""Runs one function over chunks of a range on as many threads as torch uses."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")

# Elements that a thread takes at a time: enough to make a call's cost vanish, few enough
# that threads finish together.
CHUNK = 1 << 18


class _Pools:
    """One pool of helper threads per size."""

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
    # A forked process has the pools' objects, but not their threads.
    os.register_at_fork(after_in_child=_renew_pools)


def over_chunks(work: Callable[[int, int], T], elements: int) -> list[T]:
    """Call ``work(start, stop)`` for all chunks of ``range(elements)``; results in any order.

    ``work`` should release the GIL, and has to keep alive what it works on: a second Ctrl-C can
    end this call before the helper threads have stopped. Callers share the helper threads.
    """
    ranges = [(low, min(low + CHUNK, elements)) for low in range(0, elements, CHUNK)]
    threads = min(torch.get_num_threads(), len(ranges))
    if threads <= 1:
        return [work(*r) for r in ranges]
    pending = iter(ranges)  # stepped atomically, also from several threads
    stopped = threading.Event()

    def drain() -> list[T]:
        results: list[T] = []
        while not stopped.is_set() and (item := next(pending, None)) is not None:
            results.append(work(*item))
        return results

    helpers = [_pools.get(threads - 1).submit(drain) for _ in range(threads - 1)]
    try:
        results = drain()
        for helper in helpers:
            results += helper.result()
    finally:
        # After Ctrl-C or an error no thread may go on working for a caller that is gone.
        stopped.set()
        wait(helpers)
    return results
