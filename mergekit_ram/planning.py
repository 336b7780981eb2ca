"""What MergeKit's planners are extended by: checks before, and the whole-model pass of RAM+."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from mergekit.merge_methods.base import MergeMethod
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask

from mergekit_ram._mergekit.planning import wrap_flat_planner, wrap_planner
from mergekit_ram.errors import forget_warnings
from mergekit_ram.methods import METHODS, RamMethod
from mergekit_ram.parameters import check_config
from mergekit_ram.tasks import MeasureOverlap, RescaledMergeTask

_BY_NAME = {method.spec.name: method for method in METHODS}


def install(planning: ModuleType) -> None:
    """Extend ``mergekit.plan``."""
    wrap_planner(planning, check, with_measured_overlap, _is_ours)


def install_flat(script: ModuleType) -> None:
    """Extend ``mergekit.scripts.merge_raw_pytorch``."""
    wrap_flat_planner(script, check, with_measured_overlap)


def check(config: Any, method: MergeMethod) -> None:
    """Check a config for one of our methods before it is planned.

    Raises:
        ParameterError: a parameter has a value that the method does not take.
    """
    if isinstance(method, RamMethod):
        forget_warnings()
        check_config(method.spec.name, config)


def with_measured_overlap(
    tasks: list[ExecuteMergeMethodTask], options: Any
) -> Sequence[ExecuteMergeMethodTask]:
    """Let merge tasks that need the whole model's overlap wait for its measurement.

    Plans in which no rescale factor can differ from 1 stay as they are: one pass.

    Args:
        tasks: all merge tasks of a run.
        options: MergeKit's ``MergeOptions``.
    """
    if not tasks or not _is_ours(tasks[0]):
        return tasks
    if _BY_NAME[tasks[0].method_name].tensor_local or not any(_rescales(t) for t in tasks):
        return tasks
    overlap = MeasureOverlap.model_construct(
        merges=tuple(tasks),
        math_device=options.device,
        storage_device=options.device if options.low_cpu_memory else "cpu",
        quiet=options.quiet,
    )
    return [RescaledMergeTask.of(task, overlap) for task in tasks]


def _is_ours(task: ExecuteMergeMethodTask) -> bool:
    return task.method_name in _BY_NAME


def _rescales(task: ExecuteMergeMethodTask) -> bool:
    return any(
        values["weight"] != 0 and values["r"] > 0 and values["alpha"] > 0
        for model, values in task.input_parameters.items()
        if model != task.base_model
    )
