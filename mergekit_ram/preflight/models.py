"""Checks of the models of a merge by their configurations and headers."""

from __future__ import annotations

import difflib
import importlib.resources
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mergekit._data import chat_templates
from mergekit.architecture import arch_info_for_config
from mergekit.common import ModelReference

from mergekit_ram import headers
from mergekit_ram._mergekit.merging import sections_of
from mergekit_ram.errors import fail, warn_once
from mergekit_ram.headers import Checkpoint, section, some
from mergekit_ram.preflight.request import models_of, source_lists, tokenizer_source

_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
# Quantised checkpoints keep codes with their scales beside them, by names like these.
_QUANTISED = re.compile(
    r"(^|[._])(qweight|qzeros|scales|g_idx|SCB|absmax|quant_map|weight_packed|weight_zero_point"
    r"|weight_shape|quant_state\.\w+)$|(^|\.|\bw\d+_)(weight|input|output)_scale(_inv|_2)?$"
    r"|_(blocks|scales)$"
)
_SCALE = re.compile(r"[._]scales?(_inv)?$")


def check_models(config: Any, options: Any, *, remote: bool = False) -> None:
    """Check the headers and configurations of the models, those that are on this machine.

    Raises:
        ConfigError: a model's files are damaged or quantised, or two of them are one.
    """
    models = models_of(config)
    checkpoints = {
        m: headers.read(m, options, remote=remote)
        if isinstance(m, ModelReference)
        else headers.read_file(Path(m))
        for m in models
    }
    errors = [f"{c.model}: {problem}" for c in checkpoints.values() for problem in c.problems]
    errors += [e for c in checkpoints.values() for e in _quantised(c)]
    errors += [e for m in models for e in _adapter(m)]
    errors += _same_model(config, checkpoints)
    if getattr(config, "models", None) or getattr(config, "modules", None):
        errors += _layers(config, checkpoints)
    errors += _layer_ranges(config, checkpoints)
    errors += _architectures(checkpoints, options)
    errors += _tokenizers(config, checkpoints)
    fail(errors)
    _warn_of_ties(checkpoints)


def _quantised(checkpoint: Checkpoint) -> Iterator[str]:
    config = checkpoint.config
    for part in (config, section(config, "text_config")):
        if part.get("quantization_config"):
            method = part["quantization_config"]
            name = method.get("quant_method", "") if isinstance(method, dict) else ""
            yield dequantise(checkpoint.model, f"`quantization_config` {name}".strip())
            return
    names = [n for n in checkpoint.tensors if _QUANTISED.search(n) or _scales(n, checkpoint)]
    if names:
        yield dequantise(checkpoint.model, f"scale or code tensors: {some(names)}")


def _scales(name: str, checkpoint: Checkpoint) -> bool:
    """Whether a tensor holds the scales of another one."""
    return bool(_SCALE.search(name)) and _SCALE.sub("", name) in checkpoint.tensors


def dequantise(model: str, found: str) -> str:
    return (
        f"{model} is quantised ({found}): merging would mix codes, not weights. Dequantise it "
        "first, to bfloat16 say, and remove `quantization_config` from its config.json."
    )


def _same_model(config: Any, checkpoints: Mapping[Any, Checkpoint]) -> Iterator[str]:
    """Agents that are one model under two names; a base under another name is a warning."""
    groups: dict[Path, list[Any]] = defaultdict(list)
    for model, checkpoint in checkpoints.items():
        if checkpoint.folder is not None and getattr(model, "lora", None) is None:
            groups[Path(os.path.realpath(checkpoint.folder))].append(model)
    bases = {base for _, base, _ in source_lists(config)}
    for folder, models in groups.items():
        agents = [m for m in models if m not in bases]
        if len(agents) > 1:
            yield (
                f"{' and '.join(map(str, agents))} are the same model ({folder}). Nothing that it "
                "changed would be unique. List it once."
            )
        elif agents and len(models) > 1:
            warn_once(
                f"{agents[0]} is the base model {models[0]} under another name ({folder}): it "
                "adds nothing to the merge."
            )


def _layers(config: Any, checkpoints: Mapping[Any, Checkpoint]) -> Iterator[str]:
    """Models of different depth, which only slices can merge."""
    sections = sections_of(config).values()
    named = {m.model for s in sections for m in s.models or ()} | {config.base_model}
    for part in ("", "text_config", "vision_config", "audio_config"):
        for key in _LAYER_KEYS:
            depths: dict[int, list[str]] = defaultdict(list)
            for model, checkpoint in checkpoints.items():
                found = section(checkpoint.config, part) if part else checkpoint.config
                if model in named and isinstance(found.get(key), int):
                    depths[found[key]].append(checkpoint.model)
            if len(depths) > 1:
                what = "; ".join(f"{n} in {', '.join(models)}" for n, models in depths.items())
                yield (
                    f"the models differ in {key} ({what}). An agent has as many layers as its "
                    "base model; to merge some layers of it, use `slices:`."
                )


def _layer_ranges(config: Any, checkpoints: Mapping[Any, Checkpoint]) -> Iterator[str]:
    """Layers that a slice takes of a model that has fewer."""
    for index, definition in enumerate(getattr(config, "slices", None) or ()):
        for source in definition.sources:
            found = checkpoints[source.model].config
            parts = (found, section(found, "text_config"))
            depths = [p[k] for p in parts for k in _LAYER_KEYS if isinstance(p.get(k), int)]
            if depths and source.layer_range[1] > max(depths):
                yield (
                    f"slices[{index}]: layer_range {list(source.layer_range)} goes beyond the "
                    f"{max(depths)} layers of {source.model}."
                )


def _adapter(model: Any) -> Iterator[str]:
    """An adapter's folder that holds none."""
    lora = getattr(model, "lora", None)
    if lora is None:
        return
    here = os.path.isdir(lora.path)
    if not here and (lora.path.startswith(("/", ".", "~")) or lora.path.count("/") > 1):
        yield f"{model}: the adapter's folder {lora.path} does not exist."
    elif here and not os.path.exists(os.path.join(lora.path, "adapter_config.json")):
        yield f"{model}: {lora.path} holds no adapter_config.json, so it is no adapter."


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def _tokenizers(config: Any, checkpoints: Mapping[Any, Checkpoint]) -> Iterator[str]:
    """Tokenizers that the merge needs and will not find, and chat templates likewise."""
    source = tokenizer_source(config)
    if isinstance(source, ModelReference):
        path = source.model.path
        close = difflib.get_close_matches(path, ("union", "base"), n=1)
        if close and not os.path.exists(path):
            yield f"tokenizer source '{path}': did you mean '{close[0]}'?"
        elif path.startswith(("/", ".", "~")) and not os.path.isdir(path):
            yield f"tokenizer source {path}: there is no such folder."
    elif source is not None:
        base = checkpoints.get(config.base_model)
        folder = base.folder if base is not None else None
        if folder is not None and not any((folder / f).exists() for f in _TOKENIZER_FILES):
            yield (
                f"tokenizer: {config.base_model} holds no tokenizer ({_TOKENIZER_FILES[0]} or the "
                "like), which aligning the vocabularies needs."
            )
    template = getattr(config, "chat_template", None)
    if template and template != "auto" and "{" not in template:
        names = sorted(
            f.name.removesuffix(".jinja")
            for f in importlib.resources.files(chat_templates).iterdir()
            if f.name.endswith(".jinja")
        )
        if template not in names:
            yield (
                f"chat_template: '{template}' is neither a Jinja template nor one of auto, "
                f"{', '.join(names)}."
            )


def _architectures(checkpoints: Mapping[Any, Checkpoint], options: Any) -> Iterator[str]:
    names: dict[str, list[str]] = defaultdict(list)
    definitions = []
    for model, checkpoint in checkpoints.items():
        listed = checkpoint.config.get("architectures")
        if not isinstance(model, ModelReference) or model.override_architecture or not listed:
            continue
        names[str(listed[0])].append(checkpoint.model)
        definitions.append(_definition(listed, checkpoint.config.get("model_type")))
    # Where MergeKit has no definition of one of them it infers one from the tensors' names.
    if len(names) < 2 or options.allow_crimes or None in definitions:
        return
    if any(definition != definitions[0] for definition in definitions):
        what = "; ".join(f"{name}: {', '.join(models)}" for name, models in names.items())
        yield (
            f"the models' architectures differ ({what}). An agent has its base model's; check "
            "that these are what you meant."
        )


def _definition(architectures: list[str], model_type: Any) -> Any:
    config = SimpleNamespace(architectures=architectures[:1], model_type=model_type)
    try:
        return arch_info_for_config(config)
    except Exception:  # it needs more of the configuration than its name: let MergeKit decide
        return None


def _warn_of_ties(checkpoints: Mapping[Any, Checkpoint]) -> None:
    ties: dict[bool, list[str]] = defaultdict(list)
    for checkpoint in checkpoints.values():
        tied = checkpoint.config.get("tie_word_embeddings")
        if isinstance(tied, bool):
            ties[tied].append(checkpoint.model)
    if len(ties) > 1:
        warn_once(
            f"`tie_word_embeddings` is true in {', '.join(ties[True])} and false in "
            f"{', '.join(ties[False])}: where a model has no head of its own, its embedding is "
            "merged as one. The output's config.json is the base model's."
        )
