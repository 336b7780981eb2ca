"""RAM+ with rho over the whole model: every kind of config, and its place in the graph.

What a merge is compared with is recomputed from the tensors that MergeKit hands to the merge
itself, in the second pass: element by element counts of all of them, the paper's formula, and the
reference rule. The first pass has no part in it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch
import yaml
from checkpoints import Family, changed, load, make_family, save
from helpers import assert_same_bits, ordinary
from mergekit import multigpu_executor
from mergekit.architecture import get_architecture_info
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor, TaskUniverse, build_schedule
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods import merge_state_dicts, merge_tensors
from mergekit.merge_methods.task_adapter import ExecuteMergeMethodTask
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from safetensors.torch import save_file
from test_end_to_end import assert_same, command, config_of, merged, tensor_local

from mergekit_ram import kernels, reference
from mergekit_ram.errors import NonFiniteError, PipelineError
from mergekit_ram.methods import RamMethod
from mergekit_ram.tasks import MeasureOverlap, RescaledMergeTask


@dataclass
class Unit:
    """One merged tensor: inputs, settings and result."""

    name: str
    base: torch.Tensor
    agents: dict[Any, torch.Tensor]
    settings: dict[str, dict[Any, float]]
    result: torch.Tensor


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> list[Unit]:
    """What every merge of this test merges, in order."""
    recorded: list[Unit] = []
    merge_group = RamMethod.merge_group

    def record(self, group, values, *settled):  # type: ignore[no-untyped-def]
        result = merge_group(self, group, values, *settled)
        agents = {e.id: e.tensor.clone() for e in group.non_base if values["weight"][e.id] != 0}
        settings = {
            key: {agent: values[key][agent] for agent in agents}
            for key in ("epsilon", "weight", "r", "alpha")
        }
        base = group.base.tensor.clone()
        recorded.append(Unit(group.metadata.name, base, agents, settings, result))
        return result

    monkeypatch.setattr(RamMethod, "merge_group", record)
    return recorded


def check(units: list[Unit], *, skip: tuple[str, ...] = ()) -> dict[Any, tuple[int, int]]:
    """Recompute all results; return shared and unique elements per agent.

    Args:
        units: all tensors of one merge.
        skip: names of tensors that are a second copy of another, and count with it.
    """
    assert units
    shared: dict[Any, int] = {}
    unique: dict[Any, int] = {}
    for unit in {unit.name: unit for unit in units}.values():
        if unit.name in skip:
            continue
        counts = reference.count(
            unit.base, list(unit.agents.values()), epsilon=list(unit.settings["epsilon"].values())
        )
        for agent, row in zip(unit.agents, counts["overlap"], strict=True):
            unique[agent] = unique.get(agent, 0) + row[0]
            shared[agent] = shared.get(agent, 0) + sum(row[1:])
    for unit in units:
        factors = []
        for agent in unit.agents:
            r, alpha = unit.settings["r"][agent], unit.settings["alpha"][agent]
            if unique[agent]:
                factors.append(1 + r * min(shared[agent] / unique[agent], alpha))
            else:
                factors.append(1 + r * alpha if shared[agent] else 1.0)
        wanted = reference.merge(
            unit.base,
            list(unit.agents.values()),
            epsilon=list(unit.settings["epsilon"].values()),
            weight=list(unit.settings["weight"].values()),
            rescale=factors,
        )
        assert_same_bits(unit.result, wanted)
    return {agent: (shared[agent], unique[agent]) for agent in unique}


# Below every alpha, rho differs between agents and between tensors.
PLUS = {"r": 0.5, "alpha": 10}


def model_configs(family: Family) -> dict[str, dict[str, Any]]:
    """Configs of the kinds that need no further files."""
    base, agents = str(family.base), [str(a) for a in family.agents]

    def source(model: str, low: int, high: int) -> dict[str, Any]:
        return {"model": model, "layer_range": [low, high]}

    stacked = [
        {"sources": [source(m, 0, 2) for m in (base, *agents)]},
        {"sources": [source(m, 1, 2) for m in (base, *agents)], "parameters": {"r": 0.25}},
    ]
    own = [
        {"model": agents[0], "parameters": {"r": 0.3, "alpha": 0.1, "weight": 0.7}},
        {"model": agents[1], "parameters": {"r": 0, "epsilon": 1e-3}},
        {"model": agents[2], "parameters": {"alpha": 0, "weight": -1.5}},
    ]
    filtered = {
        "epsilon": [{"filter": "mlp", "value": 1e-3}, {"value": 1e-5}],
        "r": [0.1, 0.9],
        "alpha": [{"filter": "self_attn", "value": [0.0, 0.5]}, {"value": 2}],
        "weight": [{"filter": "lm_head", "value": 0}, {"value": 1}],
    }
    unlike = config_of(family, "ram_plus", parameters=PLUS)
    unlike["models"][1]["parameters"] = {"weight": [{"filter": "mlp", "value": 0}, {"value": 1}]}
    return {
        "models": config_of(family, "ram_plus", parameters=PLUS),
        "defaults": config_of(family, "ram_plus"),
        "ram with r": config_of(family, "ram", parameters=PLUS),
        "one agent": config_of(family, "ram_plus", models=[{"model": agents[0]}]),
        "base among the models": config_of(
            family, "ram_plus", models=[{"model": m} for m in (agents[1], base, agents[0])]
        ),
        "stacked slices": {
            "merge_method": "ram_plus",
            "base_model": base,
            "slices": stacked,
            "parameters": PLUS,
        },
        "modules": {
            "merge_method": "ram_plus",
            "base_model": base,
            "modules": {"default": {"slices": stacked, "parameters": PLUS}},
        },
        "per agent": config_of(family, "ram_plus", models=own),
        "filters and gradients": config_of(family, "ram_plus", parameters=filtered),
        "an agent left out of some tensors": unlike,
        "rounded first": config_of(family, "ram_plus", dtype="float16", parameters=PLUS),
        "float64": config_of(family, "ram_plus", dtype="float64", parameters=PLUS),
    }


KINDS = tuple(model_configs(Family(Path(), Path("b"), [Path("x"), Path("y"), Path("z")], {})))


@pytest.mark.parametrize("kind", KINDS)
def test_configs(kind: str, tmp_path: Path, units: list[Unit]) -> None:
    # Llama: MergeKit cannot stack layers of configs that list the type of each layer.
    family = make_family(tmp_path, "llama", dtype=torch.float32)
    config = model_configs(family)[kind]
    got = merged(config, tmp_path / "out", clone_tensors=True)
    ratios = check(units)
    assert len(units) == len(got)
    for unit in units:
        assert_same_bits(got[unit.name], unit.result)
    if kind == "models":
        # The case tests something: all have both, and tensors differ from the whole.
        assert all(s and u for s, u in ratios.values())
        local = tensor_local(family, 0.5, 10)
        assert any(not torch.equal(local[name], got[name]) for name in got)
    if kind == "stacked slices":
        assert sum("layers." in unit.name for unit in units) == 3 * 9


OPTIONS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "pickled": {"lazy_unpickle": False},
    "lazily unpickled": {"lazy_unpickle": True},
    "asynchronous": {"async_write": True, "write_threads": 2},
    "low memory": {"low_cpu_memory": True},
    "many shards": {"out_shard_size": 3000},
}


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_files_and_options(
    kind: str, dtype: torch.dtype, tmp_path: Path, units: list[Unit]
) -> None:
    family = make_family(tmp_path, dtype=dtype, shards=3, pickled="pickled" in kind)
    config = config_of(family, "ram_plus", parameters=PLUS)
    got = merged(config, tmp_path / "out", **OPTIONS[kind])
    check(units)
    for unit in units:
        assert_same_bits(got[unit.name], unit.result)


def test_an_untied_head_with_equal_counts_is_no_copy(tmp_path: Path, units: list[Unit]) -> None:
    """Training the same rows of embedding and head gives equal counts of unlike tensors."""
    family = make_family(tmp_path, n=2)
    base = family.states[family.base]
    state = {name: tensor.clone() for name, tensor in base.items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name][:6] += 0.5
    save_file(state, family.agents[0] / "model.safetensors", metadata={"format": "pt"})
    # The other agent is the base there, but for a tensor that makes the two overlap.
    other = {n: t.clone() for n, t in base.items()}
    other["lm_head.weight"][5:7] += 0.25
    other["model.embed_tokens.weight"][5:7] += 0.25
    save_file(other, family.agents[1] / "model.safetensors", metadata={"format": "pt"})
    merged(config_of(family, "ram_plus", parameters=PLUS), tmp_path / "out")
    ratios = check(units)
    assert set(ratios.values()) == {(2 * 32, 2 * 5 * 32), (2 * 32, 2 * 32)}


@pytest.mark.parametrize("stored", ["nowhere", "in the base", "everywhere", "everywhere, changed"])
def test_a_tied_duplicate_counts_once(stored: str, tmp_path: Path, units: list[Unit]) -> None:
    family = make_family(tmp_path, tie_word_embeddings=True)
    for path, state in family.states.items():
        if stored.startswith("everywhere") or (stored == "in the base" and path == family.base):
            head = state["model.embed_tokens.weight"].clone()
            if stored.endswith("changed") and path == family.agents[0]:
                head[0] += 0.5
            tensors = state | {"lm_head.weight": head}
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    merged(config_of(family, "ram_plus", parameters=PLUS), tmp_path / "out")
    duplicate = stored in ("in the base", "everywhere")
    assert ("lm_head.weight" in {u.name for u in units}) == (stored != "nowhere")
    check(units, skip=("lm_head.weight",) if duplicate else ())


def write_tokenizer(folder: Path, tokens: list[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token=tokens[0])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=tokens[0])
    fast.save_pretrained(folder)


def test_a_union_of_tokenizers_is_the_same_each_time(tmp_path: Path) -> None:
    """Tokenizers list their tokens by a hash that differs even within a process."""
    family = make_family(tmp_path, n=2, vocab_size=30, tie_word_embeddings=True)
    more = make_family(tmp_path / "more", n=2, vocab_size=54, tie_word_embeddings=True)
    words = ["<|endoftext|>", *(f"w{i}" for i in range(1, 30))]
    family.agents[1] = more.agents[1]
    for folder in (family.base, *family.agents):
        new = [f"new{i}" for i in range(24)] if folder == family.agents[1] else []
        write_tokenizer(folder, words + new)
        state = load(folder)
        # A stored copy of the head is a copy in whatever order the new tokens come.
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(family, "ram_plus", parameters=PLUS, tokenizer={"source": "union"})
    for turn in range(3):
        merged(config, tmp_path / str(turn))
        files = {f.name: f.read_bytes() for f in (tmp_path / str(turn)).iterdir()}
        if turn == 0:
            first = files
        del files["README.md"]  # has the folder's name
        assert {name: first[name] for name in files} == files
    record = json.loads(first["ram_overlap.json"])
    copies = [n for n, tensor in record["tensors"].items() if tensor["copy_of"]]
    assert copies == ["lm_head.weight"]


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"source": "union"},
        {"source": "base"},
        {"source": "union", "tokens": {"w3": {"source": "agent1", "force": True}}},
        {"source": "union", "pad_to_multiple_of": 16},
    ],
)
def test_tokenizers(tokenizer: dict[str, Any], tmp_path: Path, units: list[Unit]) -> None:
    """Vocabularies of unlike size and order: counts see the rows as they are aligned."""
    family = make_family(tmp_path, n=2, vocab_size=30)
    # transformers gives a Qwen2 model's tokenizer this token if it has none of the name.
    words = ["<|endoftext|>", *(f"w{i}" for i in range(1, 30))]
    write_tokenizer(family.base, words)
    write_tokenizer(family.agents[0], words[:1] + words[:0:-1])
    more = make_family(tmp_path / "more", n=2, vocab_size=33)
    family.agents[1] = more.agents[1]
    write_tokenizer(family.agents[1], [*words, "new1", "new2", "new3"])
    if "tokens" in tokenizer:
        tokenizer["tokens"]["w3"]["source"] = str(family.agents[1])
    config = config_of(family, "ram_plus", parameters=PLUS, tokenizer=tokenizer)
    got = merged(config, tmp_path / "out")
    rows = {"base": 30}.get(tokenizer["source"], 48 if "pad_to_multiple_of" in tokenizer else 33)
    assert got["model.embed_tokens.weight"].shape[0] == rows
    check(units)


def test_lora_agents(tmp_path: Path, units: list[Unit]) -> None:
    import peft
    import transformers

    family = make_family(tmp_path, dtype=torch.float32, n=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(family.base)
    adapter = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    adapter.save_pretrained(tmp_path / "adapter")
    models = [f"{family.base}+{tmp_path / 'adapter'}", str(family.agents[0])]
    config = config_of(family, "ram_plus", models=[{"model": m} for m in models], parameters=PLUS)
    merged(config, tmp_path / "out", lora_merge_cache=str(tmp_path / "cache"))
    ratios = check(units)
    lora = ModelReference.model_validate(models[0])
    # The adapter changes its two matrices throughout, and nothing else.
    assert sum(ratios[lora]) == 2 * 32 * 32


def test_vision_language_modules(tmp_path: Path, units: list[Unit]) -> None:
    import transformers

    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 64,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "depth": 2,
            "num_heads": 4,
            "out_hidden_size": 32,
        },
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "base")
    start = load(tmp_path / "base")
    for i in range(2):
        model.save_pretrained(tmp_path / f"agent{i}")
        state = changed(start, seed=i, density=0.2 + 0.3 * i)
        save_file(state, tmp_path / f"agent{i}" / "model.safetensors", metadata={"format": "pt"})
    listed = [{"model": str(tmp_path / f"agent{i}")} for i in range(2)]
    recipe = {
        "merge_method": "ram_plus",
        "base_model": str(tmp_path / "base"),
        "modules": {
            "text_decoder": {"models": listed},
            "vision_tower": {"models": listed, "parameters": {"r": 0.3}},
            "multi_modal_projector": {"models": listed},
        },
        "parameters": {"r": 0.5, "alpha": 5},
    }
    got = merged(recipe, tmp_path / "out")
    ratios = check(units)
    # MergeKit lists the projector's weights in the vision tower too, and merges them twice.
    assert set(got) == {unit.name for unit in units} == set(start)
    changed_elements = sum(
        int(((load(tmp_path / "agent0")[n] - start[n]).abs() > 1e-5).sum()) for n in start
    )
    assert sum(ratios[ModelReference.model_validate(listed[0]["model"])]) == changed_elements
    # One module alone: rho is over what this run merges.
    units.clear()
    recipe["modules"] = {"text_decoder": {"models": listed}}
    merged(recipe, tmp_path / "text")
    fewer = check(units)
    assert sum(map(sum, fewer.values())) < sum(map(sum, ratios.values()))


def test_authors_own_factor(tmp_path: Path, units: list[Unit]) -> None:
    """r: 0.2, alpha: 1.0 is the released script's 1 + (f - 1) min(1, rho) with f = 1.2."""
    family = make_family(tmp_path)
    got = merged(
        config_of(family, "ram_plus", parameters={"r": 0.2, "alpha": 1.0}), tmp_path / "out"
    )
    ratios = check(units)
    rho = {str(agent): s / u for agent, (s, u) in ratios.items()}
    assert min(rho.values()) < 1 < max(rho.values())
    wanted = family.expected(rescale=lambda _, agent: 1 + 0.2 * min(1, rho[str(agent)]))
    assert_same(got, wanted)


def test_agents_without_unique_elements_and_without_changes(
    tmp_path: Path, units: list[Unit], caplog: pytest.LogCaptureFixture
) -> None:
    family = make_family(tmp_path, n=2, dtype=torch.float32)
    base, first = family.states[family.base], family.states[family.agents[0]]
    config = transformers_config(family)
    # Changes a part of what agent0 changes, in the other direction.
    part = {
        name: torch.where(torch.arange(t.numel()).reshape(t.shape) % 2 == 0, 2 * t - first[name], t)
        for name, t in base.items()
    }
    save(tmp_path / "part", config, part)
    save(tmp_path / "same", config, base)
    agents = [family.agents[0], tmp_path / "part", tmp_path / "same"]
    recipe = config_of(
        family, "ram_plus", models=[{"model": str(a)} for a in agents], parameters=PLUS
    )
    with caplog.at_level(logging.INFO, logger="mergekit_ram"):
        merged(recipe, tmp_path / "out")
    ratios = {str(agent): counts for agent, counts in check(units).items()}
    assert ratios[str(agents[1])][1] == 0 < ratios[str(agents[1])][0]
    assert ratios[str(agents[2])] == (0, 0)
    lines = caplog.text.splitlines()
    header = next(line for line in lines if line.startswith("density"))
    assert header.split() == ["density", "unique", "shared", "rho", "lambda", "agent"]
    rows = {line.split()[-1]: line.split()[:-1] for line in lines if "%" in line or " - " in line}
    # Without a unique element the factor counts as saturated; without a change it is 1.
    assert rows[str(agents[1])][2:] == ["0.0", "%", "100.0", "%", "-", "6.0000"]
    assert rows[str(agents[2])] == ["0.0", "%", "-", "-", "-", "1.0000"]


def transformers_config(family: Family) -> Any:
    import transformers

    return transformers.AutoConfig.from_pretrained(family.base)


@pytest.mark.parametrize("parameters", [{"r": 0}, {"alpha": 0}, {"r": 0, "alpha": float("inf")}])
def test_without_rescaling_it_is_ram_in_one_pass(
    parameters: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = make_family(tmp_path)
    monkeypatch.setattr(kernels, "count", lambda *a, **k: pytest.fail("counted"))
    got = merged(config_of(family, "ram_plus", parameters=parameters), tmp_path / "out")
    assert_same(got, family.expected())


def test_each_tensor_is_read_twice_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mergekit.io.lazy_tensor_loader import LazyTensorLoader

    family = make_family(tmp_path)
    reads: list[tuple[str, str]] = []
    get_tensor = LazyTensorLoader.get_tensor

    def spy(self, key, *args, **kwargs):  # type: ignore[no-untyped-def]
        reads.append((self.index.base_path, key))
        return get_tensor(self, key, *args, **kwargs)

    monkeypatch.setattr(LazyTensorLoader, "get_tensor", spy)
    merged(config_of(family, "ram_plus"), tmp_path / "out")
    tensors = len(family.states[family.base])
    assert len(reads) == 2 * 4 * tensors
    assert set(reads[: len(reads) // 2]) == set(reads[len(reads) // 2 :])


def test_bad_values_fail_before_anything_is_written(tmp_path: Path) -> None:
    family = make_family(tmp_path)
    state = dict(family.states[family.agents[2]])
    name = "model.norm.weight"
    state[name] = state[name].clone()
    state[name][3] = float("nan")
    save_file(state, family.agents[2] / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match=rf"'{name}'.*1 element in {family.agents[2]}"):
        merged(config_of(family, "ram_plus"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def plan(config: dict[str, Any], tmp_path: Path) -> list[Any]:
    """Tasks that mergekit-yaml would run."""
    options = MergeOptions()
    parsed = MergeConfiguration.model_validate(config)
    LoaderCache().setup(options)
    architecture = get_architecture_info(parsed, options)
    model_config = parsed.base_model.config()
    planner = MergePlanner(parsed, architecture, options, model_config)
    return planner.plan_to_disk(str(tmp_path / "out"))


def test_islands_of_a_multi_gpu_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The merge tasks are as independent of each other as those of ram."""
    monkeypatch.setattr(multigpu_executor, "get_torch_accelerator_type", lambda: "cuda")
    family = make_family(tmp_path)
    islands = {}
    for method in ("ram", "ram_plus"):
        tasks = plan(config_of(family, method), tmp_path)
        with caplog.at_level(logging.INFO):
            caplog.clear()
            executor = multigpu_executor.MultiGPUExecutor(tasks, num_gpus=2)
        islands[method] = next(
            int(r.message.split()[1]) for r in caplog.records if r.message.startswith("Found")
        )
        leading = [type(h.task()).__name__ for h in executor.leading_main_handles]
        assert leading == (["MeasureOverlap"] if method == "ram_plus" else []) + [
            "TensorWriterTask"
        ]
        assert len(executor.gpu_assignments) == 2
    assert islands["ram"] == islands["ram_plus"] > 10


def test_a_multi_gpu_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, units: list[Unit]
) -> None:
    """The real executor with two workers, that compute on the CPU where none has a GPU."""
    monkeypatch.setattr(multigpu_executor, "get_torch_accelerator_type", lambda: "cuda")

    def worker(self, task_list, cached_values, device, quiet):  # type: ignore[no-untyped-def]
        executor = Executor(task_list, cached_values=cached_values)
        for handle, result in executor._run(quiet=True):
            keep = handle in self.targets or handle in self.trailing_dependencies
            self.task_completion_queue.put((handle._index, result if keep else None))

    monkeypatch.setattr(multigpu_executor.MultiGPUExecutor, "_device_worker", worker)
    family = make_family(tmp_path)
    tasks = plan(config_of(family, "ram_plus", parameters=PLUS), tmp_path)
    executor = multigpu_executor.MultiGPUExecutor(tasks, num_gpus=2, storage_device="cpu")
    list(executor.run(quiet=True))
    check(units)
    got = load(tmp_path / "out")
    for unit in units:
        assert_same_bits(got[unit.name], unit.result)


def test_the_measurement_comes_first(tmp_path: Path) -> None:
    family = make_family(tmp_path)
    tasks = plan(config_of(family, "ram_plus"), tmp_path)
    universe = TaskUniverse(tasks)
    schedule = build_schedule([universe.get_handle(t) for t in tasks], {})
    assert isinstance(schedule.tasks[0].task(), MeasureOverlap)
    merges = [t.task() for t in schedule.tasks if isinstance(t.task(), ExecuteMergeMethodTask)]
    assert all(isinstance(task, RescaledMergeTask) for task in merges)
    assert len({id(task.overlap) for task in merges}) == 1
    graph = networkx.DiGraph(
        (a._index, b._index) for b in schedule.tasks for a in b.arguments().values()
    )
    assert networkx.is_directed_acyclic_graph(graph)


def test_a_pipeline_that_does_not_measure_is_an_error(tmp_path: Path) -> None:
    family = make_family(tmp_path)
    tasks = plan(config_of(family, "ram_plus"), tmp_path)
    task = next(t.tensor_task for t in tasks if hasattr(t, "tensor_task"))
    fields = {name: getattr(task, name) for name in ExecuteMergeMethodTask.model_fields}
    with pytest.raises(PipelineError, match=r"ram_plus: tensor '.*whole model.*ramplus_tl"):
        list(Executor([ExecuteMergeMethodTask(**fields)]).run(quiet=True))


def test_mergekit_pytorch(tmp_path: Path, units: list[Unit]) -> None:
    family = make_family(tmp_path)

    def recipe(folder: str) -> dict[str, Any]:
        return {
            "merge_method": "ram_plus",
            "base_model": str(family.base / "model.safetensors"),
            "models": [
                {"model": str(a / "model.safetensors"), "parameters": {"r": 0.1 * (i + 1)}}
                for i, a in enumerate(family.agents)
            ],
            "parameters": {"alpha": 10},
        }

    config = tmp_path / "config.yml"
    config.write_text(yaml.safe_dump(recipe("")))
    result = command("mergekit-pytorch", config, tmp_path / "out", "-v")
    assert result.returncode == 0, result.stderr
    assert "Overlap of the agents over the whole model" in result.stderr

    from mergekit.scripts import merge_raw_pytorch as script

    parsed = script.RawPyTorchMergeConfig.model_validate(recipe(""))
    tasks = script.plan_flat_merge(parsed, str(tmp_path / "again"), False, False, MergeOptions())
    list(Executor(tasks).run(quiet=True))
    check(units)
    assert_same(load(tmp_path / "out"), {unit.name: unit.result for unit in units})


def test_a_tied_copy_counts_once_without_an_architecture(tmp_path: Path, units: list[Unit]) -> None:
    """mergekit-pytorch and state dictionaries know no tied names: the content tells."""
    from mergekit.scripts import merge_raw_pytorch as script

    family = make_family(tmp_path, tie_word_embeddings=True)
    states = []
    for path, state in family.states.items():
        head = state["model.embed_tokens.weight"].clone()
        states.append(state | {"lm_head.weight": head})
        save_file(states[-1], path / "model.safetensors", metadata={"format": "pt"})
    config = script.RawPyTorchMergeConfig.model_validate(
        {
            "merge_method": "ram_plus",
            "base_model": str(family.base / "model.safetensors"),
            "models": [{"model": str(a / "model.safetensors")} for a in family.agents],
            "parameters": PLUS,
        }
    )
    tasks = script.plan_flat_merge(config, str(tmp_path / "out"), False, False, MergeOptions())
    list(Executor(tasks).run(quiet=True))
    check(units, skip=("lm_head.weight",))
    units.clear()
    got = merge_state_dicts(states, "ram_plus", base=0, parameters=PLUS)
    check(units, skip=("lm_head.weight",))
    assert_same(load(tmp_path / "out"), got)


class TestInMemory:
    """All groups of one call are the whole model."""

    def test_state_dicts(self, units: list[Unit]) -> None:
        shapes: list[Callable[[], Any]] = [
            lambda: ordinary((30, 20), 3, torch.bfloat16, 1, 0.1),
            lambda: ordinary((500,), 3, torch.float32, 2, 0.7),
        ]
        states: list[dict[str, torch.Tensor]] = [{}, {}, {}, {}]
        for name, make in zip("xy", shapes, strict=True):
            base, agents = make()
            for state, tensor in zip(states, (base, *agents), strict=True):
                state[name] = tensor
        for state in states:
            # One tensor under two names, as in the state of a module with tied weights.
            state["x again"] = state["x"]
        got = merge_state_dicts(
            states, "ram_plus", base=0, parameters={"r": [0.1, 0.5, 0.0], "alpha": 7}
        )
        check(units, skip=("x again",))
        assert set(got) == {"x", "y", "x again"}

    def test_tensors(self, units: list[Unit]) -> None:
        base, agents = ordinary((50, 40), 2, torch.float32)
        merge_tensors([base, *agents], "ram", base_index=0, parameters={"r": 0.4, "alpha": 3})
        check(units)

    def test_tensor_local_is_the_same_for_one_tensor(self) -> None:
        base, agents = ordinary((50, 40), 2, torch.float32)
        plus = merge_tensors([base, *agents], "ram_plus", base_index=0, parameters=PLUS)
        local = merge_tensors([base, *agents], "ramplus_tl", base_index=0, parameters=PLUS)
        assert_same_bits(plus, local)

    def test_gradients(self) -> None:
        base = torch.tensor([1.0, 1.0, 1.0], requires_grad=True)
        agent = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        other = torch.tensor([1.0, 1.0, 2.0])
        merged = merge_tensors([base, agent, other], "ram_plus", base_index=0, parameters=PLUS)
        merged.sum().backward()
        assert agent.grad.tolist() == [0.0, 1.5, 0.5]
