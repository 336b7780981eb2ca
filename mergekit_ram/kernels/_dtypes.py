"""The dtypes that the rule is defined for, and the conversions around them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mergekit_ram.errors import UnsupportedInputError

# How tensors of a dtype look to the compiled kernels: numpy has no bfloat16, numba no float16.
STORAGE: dict[torch.dtype, np.dtype[Any]] = {
    torch.bfloat16: np.dtype(np.uint16),
    torch.float16: np.dtype(np.int16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}

# Largest magnitude of the working dtype that rounds to a finite number of the dtype.
LIMIT: dict[torch.dtype, float] = {
    torch.bfloat16: float(np.uint32(0x7F7F7FFF).view(np.float32)),
    torch.float16: float(np.uint32(0x477FEFFF).view(np.float32)),
    torch.float32: float(np.finfo(np.float32).max),
    torch.float64: float(np.finfo(np.float64).max),
}


def common_dtype(tensors: Sequence[torch.Tensor], dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which inputs meet: ``dtype``, or what theirs promote to.

    Raises:
        UnsupportedInputError: the rule is not defined for a dtype, or shapes differ.
    """
    for tensor in tensors:
        if tensor.dtype not in STORAGE:
            raise UnsupportedInputError(
                f"RAM merges bfloat16, float16, float32 and float64 tensors, not {tensor.dtype}; "
                "quantised weights must be dequantised first."
            )
        if tensor.shape != tensors[0].shape:
            raise UnsupportedInputError(
                f"tensors to merge differ in shape: {[tuple(t.shape) for t in tensors]}"
            )
    if dtype is None:
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    return require(dtype)


def require(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype`` if the rule is defined for it, else raise UnsupportedInputError."""
    if dtype not in STORAGE:
        known = ", ".join(str(d).removeprefix("torch.") for d in STORAGE)
        raise UnsupportedInputError(f"RAM cannot work in {dtype}; use one of {known}.")
    return dtype


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic: float64 for float64, float32 for the others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rounded_numbers(
    values: Sequence[float], wide: torch.dtype, *, clamp: bool = False
) -> list[float]:
    """Round factors to the working dtype; with ``clamp``, to a finite number of it."""
    number = STORAGE[wide].type
    with np.errstate(over="ignore"):
        rounded = [float(number(v)) for v in values]
    return [min(v, LIMIT[wide]) for v in rounded] if clamp else rounded


def rounded_tensor(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
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


def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a contiguous tensor without values."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    # numpy asks for huge pages, which makes first writing to a large tensor twice as fast.
    storage = np.dtype(np.int16) if dtype.itemsize == 2 else STORAGE[dtype]
    return torch.from_numpy(np.empty(tuple(shape), storage)).view(dtype)
