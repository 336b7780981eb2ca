"""RAM+ over the whole model inside MergeKit's lazy graph: measure first, then merge."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from mergekit.graph import Task
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask

from mergekit_ram._mergekit.planning import run_tasks, with_extra
from mergekit_ram.methods import MEASURE, OVERLAP
from mergekit_ram.overlap import OverlapCounts, rescale_factors
from mergekit_ram.report import overlap_table

LOG = logging.getLogger(__name__)


class CountOverlap(Task[OverlapCounts | None]):
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

    def execute(self, **inputs: Any) -> OverlapCounts | None:
        """Return the counts, or None where MergeKit copies the tensor instead of merging it."""
        result = with_extra(self.merge, {MEASURE: True}).execute(**inputs)
        return result if isinstance(result, OverlapCounts) else None


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
        counted: dict[str, OverlapCounts] = {}
        tied = _tied_names(self.merges)
        # Some architectures list a weight in two modules; it is one tensor of the output.
        outputs = {task.output_weight.name: task for task in self.merges}
        results = run_tasks(
            [CountOverlap(merge=task) for task in outputs.values()],
            math_device=self.math_device,
            storage_device=self.storage_device,
            quiet=self.quiet,
            desc="Measuring overlap",
        )
        for task, counts in results:
            if counts is None:
                continue
            name = task.merge.output_weight.name
            if name in tied:
                counted[name] = counts
            else:
                total += counts
        total += _without_duplicates(counted, tied)
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


def _tied_names(merges: Sequence[ExecuteMergeMethodTask]) -> dict[str, frozenset[str]]:
    """Output names that may be one tensor under two names, with the names that they may share."""
    names = {task.output_weight.name for task in merges}
    result: dict[str, frozenset[str]] = {}
    for task in merges:
        weight = task.output_weight
        group = names & {weight.name, *(weight.tied_names or ())}
        if len(group) > 1:
            for name in group:
                result[name] = result.get(name, frozenset()) | group
    return result


def _without_duplicates(
    counted: dict[str, OverlapCounts], tied: dict[str, frozenset[str]]
) -> OverlapCounts:
    """Sum counts, those of a tied head and its embedding once.

    Files may or may not store a copy of a tied head, and a head may differ although the
    configuration ties it. Equal counts in every respect tell a copy.
    """
    total = OverlapCounts.zero(())
    kept: dict[str, OverlapCounts] = {}
    for name, counts in sorted(counted.items()):
        if not any(counts.same_as(kept[other]) for other in tied[name] if other in kept):
            kept[name] = counts
            total += counts
    return total


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
        # Its fields are those of a task that has been validated.
        fields = {name: getattr(merge, name) for name in ExecuteMergeMethodTask.model_fields}
        task: RescaledMergeTask = cls.model_construct(**fields, overlap=overlap)
        return task
