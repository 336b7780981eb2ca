"""What the plugin does around a merge: checks before it, RAM+'s measurement, a record after it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mergekit.config import MergeConfiguration
from mergekit.graph import Task
from mergekit.io.tasks import FinalizeModel, SaveTensor
from mergekit.io.tensor_writer import TensorWriter
from mergekit.merge_methods.base import MergeMethod
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from pydantic import BaseModel

from mergekit_ram import former, preflight, record
from mergekit_ram._mergekit.merging import sections_of, wrap_run_merge
from mergekit_ram._mergekit.planning import (
    files_written,
    with_extra,
    wrap_flat_planner,
    wrap_planner,
)
from mergekit_ram.errors import forget_warnings, warn_once
from mergekit_ram.headers import some
from mergekit_ram.methods import BY_NAME, RECORD
from mergekit_ram.overlap import ModelOverlap
from mergekit_ram.parameters import check_keys
from mergekit_ram.report import OverlapReport
from mergekit_ram.tasks import (
    Devices,
    MeasureOverlap,
    OverlapLedger,
    RescaledMergeTask,
    report_on,
)

LOG = logging.getLogger(__name__)


def install(planning: ModuleType) -> None:
    """Extend ``mergekit.plan``."""
    wrap_planner(planning, _EXTENSION)


def install_flat(script: ModuleType) -> None:
    """Extend ``mergekit.scripts.merge_raw_pytorch``."""
    wrap_flat_planner(script, _EXTENSION)


def install_merging(merging: ModuleType) -> None:
    """Extend ``mergekit.merge``."""
    wrap_run_merge(merging, _before_merge, _known, _card_section)


class _ByConfig:
    """What is known of the merge of a config, until it is asked for.

    Configs are told apart as objects: they can be equal, and cannot be hashed. One at a time is
    kept, since nobody asks where a merge ends early.
    """

    def __init__(self) -> None:
        self._kept: tuple[Any, Any] | None = None

    def put(self, config: Any, value: Any = True) -> None:
        self._kept = (config, value)

    def pop(self, config: Any) -> Any:
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and kept[0] is config else None


_checked = _ByConfig()
_whole = _ByConfig()
_tensors = _ByConfig()
_reports = _ByConfig()


def _card_section(config: Any) -> str | None:
    report: OverlapReport | None = _reports.pop(config)
    return record.card_section(report) if report is not None else None


class FinalizeWithRecord(FinalizeModel):
    """Finishes a merge's folder, and writes what was merged beside the weights.

    Attributes:
        config: of the merge.
        merges: its merge tasks.
        measured: the measurement that the merge waited for, if it did.
        ledger: where the merge itself entered its counts, if it did.
        former: weight files of former merges in the folder.
    """

    config: Any
    merges: tuple[Any, ...]
    measured: MeasureOverlap | None = None
    ledger: Any = None
    former: frozenset[str] = frozenset()

    # By identity: the config is not hashable, and the merge tasks are many.
    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def arguments(self) -> dict[str, Task]:
        """Return what must come before: all tensors, and the measurement."""
        measured = {"measured": self.measured} if self.measured is not None else {}
        return {**super().arguments(), **measured}

    def execute(
        self, writer: TensorWriter, measured: ModelOverlap | None = None, **inputs: Any
    ) -> None:
        """Finish the folder and write the record."""
        super().execute(writer=writer, **inputs)
        self._clear(Path(writer.out_path), files_written(writer))
        report = report_on(self.merges, measured or self.ledger.close())
        if measured is None:
            record.announce(report)
        record.write(report, Path(writer.out_path))
        _reports.put(self.config, report)

    def _clear(self, folder: Path, written: set[str]) -> None:
        """Leave no weights in the folder that loaders would take for this merge's."""
        removed = former.remove(folder, self.former, written)
        if removed:
            LOG.info("Removed from %s, of a former merge: %s", folder, ", ".join(removed))
        unfinished = former.unfinished_files(folder)
        if unfinished:
            warn_once(
                f"{folder} holds {some(sorted(unfinished))}, which an interrupted merge may have "
                "left: not a part of this one. Remove them."
            )


class _Extension:
    """See ``_mergekit.planning.Extension``."""

    def ours(self, method: Any) -> bool:
        return isinstance(method, str) and method in BY_NAME

    def parsed(self, schema: type[BaseModel], raw: Any) -> None:
        """Warn of keys that MergeKit drops."""
        forget_warnings()
        check_keys(schema, raw)

    def before(self, config: Any, method: MergeMethod, options: Any) -> None:
        """Check a config before it is planned, unless that was done when its merge began.

        Raises:
            RamError: it cannot be merged.
        """
        written = sections_of(config)
        sliced = any(getattr(section, "slices", None) for section in written.values())
        _whole.put(config, not sliced and len(written) == 1)
        if not _checked.pop(config):
            preflight.check_request(config, options)
            if not isinstance(config, MergeConfiguration):  # mergekit-pytorch's
                preflight.check_models(config, options)

    def merges(
        self, config: Any, tasks: list[ExecuteMergeMethodTask], options: Any
    ) -> Sequence[ExecuteMergeMethodTask]:
        """Let merge tasks that need the whole model's overlap wait for its measurement.

        Plans in which no rescale factor can differ from 1 stay as they are: one pass.

        Raises:
            RamError: by the models' headers the tensors cannot be merged.
        """
        tensors = preflight.check_plan(config, tasks, whole=bool(_whole.pop(config)))
        _tensors.put(config, tensors)
        if not tasks or not _needs_measurement(tasks):
            return tasks
        overlap = MeasureOverlap.model_construct(
            merges=tuple(tasks), quiet=options.quiet, **devices_of(options)
        )
        return [RescaledMergeTask.of(task, overlap) for task in tasks]

    def output(
        self,
        config: Any,
        saves: Sequence[SaveTensor],
        finalize: FinalizeModel,
        options: Any,
    ) -> Sequence[Task]:
        """Let a merge leave a record: of what was measured, or else of what it counts itself.

        Raises:
            RamError: the output folder cannot take the merge.
        """
        merges = tuple(save.tensor_task for save in saves)
        out_path = finalize.writer_task.out_path
        extra: dict[str, Any] = {}
        if out_path:  # none where only the plan is wanted
            preflight.check_output(config, _tensors.pop(config), out_path, options)
            extra["former"] = former.files_of_merges(Path(out_path))
        if merges and isinstance(merges[0], RescaledMergeTask):
            extra["measured"] = merges[0].overlap
        else:
            extra["ledger"] = ledger = OverlapLedger(merges, devices_of(options))
            saves = [
                save.model_copy(
                    update={"tensor_task": with_extra(save.tensor_task, {RECORD: ledger.record})}
                )
                for save in saves
            ]
        finished = FinalizeWithRecord.model_construct(
            tensor_save_tasks=tuple(saves),
            writer_task=finalize.writer_task,
            config=config,
            merges=merges,
            **extra,
        )
        return [*saves, finished]


_EXTENSION = _Extension()


def devices_of(options: Any) -> Devices:
    """Where MergeKit's executor computes and keeps tensors, by its ``MergeOptions``."""
    storage = options.device if options.low_cpu_memory else "cpu"
    return Devices(math_device=options.device, storage_device=storage)


def _before_merge(config: Any, options: Any) -> None:
    """Check a config and its models before MergeKit opens one."""
    if config.merge_method in BY_NAME:
        _checked.put(config)
        preflight.check_request(config, options)
        preflight.check_models(config, options)


def _known(config: Any, architecture: Any) -> None:
    """Check what takes the architecture."""
    if config.merge_method in BY_NAME:
        preflight.check_modules(config, architecture)


def _needs_measurement(tasks: Sequence[ExecuteMergeMethodTask]) -> bool:
    """Whether rho is counted over the whole model and some rescale factor can differ from 1."""
    return not BY_NAME[tasks[0].method_name].tensor_local and any(
        values["weight"] != 0 and values["r"] > 0 and values["alpha"] > 0
        for task in tasks
        for model, values in task.input_parameters.items()
        if model != task.base_model
    )
