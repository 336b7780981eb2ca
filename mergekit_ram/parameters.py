"""The methods' parameters: names, defaults, what each accepts, and errors that say so."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from mergekit.merge_methods.base import ParameterScope, ParameterSpec

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
    for place, settings in _sections(config):
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
        for item in setting:
            _check_setting(name, item)
            if not hasattr(item, "filter") and math.isinf(check(name, item)):
                raise ParameterError(f"{name}: a gradient cannot go to infinity ({setting}).")
    else:
        check(name, setting)
