"""Checks of the tensors that a plan merges, by headers, and of the folder for the output."""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mergekit.architecture.conversion import can_convert_checkpoint_keys
from mergekit.common import ModelReference
from mergekit.io.tasks import GatherTensors, LoaderCache
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask, TensorDictWrapper

from mergekit_ram import headers
from mergekit_ram.errors import fail, warn_once
from mergekit_ram.headers import Checkpoint, HeaderLoader, TensorHeader, some
from mergekit_ram.kinds import HEAD, kind_of, layer_of
from mergekit_ram.preflight.models import LAYER_KEYS, dequantise
from mergekit_ram.preflight.request import models_of

_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
# Dtypes whose every value another one holds.
_HELD = {
    "bfloat16": {"bfloat16"},
    "float16": {"float16"},
    "float32": {"bfloat16", "float16", "float32"},
    "float64": {"bfloat16", "float16", "float32", "float64"},
}
# Buffers that old checkpoints store and models compute for themselves.
_COMPUTED = re.compile(
    r"inv_freq$|position_ids$|attn\.(masked_)?bias$|attention\.(masked_)?bias$|(cos|sin)_cached$"
)


def check_plan(config: Any, merges: Sequence[ExecuteMergeMethodTask]) -> None:
    """Check the tensors that a plan merges against what the models' headers say.

    Raises:
        ConfigError: a model lacks a tensor or holds it in another shape, or quantised.
    """
    plan = _Plan(config, merges)
    fail([*plan.missing(), *plan.partial(), *plan.shapes(), *plan.dtypes()])
    plan.warn_of_rounding()
    plan.warn_of_mixed_dtypes()
    plan.warn_of_heads()
    plan.warn_of_extra()


def plan_by_headers(config: Any, options: Any) -> None:
    """Let the next plan of a config do with headers where a model is not on this machine.

    Such a plan is good for checks only.
    """
    for model in models_of(config):
        if not headers.is_here(model, options):
            checkpoint = headers.read(model, options, remote=True)
            LoaderCache().loaders[model] = HeaderLoader(checkpoint)


def check_output(
    config: Any, merges: Sequence[ExecuteMergeMethodTask], out_path: str, options: Any
) -> None:
    """Check the folder that a merge is to be written to.

    Raises:
        ConfigError: it is a model of the merge, cannot be written, or the disk is too full.
    """
    out = Path(out_path)
    inputs = [m for m in models_of(config) if _folder_of(m) == Path(os.path.realpath(out))]
    if inputs:
        fail(
            [
                f"{out_path}: the output folder is the folder of {inputs[0]}, a model of this "
                "merge, which would be overwritten while it is read. Choose another folder."
            ]
        )
        return
    if out.exists() and not out.is_dir():
        fail([f"{out_path}: is a file. Choose a folder for the output."])
        return
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not os.access(parent, os.W_OK):
        fail([f"{out_path}: {parent} cannot be written to. Choose another folder."])
        return
    size, free = _Plan(config, merges).output_size(), shutil.disk_usage(parent).free
    if size > free:
        fail(
            [
                f"{out_path}: the merge takes {_gigabytes(size)}, and the disk has "
                f"{_gigabytes(free)} left. Free some space, or choose a folder on another disk."
            ]
        )


class _Plan:
    """The tensors that a plan reads, model by model, with their headers."""

    def __init__(self, config: Any, merges: Sequence[ExecuteMergeMethodTask]) -> None:
        self.config = config
        self.merges = merges
        self.checkpoints: dict[ModelReference, Checkpoint] = {}
        self.found: list[
            tuple[ExecuteMergeMethodTask, dict[ModelReference, TensorHeader | None]]
        ] = []
        for task in merges:
            headers_of = {}
            # The base first, for the messages.
            for model, names in sorted(_reads(task), key=lambda read: read[0] != task.base_model):
                checkpoint = self._checkpoint(model, task)
                if checkpoint.readable:
                    name = next((n for n in names if n in checkpoint.tensors), None)
                    headers_of[model] = checkpoint.tensors[name] if name else None
            self.found.append((task, headers_of))

    def _checkpoint(self, model: ModelReference, task: ExecuteMergeMethodTask) -> Checkpoint:
        if model not in self.checkpoints:
            path = Path(model.model.path)
            if isinstance(task.gather_tensors, TensorDictWrapper):
                self.checkpoints[model] = headers.read_file(path)
            else:
                # The loader knows where an adapter's merged model and a downloaded one lie.
                loader = LoaderCache().get(model)
                self.checkpoints[model] = (
                    loader.checkpoint
                    if isinstance(loader, HeaderLoader)
                    else headers.read_folder(str(model), Path(loader.index.base_path))
                )
        return self.checkpoints[model]

    def missing(self) -> Iterator[str]:
        """Tensors that a model lacks and cannot do without."""
        lacking: dict[ModelReference, list[str]] = defaultdict(list)
        converts: dict[tuple[ModelReference, str], bool] = {}
        for task, found in self.found:
            if task.output_weight.optional or isinstance(task.gather_tensors, TensorDictWrapper):
                continue
            for model, names in _reads(task):
                if found.get(model, ...) is not None:
                    continue
                # Experts of one name per expert become one fused tensor; alike in every layer.
                key = (model, _template(names[0]))
                if key not in converts:
                    checkpoint = self.checkpoints[model]
                    converts[key] = can_convert_checkpoint_keys(
                        checkpoint.config.get("model_type"), set(checkpoint.tensors), names[0]
                    )
                if not converts[key]:
                    lacking[model].append(names[0])
        for model, names in lacking.items():
            yield (
                f"{model} lacks {_tensors(len(names))} that the architecture requires: "
                f"{some(names)}. Complete its files, or take the model out of the merge."
            )

    def partial(self) -> Iterator[str]:
        """Optional tensors that some models have and others lack."""
        without: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for task, found in self.found:
            name = task.output_weight.name
            lacking = [m for m, header in found.items() if header is None]
            having = [m for m in found if m not in lacking]
            if not lacking or not having or isinstance(task.gather_tensors, TensorDictWrapper):
                continue
            if not task.output_weight.optional or len(found) < len(task.model_order):
                continue
            tied = kind_of(name) == HEAD and _is_tied(self.checkpoints[having[0]].config)
            if tied or task.base_model in lacking:
                why = (
                    "The head is tied to the embedding, and its copy there would not be merged "
                    "with the others' embeddings"
                    if tied
                    else "RAM needs the base model's"
                )
                yield (
                    f"'{name}' is stored in {some([str(m) for m in having])} but not in "
                    f"{some([str(m) for m in lacking])}. {why}. Store it in all models' files, or "
                    "remove it from all."
                )
            else:
                without[tuple(str(m) for m in lacking)].append(name)
        for models, names in without.items():
            warn_once(
                f"{some(models)} {'lack' if len(models) > 1 else 'lacks'} {_tensors(len(names))} "
                f"({some(names)}), which {'are' if len(names) > 1 else 'is'} merged from the "
                "models that have them, or copied from the base model where that alone does."
            )

    def shapes(self) -> Iterator[str]:
        """Tensors of different shapes."""
        for task, found in self.found:
            weight = task.output_weight
            aligned = not isinstance(task.gather_tensors, GatherTensors | TensorDictWrapper)
            shapes: dict[tuple[int, ...], list[str]] = defaultdict(list)
            for model, header in found.items():
                if header is not None:
                    shape = list(header.shape)
                    if aligned and weight.vocabulary_axis is not None:
                        shape[weight.vocabulary_axis] = -1
                    shapes[tuple(shape)].append(str(model))
            if len(shapes) <= 1:
                continue
            what = "; ".join(
                f"{' x '.join(map(str, shape))} in {', '.join(models)}"
                for shape, models in shapes.items()
            )
            if weight.vocabulary_axis is not None and not aligned:
                yield (
                    f"tensor '{weight.name}': vocabulary sizes differ ({what}). Align them with "
                    "`tokenizer: {source: base}` or `{source: union}`."
                )
            else:
                yield (
                    f"tensor '{weight.name}': shapes differ ({what}). RAM merges models of one "
                    "architecture and size only."
                )

    def dtypes(self) -> Iterator[str]:
        """Tensors that hold codes instead of numbers."""
        coded: dict[tuple[ModelReference, str], list[str]] = defaultdict(list)
        for task, found in self.found:
            for model, header in found.items():
                if header is None or header.dtype in _NAMES:
                    continue
                # Integer buffers are no weights: MergeKit copies them, where all models agree.
                if header.dtype in ("BOOL", "I64", "I32", "I16", "U16", "U32", "U64") or (
                    header.dtype in ("I8", "U8") and _COMPUTED.search(task.output_weight.name)
                ):
                    continue
                coded[model, header.dtype].append(task.output_weight.name)
        for (model, dtype), names in coded.items():
            yield dequantise(str(model), f"{dtype} values in {some(names)}")

    def warn_of_rounding(self) -> None:
        """Warn where files hold more than ``dtype`` does."""
        wanted = str(self.config.dtype or "").removeprefix("torch.")
        if wanted not in _HELD:
            return
        lossy: dict[tuple[str, str], list[str]] = defaultdict(list)
        for task, found in self.found:
            if task.output_weight.force_dtype:
                continue
            for model, header in found.items():
                stored = _NAMES.get(header.dtype) if header is not None else None
                if header is not None and stored and stored not in _HELD[wanted]:
                    lossy[str(model), stored].append(header.file)
        for (model, stored), files in lossy.items():
            wide = "float64" if stored == "float64" else "float32"
            out = self.config.out_dtype or wanted
            names = some(list(dict.fromkeys(files)))
            warn_once(
                f"{model} holds {stored} in {_tensors(len(files))} ({names}), which `dtype: "
                f"{wanted}` rounds before RAM sees what changed: small changes are lost. Use "
                f"`dtype: {wide}` with `out_dtype: {out}`."
            )

    def warn_of_mixed_dtypes(self) -> None:
        """Warn where no ``dtype`` is given and the models' differ."""
        if self.config.dtype:
            return
        mixed: list[str] = []
        kinds: dict[str, set[str]] = defaultdict(set)
        for task, found in self.found:
            stored = {str(m): _NAMES[h.dtype] for m, h in found.items() if h and h.dtype in _NAMES}
            if len(set(stored.values())) > 1 and not task.output_weight.force_dtype:
                mixed.append(task.output_weight.name)
                for model, dtype in stored.items():
                    kinds[model].add(dtype)
        if mixed:
            what = "; ".join(f"{model}: {', '.join(sorted(d))}" for model, d in kinds.items())
            warn_once(
                f"The models hold {_tensors(len(mixed))} in different dtypes ({what}), so the "
                "output's are as wide as the widest, whatever its config.json says. Set `dtype: "
                "float32` and `out_dtype:` to what the output should have."
            )

    def warn_of_heads(self) -> None:
        """Warn of a tied head that some files store."""
        for task, found in self.found:
            name = task.output_weight.name
            base = self.checkpoints.get(task.base_model) if task.base_model else None
            if base is None or kind_of(name) != HEAD or not found:
                continue
            if not _is_tied(base.config):
                continue
            storing = [str(m) for m in found if name in self.checkpoints[m].tensors]
            if storing and task.output_weight.optional:
                warn_once(
                    f"'{name}' is tied to the embedding by {base.model}'s config.json, but stored "
                    f"in {', '.join(storing)}. The output gains a head that loaders drop in "
                    "favour of the embedding. Remove it from those files, or set "
                    "`tie_word_embeddings` to false if it was trained."
                )

    def warn_of_extra(self) -> None:
        """Warn of stored tensors that are part of no merge."""
        used: dict[ModelReference, set[str]] = defaultdict(set)
        for task, _ in self.found:
            for model, names in _reads(task):
                used[model] |= set(names)
        holding: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for model, checkpoint in self.checkpoints.items():
            if not checkpoint.readable:
                continue
            layers = {layer_of(name) for name in used[model]}
            extra = [
                name
                for name in checkpoint.tensors
                if name not in used[model]
                and not _COMPUTED.search(name)
                and not _left_out(name, layers, checkpoint)
            ]
            if extra:
                converted = _converted(used[model], checkpoint)
                extra = [name for name in extra if _template(name) not in converted]
            if extra:
                holding[tuple(extra)].append(str(model))
        for extras, models in holding.items():
            many, it = len(models) > 1, "them" if len(extras) > 1 else "it"
            warn_once(
                f"{some(models)} {'hold' if many else 'holds'} {_tensors(len(extras))} that "
                f"MergeKit does not merge; the output lacks {it}: {some(extras)}. That is right "
                f"for a value head or the like. If the model needs {it}, MergeKit does not know "
                "its layout."
            )

    def output_size(self) -> int:
        """Bytes of the merged tensors."""
        wanted = str(self.config.out_dtype or self.config.dtype or "").removeprefix("torch.")
        sizes = {}
        for task, found in self.found:
            size = 0
            for header in found.values():
                if header is None:
                    continue
                name = str(task.output_weight.force_dtype or wanted).removeprefix("torch.")
                item = _BYTES.get(name) or _BYTES.get(_NAMES.get(header.dtype, ""), 1)
                elements = 1
                for length in header.shape:
                    elements *= length
                size = max(size, elements * item)
            sizes[task.output_weight.name] = size
        return sum(sizes.values())


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Whether a model's head is its embedding."""
    inner = config.get("text_config") or {}
    return bool(inner.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))


def _left_out(name: str, layers: set[str | None], checkpoint: Checkpoint) -> bool:
    """Whether a tensor is of a layer that slices leave out, on purpose."""
    layer = layer_of(name)
    if layer is None or layer in layers:
        return False
    sections = [checkpoint.config, checkpoint.config.get("text_config") or {}]
    depths = [section[key] for section in sections for key in LAYER_KEYS if key in section]
    return int(layer.rpartition(".")[2]) < max(depths, default=0)


def _template(name: str) -> str:
    """A name that is alike in every layer and for every expert."""
    return re.sub(r"\d+", "#", name)


def _converted(used: set[str], checkpoint: Checkpoint) -> set[str]:
    """Templates of the stored names that MergeKit converts to names of the architecture.

    As experts that have an entry each, of which one fused tensor is made. One layer stands for
    all, since looking at every name would take minutes for many experts.
    """
    model_type = checkpoint.config.get("model_type")
    targets = {_template(name): name for name in sorted(used - set(checkpoint.tensors))}
    found: set[str] = set()
    for target in targets.values():
        number = _layer_number(target)
        names = {name for name in checkpoint.tensors if _layer_number(name) == number}
        if not can_convert_checkpoint_keys(model_type, names, target):
            continue
        for template in {_template(name) for name in names - used} - found:
            others = {name for name in names if _template(name) != template}
            if not can_convert_checkpoint_keys(model_type, others, target):
                found.add(template)
    return found


def _layer_number(name: str) -> str | None:
    layer = layer_of(name)
    return layer.rpartition(".")[2] if layer is not None else None


def _reads(task: ExecuteMergeMethodTask) -> Iterator[tuple[ModelReference, list[str]]]:
    """The models that a merge task reads from, each with the names that it looks for."""
    inputs = task.gather_tensors
    if isinstance(inputs, TensorDictWrapper):
        for model, load in inputs.tensors.items():
            yield model, [load.tensor_name]
        return
    gather = inputs if isinstance(inputs, GatherTensors) else inputs.gather_tensors
    for model, weight in gather.weight_info.items():
        yield model, [weight.name, *(weight.aliases or ()), *(weight.tied_names or ())]


def _folder_of(model: Any) -> Path | None:
    """Where a model's own files lie, by its real path; None where it is not a folder here."""
    if isinstance(model, ModelReference):
        if model.lora is not None or not os.path.exists(model.model.path):
            return None
        return Path(os.path.realpath(model.model.path))
    return Path(os.path.realpath(Path(model).parent))


def _tensors(number: int) -> str:
    return f"{number:,} tensor{'s' if number != 1 else ''}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e8 else f"{size / 1e6:,.1f} MB"
