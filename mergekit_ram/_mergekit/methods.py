"""Touches of MergeKit's merge methods and their registry."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from mergekit.merge_methods.base import BatchOptions, MergeMethod, TensorGroup

# Marks parameters that were bound by a direct call, whose groups are the whole model. The graph
# calls ``_execute_resolved`` without binding, so its parameters do not carry it.
_DIRECT_CALL = "mergekit_ram.direct_call"


class WholeCallMethod(MergeMethod):
    """A merge method that sees all tensor groups of one call, and how it was called.

    ``MergeMethod`` offers batches or single groups; only ``_execute`` sees the call as a whole.
    It is overridden also because the ready-made ones convert every input to a common dtype in
    full before the method is asked.
    """

    @abstractmethod
    def merge_call(
        self,
        groups: Sequence[TensorGroup],
        parameters: Sequence[Mapping[str, Any]],
        *,
        dtypes: Sequence[torch.dtype | None],
        out_dtype: torch.dtype | None,
        whole_model: bool,
    ) -> tuple[torch.Tensor, ...]:
        """Merge the groups.

        Args:
            groups: one per output tensor; inputs in their stored dtypes.
            parameters: bound values per group.
            dtypes: per group, the dtype that inputs are to be rounded to first.
            out_dtype: dtype of the results, where it is not that of the inputs.
            whole_model: whether the groups are all that this merge consists of.
        """

    def _bind_parameters(
        self, groups: Sequence[TensorGroup], parameters: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        bound = super()._bind_parameters(groups, parameters)
        return [{**values, _DIRECT_CALL: True} for values in bound]

    def _execute(
        self,
        groups: Sequence[TensorGroup],
        parameters: list[dict[str, Any]],
        options: BatchOptions,
        *,
        input_dtypes: Sequence[torch.dtype | None],
        out_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, ...]:
        return self.merge_call(
            groups,
            parameters,
            dtypes=input_dtypes,
            out_dtype=out_dtype,
            whole_model=all(_DIRECT_CALL in values for values in parameters),
        )


def replace_methods(registry: ModuleType, methods: Sequence[MergeMethod]) -> Callable[[], None]:
    """Put the methods into MergeKit's registry, over built-ins of the same name.

    Returns what puts the built-ins back.

    ``register`` refuses a name that is taken, so that the table itself has to be written.
    """
    table = registry._METHODS
    if not isinstance(table, dict) or registry.get("linear") is not table["linear"]:
        raise TypeError("mergekit.merge_methods.registry no longer keeps methods in _METHODS")
    ours = {method.spec.name: method for method in methods}
    replaced = {name: table[name] for name in ours if name in table}
    table.update(ours)

    def restore() -> None:
        for name in ours:
            table.pop(name, None)
        table.update(replaced)

    return restore
