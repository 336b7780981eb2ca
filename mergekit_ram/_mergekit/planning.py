"""Touches of MergeKit's planners, tasks and executor."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any, Protocol
from zipfile import BadZipFile

import tqdm
from mergekit.common import ImmutableMap
from mergekit.graph import Executor, Task, TaskHandle, TaskUniverse
from mergekit.io.lazy_tensor_loader import LazyTensorLoader
from mergekit.io.tasks import FinalizeModel, LoaderCache, SaveTensor
from mergekit.io.tensor_writer import TensorWriter
from mergekit.merge_methods.base import MergeMethod
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.tokenizer import BuildTokenizer
from pydantic import BaseModel
from safetensors import SafetensorError

from mergekit_ram._mergekit.merging import models_in_order
from mergekit_ram._mergekit.tokenizers import OrderedBuildTokenizer, wrap_tokenizers
from mergekit_ram.errors import ReadError


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
    tasks: Sequence[Task],
    *,
    math_device: str,
    storage_device: str,
    quiet: bool,
    desc: str,
    once: tuple[type[Task], ...] = (),
) -> Iterator[tuple[Task, Any]]:
    """Run independent tasks out of core, one after the other, in the order of their labels.

    Dependencies of the types ``once``, and tokenizers, are run once for all of them.

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
            # Many others wait for these, and they are dear to run.
            if isinstance(dependency.task(), (BuildTokenizer, *once)) and dependency not in shared:
                ((_, value),) = Executor([dependency], **devices).run(quiet=True)
                shared[dependency] = value
        ((_, result),) = Executor([handle], **devices, cached_values=shared).run(quiet=True)
        yield task, result


def _ancestors(handle: TaskHandle) -> Iterator[TaskHandle]:
    for dependency in handle.arguments().values():
        yield dependency
        yield from _ancestors(dependency)


def files_written(writer: TensorWriter) -> set[str]:
    """Names of the files that a finished writer has left in its folder.

    It gives a single file its name without telling its own table.
    """
    stem, suffix = writer._get_name_components()
    if writer.shards_written == 1:
        return {f"{stem}.{suffix}"}
    return {f"{stem}.{suffix}.index.json", *writer.weight_map.values()}


def _name_reads(model: Any, loader: Any) -> None:
    """Make errors of reading a model say which file they are about.

    Those of the file formats do not. MergeKit keeps one loader per model, and asks it for every
    tensor, in whatever task.
    """
    if not isinstance(loader, LazyTensorLoader) or "get_tensor" in vars(loader):
        return
    read = type(loader).get_tensor
    # A loader that referred to itself would keep its files open until garbage is collected.
    reference = weakref.ref(loader)

    @functools.wraps(read)
    def get_tensor(key: str, *args: Any, **kwargs: Any) -> Any:
        loader = reference()
        assert loader is not None  # its method is being called
        try:
            return read(loader, key, *args, **kwargs)
        except Exception as error:
            if not isinstance(error, _UNREADABLE) and "PytorchStreamReader" not in str(error):
                raise
            file = Path(loader.index.base_path, loader.index.tensor_paths.get(key, ""))
            raise ReadError(
                f"{model}: '{key}' cannot be read from {file}, which was removed or changed since "
                f"the merge began ({error}). Mend the file, and merge again."
            ) from error

    loader.get_tensor = get_tensor


_UNREADABLE = (OSError, SafetensorError, EOFError, BadZipFile, UnpicklingError)
NARROW = ("float16", "bfloat16", "torch.float16", "torch.bfloat16")


class Extension(Protocol):
    """What the plugin does around MergeKit's planning."""

    def parsed(self, schema: type[BaseModel], raw: Any) -> None:
        """Look at a config that is about to be parsed by ``schema``."""

    def before(self, config: Any, method: MergeMethod, options: Any) -> None:
        """Look at a config, as its author wrote it, before it is planned."""

    def merges(
        self, config: Any, tasks: list[ExecuteMergeMethodTask], options: Any
    ) -> Sequence[ExecuteMergeMethodTask]:
        """Return what takes the place of the merge tasks."""

    def output(
        self,
        config: Any,
        saves: Sequence[SaveTensor],
        finalize: FinalizeModel,
        options: Any,
    ) -> Sequence[Task]:
        """Return what takes the place of the tasks that save the merge and finish its folder."""

    def ours(self, method: Any) -> bool:
        """Whether the plugin has to do with what a config names as its merge method."""


def wrap_planner(planning: ModuleType, extension: Extension) -> None:
    """Call the extension around ``MergePlanner``.

    ``_plan`` is what planning to disk and in memory have in common: before it the config is as
    its author wrote it, and after it ``_tensors`` holds the merge tasks. ``plan_to_disk`` adds
    the tasks that save them, which is where a merge's folder is known.

    A narrower ``out_dtype`` is handed to the merge tasks, which have a field for it that the
    planner leaves empty: the task that saves would round to it, and turn what does not fit into
    infinity without a word.
    """
    _watch_parsing(planning.MergeConfiguration, extension)
    planner = planning.MergePlanner
    plan, plan_to_disk = planner._plan, planner.plan_to_disk

    @functools.wraps(plan)
    def _plan(self: Any) -> None:
        if not extension.ours(self._method.spec.name):
            plan(self)
            return
        extension.before(self.config, self._method, self.options)
        if self._tokenizer_task is not None:
            models = models_in_order(self.config)
            self._tokenizer_task = OrderedBuildTokenizer.of(self._tokenizer_task, models)
        plan(self)
        weights = [weight for weight, _ in self._tensors]
        tasks = [
            task.model_copy(update={"out_dtype": self.config.out_dtype})
            if self.config.out_dtype in NARROW and not weight.force_dtype
            else task
            for weight, task in self._tensors
        ]
        for model in models_in_order(self.config):
            _name_reads(model, LoaderCache().loaders.get(model))
        merges = extension.merges(self.config, tasks, self.options)
        self._tensors = list(zip(weights, merges, strict=True))

    @functools.wraps(plan_to_disk)
    def _plan_to_disk(self: Any, out_path: str) -> list[Task]:
        targets: list[Task] = plan_to_disk(self, out_path)
        if not extension.ours(self._method.spec.name):
            return targets
        return _with_output(extension, self.config, targets, self.options)

    planner._plan = _plan
    planner.plan_to_disk = _plan_to_disk
    wrap_tokenizers()


def wrap_flat_planner(script: Any, extension: Extension) -> None:
    """Do for mergekit-pytorch what ``wrap_planner`` does for the other commands.

    The script looks ``plan_flat_merge`` up by name, so that it can be replaced in the module. Its
    plan is a list of ``SaveTensor`` and a ``FinalizeModel`` that refers to them. They are sorted,
    since they come in the order of a set, which differs from one process to the next.
    """
    _watch_parsing(script.RawPyTorchMergeConfig, extension)
    plan = script.plan_flat_merge

    @functools.wraps(plan)
    def plan_flat_merge(
        config: Any, out_path: str, tensor_union: bool, tensor_intersection: bool, options: Any
    ) -> list[Task]:
        if not extension.ours(config.merge_method):
            unchanged: list[Task] = plan(
                config, out_path, tensor_union, tensor_intersection, options
            )
            return unchanged
        extension.before(config, script.merge_methods.get(config.merge_method), options)
        *saves, finalize = plan(config, out_path, tensor_union, tensor_intersection, options)
        saves.sort(key=lambda save: save.tensor_name)
        for model, loader in script.SimpleLoaderCache().loaders.items():
            _name_reads(model, loader)
        merges = extension.merges(config, [save.tensor_task for save in saves], options)
        saves = [
            save.model_copy(update={"tensor_task": merge})
            for save, merge in zip(saves, merges, strict=True)
        ]
        finalize = finalize.model_copy(update={"tensor_save_tasks": tuple(saves)})
        return _with_output(extension, config, [*saves, finalize], options)

    script.plan_flat_merge = plan_flat_merge


def _watch_parsing(schema: Any, extension: Extension) -> None:
    """Show the extension a config's keys before its schema drops those that it does not know.

    Every command parses by ``model_validate``, a class method that can be replaced on the class.
    """
    parse = schema.model_validate

    @functools.wraps(parse.__func__)
    def model_validate(cls: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is schema and isinstance(obj, dict) and extension.ours(obj.get("merge_method", "")):
            extension.parsed(schema, obj)
        return parse.__func__(cls, obj, *args, **kwargs)

    schema.model_validate = classmethod(model_validate)


def _with_output(
    extension: Extension, config: Any, targets: Sequence[Task], options: Any
) -> list[Task]:
    saves = [task for task in targets if isinstance(task, SaveTensor)]
    (finalize,) = (task for task in targets if isinstance(task, FinalizeModel))
    others = [task for task in targets if not isinstance(task, SaveTensor | FinalizeModel)]
    return [*extension.output(config, saves, finalize, options), *others]
