"""Compares a folder of merged weights with the merge done again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mergekit.common import dtype_from_name
from mergekit.io import LazyTensorLoader

from mergekit_ram._mergekit.commands import Planned
from mergekit_ram._mergekit.planning import run_tasks
from mergekit_ram.errors import RamError
from mergekit_ram.planning import devices_of
from mergekit_ram.tasks import MeasureOverlap

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements compared at a time.
CHUNK = 1 << 22


def compare(
    planned: Sequence[Planned], folder: Path, options: Any
) -> Iterator[tuple[str, str | None]]:
    """Merge every tensor again and compare it, one at a time.

    Args:
        planned: the tensors of the merge.
        folder: with its weights, as MergeKit writes them.
        options: MergeKit's ``MergeOptions``.

    Yields:
        The name of each tensor that either has, and how it differs; None where it is equal, bit
        for bit.

    Raises:
        RamError: there are no weights in the folder, or they cannot be read.
    """
    try:
        loader = LazyTensorLoader.from_disk(str(folder), lazy_unpickle=options.lazy_unpickle)
    except Exception as error:
        raise RamError(f"{folder}: its weights cannot be read ({error}).") from None
    stored = set(loader.index.tensor_paths)
    by_task = {id(p.merge): p for p in {p.name: p for p in planned}.values()}
    tasks = [p.merge for p in by_task.values()]
    results = run_tasks(
        tasks,
        **devices_of(options),
        quiet=options.quiet,
        desc="Merging again",
        once=(MeasureOverlap,),
    )
    for task, tensor in results:
        entry = by_task[id(task)]
        if tensor is None:
            continue  # an optional weight that no model has
        if entry.name not in stored:
            yield entry.name, "is missing from the folder"
            continue
        stored.discard(entry.name)
        if entry.dtype:
            tensor = tensor.to(dtype_from_name(entry.dtype))
        try:
            found = loader.get_tensor(entry.name)
        except Exception as error:
            raise RamError(f"{folder}: '{entry.name}' cannot be read ({error}).") from None
        yield entry.name, difference(found, tensor.cpu())
    for name in sorted(stored):
        yield name, "is not part of the merge"


def difference(found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    """Say how a tensor differs from what it should be; None where all bits are equal."""
    if found.dtype != wanted.dtype:
        return f"is {_name(found.dtype)} instead of {_name(wanted.dtype)}"
    if found.shape != wanted.shape:
        return f"has the shape {_shape(found)} instead of {_shape(wanted)}"
    number, largest, first = 0, 0.0, -1
    a, b = found.reshape(-1), wanted.reshape(-1)
    for low in range(0, a.numel(), CHUNK):
        one, other = a[low : low + CHUNK], b[low : low + CHUNK]
        differ = _bits(one) != _bits(other)
        here = int(differ.sum())
        if here:
            if first < 0:
                first = low + int(differ.nonzero()[0])
            number += here
            gaps = (one[differ].double() - other[differ].double()).abs()
            largest = max(largest, float(gaps.nan_to_num(nan=float("inf")).max()))
    if not number:
        return None
    place = ", ".join(str(int(i)) for i in np.unravel_index(first, tuple(found.shape)))
    return (
        f"{number:,} of {a.numel():,} elements differ, by at most {largest:.3g}; the first at "
        f"[{place}] is {float(a[first]):.9g} instead of {float(b[first]):.9g}"
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.bool else tensor.view(_INTEGER[tensor.element_size()])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(tensor: torch.Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "of one number"
