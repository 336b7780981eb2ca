"""The rule for CPU tensors, compiled: one pass over the inputs, in registers.

A group of ``LANES`` elements is merged at a time, agent after agent. For the counts each agent
leaves one bit per element that says whether it is active; blocks of bits are then counted.

The fast loop carries no test for NaN and infinity. It lets a non-finite task vector count as
active, so that it poisons the group's sum; a group with a non-finite sum or result is then done
again with masks that tell an unchanged NaN from an error.

All functions release the GIL, work on a range of elements and hold no state, so that any number
of Python threads may call them at once.
"""

from __future__ import annotations

import functools
import hashlib
import pkgutil
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core.caching import NullCache
from numba.core.errors import NumbaError

from mergekit_ram.errors import warn_once
from mergekit_ram.kernels import _lanes
from mergekit_ram.kernels._lanes import (
    LANES,
    choose,
    converts_float16,
    differ,
    everywhere,
    exceeds,
    load,
    narrow,
    negative,
    popcount,
    prefetch,
    splat,
    store,
    store_bits,
    widen,
    within,
)

# Elements whose flags are counted at a time: a group of 64-bit words holds one flag of each.
BLOCK = 64 * LANES
GROUPS = BLOCK // LANES
AHEAD = 1024  # bytes that an agent's values are asked for before they are used

# No fastmath, and nothing that lets LLVM fuse a multiplication with an addition.
OPTIONS = {"nogil": True, "error_model": "numpy"}
COMPILED: list[Any] = []

__all__ = ["LANES", "call", "converts_float16", "count_range", "merge_range", "scratch_rows"]


def _compile(function: Callable[..., Any]):
    """Compile ``function``, with its machine code kept on disk where that is possible."""
    try:
        compiled = numba.njit(cache=True, **OPTIONS)(function)
    except (RuntimeError, OSError) as error:
        _warn_no_cache(error)
        compiled = numba.njit(**OPTIONS)(function)
    # numba compiles anew when this file has changed; _lanes.py is in the machine code as well.
    kept = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if kept is not None:
        kept._source_stamp = (kept._source_stamp, _lanes_stamp())
    COMPILED.append(compiled)
    return compiled


@functools.cache
def _lanes_stamp():
    # By the loader: the package may be imported from an archive.
    return hashlib.sha256(pkgutil.get_data(_lanes.__name__, "_lanes.py") or b"").hexdigest()


def _warn_no_cache(error: Exception):
    warn_once(
        "Compiled kernels cannot be kept on disk, so each run compiles them anew (some seconds): "
        f"{type(error).__name__}: {error}. Set NUMBA_CACHE_DIR to an empty folder that can be "
        "written.",
        key="numba-cache",
    )


# --- Count ---------------------------------------------------------------------------------
# Flags are bits, in three rows per agent: whether an element is active, whether its bits differ
# from the base's, and whether its task vector is negative.


@_compile
def count_range(like, inputs, epsilon, limits, start, stop, scratch, table, bad):
    """Count elements ``start`` to ``stop`` of one tensor, a multiple of LANES.

    Args:
        like: array of the storage dtype: uint16 for bfloat16, int16 for float16.
        inputs: int64 addresses of the base and the ``n`` agents, contiguous.
        epsilon: ``(n,)`` in the working dtype; finite.
        limits: largest magnitude that rounds to a finite output, largest finite input.
        scratch: uint64 ``(scratch_rows(n), LANES)``.
        table: int64 ``(2 n + 2, n)``, added to: rows 0 to n - 1 hold the overlap but for the
            first two columns, which follow from the rest, rows n to 2 n - 1 the pairs, row 2 n
            what changed below epsilon, and the last row, in its first place, the sign conflicts.
        bad: int64 ``(n + 2,)``, added to: changed elements with a non-finite base value and with
            a non-finite value in each agent; a count has no overflow.
    """
    zero = splat(epsilon.dtype.type(0))
    largest = splat(limits[1])
    flags = scratch.ctypes.data
    for low in range(start, stop, BLOCK):
        groups = min(BLOCK, stop - low) // LANES
        _clear(scratch, groups)
        for g in range(groups):
            offset = (low + g * LANES) * like.itemsize
            raw = load(inputs[0] + offset, like)
            base = widen(raw)
            total = zero
            for i in range(epsilon.size):
                prefetch(inputs[1 + i] + offset + AHEAD)
                other = load(inputs[1 + i] + offset, like)
                tau = widen(other) - base
                active = exceeds(tau, splat(epsilon[i]))
                _set_flags(flags, i, g, active, differ(other, raw), negative(tau))
                total = total + tau
            if not everywhere(within(total, largest)):
                _check_group(like, inputs, offset, epsilon, limits, flags, g, bad)
        _tally(scratch, table)


@_compile
def _clear(scratch, groups):
    """Clear the flags of a block that is not full."""
    if groups < GROUPS:
        for i in range(scratch.shape[0]):
            for w in range(LANES):
                scratch[i, w] = 0


@_compile
def _set_flags(flags, i, g, active, differs, down):
    place = flags + (3 * i * GROUPS + g) * (LANES // 8)
    store_bits(place, active)
    store_bits(place + BLOCK // 8, differs)
    store_bits(place + 2 * BLOCK // 8, down)


@_compile
def _check_group(like, inputs, offset, epsilon, limits, flags, g, bad):
    """Set the flags of a group with non-finite values, and count these in ``bad``."""
    largest = splat(limits[1])
    raw = load(inputs[0] + offset, like)
    base = widen(raw)
    for i in range(epsilon.size):
        other = load(inputs[1 + i] + offset, like)
        value = widen(other)
        tau = value - base
        changed = differ(other, raw)
        active = exceeds(tau, splat(epsilon[i])) & changed
        _set_flags(flags, i, g, active, changed, negative(tau))
        bad[0] += popcount(changed & ~within(base, largest))
        bad[1 + i] += popcount(changed & ~within(value, largest))


def scratch_rows(n):
    """Rows that counting ``n`` agents needs: their flags, and digits."""
    return 3 * n + n.bit_length()


@_compile
def _tally(scratch, table):
    """Count a block's flags, a row at a time."""
    n = table.shape[1]
    nothing = splat(np.uint64(0))
    # The number of active agents of each element, in binary: a row per digit.
    digits = range(3 * n, scratch.shape[0])
    for d in digits:
        store(_row(scratch, d), nothing)
    up, down = nothing, nothing
    for i in range(n):
        active = load(_row(scratch, 3 * i), scratch)
        differs = load(_row(scratch, 3 * i + 1), scratch)
        negative = load(_row(scratch, 3 * i + 2), scratch)
        table[2 * n, i] += popcount(differs & ~active)
        up, down = up | active & ~negative, down | active & negative
        for k in range(i + 1):
            table[n + k, i] += popcount(active & load(_row(scratch, 3 * k), scratch))
        carry = active
        for d in digits:
            digit = load(_row(scratch, d), scratch)
            store(_row(scratch, d), digit ^ carry)
            carry = digit & carry
    table[2 * n + 1, 0] += popcount(up & down)
    for k in range(3, n + 1):
        exactly = ~nothing
        for d in digits:
            digit = load(_row(scratch, d), scratch)
            exactly = exactly & (digit if k >> (d - 3 * n) & 1 else ~digit)
        if popcount(exactly):
            for i in range(n):
                active = load(_row(scratch, 3 * i), scratch)
                table[i, k - 1] += popcount(active & exactly)


@_compile
def _row(scratch, i):
    return scratch.ctypes.data + i * (BLOCK // 8)


# --- Merge ---------------------------------------------------------------------------------


@_compile
def merge_range(
    like, inputs, epsilon, scaled, weight, rescale, limits, output, start, stop, scratch, table, bad
):
    """Merge elements ``start`` to ``stop`` of one tensor, a multiple of LANES.

    Args:
        like, inputs, epsilon, limits, scratch, bad: as for ``count_range``. The last number of
            ``bad`` is of finite elements whose result overflows.
        scaled: bool ``(n,)``, whether the agent's weight or its rescale is not 1.
        weight, rescale: ``(n,)`` in the working dtype.
        output: int64 address.
        table: as for ``count_range``; None to merge without counting.
    """
    n = epsilon.size
    number = epsilon.dtype.type
    zero, one = splat(number(0)), splat(number(1))
    limit, largest = splat(limits[0]), splat(limits[1])
    flags = scratch.ctypes.data
    for low in range(start, stop, BLOCK):
        groups = min(BLOCK, stop - low) // LANES
        if table is not None:
            _clear(scratch, groups)
        for g in range(groups):
            offset = (low + g * LANES) * like.itemsize
            raw = load(inputs[0] + offset, like)
            base = widen(raw)
            total, count, unique = zero, zero, base
            for i in range(n):
                prefetch(inputs[1 + i] + offset + AHEAD)
                other = load(inputs[1 + i] + offset, like)
                value = widen(other)
                tau = value - base
                active = ~within(tau, splat(epsilon[i]))
                if table is not None:
                    _set_flags(flags, i, g, active, differ(other, raw), negative(tau))
                if scaled[i]:
                    tau = splat(weight[i]) * tau
                    value = base + splat(rescale[i]) * tau
                total = total + choose(active, tau, zero)
                count = count + choose(active, one, zero)
                unique = choose(active, value, unique)
            merged = choose(count <= one, unique, base + total / count)
            store(output + offset, narrow(merged, like))
            if not everywhere(within(total, largest) & within(merged, limit)):
                _check_group(like, inputs, offset, epsilon, limits, flags, g, bad)
                _merge_group_checked(
                    like, inputs, epsilon, weight, rescale, limits, output, offset, bad
                )
        if table is not None:
            _tally(scratch, table)


@_compile
def _merge_group_checked(like, inputs, epsilon, weight, rescale, limits, output, offset, bad):
    """Merge a group with non-finite values."""
    number = epsilon.dtype.type
    zero, one = splat(number(0)), splat(number(1))
    raw = load(inputs[0] + offset, like)
    base = widen(raw)
    total, count, unique = zero, zero, base
    for i in range(epsilon.size):
        other = load(inputs[1 + i] + offset, like)
        value = widen(other)
        tau = value - base
        active = exceeds(tau, splat(epsilon[i])) & differ(other, raw)
        if weight[i] != 1 or rescale[i] != 1:
            tau = splat(weight[i]) * tau
            value = base + splat(rescale[i]) * tau
        total = total + choose(active, tau, zero)
        count = count + choose(active, one, zero)
        unique = choose(active, value, unique)
    unchanged = count <= zero
    merged = choose(count <= one, unique, base + total / count)
    # Not the rounded base: a conversion would quiet a signalling NaN.
    store(output + offset, choose(unchanged, raw, narrow(merged, like)))
    fits = within(merged, splat(limits[0]))
    bad[1 + epsilon.size] += popcount(~unchanged & ~fits)


def call(function, *arguments):
    """Call a kernel; where its machine code cannot be saved, without saving it."""
    try:
        function(*arguments)
    except NumbaError:
        raise
    except Exception as error:
        # The kernels themselves raise nothing: this is a folder that cannot be written, or a
        # damaged file in it, and it comes before the kernel has run.
        _warn_no_cache(error)
        for compiled in COMPILED:
            compiled._cache = NullCache()
        function(*arguments)
