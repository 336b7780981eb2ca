"""What a checkpoint holds, by its headers and configuration alone: no weight is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import safetensors
import torch
from mergekit.common import ModelReference

_LFS_POINTER = b"version https://git-lfs"
_TORCH_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorHeader:
    """One tensor's dtype, by its name in safetensors (``BF16``), its shape, and its file."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass
class Checkpoint:
    """A model's files.

    Attributes:
        model: as the config names it.
        folder: where it lies; None where it is not on this machine (yet).
        tensors: headers by name.
        readable: whether ``tensors`` is all that there is.
        config: its ``config.json``.
        problems: what is wrong with its files, for the person who has to mend them.
    """

    model: str
    folder: Path | None = None
    tensors: dict[str, TensorHeader] = field(default_factory=dict)
    readable: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class HeaderIndex:
    """What MergeKit's planner asks of a model's index."""

    tensor_paths: Mapping[str, str]
    base_path: str = ""


class HeaderLoader:
    """Takes a loader's place in a plan of models whose weights are not on this machine."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.index = HeaderIndex({n: h.file for n, h in checkpoint.tensors.items()})


def read(model: ModelReference, options: Any, *, remote: bool = False) -> Checkpoint:
    """Read the headers of a model folder, or of a model in the Hugging Face cache.

    Args:
        model: a model of a merge config. An adapter has no headers before it is merged into its
            model; with ``remote`` its model's take their place.
        options: MergeKit's ``MergeOptions``.
        remote: whether to ask the hub for the headers of a model that is not on this machine.
    """
    if model.lora is None or remote:
        folder = _folder(model, options)
        if folder is not None:
            return read_folder(str(model), folder)
    checkpoint = Checkpoint(str(model))
    if remote:
        _read_remote(checkpoint, model)
    return checkpoint


def is_here(model: ModelReference, options: Any) -> bool:
    """Whether a model can be opened without a download or the merge of an adapter."""
    return model.lora is None and _folder(model, options) is not None


def read_folder(name: str, folder: Path) -> Checkpoint:
    """Read the headers of the model ``name`` in a folder."""
    checkpoint = Checkpoint(name, folder)
    checkpoint.config = _json(folder / "config.json", checkpoint.problems) or {}
    for stem in ("model.safetensors", "pytorch_model.bin"):  # in MergeKit's order
        single, index = folder / stem, folder / f"{stem}.index.json"
        if index.exists():
            _read_shards(checkpoint, index)
        elif single.exists():
            _read_file(checkpoint, single)
        else:
            continue
        checkpoint.readable = not checkpoint.problems
        return checkpoint
    checkpoint.problems.append(
        f"{folder} holds no model.safetensors, pytorch_model.bin or index of shards."
    )
    return checkpoint


def read_file(path: Path) -> Checkpoint:
    """Read the headers of one file of tensors, as mergekit-pytorch takes them."""
    checkpoint = Checkpoint(str(path), path)
    if path.exists():
        _read_file(checkpoint, path)
    else:
        checkpoint.problems.append(f"{path} does not exist.")
    checkpoint.readable = not checkpoint.problems
    return checkpoint


def _folder(model: ModelReference, options: Any) -> Path | None:
    path = model.model.path
    if os.path.exists(path):
        return Path(path)
    try:
        return Path(
            huggingface_hub.snapshot_download(
                path,
                revision=model.model.revision,
                cache_dir=options.transformers_cache,
                local_files_only=True,
            )
        )
    except Exception:  # not cached, or not a name of the hub: MergeKit says so when it downloads
        return None


def _read_remote(checkpoint: Checkpoint, model: ModelReference) -> None:
    try:
        found = huggingface_hub.get_safetensors_metadata(
            model.model.path, revision=model.model.revision
        )
        config = huggingface_hub.hf_hub_download(
            model.model.path, "config.json", revision=model.model.revision
        )
    except Exception as error:
        reason = str(error).strip().splitlines()
        checkpoint.problems.append(
            "it is no folder on this machine, not in the Hugging Face cache, and could not be "
            f"looked up on the hub ({reason[0] if reason else type(error).__name__})."
        )
        return
    for file, metadata in found.files_metadata.items():
        for name, info in metadata.tensors.items():
            checkpoint.tensors[name] = TensorHeader(info.dtype, tuple(info.shape), file)
    checkpoint.config = _json(Path(config), checkpoint.problems) or {}
    checkpoint.readable = True


def _read_shards(checkpoint: Checkpoint, index: Path) -> None:
    content = _json(index, checkpoint.problems)
    if content is None:
        return
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        checkpoint.problems.append(f"{index} has no 'weight_map' of tensors to files.")
        return
    missing = []
    for file in dict.fromkeys(weight_map.values()):
        path = index.parent / file
        if path.exists():
            _read_file(checkpoint, path)
        else:
            missing.append(file)
    if missing:
        checkpoint.problems.append(
            f"{some(missing)} missing from {index.parent}, though {index.name} lists "
            f"{'it' if len(missing) == 1 else 'them'}: download the model again."
        )
    elif not checkpoint.problems:
        lost = [name for name in weight_map if name not in checkpoint.tensors]
        if lost:
            checkpoint.problems.append(
                f"{index} lists tensors that its shards do not hold: {some(lost)}."
            )
        # MergeKit knows what the index lists, and no more.
        checkpoint.tensors = {n: h for n, h in checkpoint.tensors.items() if n in weight_map}


def _read_file(checkpoint: Checkpoint, path: Path) -> None:
    """Add the headers of one file, or what is wrong with it."""
    try:
        with path.open("rb") as file:
            pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
        if pointer:
            checkpoint.problems.append(
                f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` there."
            )
        elif path.suffix == ".safetensors":
            checkpoint.tensors.update(_safetensors(path))
        else:
            checkpoint.tensors.update(_pickled(path))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        checkpoint.problems.append(
            f"{path} cannot be read, it is damaged or incomplete: download it again ({reason})."
        )


def _safetensors(path: Path) -> Iterator[tuple[str, TensorHeader]]:
    with safetensors.safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            part = file.get_slice(name)
            yield name, TensorHeader(part.get_dtype(), tuple(part.get_shape()), path.name)


def _pickled(path: Path) -> Iterator[tuple[str, TensorHeader]]:
    try:
        state = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except RuntimeError:  # a file of before torch 1.6 cannot be mapped
        state = torch.load(path, map_location="meta", weights_only=True)
    for name, tensor in state.get("state_dict", state).items():
        if isinstance(tensor, torch.Tensor):
            dtype = _TORCH_NAMES.get(tensor.dtype, str(tensor.dtype))
            yield name, TensorHeader(dtype, tuple(tensor.shape), path.name)


def _json(path: Path, problems: list[str]) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{path} does not exist.")
    except (OSError, ValueError) as error:
        problems.append(f"{path} cannot be read: {error}")
    else:
        if isinstance(content, dict):
            return content
        problems.append(f"{path} is not a JSON object.")
    return None


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A part of a model's configuration; empty where there is none, or something else."""
    part = config.get(key)
    return part if isinstance(part, Mapping) else {}


def some(names: Sequence[str]) -> str:
    """The first few of many names."""
    rest = len(names) - 3
    return ", ".join(names[:3]) + (f" and {rest} more" if rest > 0 else "")
