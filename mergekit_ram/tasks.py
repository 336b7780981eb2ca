"""Counting the overlap inside MergeKit's lazy graph: before the merge for RAM+, or beside it."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from mergekit.graph import Task
from mergekit.merge_methods.base import TensorGroup
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask, TensorDictWrapper

from mergekit_ram._mergekit.planning import fields_of, run_tasks, with_extra
from mergekit_ram.kernels import bits_digest, bits_sample
from mergekit_ram.kinds import HEAD, kind_of, natural_order
from mergekit_ram.methods import BY_NAME, MEASURE, OVERLAP
from mergekit_ram.overlap import ModelOverlap, OverlapCounts
from mergekit_ram.record import announce
from mergekit_ram.report import OverlapReport


class Devices(TypedDict):
    """Where MergeKit's executor computes and keeps tensors."""

    math_device: str
    storage_device: str


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


class OverlapLedger:
    """Collects the counts of a merge's tensors, from any thread, and closes to a ``ModelOverlap``.

    Args:
        merges: the merge tasks of the run.
        devices: where copies are to be compared.
    """

    def __init__(self, merges: Sequence[ExecuteMergeMethodTask], devices: Devices) -> None:
        # Some architectures list a weight in two modules; it is one tensor of the output.
        self.merges = {task.output_weight.name: task for task in merges}
        self._devices = devices
        self._counted: dict[str, Counted] = {}
        self._lock = threading.Lock()

    def add(self, name: str, counted: Counted) -> None:
        """Enter the counts of the output tensor ``name``."""
        with self._lock:
            self._counted[name] = counted

    def record(self, group: TensorGroup, counts: OverlapCounts) -> None:
        """Enter the counts that a merge made of one of its groups; see ``methods.RECORD``."""
        sample = tuple((entry.id, bits_sample(entry.tensor)) for entry in group.entries)
        self.add(group.metadata.name, Counted(counts, sample))

    def close(self) -> ModelOverlap:
        """Return all counts, with copies told apart from weights of their own."""
        agents = dict.fromkeys(
            model
            for task in self.merges.values()
            for model in task.model_order
            if model != task.base_model
        )
        # A head comes last: it is the copy of an embedding, not the other way round.
        names = sorted(self._counted, key=lambda n: (kind_of(n) == HEAD, natural_order(n)))
        counted = {name: self._counted[name] for name in names}
        groups = _tied_groups(list(self.merges.values()))
        kept: dict[Hashable, str] = {}
        copies = {}
        for name, found in counted.items():
            if name not in groups or not found.counts.changed.any():
                continue
            key = (groups[name], found.counts.key(), found.sample)
            other = kept.setdefault(key, name)
            if other != name and self._same_inputs(name, other):
                copies[name] = other
        return ModelOverlap(
            tuple(agents), {name: found.counts for name, found in counted.items()}, copies
        )

    def _same_inputs(self, one: str, other: str) -> bool:
        """Whether two merge tasks merge the same values, bit for bit, read again to tell.

        Files may or may not store a copy of a tied head, and a head may differ although the
        configuration ties it: only the content decides.
        """
        inputs = [self.merges[name].gather_tensors for name in (one, other)]
        digests = [
            {m: (t.dtype, t.shape, bits_digest(t)) for m, t in tensors.items()}
            for _, tensors in run_tasks(inputs, **self._devices, quiet=True, desc="")
        ]
        return all(digest == digests[0] for digest in digests)


def measure(
    merges: Sequence[ExecuteMergeMethodTask], devices: Devices, *, quiet: bool = False
) -> ModelOverlap:
    """Stream all inputs of a merge once and count how the agents overlap.

    Raises:
        NonFiniteError: a changed value of some tensor is NaN or infinite.
    """
    ledger = OverlapLedger(merges, devices)
    counting = [CountOverlap(merge=task) for task in ledger.merges.values()]
    for task, counted in run_tasks(counting, **devices, quiet=quiet, desc="Measuring overlap"):
        if counted is not None:
            ledger.add(task.merge.output_weight.name, counted)
    return ledger.close()


def report_on(merges: Sequence[ExecuteMergeMethodTask], overlap: ModelOverlap) -> OverlapReport:
    """Put the counts together with the settings of the merge tasks that they are of."""
    method = BY_NAME[merges[0].method_name]
    return OverlapReport(
        method=method.spec.name,
        tensor_local=method.tensor_local,
        base_models=tuple(dict.fromkeys(str(task.base_model) for task in merges)),
        overlap=overlap,
        settings={
            task.output_weight.name: {
                model: values
                for model, values in task.input_parameters.items()
                if model != task.base_model
            }
            for task in merges
        },
    )


class MeasureOverlap(Task[ModelOverlap]):
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

    def execute(self) -> ModelOverlap:
        """Run the pass; see ``measure``."""
        devices = Devices(math_device=self.math_device, storage_device=self.storage_device)
        overlap = measure(self.merges, devices, quiet=self.quiet)
        announce(report_on(self.merges, overlap))
        return overlap


def _tied_groups(merges: Sequence[ExecuteMergeMethodTask]) -> dict[str, str]:
    """Names of outputs that may be copies of each other, with the name of their group.

    Architectures say which weights can be tied; one that MergeKit infers says only which have a
    row per token. mergekit-pytorch knows no architecture, so that there any two tensors may be
    copies.
    """
    names = {task.output_weight.name for task in merges}
    vocabulary = {
        task.output_weight.name for task in merges if task.output_weight.vocabulary_axis is not None
    }
    groups: dict[str, str] = {}
    for task in merges:
        weight = task.output_weight
        if isinstance(task.gather_tensors, TensorDictWrapper):
            groups[weight.name] = ""
            continue
        tied = weight.tied_names or (vocabulary if weight.name in vocabulary else ())
        group = sorted(names & {weight.name, *tied})
        if len(group) > 1:
            groups |= dict.fromkeys(group, group[0])
    return groups


class RescaledMergeTask(ExecuteMergeMethodTask):
    """A merge task that waits for the measured overlap and merges with the factors from it."""

    overlap: MeasureOverlap

    def arguments(self) -> dict[str, Task]:
        """Return the merge task's inputs and the measurement."""
        return {**super().arguments(), "overlap": self.overlap}

    def execute(self, overlap: ModelOverlap, **inputs: Any) -> torch.Tensor | None:
        """Merge with the rescale factors that follow from ``overlap``."""
        extra = {OVERLAP: overlap.total}
        merged: torch.Tensor | None = with_extra(self, extra).execute(**inputs)
        return merged

    @classmethod
    def of(cls, merge: ExecuteMergeMethodTask, overlap: MeasureOverlap) -> RescaledMergeTask:
        """Return what takes the place of ``merge``."""
        task: RescaledMergeTask = cls.model_construct(**fields_of(merge), overlap=overlap)
        return task


def merges_of(tasks: Sequence[ExecuteMergeMethodTask]) -> Sequence[ExecuteMergeMethodTask]:
    """The merge tasks as they were planned, before they had to wait for a measurement."""
    if tasks and isinstance(tasks[0], RescaledMergeTask):
        merges: Sequence[ExecuteMergeMethodTask] = tasks[0].overlap.merges
        return merges
    return tasks
