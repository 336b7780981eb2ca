"""Touches of MergeKit's planners, tasks and executor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import tqdm
from mergekit.common import ImmutableMap
from mergekit.graph import Executor, Task, TaskHandle, TaskUniverse
from mergekit.merge_methods.base import MergeMethod
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.tokenizer import BuildTokenizer


def fields_of(task: ExecuteMergeMethodTask) -> dict[str, Any]:
    """Return a merge task's fields, to construct its like without validating them again."""
    return {name: getattr(task, name) for name in ExecuteMergeMethodTask.model_fields}


def with_extra(task: ExecuteMergeMethodTask, extra: Mapping[str, Any]) -> ExecuteMergeMethodTask:
    """Return a copy of a merge task that hands ``extra`` to the method with its parameters.

    The task passes its shared parameters on without validating them again, and returns what the
    method returns. So its own ``execute`` can be used for both passes over the model, with all
    that it knows of missing tensors, buffers and optional weights.
    """
    parameters = ImmutableMap({**dict(task.parameters.items()), **extra})
    fields = fields_of(task) | {"parameters": parameters}
    return ExecuteMergeMethodTask.model_construct(**fields)


def run_tasks(
    tasks: Sequence[Task], *, math_device: str, storage_device: str, quiet: bool, desc: str
) -> Iterator[tuple[Task, Any]]:
    """Run independent tasks out of core, one after the other, in the order of their labels.

    Labels are names of tensors; it is the order in which MergeKit reads files. Each task gets an
    executor of its own. One for all would schedule tasks without labels (those of
    mergekit-pytorch) so that most tensors are loaded before the first is used, and look through
    its lists of targets and of live values at every step, which is quadratic in their number.
    """
    universe = TaskUniverse(tasks)
    devices = {"math_device": math_device, "storage_device": storage_device}
    ordered = sorted(tasks, key=lambda task: task.group_label() or "")
    shared: dict[TaskHandle, Any] = {}
    for task in tqdm.tqdm(ordered, disable=quiet, desc=desc):
        handle = universe.get_handle(task)
        for dependency in _ancestors(handle):
            # The one task that many others wait for and that is dear to run.
            if isinstance(dependency.task(), BuildTokenizer) and dependency not in shared:
                ((_, value),) = Executor([dependency], **devices).run(quiet=True)
                shared[dependency] = value
        ((_, result),) = Executor([handle], **devices, cached_values=shared).run(quiet=True)
        yield task, result


def _ancestors(handle: TaskHandle) -> Iterator[TaskHandle]:
    for dependency in handle.arguments().values():
        yield dependency
        yield from _ancestors(dependency)


NARROW = ("float16", "bfloat16", "torch.float16", "torch.bfloat16")

Plan = Callable[[list[ExecuteMergeMethodTask], Any], Sequence[ExecuteMergeMethodTask]]


def wrap_planner(
    planning: ModuleType,
    before: Callable[[Any, MergeMethod], None],
    after: Plan,
    ours: Callable[[ExecuteMergeMethodTask], bool],
) -> None:
    """Call ``before(config, method)`` and ``after(merge tasks, options)`` around planning.

    A narrower ``out_dtype`` is handed to the merge tasks, which have a field for it that the
    planner leaves empty: the task that saves would round to it, and turn what does not fit into
    infinity without a word.

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
        weights = [weight for weight, _ in self._tensors]
        tasks = [
            task.model_copy(update={"out_dtype": self.config.out_dtype})
            if self.config.out_dtype in NARROW and not weight.force_dtype and ours(task)
            else task
            for weight, task in self._tensors
        ]
        planned = after(tasks, self.options)
        self._tensors = list(zip(weights, planned, strict=True))

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
