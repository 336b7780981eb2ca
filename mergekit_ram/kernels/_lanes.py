"""Sixteen elements at a time: what the compiled kernels compute with.

A group of elements travels in vector registers; LLVM splits it into what the CPU has. Each
operation has a Python body on NumPy arrays, which is its meaning and what runs with
NUMBA_DISABLE_JIT=1, and a compiled one. Arithmetic is written with Python's operators.

bfloat16 is stored as uint16 and float16 as int16: numba has neither.
"""

from __future__ import annotations

import ctypes
import operator
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import config, types
from numba.core.codegen import get_host_cpu_features
from numba.extending import lower_builtin, models, register_model, type_callable

LANES = 16


class Lanes(types.Type):
    """``LANES`` elements of one type, in registers."""

    def __init__(self, dtype):
        self.dtype = dtype
        super().__init__(name=f"Lanes({dtype})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _vector(_ELEMENT[kind.dtype]))


_ELEMENT = {
    types.boolean: ir.IntType(1),
    types.uint16: ir.IntType(16),
    types.int16: ir.IntType(16),
    types.uint64: ir.IntType(64),
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
}
_MASK = Lanes(types.boolean)


def _vector(element):
    return ir.VectorType(element, LANES)


def _fill(element, value):
    return ir.Constant(_vector(element), [value] * LANES)


def _integers(builder, x):
    """Reinterpret a vector as unsigned integers."""
    width = {ir.FloatType(): 32, ir.DoubleType(): 64}.get(x.type.element)
    return builder.bitcast(x, _vector(ir.IntType(width))) if width else x


def _lowered(function: Any, result: Callable[..., Any], *kinds: Any):
    """Pair ``function`` with a compiled body for arguments of these kinds.

    ``result`` gives the result's type for those of the arguments, None where it is not meant.
    The decorated function writes the instructions.
    """
    type_callable(function)(lambda context: result)

    def pair(write):
        def lower(context, builder, signature, arguments):
            value = write(builder, signature, *arguments)
            return context.get_dummy_value() if value is None else value

        lower_builtin(function, *kinds)(lower)
        return write

    return pair


# --- Memory --------------------------------------------------------------------------------


def _array_at(address, count, like):
    """View ``count`` items of ``like``'s dtype at an address."""
    memory = (ctypes.c_byte * (int(count) * like.itemsize)).from_address(int(address))
    return np.frombuffer(memory, like.dtype)


def load(address, like):
    """Read elements of ``like``'s dtype."""
    return _array_at(address, LANES, like).copy()


def store(address, x):
    """Write elements."""
    _array_at(address, LANES, x)[:] = x


def prefetch(address):
    """Ask for memory that will be read soon, or that does not exist."""


def splat(x):
    """Repeat one number."""
    return np.full(LANES, x)


@_lowered(load, lambda address, like: Lanes(like.dtype), types.Integer, types.Array)
def _(builder, signature, address, like):
    kind = signature.return_type.dtype
    value = builder.load(builder.inttoptr(address, _vector(_ELEMENT[kind]).as_pointer()))
    value.align = kind.bitwidth // 8
    return value


@_lowered(store, lambda address, x: types.none, types.Integer, Lanes)
def _(builder, signature, address, x):
    written = builder.store(x, builder.inttoptr(address, x.type.as_pointer()))
    written.align = signature.args[1].dtype.bitwidth // 8


@_lowered(prefetch, lambda address: types.none, types.Integer)
def _(builder, signature, address):
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    to_read, keep, data = number(0), number(3), number(1)
    builder.call(function, [builder.inttoptr(address, pointer), to_read, keep, data])


@_lowered(splat, lambda x: Lanes(x), types.Number)
def _(builder, signature, x):
    first = builder.insert_element(_fill(x.type, ir.Undefined), x, ir.IntType(32)(0))
    return builder.shuffle_vector(first, first, _fill(ir.IntType(32), 0))


# --- Storage dtypes ------------------------------------------------------------------------


def widen(raw):
    """Exact values in the working dtype, but for signalling NaNs, which may become quiet."""
    if raw.dtype == np.uint16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float16).astype(np.float32) if raw.dtype == np.int16 else raw


def narrow(x, like):
    """Round numbers to ``like``'s dtype, to nearest even; NaN may become anything."""
    if like.dtype == np.uint16:
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return x.astype(np.float16).view(np.int16) if like.dtype == np.int16 else x


def _widened(raw):
    return raw if isinstance(raw.dtype, types.Float) else Lanes(types.float32)


@_lowered(widen, _widened, Lanes)
def _(builder, signature, raw):
    wide = _vector(ir.FloatType())
    if signature.args[0].dtype == types.uint16:
        bits = builder.zext(raw, _vector(ir.IntType(32)))
        return builder.bitcast(builder.shl(bits, _fill(ir.IntType(32), 16)), wide)
    if signature.args[0].dtype == types.int16:
        return builder.fpext(builder.bitcast(raw, _vector(ir.HalfType())), wide)
    return raw


@_lowered(narrow, lambda x, like: Lanes(like.dtype), Lanes, types.Array)
def _(builder, signature, x, like):
    stored = signature.return_type.dtype
    short = _vector(ir.IntType(16))
    if stored == types.int16:
        return builder.bitcast(builder.fptrunc(x, _vector(ir.HalfType())), short)
    if stored == types.uint16:
        word = ir.IntType(32)
        bits = _integers(builder, x)
        high = builder.lshr(bits, _fill(word, 16))
        odd = builder.and_(high, _fill(word, 1))
        carry = builder.add(odd, _fill(word, 0x7FFF))
        return builder.trunc(builder.lshr(builder.add(bits, carry), _fill(word, 16)), short)
    return x


def converts_float16() -> bool:
    """Whether the CPU converts float16. Where it does not, LLVM would end the process."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    features = config.CPU_FEATURES
    return "+f16c" in (get_host_cpu_features() if features is None else features).split(",")


# --- Arithmetic, comparisons and masks -----------------------------------------------------


def _floats(x, y):
    alike = isinstance(x, Lanes) and x == y and isinstance(x.dtype, types.Float)
    return x if alike else None


def _compared(x, y):
    return _floats(x, y) and _MASK


def _bitwise(x, y):
    return x if x == y and x in (_MASK, Lanes(types.uint64)) else None


@_lowered(operator.add, _floats, Lanes, Lanes)
def _(builder, signature, x, y):
    return builder.fadd(x, y)


@_lowered(operator.sub, _floats, Lanes, Lanes)
def _(builder, signature, x, y):
    return builder.fsub(x, y)


@_lowered(operator.mul, _floats, Lanes, Lanes)
def _(builder, signature, x, y):
    return builder.fmul(x, y)


@_lowered(operator.truediv, _floats, Lanes, Lanes)
def _(builder, signature, x, y):
    return builder.fdiv(x, y)


@_lowered(operator.le, _compared, Lanes, Lanes)
def _(builder, signature, x, y):
    return builder.fcmp_ordered("<=", x, y)


@_lowered(operator.and_, _bitwise, Lanes, Lanes)
def _(builder, signature, x, y):
    return builder.and_(x, y)


@_lowered(operator.or_, _bitwise, Lanes, Lanes)
def _(builder, signature, x, y):
    return builder.or_(x, y)


@_lowered(operator.xor, _bitwise, Lanes, Lanes)
def _(builder, signature, x, y):
    return builder.xor(x, y)


@_lowered(operator.invert, lambda x: _bitwise(x, x), Lanes)
def _(builder, signature, x):
    return builder.not_(x)


def within(x, y):
    """Whether magnitudes of ``x`` are at most ``y``; never for NaN."""
    return np.abs(x) <= y


def exceeds(x, y):
    """Whether magnitudes of ``x`` are larger than ``y``; never for NaN."""
    return np.abs(x) > y


def negative(x):
    """Whether the sign bit is set."""
    return np.signbit(x)


def differ(x, y):
    """Whether bits differ."""
    unsigned = np.dtype(f"u{x.itemsize}")
    return x.view(unsigned) != y.view(unsigned)


def choose(mask, x, y):
    """Take ``x`` where the mask is set, else ``y``."""
    return np.where(mask, x, y)


def everywhere(mask):
    """Whether the mask is set for all elements."""
    return bool(np.all(mask))


def store_bits(address, mask):
    """Write a mask, one bit per element."""
    _array_at(address, LANES // 8, np.empty(0, np.uint8))[:] = np.packbits(mask, bitorder="little")


def popcount(x):
    """Count the bits that are set, of a mask or of a group of words."""
    return sum(int(word).bit_count() for word in x)


def _magnitude(builder, x):
    integers = _integers(builder, x)
    element = integers.type.element
    cleared = builder.and_(integers, _fill(element, (1 << element.width - 1) - 1))
    return builder.bitcast(cleared, x.type)


@_lowered(within, _compared, Lanes, Lanes)
def _(builder, signature, x, y):
    return builder.fcmp_ordered("<=", _magnitude(builder, x), y)


@_lowered(exceeds, _compared, Lanes, Lanes)
def _(builder, signature, x, y):
    return builder.fcmp_ordered(">", _magnitude(builder, x), y)


@_lowered(negative, lambda x: _MASK, Lanes)
def _(builder, signature, x):
    integers = _integers(builder, x)
    return builder.icmp_signed("<", integers, _fill(integers.type.element, 0))


@_lowered(differ, lambda x, y: _MASK, Lanes, Lanes)
def _(builder, signature, x, y):
    return builder.icmp_unsigned("!=", _integers(builder, x), _integers(builder, y))


@_lowered(choose, lambda mask, x, y: x, Lanes, Lanes, Lanes)
def _(builder, signature, mask, x, y):
    return builder.select(mask, x, y)


@_lowered(everywhere, lambda mask: types.boolean, Lanes)
def _(builder, signature, mask):
    packed = ir.IntType(LANES)
    return builder.icmp_unsigned("==", builder.bitcast(mask, packed), packed((1 << LANES) - 1))


@_lowered(store_bits, lambda address, mask: types.none, types.Integer, Lanes)
def _(builder, signature, address, mask):
    packed = ir.IntType(LANES)
    written = builder.store(
        builder.bitcast(mask, packed), builder.inttoptr(address, packed.as_pointer())
    )
    written.align = 1


@_lowered(popcount, lambda x: types.int64, Lanes)
def _(builder, signature, x):
    long = ir.IntType(64)
    if signature.args[0] == _MASK:
        return builder.zext(builder.ctpop(builder.bitcast(x, ir.IntType(LANES))), long)

    def declared(name, result):
        known = builder.module.globals.get(name)
        return known or ir.Function(builder.module, ir.FunctionType(result, [x.type]), name)

    counts = builder.call(declared(f"llvm.ctpop.v{LANES}i64", x.type), [x])
    return builder.call(declared(f"llvm.vector.reduce.add.v{LANES}i64", long), [counts])
