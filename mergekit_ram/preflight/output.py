"""Checks of the folder that a merge is to be written to."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mergekit.common import ModelReference

from mergekit_ram import former
from mergekit_ram.errors import fail
from mergekit_ram.headers import some
from mergekit_ram.preflight.plan import FLOATS
from mergekit_ram.preflight.request import models_of, tokenizer_source
from mergekit_ram.preflight.tensors import PlannedTensors

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def check_output(config: Any, tensors: PlannedTensors, out_path: str, options: Any) -> None:
    """Check the folder that a merge is to be written to.

    Raises:
        ConfigError: it is a model of the merge, holds another model, cannot be written, or the
            disk is too full.
    """
    problem = _place(config, out_path)
    if problem is None:
        parent = _existing(Path(out_path))
        size, free = _size(config, tensors), shutil.disk_usage(parent).free
        problem = _foreign(Path(out_path), size, options)
        if problem is None and size > free:
            problem = (
                f"the merge takes {_gigabytes(size)}, and the disk has {_gigabytes(free)} left. "
                "Free some space, or choose a folder on another disk."
            )
    if problem is not None:
        fail([f"{out_path or 'output'}: {problem}"])


def _place(config: Any, out_path: str) -> str | None:
    """What is wrong with the folder itself."""
    if not out_path:
        return "the output folder has no name."
    out = Path(out_path)
    for model, folder in _inputs(config):
        if folder == Path(os.path.realpath(out)):
            return (
                f"the output folder is the folder of {model}, an input of this merge, which would "
                "be overwritten. Choose another folder."
            )
    if out.is_symlink() and not out.exists():
        return "is a link to a folder that does not exist. Choose another folder."
    if out.exists() and not out.is_dir():
        return "is a file. Choose a folder for the output."
    parent = _existing(out)
    if not parent.is_dir():
        return f"{parent} is a file, not a folder. Choose another folder."
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{parent} cannot be written to. Choose another folder."
    return None


def _foreign(out: Path, size: int, options: Any) -> str | None:
    """Weights that no merge wrote, where the output would not replace them."""
    found = former.weight_files(out) - former.files_of_merges(out)
    single = "model.safetensors" if options.safe_serialization else "pytorch_model.bin"
    if size <= options.out_shard_size or options.out_shard_size <= 0:
        found -= {single}
    if not found:
        return None
    return (
        f"the folder holds weights of a model that is no merge ({some(sorted(found))}), which "
        "loaders may take instead of this merge's. Choose another folder, or remove them."
    )


def _existing(out: Path) -> Path:
    """The folder itself, or what exists of its parents."""
    return next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())


def _inputs(config: Any) -> Iterator[tuple[Any, Path]]:
    """Every folder on this machine that a merge reads from, by its real path."""
    for model in models_of(config):
        if isinstance(model, ModelReference):
            paths = [model.model.path, *([model.lora.path] if model.lora else [])]
        else:
            paths = [os.path.dirname(model) or "."]
        for path in paths:
            if os.path.exists(path):
                yield model, Path(os.path.realpath(path))
    source = tokenizer_source(config)
    if isinstance(source, ModelReference) and os.path.exists(source.model.path):
        yield f"the tokenizer's source {source}", Path(os.path.realpath(source.model.path))


def _size(config: Any, tensors: PlannedTensors) -> int:
    """Bytes of the merged tensors."""
    wanted = str(config.out_dtype or config.dtype or "").removeprefix("torch.")
    sizes: dict[str, int] = {}
    for entry in [*tensors.entries, *tensors.parts]:
        name = str(entry.task.output_weight.force_dtype or wanted).removeprefix("torch.")
        found = [h for h in entry.headers.values() if h is not None]
        items = [_BYTES.get(name) or _BYTES.get(FLOATS.get(h.dtype, ""), 1) for h in found]
        parts = [math.prod(h.shape) * item for h, item in zip(found, items, strict=True)]
        sizes[entry.name] = max(parts, default=0)
    return sum(sizes.values())


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
