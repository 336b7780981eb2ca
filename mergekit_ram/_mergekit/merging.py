"""Touches of ``run_merge``, by way of two functions that it looks up in its module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mergekit.config import MergeConfiguration


def sections_of(config: Any) -> dict[str, Any]:
    """The parts of a config that list models or slices, by how their places begin.

    Itself, and its modules; mergekit-pytorch's configs have neither modules nor slices.
    """
    modules = getattr(config, "modules", None) or {}
    return {"": config} | {f"modules.{name}.": module for name, module in modules.items()}


def models_in_order(config: Any) -> list[Any]:
    """All models of a config, the base model first."""
    models = [config.base_model] if config.base_model else []
    for section in sections_of(config).values():
        models += [m.model for m in section.models or ()]
        slices = getattr(section, "slices", None) or ()
        models += [source.model for s in slices for source in s.sources]
    return list(dict.fromkeys(models))


class _InOrder(MergeConfiguration):
    """A config whose models come in its own order.

    MergeKit lists them in the order of a set, which differs from one process to the next, and
    with it the model card.
    """

    def referenced_models(self) -> list[Any]:
        return models_in_order(self)


def wrap_run_merge(
    merging: Any,
    before: Callable[[Any, Any], None],
    known: Callable[[Any, Any], None],
    card_section: Callable[[Any], str | None],
) -> None:
    """Look at a merge before and when its architecture is known; add to its model card.

    ``run_merge`` itself cannot be replaced: scripts hold it by name. The first that it does with
    a config and its options is to call ``get_architecture_info``, before it opens a model; the
    last with the config is ``generate_card``.

    Args:
        merging: ``mergekit.merge``.
        before: is called with every config and its options; raises what is to stop the merge.
        known: is called with every config and its architecture.
        card_section: Markdown for the card of a config's merge; None for none.
    """
    architecture, card = merging.get_architecture_info, merging.generate_card

    @functools.wraps(architecture)
    def get_architecture_info(config: Any, options: Any) -> Any:
        before(config, options)
        found = architecture(config, options)
        known(config, found)
        return found

    @functools.wraps(card)
    def generate_card(config: Any, config_yaml: str, name: str | None = None) -> str:
        section = card_section(config)
        if section is None:
            return str(card(config=config, config_yaml=config_yaml, name=name))
        ordered = _InOrder.model_construct(**dict(config))
        text = str(card(config=ordered, config_yaml=config_yaml, name=name))
        return f"{text.rstrip()}\n\n{section}"

    merging.get_architecture_info = get_architecture_info
    merging.generate_card = generate_card
