"""The methods' parameters: names, defaults, what each accepts, and errors that say so."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import torch
from mergekit.common import ModelReference
from mergekit.merge_methods.base import ParameterScope, ParameterSpec
from pydantic import BaseModel

from mergekit_ram.errors import ParameterError, warn_once


@dataclass(frozen=True)
class _Rule:
    """What one parameter accepts."""

    accepts: Callable[[float], bool]
    wanted: str
    description: str


_RULES = {
    "epsilon": _Rule(
        lambda v: math.isfinite(v) and v >= 0,
        "a finite number of at least 0",
        "an element counts as changed where |agent - base| is larger",
    ),
    "weight": _Rule(
        math.isfinite,
        "a finite number",
        "factor of the agent's task vector in the merged value; 0 leaves the agent out",
    ),
    "r": _Rule(
        lambda v: math.isfinite(v) and v >= 0,
        "a finite number of at least 0",
        "strength of RAM+'s rescaling of what only one agent changed; 0 switches it off",
    ),
    "alpha": _Rule(
        lambda v: v >= 0,
        "a number of at least 0",
        "upper limit of the overlap-unique ratio rho in RAM+'s factor 1 + r * min(rho, alpha)",
    ),
}

NAMES = tuple(_RULES)


def check(name: str, value: Any) -> float:
    """Return ``value`` as the number that the parameter ``name`` stands for.

    Numbers and quoted numbers are taken (YAML reads ``1e-5`` as a string), booleans are not.

    Raises:
        ParameterError: the value is not one that the parameter accepts.
    """
    rule = _RULES[name]
    number = math.nan
    # A boolean is a number to Python, and never what the config's author meant.
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    is_switch = isinstance(value, bool)
    if isinstance(value, Real | str) and not is_switch:
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)
    if math.isnan(number) or not rule.accepts(number):
        raise ParameterError(f"{name}: {value!r} is not allowed; it must be {rule.wanted}.")
    return number


@dataclass(frozen=True)
class RamParameter(ParameterSpec):
    """A parameter per agent whose values are checked by ``check``."""

    def validate(self, value: Any) -> float:
        """Return the number; see ``check``."""
        return check(self.name, value)


def parameter_specs(r: float) -> tuple[ParameterSpec, ...]:
    """Specifications of all parameters, with ``r`` as the default of the method's ``r``."""
    defaults = {"epsilon": 1e-5, "weight": 1.0, "r": r, "alpha": 0.2}
    return tuple(
        RamParameter(
            name=name,
            value_type=float,
            scope=ParameterScope.NON_BASE,
            default=defaults[name],
            description=rule.description,
        )
        for name, rule in _RULES.items()
    )


def check_config(method: str, config: Any) -> None:
    """Check every ``parameters`` section of a merge configuration.

    A value that the method does not accept is an error with its place in the config; a key that
    the method does not know is a warning with the closest name, since MergeKit ignores it.

    Args:
        method: the name of the merge method, for the messages.
        config: a MergeConfiguration of mergekit-yaml or the one of mergekit-pytorch.

    Raises:
        ParameterError: at the first value that is not accepted.
    """
    unknown: dict[str, list[str]] = {}
    base = config.base_model
    for place, settings in _sections(config):
        if base is not None and place.endswith(f" ({base}).parameters"):
            warn_once(
                f"{place}: the base model has no parameters of its own in '{method}'; these have "
                "no effect. Set them for the agents, or for all in `parameters:` at the top level."
            )
        for key, setting in settings.items():
            if key in _RULES:
                try:
                    _check_setting(key, setting)
                except ParameterError as error:
                    raise ParameterError(f"{place}.{error.message}") from None
            else:
                unknown.setdefault(key, []).append(place)
    for key, places in unknown.items():
        close = difflib.get_close_matches(key, NAMES, n=1, cutoff=0.5)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        warn_once(
            f"'{key}' in {', '.join(places)}: the merge method '{method}' has no such parameter; "
            f"it is ignored.{hint} Parameters: {', '.join(NAMES)}."
        )


def check_keys(schema: type[BaseModel], raw: Any) -> None:
    """Warn of keys in a config, as it was written, that MergeKit drops without a word.

    Args:
        schema: MergeKit's model of the config.
        raw: the config's mappings and lists.
    """
    for place, key, known in _unknown_keys(schema, raw, ""):
        inside = f" in {place}" if place else ""
        if key in NAMES and "parameters" in known:
            warn_once(
                f"'{key}'{inside} has no effect there: parameters of a merge method stand under "
                "`parameters:`."
            )
            continue
        close = difflib.get_close_matches(str(key), [*known, *NAMES], n=1, cutoff=0.5)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        if close and close[0] in NAMES:
            hint = f" Did you mean '{close[0]}', under `parameters:`?"
        warn_once(
            f"'{key}'{inside}: MergeKit knows no such key there; it is ignored.{hint} "
            f"Keys: {', '.join(known)}."
        )


def _unknown_keys(
    schema: type[BaseModel], raw: Any, place: str
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield keys that the schema lacks, each with its place and the keys known there."""
    if not isinstance(raw, Mapping):
        return
    known = list(schema.model_fields)
    for key, value in raw.items():
        # Keys like "x-common" hold YAML anchors.
        if key not in schema.model_fields and not str(key).startswith(("x-", ".")):
            yield place, str(key), known
        elif key in known and key != "parameters":
            inner = f"{place}.{key}" if place else str(key)
            for part in _parts(schema.model_fields[key].annotation, value, inner):
                yield from _unknown_keys(*part)


def _parts(annotation: Any, value: Any, place: str) -> Iterator[tuple[type[BaseModel], Any, str]]:
    """Yield the sections in a value, by its annotation; models can be written in several ways."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation is not ModelReference:
            yield annotation, value, place
    elif get_origin(annotation) is list and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _parts(get_args(annotation)[0], item, f"{place}[{index}]")
    elif get_origin(annotation) is dict and isinstance(value, Mapping):
        for name, item in value.items():
            yield from _parts(get_args(annotation)[1], item, f"{place}.{name}")
    elif get_origin(annotation) in (Union, UnionType):
        choices = [choice for choice in get_args(annotation) if choice is not NoneType]
        if len(choices) == 1:
            yield from _parts(choices[0], value, place)


def _sections(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every ``parameters`` mapping with its place in the config."""
    yield from _own("", config)
    yield from _models("", getattr(config, "models", None))
    yield from _slices("", getattr(config, "slices", None))
    for name, module in (getattr(config, "modules", None) or {}).items():
        place = f"modules.{name}."
        yield from _own(place, module)
        yield from _models(place, module.models)
        yield from _slices(place, module.slices)


def _own(place: str, section: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if section.parameters:
        yield f"{place}parameters", section.parameters


def _models(place: str, models: Sequence[Any] | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for index, definition in enumerate(models or ()):
        yield from _own(f"{place}models[{index}] ({definition.model}).", definition)


def _slices(place: str, slices: Sequence[Any] | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for index, definition in enumerate(slices or ()):
        yield from _own(f"{place}slices[{index}].", definition)
        for number, source in enumerate(definition.sources):
            inner = f"{place}slices[{index}].sources[{number}] ({source.model})."
            yield from _own(inner, source)


def _check_setting(name: str, setting: Any) -> None:
    """Check all values in a setting: a scalar, a gradient, or values under filters."""
    if hasattr(setting, "filter"):
        _check_setting(name, setting.value)
    elif isinstance(setting, list | tuple):
        if not setting:
            raise ParameterError(f"{name}: [] is not allowed; it must be {_RULES[name].wanted}.")
        for item in setting:
            _check_setting(name, item)
            if not hasattr(item, "filter") and math.isinf(check(name, item)):
                raise ParameterError(f"{name}: a gradient cannot go to infinity ({setting}).")
    else:
        check(name, setting)
