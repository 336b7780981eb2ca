"""Touches of MergeKit's planners, tasks and executor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from mergekit.common import ImmutableMap
from mergekit.graph import Executor, Task
from mergekit.merge_methods.base import MergeMethod
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask


def with_extra(task: ExecuteMergeMethodTask, extra: Mapping[str, Any]) -> ExecuteMergeMethodTask:
    """Return a copy of a merge task that hands ``extra`` to the method with its parameters.

    The task passes its shared parameters on without validating them again, and returns what the
    method returns. So its own ``execute`` can be used for both passes over the model, with all
    that it knows of missing tensors, buffers and optional weights.
    """
    parameters = ImmutableMap({**dict(task.parameters.items()), **extra})
    fields = {name: getattr(task, name) for name in ExecuteMergeMethodTask.model_fields}
    return ExecuteMergeMethodTask.model_construct(**{**fields, "parameters": parameters})


def run_tasks(
    tasks: Sequence[Task], *, math_device: str, storage_device: str, quiet: bool, desc: str
) -> Iterator[tuple[Task, Any]]:
    """Run independent tasks out of core, in the order of the files that they read.

    The executor looks each task up in its list of targets, which for n targets takes n**2 steps;
    in a set it takes n.
    """
    executor = Executor(list(tasks), math_device=math_device, storage_device=storage_device)
    executor.targets = frozenset(executor.targets)
    yield from executor.run(quiet=quiet, desc=desc)


Plan = Callable[[list[ExecuteMergeMethodTask], Any], Sequence[ExecuteMergeMethodTask]]


def wrap_planner(
    planning: ModuleType, before: Callable[[Any, MergeMethod], None], after: Plan
) -> None:
    """Call ``before(config, method)`` and ``after(merge tasks, options)`` around planning.

    ``MergePlanner._plan`` is what planning to disk and in memory have in common: before it the
    config is as its author wrote it, and after it ``_tensors`` holds the merge tasks, of which
    those that ``after`` returns take the place.
    """
    planner = planning.MergePlanner
    plan = planner._plan

    @functools.wraps(plan)
    def _plan(self: Any) -> None:
        before(self.config, self._method)
        plan(self)
        tasks = after([task for _, task in self._tensors], self.options)
        weights = [weight for weight, _ in self._tensors]
        self._tensors = list(zip(weights, tasks, strict=True))

    planner._plan = _plan


def wrap_flat_planner(script: Any, before: Callable[[Any, MergeMethod], None], after: Plan) -> None:
    """Do for mergekit-pytorch what ``wrap_planner`` does for the other commands.

    The script looks ``plan_flat_merge`` up by name, so that it can be replaced in the module. Its
    plan is a list of ``SaveTensor`` and a ``FinalizeModel`` that refers to them.
    """
    plan = script.plan_flat_merge

    @functools.wraps(plan)
    def plan_flat_merge(
        config: Any, out_path: str, tensor_union: bool, tensor_intersection: bool, options: Any
    ) -> list[Task]:
        before(config, script.merge_methods.get(config.merge_method))
        *saves, finalize = plan(config, out_path, tensor_union, tensor_intersection, options)
        tasks = after([save.tensor_task for save in saves], options)
        saves = [
            save.model_copy(update={"tensor_task": task})
            for save, task in zip(saves, tasks, strict=True)
        ]
        return [*saves, finalize.model_copy(update={"tensor_save_tasks": tuple(saves)})]

    script.plan_flat_merge = plan_flat_merge
