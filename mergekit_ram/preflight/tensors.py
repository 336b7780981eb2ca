"""The tensors that a plan reads, as the models' headers describe them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergekit.architecture.conversion import can_convert_checkpoint_keys
from mergekit.common import ModelReference
from mergekit.io.tasks import GatherTensors, LoaderCache
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask, TensorDictWrapper

from mergekit_ram import headers
from mergekit_ram.headers import Checkpoint, HeaderLoader, TensorHeader
from mergekit_ram.kinds import layer_of, natural_order


@dataclass(frozen=True)
class Entry:
    """One name under which models store a tensor of the merge.

    Attributes:
        name: in the output, or in the files where several are converted into one.
        task: the merge task, of the fused tensor where there are several.
        headers: of each model that can be looked at; None where it has no such tensor.
    """

    name: str
    task: ExecuteMergeMethodTask
    headers: dict[ModelReference, TensorHeader | None]


class PlannedTensors:
    """What each merge task of a plan finds in each model.

    Attributes:
        checkpoints: the models.
        entries: one per merge task.
        parts: one per stored name of tensors that MergeKit converts, as experts that have a file
            entry each and are fused in the output.
        lacking: per model, what it lacks and the merge cannot do without.
        used: names that some model is read under.
    """

    def __init__(self, merges: Sequence[ExecuteMergeMethodTask]) -> None:
        self.checkpoints: dict[ModelReference, Checkpoint] = {}
        self.entries: list[Entry] = []
        self.parts: list[Entry] = []
        self.lacking: dict[ModelReference, list[str]] = defaultdict(list)
        self.used: set[str] = set()
        for task in merges:
            found: dict[ModelReference, TensorHeader | None] = {}
            # The base first, for the messages.
            for model, names in sorted(_reads(task), key=lambda read: read[0] != task.base_model):
                self.used.update(names)
                checkpoint = self._checkpoint(model, task)
                if checkpoint.readable:
                    name = next((n for n in names if n in checkpoint.tensors), None)
                    found[model] = checkpoint.tensors[name] if name else None
            self.entries.append(Entry(task.output_weight.name, task, found))
        self._look_at_conversions()

    def _checkpoint(self, model: ModelReference, task: ExecuteMergeMethodTask) -> Checkpoint:
        if model not in self.checkpoints:
            path = Path(model.model.path)
            if isinstance(task.gather_tensors, TensorDictWrapper):
                self.checkpoints[model] = headers.read_file(path)
            else:
                # The loader knows where an adapter's merged model and a downloaded one lie.
                loader = LoaderCache().get(model)
                self.checkpoints[model] = (
                    loader.checkpoint
                    if isinstance(loader, HeaderLoader)
                    else headers.read_folder(str(model), Path(loader.index.base_path))
                )
        return self.checkpoints[model]

    def _look_at_conversions(self) -> None:
        """Find the stored names that are converted, and what models lack of them."""
        stored: dict[str | None, set[str]] = defaultdict(set)
        for checkpoint in self.checkpoints.values():
            for name in checkpoint.tensors:
                if name not in self.used:
                    stored[_layer_number(name)].add(name)
        templates: dict[str, set[str]] = {}
        converting: dict[str, tuple[ExecuteMergeMethodTask, set[ModelReference]]] = {}
        for entry in self.entries:
            if isinstance(entry.task.gather_tensors, TensorDictWrapper):
                continue
            for model, names in _reads(entry.task):
                if entry.headers.get(model, ...) is not None:
                    continue
                target, kind = names[0], self.checkpoints[model].config.get("model_type")
                # By all models' names: one that lacks an expert should be told which.
                known = stored[_layer_number(target)]
                if not can_convert_checkpoint_keys(kind, known, target):
                    # Another model may have an expert too many.
                    known = known & self.checkpoints[model].tensors.keys()
                if not can_convert_checkpoint_keys(kind, known, target):
                    if not entry.task.output_weight.optional:
                        self.lacking[model].append(target)
                    continue
                shape = _template(target)
                if shape not in templates:
                    templates[shape] = _sources(kind, known, target)
                for name in known:
                    if _template(name) in templates[shape]:
                        converting.setdefault(name, (entry.task, set()))[1].add(model)
        for name in sorted(converting, key=natural_order):
            task, models = converting[name]
            found = {m: self.checkpoints[m].tensors.get(name) for m in self.checkpoints}
            self.parts.append(
                Entry(name, task, {m: header for m, header in found.items() if m in models})
            )
            self.used.add(name)
            for model in models:
                if found[model] is None:
                    self.lacking[model].append(name)


def _sources(kind: object, known: set[str], target: str) -> set[str]:
    """Templates of the stored names that a target is made of."""
    found = set()
    for template in {_template(name) for name in known}:
        others = {name for name in known if _template(name) != template}
        if not can_convert_checkpoint_keys(str(kind), others, target):
            found.add(template)
    return found


def _reads(task: ExecuteMergeMethodTask) -> Iterator[tuple[ModelReference, list[str]]]:
    """The models that a merge task reads from, each with the names that it looks for."""
    inputs = task.gather_tensors
    if isinstance(inputs, TensorDictWrapper):
        for model, load in inputs.tensors.items():
            yield model, [load.tensor_name]
        return
    gather = inputs if isinstance(inputs, GatherTensors) else inputs.gather_tensors
    for model, weight in gather.weight_info.items():
        yield model, [weight.name, *(weight.aliases or ()), *(weight.tied_names or ())]


def _template(name: str) -> str:
    """A name that is alike in every layer and for every expert."""
    return re.sub(r"\d+", "#", name)


def _layer_number(name: str) -> str | None:
    layer = layer_of(name)
    return layer.rpartition(".")[2] if layer is not None else None
