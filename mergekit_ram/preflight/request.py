"""Checks of a merge config by itself, before any model is looked at."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from mergekit_ram._mergekit.merging import models_in_order, sections_of
from mergekit_ram.errors import fail, warn_once
from mergekit_ram.parameters import check_config

DTYPES = ("bfloat16", "float16", "float32", "float64")


def check_request(config: Any, options: Any) -> None:
    """Check what can be told from a merge config alone.

    Raises:
        ParameterError: a parameter has a value that the method does not take.
        ConfigError: the config cannot be merged.
    """
    check_config(config.merge_method, config)
    errors = []
    for key in ("dtype", "out_dtype"):
        name = getattr(config, key)
        if name is not None and str(name).removeprefix("torch.") not in DTYPES:
            close = difflib.get_close_matches(str(name), DTYPES, n=1, cutoff=0.5)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            errors.append(f"{key}: '{name}' is not one of {', '.join(DTYPES)}.{hint}")
    for place, base, sources in source_lists(config):
        models = [source.model for source in sources]
        twice = [m for m in dict.fromkeys(models) if models.count(m) > 1]
        errors += [f"{place}: {model} is listed twice. List each model once." for model in twice]
        if base is None:
            errors.append(
                f"{place}: RAM needs a base model, which the agents were trained from. Name it in "
                "`base_model:`."
            )
        elif not [model for model in models if model != base]:
            errors.append(f"{place}: no agent besides the base model {base}. Add `- model:` lines.")
    for model in models_of(config):
        lora = getattr(model, "lora", None)
        if lora is not None and not options.lora_merge_cache:
            errors.append(
                f"{model}: merging an adapter into its model needs a folder to keep the result "
                "in. Give --lora-merge-cache FOLDER."
            )
    fail(errors)
    _warn_of_slices(config)


def check_modules(config: Any, architecture: Any) -> None:
    """Check the names of modules, as soon as the architecture is known.

    Raises:
        ConfigError: a module does not exist.
    """
    known = list(architecture.modules)
    errors = []
    for name in config.modules or ():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            errors.append(
                f"modules.{name}: the model has no such module. Its modules: "
                f"{', '.join(known)}.{hint}"
            )
    if config.slices and len(known) > 1:
        errors.append(
            f"slices: the model has several modules ({', '.join(known)}). Write the slices under "
            "`modules:`, per module."
        )
    fail(errors)
    if errors:
        return
    left_out = [name for name in known if config.modules and name not in config.modules]
    if left_out:
        warn_once(
            f"modules: {', '.join(left_out)} is not listed, so its weights are not written: the "
            "output is only a part of the model. List all modules for a whole one."
        )


def source_lists(config: Any) -> Iterator[tuple[str, Any, Sequence[Any]]]:
    """Every list of models to merge, with its place in the config and its base model."""
    base = config.base_model
    for place, section in sections_of(config).items():
        if section.models:
            yield f"{place}models", base, section.models
        for i, definition in enumerate(getattr(section, "slices", None) or ()):
            yield f"{place}slices[{i}]", definition.base_model or base, definition.sources


def models_of(config: Any) -> list[Any]:
    """All models of a config, in its order, with the base models that slices name."""
    bases = (base for _, base, _ in source_lists(config) if base)
    return list(dict.fromkeys([*models_in_order(config), *bases]))


def tokenizer_source(config: Any) -> Any:
    """Where the output's tokenizer comes from; None where it is copied."""
    tokenizer = getattr(config, "tokenizer", None)
    return tokenizer.source if tokenizer else getattr(config, "tokenizer_source", None)


def _warn_of_slices(config: Any) -> None:
    for place, section in sections_of(config).items():
        slices = getattr(section, "slices", None) or []
        lengths = [len(definition.sources) for definition in slices]
        if len(set(lengths)) <= 1:
            continue
        lost = [str(source.model) for source in slices[-1].sources[lengths[0] :]]
        if lost:
            what = (
                f"MergeKit merges the head and the final norm from as many models as the first "
                f"slice has, so that the changes of {', '.join(lost)} to them are lost"
            )
        else:
            what = (
                "weights before the first layer are merged from the first slice's models, those "
                "after the last layer from the last slice's"
            )
        warn_once(
            f"{place}slices: the slices' source lists differ in length "
            f"({', '.join(map(str, lengths))}): {what}. List all models in every slice; "
            "`weight: 0` leaves one out of a slice."
        )
