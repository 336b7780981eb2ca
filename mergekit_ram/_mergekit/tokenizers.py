"""Touches of the task that builds the output's tokenizer, to build the same one each time."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from mergekit.common import ModelReference
from mergekit.tokenizer import BuildTokenizer, TokenizerInfo
from mergekit.tokenizer import build as building

_in_order: ContextVar[bool] = ContextVar("in_order", default=False)


class OrderedBuildTokenizer(BuildTokenizer):
    """Builds a tokenizer whose new tokens come in the order of the models and of their numbers.

    MergeKit numbers the tokens of a union as the tokenizers list them, which is by a hash that
    differs even within a process. Both passes over a model, and a merge and its verification,
    have to number them alike.
    """

    def execute(self, **inputs: Any) -> TokenizerInfo:
        """Build the tokenizer."""
        token = _in_order.set(True)
        try:
            return super().execute(**inputs)
        finally:
            _in_order.reset(token)

    @classmethod
    def of(cls, task: BuildTokenizer, models: Sequence[ModelReference]) -> OrderedBuildTokenizer:
        """Return what takes the place of a task; ``models`` are its models in order."""
        fields = {name: getattr(task, name) for name in BuildTokenizer.model_fields}
        known = set(fields["referenced_models"])
        fields["referenced_models"] = tuple(model for model in models if model in known)
        ordered: OrderedBuildTokenizer = cls.model_construct(**fields)
        return ordered


class _Sorted:
    """A tokenizer whose vocabulary comes in the order of its numbers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def get_vocab(self) -> dict[str, int]:
        return dict(sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def wrap_tokenizers() -> None:
    """Let ``build_union_tokenizer``, which is looked up by name, read vocabularies in order."""
    build = building.build_union_tokenizer
    if hasattr(build, "__wrapped__"):
        return

    @functools.wraps(build)
    def build_union_tokenizer(
        base_tok: Any, tokenizers: Mapping[Any, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if _in_order.get():
            tokenizers = {model: _Sorted(tokenizer) for model, tokenizer in tokenizers.items()}
        return build(base_tok, tokenizers, *args, **kwargs)

    building.build_union_tokenizer = build_union_tokenizer
