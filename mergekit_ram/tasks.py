"""RAM+ over the whole model inside MergeKit's lazy graph: measure first, then merge."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mergekit.graph import Task
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask, TensorDictWrapper

from mergekit_ram._mergekit.planning import fields_of, run_tasks, with_extra
from mergekit_ram.kernels import bits_digest, bits_sample
from mergekit_ram.methods import MEASURE, OVERLAP
from mergekit_ram.overlap import OverlapCounts, rescale_factors
from mergekit_ram.report import overlap_table

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Counted:
    """Counts of one tensor, and a sample of what was counted."""

    counts: OverlapCounts
    sample: tuple[tuple[Hashable, bytes], ...]


class CountOverlap(Task[Counted | None]):
    """Counts how the agents overlap in the tensor that a merge task merges.

    It depends on the merge task's own inputs, so that dtype casts, tokenizer alignment, slices,
    LoRA merges and whatever else MergeKit does to them are seen.
    """

    merge: ExecuteMergeMethodTask

    def arguments(self) -> dict[str, Task]:
        """Return the merge task's inputs."""
        inputs: dict[str, Task] = self.merge.arguments()
        return inputs

    def group_label(self) -> str | None:
        """Keep tensors of one file together, as the merge does."""
        label: str | None = self.merge.group_label()
        return label

    def uses_accelerator(self) -> bool:
        """Count where the merge is done."""
        return bool(self.merge.uses_accelerator())

    def execute(self, tensors: dict[Any, torch.Tensor], **inputs: Any) -> Counted | None:
        """Return the counts, or None where MergeKit copies the tensor instead of merging it."""
        counts = with_extra(self.merge, {MEASURE: True}).execute(tensors=tensors, **inputs)
        if not isinstance(counts, OverlapCounts):
            return None
        return Counted(counts, tuple((m, bits_sample(t)) for m, t in tensors.items()))


class MeasureOverlap(Task[OverlapCounts]):
    """Streams the whole model once and returns how the agents overlap in it.

    The pass is an out-of-core run of MergeKit's executor of its own: it holds one tensor's inputs
    at a time, shows a progress bar and keeps nothing but the counts. It has no arguments and runs
    first and on the main thread, so that MergeKit's multi-GPU executor, which splits the graph at
    such tasks, still finds the merge tasks independent of each other.

    Attributes:
        merges: the merge tasks of the run.
        math_device, storage_device: where the executor computes and keeps tensors.
        quiet: whether to hide the progress bar.
    """

    merges: tuple[ExecuteMergeMethodTask, ...]
    math_device: str = "cpu"
    storage_device: str = "cpu"
    quiet: bool = False

    # By identity: every merge task depends on this one, and comparing thousands of tasks with
    # each other thousands of times would make planning quadratic.
    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def arguments(self) -> dict[str, Task]:
        """Return nothing: the pass reads its inputs by itself, and lets go of them."""
        return {}

    def priority(self) -> int:
        """Come before everything else, the creation of the output folder (10,000) included."""
        return 20_000

    def main_thread_only(self) -> bool:
        """Run before the parallel part of a multi-GPU run, not in it."""
        return True

    def execute(self) -> OverlapCounts:
        """Run the pass.

        Raises:
            NonFiniteError: a changed value of some tensor is NaN or infinite.
        """
        order = dict.fromkeys(
            model for task in self.merges for model in task.model_order if model != task.base_model
        )
        total = OverlapCounts.zero(list(order))
        # Some architectures list a weight in two modules; it is one tensor of the output.
        outputs = {task.output_weight.name: task for task in self.merges}
        groups = _tied_groups(list(outputs.values()))
        kept: dict[Hashable, ExecuteMergeMethodTask] = {}
        devices = {"math_device": self.math_device, "storage_device": self.storage_device}
        results = run_tasks(
            [CountOverlap(merge=task) for task in outputs.values()],
            **devices,
            quiet=self.quiet,
            desc="Measuring overlap",
        )
        for task, counted in results:
            if counted is None:
                continue
            group = groups.get(task.merge.output_weight.name)
            if group is not None and counted.counts.changed.any():
                key = (group, counted.counts.key(), counted.sample)
                other = kept.setdefault(key, task.merge)
                if other is not task.merge and _same_inputs(task.merge, other, devices):
                    continue
            total += counted.counts
        LOG.info(
            "Overlap of the agents over the whole model (%s elements, %s shared with conflicting "
            "signs):\n%s",
            f"{total.elements:,}",
            f"{total.sign_conflicts:,}",
            overlap_table(total, _factors(self.merges, total)),
        )
        return total


def _factors(
    merges: Sequence[ExecuteMergeMethodTask], counts: OverlapCounts
) -> dict[Hashable, tuple[float, float]]:
    """Smallest and largest rescale factor of each agent in the run."""
    settings: dict[Hashable, set[tuple[float, float]]] = {}
    for task in merges:
        for model, values in task.input_parameters.items():
            if model != task.base_model and values["weight"] != 0:
                settings.setdefault(model, set()).add((values["r"], values["alpha"]))
    result: dict[Hashable, tuple[float, float]] = {}
    for agent, pairs in settings.items():
        found = [rescale_factors(counts, {agent: r}, {agent: alpha})[agent] for r, alpha in pairs]
        result[agent] = (min(found), max(found))
    return result


def _tied_groups(merges: Sequence[ExecuteMergeMethodTask]) -> dict[str, str]:
    """Names of outputs that may be copies of each other, with the name of their group.

    Architectures say which weights can be tied. mergekit-pytorch knows no architecture, so that
    there any two tensors may be copies.
    """
    names = {task.output_weight.name for task in merges}
    groups: dict[str, str] = {}
    for task in merges:
        weight = task.output_weight
        if isinstance(task.gather_tensors, TensorDictWrapper):
            groups[weight.name] = ""
            continue
        group = sorted(names & {weight.name, *(weight.tied_names or ())})
        if len(group) > 1:
            groups |= dict.fromkeys(group, group[0])
    return groups


def _same_inputs(
    one: ExecuteMergeMethodTask, other: ExecuteMergeMethodTask, devices: Mapping[str, str]
) -> bool:
    """Whether two merge tasks merge the same values, bit for bit, read again to tell.

    Files may or may not store a copy of a tied head, and a head may differ although the
    configuration ties it: only the content decides.
    """
    return _digests(one, devices) == _digests(other, devices)


def _digests(task: ExecuteMergeMethodTask, devices: Mapping[str, str]) -> dict[Hashable, Any]:
    ((_, tensors),) = run_tasks([task.gather_tensors], **devices, quiet=True, desc="")
    return {
        model: (tensor.dtype, tensor.shape, bits_digest(tensor))
        for model, tensor in tensors.items()
    }


class RescaledMergeTask(ExecuteMergeMethodTask):
    """A merge task that waits for the measured overlap and merges with the factors from it."""

    overlap: MeasureOverlap

    def arguments(self) -> dict[str, Task]:
        """Return the merge task's inputs and the measurement."""
        return {**super().arguments(), "overlap": self.overlap}

    def execute(self, overlap: OverlapCounts, **inputs: Any) -> torch.Tensor | None:
        """Merge with the rescale factors that follow from ``overlap``."""
        merged: torch.Tensor | None = with_extra(self, {OVERLAP: overlap}).execute(**inputs)
        return merged

    @classmethod
    def of(cls, merge: ExecuteMergeMethodTask, overlap: MeasureOverlap) -> RescaledMergeTask:
        """Return what takes the place of ``merge``."""
        task: RescaledMergeTask = cls.model_construct(**fields_of(merge), overlap=overlap)
        return task
