"""The merge methods ``ram``, ``ram_plus`` and ``ramplus_tl``: one class, three names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from mergekit.merge_methods.base import (
    BasePolicy,
    InputContract,
    MergeMethodSpec,
    TensorEntry,
    TensorGroup,
)

from mergekit_ram import kernels
from mergekit_ram._mergekit.methods import WholeCallMethod, replace_methods
from mergekit_ram.errors import NonFiniteError, PipelineError, UnsupportedInputError
from mergekit_ram.kernels import BadValues
from mergekit_ram.overlap import OverlapCounts, rescale_factors
from mergekit_ram.parameters import parameter_specs

REFERENCE_URL = "https://arxiv.org/abs/2601.13572"

# Parameters that our own tasks add: to count instead of merging, what was measured, and whom to
# tell the counts of a merge (a function of the group and its counts).
MEASURE = "mergekit_ram.measure"
OVERLAP = "mergekit_ram.overlap"
RECORD = "mergekit_ram.record"
Record = Callable[[TensorGroup, OverlapCounts], None]


class RamMethod(WholeCallMethod):
    """Reinforced Agent Merging (arXiv 2601.13572), with the rescaling of RAM+ where ``r > 0``.

    Inputs are bfloat16, float16, float32 or float64 tensors of any shape; arithmetic is float32
    (float64 for float64) and the result is rounded once, to the inputs' dtype unless MergeKit
    asks for another. Scratch memory is bounded whatever the tensor's size.

    Args:
        name: under which MergeKit finds the method.
        pretty_name: shown in model cards.
        r: default of the parameter ``r``.
        tensor_local: whether rho is counted over each tensor instead of the whole model.
    """

    def __init__(self, name: str, pretty_name: str, *, r: float, tensor_local: bool) -> None:
        self.tensor_local = tensor_local
        self.spec = MergeMethodSpec(
            name=name,
            pretty_name=pretty_name,
            reference_url=REFERENCE_URL,
            contract=InputContract(base=BasePolicy.REQUIRED),
            parameters=parameter_specs(r),
        )

    def merge_call(
        self,
        groups: Sequence[TensorGroup],
        parameters: Sequence[Mapping[str, Any]],
        *,
        dtypes: Sequence[torch.dtype | None],
        out_dtype: torch.dtype | None,
        whole_model: bool,
    ) -> tuple[torch.Tensor, ...]:
        """Merge all groups of one call; see ``WholeCallMethod``.

        With ``MEASURE`` among a group's parameters the result is its ``OverlapCounts`` instead.
        """
        calls = list(zip(groups, parameters, dtypes, strict=True))
        if any(MEASURE in values for values in parameters):
            return tuple(self.count_group(*call) for call in calls)  # type: ignore[misc]
        overlap: OverlapCounts | None = None
        if whole_model and not self.tensor_local and any(self._rescales(*c[:2]) for c in calls):
            overlap = self._count_all(calls)
        results = []
        for group, values, dtype in calls:
            record: Record | None = values.get(RECORD)
            factors: Mapping[Hashable, float] = {}
            if self._rescales(group, values):
                if self.tensor_local:
                    counts = self.count_group(group, values, dtype)
                    if record is not None:
                        record(group, counts)
                        record = None
                else:
                    counts = overlap or self._measured(group, values)
                factors = rescale_factors(counts, values["r"], values["alpha"])
            results.append(self.merge_group(group, values, factors, dtype, out_dtype, record))
        return tuple(results)

    def _count_all(
        self, calls: Sequence[tuple[TensorGroup, Mapping[str, Any], torch.dtype | None]]
    ) -> OverlapCounts:
        """Count over all groups; tensors that are copies of each other, as tied ones are, once."""
        total = OverlapCounts.zero(())
        kept: dict[Hashable, TensorGroup] = {}
        for group, values, dtype in calls:
            counts = self.count_group(group, values, dtype)
            if counts.changed.any():
                sample = tuple(kernels.bits_sample(tensor) for tensor in group.tensors)
                other = kept.setdefault((counts.key(), sample), group)
                if other is not group and _same_content(group, other):
                    continue
            total += counts
        return total

    def _measured(self, group: TensorGroup, values: Mapping[str, Any]) -> OverlapCounts:
        try:
            counts: OverlapCounts = values[OVERLAP]
        except KeyError:
            raise PipelineError(
                f"{self._at(group)}: RAM+ rescales by an overlap that is counted over the whole "
                "model before the first tensor is merged, and this pipeline merges without having "
                "counted it. mergekit-yaml, mergekit-multi, mergekit-pytorch, run_merge, "
                "merge_state_dicts and merge_tensors do. Use one of those, `r: 0` (RAM), or "
                "`merge_method: ramplus_tl`, which counts in each tensor."
            ) from None
        return counts

    def _rescales(self, group: TensorGroup, values: Mapping[str, Any]) -> bool:
        """Whether a rescale factor of this group can differ from 1."""
        agents = _participants(group, values)
        return any(values["r"][a.id] > 0 and values["alpha"][a.id] > 0 for a in agents)

    def count_group(
        self, group: TensorGroup, values: Mapping[str, Any], dtype: torch.dtype | None
    ) -> OverlapCounts:
        """Count how the agents of one group overlap.

        Raises:
            NonFiniteError: the counts have no meaning, since a changed value is not a number.
        """
        base, agents = _base(group), _participants(group, values)
        if not agents:
            return _no_counts(base)
        with self._naming(group):
            counts, bad = kernels.count(
                base.tensor,
                [a.tensor for a in agents],
                epsilon=[values["epsilon"][a.id] for a in agents],
                names=[a.id for a in agents],
                dtype=dtype,
            )
        self._raise_bad(group, agents, bad, dtype, None)
        return counts

    def merge_group(
        self,
        group: TensorGroup,
        values: Mapping[str, Any],
        factors: Mapping[Hashable, float],
        dtype: torch.dtype | None,
        out_dtype: torch.dtype | None,
        record: Record | None = None,
    ) -> torch.Tensor:
        """Merge one group with the given rescale factors (1 for agents without one).

        With ``record`` the overlap is counted in the same pass, and handed to it.

        Raises:
            NonFiniteError: a changed value is NaN or infinite, or a result overflows.
        """
        base, agents = _base(group), _participants(group, values)
        if not agents:
            merged, overflow = kernels.convert(base.tensor, dtype, out_dtype)
            counts, bad = _no_counts(base), BadValues(0, (), overflow)
        else:
            inputs = base.tensor, [a.tensor for a in agents]
            settings: dict[str, Any] = {
                "epsilon": [values["epsilon"][a.id] for a in agents],
                "weight": [values["weight"][a.id] for a in agents],
                "rescale": [factors.get(a.id, 1.0) for a in agents],
                "dtype": dtype,
                "out_dtype": out_dtype,
            }
            with self._naming(group):
                if record is None:
                    merged, bad = kernels.merge(*inputs, **settings)
                else:
                    names = [a.id for a in agents]
                    merged, counts, bad = kernels.merge_and_count(*inputs, **settings, names=names)
        self._raise_bad(group, agents, bad, dtype, out_dtype)
        if record is not None:
            record(group, counts)
        return merged

    @contextlib.contextmanager
    def _naming(self, group: TensorGroup) -> Iterator[None]:
        """Say in errors which tensor of which models they are about."""
        try:
            yield
        except UnsupportedInputError as error:
            models = ", ".join(str(entry.id) for entry in group.entries)
            message = f"{self._at(group)}: {error.message} (models: {models})"
            raise UnsupportedInputError(message) from None

    def _at(self, group: TensorGroup) -> str:
        return f"{self.spec.name}: tensor '{group.metadata.name or 'without a name'}'"

    def _raise_bad(
        self,
        group: TensorGroup,
        agents: Sequence[TensorEntry],
        bad: BadValues,
        dtype: torch.dtype | None,
        out_dtype: torch.dtype | None,
    ) -> None:
        if not bad:
            return
        base = _base(group)
        if bad.base or any(bad.agents):
            found = [(f"the base model {base.id}", bad.base)]
            found += [(f"{a.id}", n) for a, n in zip(agents, bad.agents, strict=True)]
            where = "; ".join(f"{_elements(n)} in {model}" for model, n in found if n)
            raise NonFiniteError(
                f"{self._at(group)}: NaN or infinite values where an agent differs from the "
                f"base model: {where}. Nothing was written for it. Repair or leave out that "
                f"model; if its file holds finite numbers, they do not fit into {_name(dtype)} "
                "(`dtype`)."
            )
        narrow = out_dtype if out_dtype not in (None, dtype) else dtype
        key = "out_dtype" if narrow is not dtype else "dtype"
        wider = "float64" if narrow == torch.float32 else "float32 or bfloat16"
        raise NonFiniteError(
            f"{self._at(group)}: the merge does not fit into {_name(narrow)} in "
            f"{_elements(bad.overflow)} (models: {', '.join(str(e.id) for e in group.entries)}). "
            "Nothing was written for it. Use smaller weights or factors, or "
            f"`{key}: {wider}`."
        )


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _elements(n: int) -> str:
    return f"{n:,} element{'s' if n != 1 else ''}"


def _base(group: TensorGroup) -> TensorEntry:
    base = group.base
    assert base is not None  # the contract requires one
    return base


def _no_counts(base: TensorEntry) -> OverlapCounts:
    """Counts of a tensor that no agent takes part in."""
    return replace(OverlapCounts.zero(()), elements=base.tensor.numel())


def _same_content(one: TensorGroup, other: TensorGroup) -> bool:
    """Whether two groups hold the same values, bit for bit."""
    return all(
        a.id == b.id
        and a.tensor.dtype == b.tensor.dtype
        and a.tensor.shape == b.tensor.shape
        and (
            a.tensor.data_ptr() == b.tensor.data_ptr()
            or kernels.bits_digest(a.tensor) == kernels.bits_digest(b.tensor)
        )
        for a, b in zip(one.entries, other.entries, strict=True)
    )


def _participants(group: TensorGroup, values: Mapping[str, Any]) -> list[TensorEntry]:
    """Agents that take part in this tensor: a weight of 0 is as if not listed."""
    return [entry for entry in group.non_base if values["weight"][entry.id] != 0]


RAM = RamMethod("ram", "Reinforced Agent Merging", r=0.0, tensor_local=False)
RAM_PLUS = RamMethod("ram_plus", "Reinforced Agent Merging Plus", r=0.1, tensor_local=False)
RAMPLUS_TL = RamMethod(
    "ramplus_tl", "Reinforced Agent Merging Plus (Tensor-Local)", r=0.1, tensor_local=True
)
METHODS = (RAM, RAM_PLUS, RAMPLUS_TL)
BY_NAME = {method.spec.name: method for method in METHODS}
_installed: list[Callable[[], None]] = []


def install(registry: ModuleType) -> None:
    """Register the methods in ``mergekit.merge_methods.registry``."""
    _installed.append(replace_methods(registry, METHODS))


def uninstall() -> None:
    """Give MergeKit its built-in methods back; what else of it is extended leaves them alone."""
    BY_NAME.clear()
    while _installed:
        _installed.pop()()
