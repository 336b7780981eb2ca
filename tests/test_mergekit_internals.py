"""What we rely on in MergeKit without being promised it.

A failure here means that a MergeKit release changed something: the message says what, and
``mergekit_ram/_mergekit/`` is where to follow it.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from mergekit import merge as merging
from mergekit import merge_methods
from mergekit import plan as planning
from mergekit.architecture import WeightInfo
from mergekit.common import ImmutableMap, ModelReference
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor, Task, TaskUniverse
from mergekit.io import ShardedTensorIndex
from mergekit.io.tasks import (
    FinalizeModel,
    GatherTensors,
    LoaderCache,
    LoadTensor,
    SaveTensor,
    TensorWriterTask,
)
from mergekit.io.tensor_writer import TensorWriter
from mergekit.merge_methods import registry
from mergekit.merge_methods.base import MergeMethod, MergeMethodSpec, TensorGroup
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask, TensorDictWrapper
from mergekit.scripts import merge_raw_pytorch as script
from mergekit.scripts import multimerge, run_yaml
from mergekit.tokenizer import PermutedVocabulary
from mergekit.tokenizer.truncate import TruncatedVocabulary

from mergekit_ram._mergekit.methods import WholeCallMethod, replace_methods
from mergekit_ram._mergekit.planning import run_tasks, with_extra
from mergekit_ram.methods import METHODS


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(inspect.unwrap(function)).parameters)


def test_the_registry_is_a_table_by_name() -> None:
    assert isinstance(registry._METHODS, dict), "registry._METHODS is no longer a dict"
    for method in METHODS:
        assert registry._METHODS[method.spec.name] is merge_methods.get(method.spec.name) is method
    with pytest.raises(ValueError, match="already registered"):
        registry.register(METHODS[0])


def test_a_registry_that_has_changed_is_an_error() -> None:
    class Registry:
        _METHODS = (METHODS[0],)

    with pytest.raises(TypeError, match="no longer keeps methods in _METHODS"):
        replace_methods(Registry, METHODS)  # type: ignore[arg-type]


def test_methods_execute_all_groups_of_a_call() -> None:
    assert parameters(MergeMethod._execute) == [
        "self",
        "groups",
        "parameters",
        "options",
        "input_dtypes",
        "out_dtype",
    ], "MergeMethod._execute has other parameters"
    assert parameters(MergeMethod._bind_parameters) == ["self", "groups", "parameters"]
    # Direct calls bind, the graph does not: that is how a whole model is told from a tensor.
    assert "_bind_parameters" in inspect.getsource(MergeMethod.__call__)
    assert "_bind_parameters" not in inspect.getsource(ExecuteMergeMethodTask.execute)
    assert "_bind_parameters" not in inspect.getsource(MergeMethod._execute_resolved)


class Recorder(WholeCallMethod):
    """Returns what it was called with instead of a tensor."""

    spec = MergeMethodSpec(name="mergekit_ram_test_recorder")

    def merge_call(self, groups, parameters, **rest):  # type: ignore[no-untyped-def]
        return tuple((group, dict(values), rest) for group, values in zip(groups, parameters))  # noqa: B905


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    method = Recorder()
    monkeypatch.setitem(registry._METHODS, method.spec.name, method)
    return method


def test_a_direct_call_says_so(recorder: Recorder) -> None:
    groups = [TensorGroup.from_tensors([torch.ones(2)]), TensorGroup.from_tensors([torch.ones(3)])]
    (first, second) = recorder(groups, out_dtype=torch.float64)
    assert first[0] is groups[0]
    assert second[0] is groups[1]
    assert first[2] == {
        "dtypes": [torch.float32] * 2,
        "out_dtype": torch.float64,
        "whole_model": True,
    }


class Given(Task[torch.Tensor]):
    def arguments(self) -> dict[str, Task]:
        return {}

    def execute(self, **_: Any) -> torch.Tensor:
        return torch.ones(2)


def merge_task(method: str) -> ExecuteMergeMethodTask:
    model = ModelReference.model_validate("./a/model")
    return ExecuteMergeMethodTask(
        method_name=method,
        gather_tensors=TensorDictWrapper(tensors=ImmutableMap({model: Given()})),
        model_order=(model,),
        base_model=None,
        output_weight=WeightInfo(name="w"),
        parameters=ImmutableMap({}),
        input_parameters=ImmutableMap({model: ImmutableMap({})}),
    )


def test_a_merge_task_passes_extra_parameters_and_any_result_on(recorder: Recorder) -> None:
    task = merge_task(recorder.spec.name)
    ((_, result),) = run_tasks(
        [with_extra(task, {"extra": 7})],
        math_device="cpu",
        storage_device="cpu",
        quiet=True,
        desc="",
    )
    group, values, rest = result
    assert group.metadata.name == "w"
    assert values == {"extra": 7}, "ExecuteMergeMethodTask no longer hands all parameters on"
    assert rest["whole_model"] is False
    assert "extra" not in task.parameters.data


def test_an_executor_takes_values_that_are_known(recorder: Recorder) -> None:
    task = merge_task(recorder.spec.name)
    universe = TaskUniverse([task])
    handle = universe.get_handle(task)
    (inputs,) = handle.arguments().values()
    known = {inputs: {task.model_order[0]: torch.full((2,), 5.0)}}
    ((_, result),) = Executor([handle], cached_values=known).run(quiet=True)
    assert result[0].tensors[0].tolist() == [5.0, 5.0], "Executor no longer uses cached values"


def test_the_planner_keeps_merge_tasks_until_it_saves_them() -> None:
    planner = planning.MergePlanner
    assert parameters(planner._plan) == ["self"]
    for function in (planner.plan_to_disk, planner.plan_in_memory):
        source = inspect.getsource(function)
        assert "self._plan()" in source, "MergePlanner plans without _plan"
        assert "in self._tensors" in source, "MergePlanner keeps its tasks elsewhere"
    assert "self._tensors.append((weight, tensor_task))" in inspect.getsource(planner.plan_tensor)
    assert {"config", "options", "_method"} <= set(planner.__annotations__)


def test_run_merge_looks_up_what_we_wrap() -> None:
    source = inspect.getsource(merging.run_merge)
    first = source.index("get_architecture_info(merge_config, options)")
    assert first < source.index("loader_cache.get("), "run_merge opens models before we look"
    assert "generate_card(\n            config=merge_config," in source
    assert parameters(merging.get_architecture_info) == ["config", "options"]
    assert parameters(merging.generate_card) == ["config", "config_yaml", "name"]
    # The model card lists models in the order of a set; ours in the config's.
    assert "return list(models)" in inspect.getsource(MergeConfiguration.referenced_models)
    assert "config.referenced_models()" in inspect.getsource(inspect.unwrap(merging.generate_card))


def test_our_commands_plan_like_run_merge() -> None:
    """``_mergekit.commands.plan_merge`` has these steps of ``run_merge``, in this order."""
    steps = (
        "get_architecture_info(merge_config, options)",
        "loader_cache.setup(options=options)",
        "cfg_out = _model_out_config(\n"
        "        merge_config, arch_info, trust_remote_code=options.trust_remote_code\n",
        "loader_cache.get(model)",
        "MergePlanner(\n        merge_config,\n        arch_info,\n        options=options,\n"
        "        out_model_config=cfg_out,\n    ).plan_to_disk(out_path=out_path)",
    )
    source = inspect.getsource(merging.run_merge)
    places = [source.find(step) for step in steps]
    assert min(places) >= 0, f"run_merge no longer does: {steps[places.index(-1)]}"
    assert places == sorted(places)
    saved = "dtype=weight.force_dtype or self.config.out_dtype"
    assert saved in inspect.getsource(inspect.unwrap(planning.MergePlanner.plan_to_disk))


def test_every_command_parses_configs_by_a_method_that_we_can_watch() -> None:
    for module in (run_yaml, multimerge, script):
        source = inspect.getsource(module)
        assert re.search(r"(MergeConfiguration|RawPyTorchMergeConfig)\.model_validate\(", source)
    for schema in (MergeConfiguration, script.RawPyTorchMergeConfig):
        assert hasattr(schema.model_validate.__func__, "__wrapped__")
        assert schema.model_validate.__self__ is schema


def test_loaders_are_kept_by_model_and_tell_their_folder() -> None:
    assert isinstance(LoaderCache.loaders, dict), "LoaderCache.loaders is no longer a dict"
    assert {"tensor_paths", "base_path"} <= set(ShardedTensorIndex.__dataclass_fields__)
    assert "weight_info" in GatherTensors.model_fields
    assert "gather_tensors" in PermutedVocabulary.model_fields
    assert "tokenizer_task" in PermutedVocabulary.model_fields
    assert "gather_tensors" in TruncatedVocabulary.model_fields


def test_finishing_a_folder_can_be_extended() -> None:
    assert parameters(FinalizeModel.execute) == ["self", "writer", "kwargs"]
    assert set(FinalizeModel.model_fields) == {"tensor_save_tasks", "writer_task"}
    assert "out_path" in TensorWriterTask.model_fields
    assert "out_path" in TensorWriter.__annotations__


def test_a_writer_tells_what_it_wrote() -> None:
    """For ``files_written``; what it says of real folders is tested in ``test_faults``."""
    assert {"shards_written", "weight_map"} <= set(TensorWriter.__annotations__)
    assert parameters(TensorWriter._get_name_components) == ["self"]


def test_every_read_goes_through_the_loader_that_is_kept() -> None:
    source = inspect.getsource(LoadTensor)
    assert "loader = LoaderCache().get(self.model)" in source
    assert source.count("loader.get_tensor(") == 2


def test_mergekit_pytorch_plans_by_name() -> None:
    assert parameters(script.plan_flat_merge) == [
        "config",
        "out_path",
        "tensor_union",
        "tensor_intersection",
        "options",
    ]
    assert "plan_flat_merge(" in inspect.getsource(script.main.callback)
    source = inspect.getsource(inspect.unwrap(script.plan_flat_merge))
    assert "return save_tasks + [finalize]" in source
    assert "tensor_task" in SaveTensor.model_fields
    assert "tensor_save_tasks" in FinalizeModel.model_fields


def test_the_output_folder_is_made_by_a_task_that_waits_for_us() -> None:
    from mergekit_ram.tasks import MeasureOverlap

    writer = TensorWriterTask(out_path="x", max_shard_size=1)
    measure = MeasureOverlap.model_construct(merges=())
    assert measure.priority() > writer.priority(), "TensorWriterTask comes before the measurement"
    assert measure.arguments() == writer.arguments() == {}
