"""Plans merges as MergeKit's commands do, for commands of our own.

A module by itself, since it imports ``mergekit.merge``, which the others are imported during.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mergekit import merge as merging
from mergekit.io.tasks import LoaderCache, SaveTensor
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.scripts import merge_raw_pytorch


@dataclass(frozen=True)
class Planned:
    """One tensor of a merge: its name in the output, the task that merges it, and its dtype there.

    ``optional`` tensors may turn out not to exist.
    """

    name: str
    merge: ExecuteMergeMethodTask
    dtype: str | None
    optional: bool


def plan_merge(config: Any, options: Any) -> list[Planned]:
    """Plan as ``run_merge`` does, the plugin's extensions included; nothing is written.

    ``run_merge`` plans and merges in one, so that its steps up to the plan stand here again.
    """
    architecture = merging.get_architecture_info(config, options)
    LoaderCache().setup(options=options)
    output = merging._model_out_config(
        config, architecture, trust_remote_code=options.trust_remote_code
    )
    for model in config.referenced_models():
        LoaderCache().get(model)
    planner = merging.MergePlanner(config, architecture, options, output)
    planner._plan()
    return [
        Planned(weight.name, task, weight.force_dtype or config.out_dtype, weight.optional)
        for weight, task in planner._tensors
    ]


def plan_flat_merge(config: Any, options: Any, *, union: bool, intersection: bool) -> list[Planned]:
    """Plan as mergekit-pytorch does."""
    # The folder is created by the first task of the plan, which is not run.
    targets = merge_raw_pytorch.plan_flat_merge(config, "", union, intersection, options)
    return [
        Planned(task.tensor_name, task.tensor_task, task.dtype, optional=True)
        for task in targets
        if isinstance(task, SaveTensor)
    ]
