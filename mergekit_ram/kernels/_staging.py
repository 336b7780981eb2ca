"""Hands inputs to the kernels as flat contiguous tensors of one dtype, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import EllipsisType

import torch

from mergekit_ram.kernels._dtypes import rounded_tensor

# Bytes of copies at a time of inputs that no kernel reads directly.
STAGING = 32 << 20

Index = tuple[int | slice | EllipsisType, ...]


def pieces(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype, inner: torch.dtype
) -> Iterator[tuple[Index, list[torch.Tensor], int]]:
    """Yield inputs rounded to ``dtype`` and then held in ``inner``, with the piece they are.

    The whole tensors at once, without a copy, where they are flat and of that dtype already. The
    last item is how many finite values of the piece ``dtype`` cannot hold.
    """
    if inner == dtype and all(t.dtype == dtype and t.is_contiguous() for t in tensors):
        yield (...,), [t.detach().view(-1) for t in tensors], 0
        return
    itemsize = max(dtype.itemsize, inner.itemsize)
    for index in split(tensors[0].shape, max(1, STAGING // (2 * len(tensors) * itemsize))):
        flat = []
        overflow = 0
        for tensor in tensors:
            part = tensor.detach()[index]
            if part.dtype != dtype:
                part, lost = rounded_tensor(part, dtype)
                overflow += lost
            flat.append(part.to(inner).reshape(-1).contiguous())
        yield index, flat, overflow


def split(shape: Sequence[int], limit: int) -> Iterator[Index]:
    """Indices of the contiguous pieces of at most ``limit`` elements that make up a tensor."""
    if not shape:
        yield (...,)
        return
    row = math.prod(shape[1:])
    if row > limit:
        for i in range(shape[0]):
            for rest in split(shape[1:], limit):
                yield (i, *rest)
        return
    step = max(1, limit // max(row, 1))
    for low in range(0, shape[0], step):
        yield (slice(low, low + step), ...)
