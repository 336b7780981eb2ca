"""The rule for CPU tensors, compiled: one pass over the inputs, in blocks that stay in cache.

Values travel in the working dtype, float32 for bfloat16, float16 and float32 and float64 for
float64. A block's running sums live in one scratch array per call, a few KB: several arrays
would need more pointer-overlap checks than LLVM is willing to vectorise a loop behind.

The fast loops carry no test for NaN and infinity. They let a non-finite task vector count as
active, so that it poisons the block's sum; a block with a non-finite sum or result is then done
again by loops that tell an unchanged NaN from an error.

All functions release the GIL, work on a range of elements and hold no state, so that any number
of Python threads may call them at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.caching import NullCache
from numba.core.errors import NumbaError
from numba.extending import intrinsic, overload

from mergekit_ram.errors import warn_once

BLOCK = 256
# Rows a multiple of 4 KB apart would look like the same address to the store buffer.
PITCH = BLOCK + 48
BASE, TOTAL, COUNT, UNIQUE = 0, PITCH, 2 * PITCH, 3 * PITCH
SIGN = TOTAL  # counting needs no total

# No fastmath, and nothing that lets LLVM fuse a multiplication with an addition.
OPTIONS = {"nogil": True, "error_model": "numpy"}
COMPILED: list[Any] = []


def _compile(function: Callable[..., Any]):
    """Compile ``function``, with its machine code kept on disk where that is possible."""
    try:
        compiled = numba.njit(cache=True, **OPTIONS)(function)
    except (RuntimeError, OSError) as error:
        _warn_no_cache(error)
        compiled = numba.njit(**OPTIONS)(function)
    COMPILED.append(compiled)
    return compiled


def _warn_no_cache(error: Exception):
    warn_once(
        "Compiled kernels cannot be kept on disk, so each run compiles them anew (some seconds): "
        f"{type(error).__name__}: {error}. Set NUMBA_CACHE_DIR to an empty folder that can be "
        "written.",
        key="numba-cache",
    )


# --- Bits and memory -----------------------------------------------------------------------
# Each helper has a Python body, used with NUMBA_DISABLE_JIT=1, and a compiled one.


def _array_at(address, count, like):
    """View ``count`` items of ``like``'s dtype at ``address``."""
    memory = (ctypes.c_byte * (int(count) * like.itemsize)).from_address(int(address))
    return np.frombuffer(memory, like.dtype)


def _or_bits(x, y):
    """Bitwise or of two floats' bits, as a float."""
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return (x.view(unsigned) | y.view(unsigned)).view(x.dtype)


def _bits(x):
    """Bits of a float as an unsigned integer of its size."""
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def _float32(bits):
    """Float32 with these bits."""
    return bits.view(np.float32)


def _widen(raw):
    """Exact value of a stored element in the working dtype."""
    if raw.dtype == np.uint16:
        return _float32(np.uint32(raw) << np.uint32(16))
    return _from_float16(raw) if raw.dtype == np.int16 else raw


def _narrow(value, like: np.ndarray):
    """Round a value of the working dtype to nearest even, as it is stored."""
    if like.dtype == np.uint16:
        return _to_bfloat16(value)
    return _to_float16(value) if like.dtype == np.int16 else value


def _from_float16(raw):
    u = np.uint32(np.uint16(raw))
    sign = np.uint32(np.uint32(u & np.uint32(0x8000)) << np.uint32(16))
    magnitude = np.uint32(u & np.uint32(0x7FFF))
    # A float16 subnormal counts steps of 2**-24, which float32 holds exactly.
    tiny = _bits(np.float32(np.float32(np.int32(magnitude)) * np.float32(2.0**-24)))
    offset = np.uint32(112 << 23) if magnitude < np.uint32(0x7C00) else np.uint32(224 << 23)
    normal = np.uint32(np.uint32(magnitude << np.uint32(13)) + offset)
    wide = tiny if magnitude < np.uint32(0x400) else normal
    return _float32(np.uint32(wide | sign))


def _to_float16(value):
    x = _bits(value)
    sign = np.uint32(np.uint32(x >> np.uint32(16)) & np.uint32(0x8000))
    a = np.uint32(x & np.uint32(0x7FFFFFFF))
    # Adding 0.5 leaves room for steps of 2**-24 alone: the hardware rounds to a subnormal.
    tiny = np.uint32(_bits(np.float32(_float32(a) + np.float32(0.5))) - np.uint32(0x3F000000))
    odd = np.uint32(np.uint32(a >> np.uint32(13)) & np.uint32(1))
    rounded = np.uint32(np.uint32(a + np.uint32(np.uint32(0xFFF) + odd)) >> np.uint32(13))
    normal = np.uint32(rounded - np.uint32(112 << 10))
    h = tiny if a < np.uint32(0x38800000) else normal
    h = np.uint32(0x7C00) if a >= np.uint32(0x477FF000) else h
    nan = np.uint32(np.uint32(0x7C00) | np.uint32(np.uint32(a >> np.uint32(13)) & np.uint32(0x3FF)))
    h = nan if a > np.uint32(0x7F800000) else h
    return np.int16(np.uint16(np.uint32(h | sign)))


def _to_bfloat16(value):
    x = _bits(value)
    high = np.uint32(x >> np.uint32(16))
    carry = np.uint32(np.uint32(0x7FFF) + np.uint32(high & np.uint32(1)))
    rounded = np.uint32(np.uint32(x + carry) >> np.uint32(16))
    nan = np.uint32(x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.uint16(high if nan else rounded)


def _cast(signature):
    """Intrinsic body that reinterprets its only argument."""

    def body(context, builder, sig, args):
        return builder.bitcast(args[0], context.get_value_type(sig.return_type))

    return signature, body


@intrinsic
def _pointer(typing_context, address):
    def body(context, builder, sig, args):
        return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

    return types.voidptr(types.intp), body


@intrinsic
def _bits_intrinsic(typing_context, x):
    return _cast((types.uint32 if x == types.float32 else types.uint64)(x))


@intrinsic
def _float32_intrinsic(typing_context, bits):
    return _cast(types.float32(types.uint32))


@intrinsic
def _or_bits_intrinsic(typing_context, x, y):
    def body(context, builder, sig, args):
        integer = ir.IntType(x.bitwidth)
        both = builder.or_(builder.bitcast(args[0], integer), builder.bitcast(args[1], integer))
        return builder.bitcast(both, context.get_value_type(sig.return_type))

    return x(x, x), body


@overload(_array_at)
def _(address, count, like):
    dtype = like.dtype
    return lambda address, count, like: numba.carray(_pointer(address), (count,), dtype)


@overload(_bits)
def _(x):
    return lambda x: _bits_intrinsic(x)


@overload(_float32)
def _(bits):
    return lambda bits: _float32_intrinsic(bits)


@overload(_or_bits)
def _(x, y):
    return lambda x, y: _or_bits_intrinsic(x, y)


@overload(_widen)
def _(raw):
    if raw == types.uint16:
        return lambda raw: _float32(np.uint32(np.uint32(raw) << np.uint32(16)))
    if raw == types.int16:
        return lambda raw: _from_float16(raw)
    return lambda raw: raw


@overload(_narrow)
def _(value, like):
    if like.dtype == types.uint16:
        return lambda value, like: _to_bfloat16(value)
    if like.dtype == types.int16:
        return lambda value, like: _to_float16(value)
    return lambda value, like: value


_from_float16 = _compile(_from_float16)
_to_float16 = _compile(_to_float16)
_to_bfloat16 = _compile(_to_bfloat16)


# --- Merge ---------------------------------------------------------------------------------


@_compile
def _load_base(raw, scratch):
    zero = scratch.dtype.type(0)
    for j in range(raw.size):
        scratch[BASE + j] = _widen(raw[j])
        scratch[TOTAL + j] = zero
        scratch[COUNT + j] = zero
        scratch[UNIQUE + j] = zero


@_compile
def _add_agent(raw, scratch, epsilon, weight, rescale):
    """Add one agent's block to the sums; UNIQUE holds the one agent's value where COUNT is 1."""
    zero = scratch.dtype.type(0)
    one = scratch.dtype.type(1)
    if weight == one and rescale == one:
        for j in range(raw.size):
            value = _widen(raw[j])
            tau = value - scratch[BASE + j]
            active = not (abs(tau) <= epsilon)
            scratch[TOTAL + j] += tau if active else zero
            scratch[COUNT + j] += one if active else zero
            # Or, not select: LLVM turns a select into masked stores, which are slow.
            scratch[UNIQUE + j] = _or_bits(scratch[UNIQUE + j], value if active else zero)
    else:
        for j in range(raw.size):
            base = scratch[BASE + j]
            tau = _widen(raw[j]) - base
            active = not (abs(tau) <= epsilon)
            scaled = weight * tau
            value = base + rescale * scaled
            scratch[TOTAL + j] += scaled if active else zero
            scratch[COUNT + j] += one if active else zero
            scratch[UNIQUE + j] = _or_bits(scratch[UNIQUE + j], value if active else zero)


@_compile
def _add_agent_checked(raw, scratch, epsilon, weight, rescale, largest, bad, i):
    """As ``_add_agent``, for blocks with non-finite values, which it counts in ``bad``."""
    one = scratch.dtype.type(1)
    for j in range(raw.size):
        base = scratch[BASE + j]
        value = _widen(raw[j])
        if _bits(value) == _bits(base):
            continue
        if not (abs(base) <= largest):
            bad[0] += 1
        if not (abs(value) <= largest):
            bad[1 + i] += 1
        tau = value - base
        if abs(tau) > epsilon:
            scaled = weight * tau
            if weight != one or rescale != one:
                value = base + rescale * scaled
            scratch[TOTAL + j] += scaled
            scratch[COUNT + j] += one
            scratch[UNIQUE + j] = _or_bits(scratch[UNIQUE + j], value)


@_compile
def _merged(scratch, j):
    one = scratch.dtype.type(1)
    two = scratch.dtype.type(2)
    count = scratch[COUNT + j]
    base = scratch[BASE + j]
    shared = base + scratch[TOTAL + j] / count
    value = scratch[UNIQUE + j] if count >= one else base
    return shared if count >= two else value


@_compile
def _store(scratch, out, limit, largest):
    """Write the block; True where a sum or a result is not finite."""
    bad = np.uint32(0)
    for j in range(out.size):
        value = _merged(scratch, j)
        out[j] = _narrow(value, out)
        poisoned = not (abs(scratch[TOTAL + j]) <= largest)
        overflows = not (abs(value) <= limit)
        bad = np.uint32(bad | np.uint32(poisoned) | np.uint32(overflows))
    return bad != np.uint32(0)


@_compile
def _count_overflow(scratch, size, limit, largest):
    """Results that the output's dtype cannot hold; an unchanged NaN or infinity is not one."""
    zero = scratch.dtype.type(0)
    overflows = 0
    for j in range(size):
        unchanged = scratch[COUNT + j] == zero and not (abs(scratch[BASE + j]) <= largest)
        if not (abs(_merged(scratch, j)) <= limit) and not unchanged:
            overflows += 1
    return overflows


@_compile
def merge_range(
    like,
    inputs,
    epsilon,
    weight,
    rescale,
    limits,
    output,
    start,
    stop,
    bad,
):
    """Merge elements ``start`` to ``stop`` of one tensor.

    Args:
        like: empty array of the storage dtype: uint16 for bfloat16, int16 for float16.
        inputs: int64 addresses of the base and the ``n`` agents, contiguous.
        epsilon, weight, rescale: ``(n,)`` in the working dtype; epsilon finite.
        limits: largest magnitude that rounds to a finite output, largest finite input.
        output: int64 address.
        bad: int64 ``(n + 2,)``, added to: changed elements with a non-finite base value, with a
            non-finite value in each agent, and finite elements whose result overflows.
    """
    scratch = np.empty(4 * PITCH, epsilon.dtype)
    limit, largest = limits[0], limits[1]
    for low in range(start, stop, BLOCK):
        size = min(BLOCK, stop - low)
        offset = low * like.itemsize
        out = _array_at(output + offset, size, like)
        base = _array_at(inputs[0] + offset, size, like)
        _load_base(base, scratch)
        for i in range(epsilon.size):
            agent = _array_at(inputs[1 + i] + offset, size, like)
            _add_agent(agent, scratch, epsilon[i], weight[i], rescale[i])
        if _store(scratch, out, limit, largest):
            _load_base(base, scratch)
            for i in range(epsilon.size):
                agent = _array_at(inputs[1 + i] + offset, size, like)
                _add_agent_checked(
                    agent, scratch, epsilon[i], weight[i], rescale[i], largest, bad, i
                )
            _store(scratch, out, limit, largest)
            bad[1 + epsilon.size] += _count_overflow(scratch, size, limit, largest)


# --- Count ---------------------------------------------------------------------------------


@_compile
def _mark_agent(raw, scratch, active, epsilon, largest):
    """Mark where one agent's block is active; elements changed below epsilon, and non-finite."""
    zero = scratch.dtype.type(0)
    one = scratch.dtype.type(1)
    # Two sign flags in one float: 1 for a positive task vector, 2 for a negative one.
    positive = one
    negative = one + one
    below = np.uint32(0)
    bad = np.uint32(0)
    for j in range(raw.size):
        value = _widen(raw[j])
        base = scratch[BASE + j]
        tau = value - base
        on = abs(tau) > epsilon
        active[j] = np.uint32(on)
        scratch[COUNT + j] += one if on else zero
        flag = positive if tau > zero else negative
        scratch[SIGN + j] = _or_bits(scratch[SIGN + j], flag if on else zero)
        differs = np.uint32(_bits(value) != _bits(base))
        below = np.uint32(below + np.uint32(differs & np.uint32(not on)))
        bad = np.uint32(bad | np.uint32(not (abs(tau) <= largest)))
    return below, bad != np.uint32(0)


@_compile
def _count_non_finite(raw, scratch, largest, bad, i):
    for j in range(raw.size):
        base = scratch[BASE + j]
        value = _widen(raw[j])
        if _bits(value) != _bits(base):
            bad[0] += not (abs(base) <= largest)
            bad[1 + i] += not (abs(value) <= largest)


@_compile
def _sum_where(active, scratch, wanted):
    """Elements of the block that are active in the row and in ``wanted`` agents in all."""
    hits = np.uint32(0)
    for j in range(active.size):
        equal = np.uint32(scratch[COUNT + j] == wanted)
        hits = np.uint32(hits + np.uint32(active[j] & equal))
    return hits


@_compile
def _sum_both(active, other):
    hits = np.uint32(0)
    for j in range(active.size):
        hits = np.uint32(hits + np.uint32(active[j] & other[j]))
    return hits


@_compile
def _tally(scratch, size):
    """Elements of the block that are active at all, shared, and of conflicting signs."""
    one = scratch.dtype.type(1)
    two = scratch.dtype.type(2)
    both = _bits(_or_bits(one, two))
    touched = np.uint32(0)
    shared = np.uint32(0)
    conflicts = np.uint32(0)
    for j in range(size):
        count = scratch[COUNT + j]
        touched = np.uint32(touched + np.uint32(count >= one))
        shared = np.uint32(shared + np.uint32(count >= two))
        conflicts = np.uint32(conflicts + np.uint32(_bits(scratch[SIGN + j]) == both))
    return touched, shared, conflicts


@_compile
def count_range(
    like,
    inputs,
    epsilon,
    largest,
    start,
    stop,
    table,
    bad,
):
    """Count elements ``start`` to ``stop`` of one tensor.

    Args:
        like, inputs, epsilon: as for ``merge_range``.
        largest: largest finite number of the working dtype, ``(1,)``.
        table: int64 ``(2 n + 2, n)``, added to: rows 0 to n - 1 hold the overlap, rows n to
            2 n - 1 the pairs, row 2 n what changed below epsilon, and the last row, in its
            first place, the sign conflicts.
        bad: int64 ``(n + 2,)``, as for ``merge_range``; a count has no overflow.
    """
    n = epsilon.size
    scratch = np.empty(4 * PITCH, epsilon.dtype)
    active = np.empty(n * PITCH, np.uint32)
    for low in range(start, stop, BLOCK):
        size = min(BLOCK, stop - low)
        offset = low * like.itemsize
        _load_base(_array_at(inputs[0] + offset, size, like), scratch)
        for i in range(n):
            agent = _array_at(inputs[1 + i] + offset, size, like)
            row = active[i * PITCH : i * PITCH + size]
            below, suspect = _mark_agent(agent, scratch, row, epsilon[i], largest[0])
            table[2 * n, i] += below
            if suspect:
                _count_non_finite(agent, scratch, largest[0], bad, i)
        touched, shared, conflicts = _tally(scratch, size)
        if touched == 0:
            continue
        table[2 * n + 1, 0] += conflicts
        most = n if shared else 1
        for i in range(n):
            row = active[i * PITCH : i * PITCH + size]
            for k in range(most):
                table[i, k] += _sum_where(row, scratch, scratch.dtype.type(k + 1))
            for k in range(i, n):
                table[n + i, k] += _sum_both(row, active[k * PITCH : k * PITCH + size])


# --- Both ----------------------------------------------------------------------------------

# Elements that are merged and then counted, while the first cache still has them.
SPAN = 4 * BLOCK


@_compile
def merge_and_count_range(
    like,
    inputs,
    epsilon,
    weight,
    rescale,
    limits,
    output,
    start,
    stop,
    table,
    bad,
):
    """Do what ``merge_range`` and ``count_range`` do; ``bad`` is added to once."""
    same = np.zeros_like(bad)
    for low in range(start, stop, SPAN):
        high = min(low + SPAN, stop)
        merge_range(like, inputs, epsilon, weight, rescale, limits, output, low, high, bad)
        count_range(like, inputs, epsilon, limits[1:], low, high, table, same)


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
