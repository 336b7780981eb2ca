"""Checks of the tensors that a plan merges, by their headers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mergekit.common import ModelReference
from mergekit.io.tasks import GatherTensors, LoaderCache
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask, TensorDictWrapper

from mergekit_ram import headers
from mergekit_ram.errors import fail, warn_once
from mergekit_ram.headers import HeaderLoader, section, some
from mergekit_ram.kinds import HEAD, kind_of
from mergekit_ram.preflight.models import dequantise
from mergekit_ram.preflight.request import models_of
from mergekit_ram.preflight.tensors import Entry, PlannedTensors

FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
# Dtypes whose every value another one holds.
_HELD = {
    "bfloat16": {"bfloat16"},
    "float16": {"float16"},
    "float32": {"bfloat16", "float16", "float32"},
    "float64": {"bfloat16", "float16", "float32", "float64"},
}
_BUFFER_DTYPES = ("BOOL", "I64", "I32", "I16", "U16", "U32", "U64")
# Buffers that old checkpoints store and models compute for themselves.
_COMPUTED = re.compile(
    r"inv_freq$|position_ids$|attn\.(masked_)?bias$|attention\.(masked_)?bias$|(cos|sin)_cached$"
)


def check_plan(
    config: Any, merges: Sequence[ExecuteMergeMethodTask], *, whole: bool = True
) -> PlannedTensors:
    """Check the tensors that a plan merges against what the models' headers say.

    Returns them, for other checks.

    Args:
        config: of the merge.
        merges: its merge tasks.
        whole: whether the config means to merge whole models, not some modules or layers.

    Raises:
        ConfigError: a model lacks a tensor or holds it in another shape, or quantised.
    """
    if not merges:
        fail(
            [
                "MergeKit finds no tensor to merge. It does not know this architecture, or the "
                "config names no layers and no modules that the models have."
            ]
        )
    tensors = PlannedTensors(merges)
    fail([*_missing(tensors), *_partial(tensors), *_shapes(tensors), *_coded(tensors)])
    _warn_of_rounding(config, tensors)
    _warn_of_mixed_dtypes(config, tensors)
    _warn_of_heads(tensors)
    if whole:
        _warn_of_extra(tensors)
    return tensors


def plan_by_headers(config: Any, options: Any) -> None:
    """Let the next plan of a config do with headers where a model is not on this machine.

    Such a plan is good for checks only.
    """
    for model in models_of(config):
        if not headers.is_here(model, options):
            checkpoint = headers.read(model, options, remote=True)
            LoaderCache().loaders[model] = HeaderLoader(checkpoint)


def _missing(tensors: PlannedTensors) -> Iterator[str]:
    """Tensors that a model lacks and cannot do without."""
    for model, names in tensors.lacking.items():
        yield (
            f"{model} lacks {count_of(names)} that the merge needs: {some(names)}. Complete its "
            "files, or take the model out of the merge."
        )


def _partial(tensors: PlannedTensors) -> Iterator[str]:
    """Optional tensors that some models have and others lack."""
    without: dict[tuple[str, ...], list[str]] = defaultdict(list)
    converted = {entry.task.output_weight.name for entry in tensors.parts}
    for entry in tensors.entries:
        task, found = entry.task, entry.headers
        lacking = [m for m, header in found.items() if header is None]
        having = [m for m in found if m not in lacking]
        if not lacking or not having or isinstance(task.gather_tensors, TensorDictWrapper):
            continue
        if not task.output_weight.optional or len(found) < len(task.model_order):
            continue
        if entry.name in converted:
            continue
        tied = kind_of(entry.name) == HEAD and _is_tied(tensors.checkpoints[having[0]].config)
        if tied or task.base_model in lacking:
            why = (
                "The head is tied to the embedding, and its copy there would not be merged with "
                "the others' embeddings"
                if tied
                else "RAM needs the base model's"
            )
            yield (
                f"'{entry.name}' is stored in {some([str(m) for m in having])} but not in "
                f"{some([str(m) for m in lacking])}. {why}. Store it in all models' files, or "
                "remove it from all."
            )
        else:
            without[tuple(str(m) for m in lacking)].append(entry.name)
    for models, names in without.items():
        warn_once(
            f"{some(models)} {'lack' if len(models) > 1 else 'lacks'} {count_of(names)} "
            f"({some(names)}), which {'are' if len(names) > 1 else 'is'} merged from the models "
            "that have them, or copied from the base model where that alone does."
        )


def _shapes(tensors: PlannedTensors) -> Iterator[str]:
    """Tensors of different shapes."""
    for entry in [*tensors.entries, *tensors.parts]:
        weight = entry.task.output_weight
        inputs = entry.task.gather_tensors
        aligned = not isinstance(inputs, GatherTensors | TensorDictWrapper)
        shapes: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for model, header in entry.headers.items():
            if header is not None:
                shape = list(header.shape)
                if aligned and weight.vocabulary_axis is not None:
                    shape[weight.vocabulary_axis] = -1
                shapes[tuple(shape)].append(str(model))
        if len(shapes) <= 1:
            continue
        what = "; ".join(
            f"{' x '.join(map(str, shape)) or 'one number'} in {', '.join(models)}"
            for shape, models in shapes.items()
        )
        if weight.vocabulary_axis is not None and not aligned:
            yield (
                f"tensor '{entry.name}': vocabulary sizes differ ({what}). Align them with "
                "`tokenizer: {source: base}` or `{source: union}`."
            )
        else:
            yield (
                f"tensor '{entry.name}': shapes differ ({what}). RAM merges models of one "
                "architecture and size only."
            )


def _coded(tensors: PlannedTensors) -> Iterator[str]:
    """Tensors that hold codes instead of numbers."""
    coded: dict[tuple[ModelReference, str], list[str]] = defaultdict(list)
    for entry in [*tensors.entries, *tensors.parts]:
        for model, header in entry.headers.items():
            # Integer buffers are no weights: MergeKit copies them, where all models agree.
            if (
                header is None
                or header.dtype in FLOATS
                or header.dtype in _BUFFER_DTYPES
                or (header.dtype in ("I8", "U8") and _COMPUTED.search(entry.name))
            ):
                continue
            coded[model, header.dtype].append(entry.name)
    for (model, dtype), names in coded.items():
        yield dequantise(str(model), f"{dtype} values in {some(names)}")


def _warn_of_rounding(config: Any, tensors: PlannedTensors) -> None:
    """Warn where files hold more than ``dtype`` does."""
    wanted = str(config.dtype or "").removeprefix("torch.")
    if wanted not in _HELD:
        return
    lossy: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in _unforced(tensors):
        for model, header in entry.headers.items():
            stored = FLOATS.get(header.dtype) if header is not None else None
            if header is not None and stored and stored not in _HELD[wanted]:
                lossy[str(model), stored].append(header.file)
    for (model, stored), files in lossy.items():
        wide = "float64" if stored == "float64" else "float32"
        out = config.out_dtype or wanted
        names = some(list(dict.fromkeys(files)))
        warn_once(
            f"{model} holds {stored} in {count_of(files)} ({names}), which `dtype: {wanted}` "
            "rounds before RAM sees what changed: small changes are lost. Use "
            f"`dtype: {wide}` with `out_dtype: {out}`."
        )


def _warn_of_mixed_dtypes(config: Any, tensors: PlannedTensors) -> None:
    """Warn where no ``dtype`` is given and the models' differ."""
    if config.dtype:
        return
    mixed: list[str] = []
    kinds: dict[str, set[str]] = defaultdict(set)
    for entry in _unforced(tensors):
        stored = {
            str(model): FLOATS[header.dtype]
            for model, header in entry.headers.items()
            if header is not None and header.dtype in FLOATS
        }
        if len(set(stored.values())) > 1:
            mixed.append(entry.name)
            for model, dtype in stored.items():
                kinds[model].add(dtype)
    if mixed:
        what = "; ".join(f"{model}: {', '.join(sorted(d))}" for model, d in kinds.items())
        warn_once(
            f"The models hold {count_of(mixed)} in different dtypes ({what}), so the output's are "
            "as wide as the widest, whatever its config.json says. Set `dtype: float32` and "
            "`out_dtype:` to what the output should have."
        )


def _warn_of_heads(tensors: PlannedTensors) -> None:
    """Warn of a tied head that some files store."""
    for entry in tensors.entries:
        task = entry.task
        base = tensors.checkpoints.get(task.base_model) if task.base_model else None
        if base is None or kind_of(entry.name) != HEAD or not task.output_weight.optional:
            continue
        found = [m for m in entry.headers if entry.name in tensors.checkpoints[m].tensors]
        if found and _is_tied(base.config):
            warn_once(
                f"'{entry.name}' is tied to the embedding by {base.model}'s config.json, but "
                f"stored in {some([str(m) for m in found])}. The output gains a head that loaders "
                "drop in favour of the embedding. Remove it from those files, or set "
                "`tie_word_embeddings` to false if it was trained."
            )


def _warn_of_extra(tensors: PlannedTensors) -> None:
    """Warn of stored tensors that are part of no merge."""
    holding: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for model, checkpoint in tensors.checkpoints.items():
        names = (n for n in checkpoint.tensors if n not in tensors.used)
        extra = tuple(name for name in names if not _COMPUTED.search(name))
        if extra and checkpoint.readable:
            holding[extra].append(str(model))
    for extra, models in holding.items():
        many, it = len(models) > 1, "them" if len(extra) > 1 else "it"
        warn_once(
            f"{some(models)} {'hold' if many else 'holds'} {count_of(extra)} that MergeKit does "
            f"not merge; the output lacks {it}: {some(extra)}. That is right for a value head or "
            f"the like. If the model needs {it}, MergeKit does not know its layout."
        )


def _unforced(tensors: PlannedTensors) -> Iterator[Entry]:
    """Tensors that ``dtype`` applies to."""
    for entry in [*tensors.entries, *tensors.parts]:
        if not entry.task.output_weight.force_dtype:
            yield entry


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Whether a model's head is its embedding."""
    inner = section(config, "text_config")
    return bool(inner.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))


def count_of(names: Sequence[str]) -> str:
    """How many tensors."""
    return f"{len(names):,} tensor{'s' if len(names) != 1 else ''}"
