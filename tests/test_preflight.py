"""`mergekit-ram check` and the same checks before a merge: every kind, and no false alarm."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from checkpoints import Family, load, make_family, save, tiny_config
from click.testing import CliRunner
from mergekit.config import MergeConfiguration
from mergekit.io import LazyTensorLoader
from mergekit.io.tasks import LoaderCache
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors.torch import save_file
from test_architectures import KINDS as KINDS_OF_MODELS
from test_architectures import write_family
from test_end_to_end import config_of

from mergekit_ram.cli import main
from mergekit_ram.errors import ConfigError, RamError
from mergekit_ram.preflight import check_plan
from mergekit_ram.preflight import models as preflight_models

EXAMPLES = Path(__file__).parents[1] / "example_configs"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LazyTensorLoader, key: str, *args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a check read the weight {key}")

    monkeypatch.setattr(LazyTensorLoader, "get_tensor", refuse)
    monkeypatch.setattr(LoaderCache, "loaders", {})


def check(config: dict[str, Any], folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output, without line breaks, of ``mergekit-ram check``."""
    file = folder / "config.yml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    result = CliRunner().invoke(main, ["check", str(file), *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def state_of(family: Family, folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in family.states[folder].items()}


def rewrite(folder: Path, state: dict[str, torch.Tensor]) -> None:
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def edit(folder: Path, **entries: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


# --- What people get wrong, each with what they are told ------------------------------------

Break = Callable[[Family, dict[str, Any]], None]
KINDS: dict[str, tuple[str, Break, str]] = {}


def kind(level: str, says: str) -> Callable[[Break], Break]:
    def enter(function: Break) -> Break:
        KINDS[function.__name__.replace("_", " ")] = (level, function, says)
        return function

    return enter


@kind("warning", "agent0 holds float32 in .*model.safetensors.*`dtype: float32` with `out_dtype: b")
def float32_agents(family: Family, config: dict[str, Any]) -> None:
    rewrite(family.agents[0], {n: t.float() for n, t in family.states[family.agents[0]].items()})
    config["dtype"] = "bfloat16"


@kind("warning", "different dtypes .*agent1: float16.*Set `dtype: float32`")
def dtypes_differ_without_dtype(family: Family, config: dict[str, Any]) -> None:
    rewrite(family.agents[1], {n: t.half() for n, t in family.states[family.agents[1]].items()})


@kind("error", "agent1 is quantised .*F8_E4M3.*Dequantise it")
def float8_files(family: Family, config: dict[str, Any]) -> None:
    state = state_of(family, family.agents[1])
    state[UP] = state[UP].to(torch.float8_e4m3fn)
    rewrite(family.agents[1], state)
    config["dtype"] = "bfloat16"


@kind("error", "agent1 is quantised .*I8 values in model.layers.1.mlp.up_proj.weight")
def int8_files(family: Family, config: dict[str, Any]) -> None:
    state = state_of(family, family.agents[1])
    state[UP] = state[UP].to(torch.int8)
    rewrite(family.agents[1], state)


@kind("error", "agent0 is quantised .*weight_scale_inv")
def scale_tensors(family: Family, config: dict[str, Any]) -> None:
    state = state_of(family, family.agents[0])
    state[f"{UP}_scale_inv"] = torch.ones(1)
    rewrite(family.agents[0], state)


@kind("error", "agent2 is quantised .*`quantization_config` fp8")
def quantization_config(family: Family, config: dict[str, Any]) -> None:
    edit(family.agents[2], quantization_config={"quant_method": "fp8"})


@kind("warning", "'lm_head.weight' is tied .* but stored in .*agent1.* loaders drop")
def a_stored_tied_head(family: Family, config: dict[str, Any]) -> None:
    for folder in (family.base, *family.agents):
        state = state_of(family, folder)
        head = state.pop("lm_head.weight")
        if folder == family.agents[1]:
            state["lm_head.weight"] = head
        rewrite(folder, state)
        edit(folder, tie_word_embeddings=True)


@kind("warning", "`tie_word_embeddings` is true in .*agent0 and false in .*base")
def ties_differ(family: Family, config: dict[str, Any]) -> None:
    edit(family.agents[0], tie_word_embeddings=True)


@kind("error", "'model.embed_tokens.weight': vocabulary sizes differ .*64 x 32.*60 x 32.*tokenizer")
def vocabulary_sizes(family: Family, config: dict[str, Any]) -> None:
    state = state_of(family, family.agents[0])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][:60].contiguous()
    rewrite(family.agents[0], state)


@kind("error", rf"tensor '{UP}': shapes differ \(48 x 32 .*47 x 32 in .*agent0")
def shapes(family: Family, config: dict[str, Any]) -> None:
    state = state_of(family, family.agents[0])
    state[UP] = state[UP][:47].contiguous()
    rewrite(family.agents[0], state)


@kind("warning", r"slices: the slices' source lists differ in length \(2, 3\).*agent1.* lost")
def slices_of_unequal_length(family: Family, config: dict[str, Any]) -> None:
    del config["models"]
    one, two, _ = (str(agent) for agent in family.agents)
    base = str(family.base)
    config["slices"] = [
        {"sources": [{"model": m, "layer_range": [i, i + 1]} for m in models]}
        for i, models in enumerate([(base, one), (base, one, two)])
    ]


@kind("error", f"agent2 lacks 1 tensor that the merge needs: {UP}")
def a_missing_tensor(family: Family, config: dict[str, Any]) -> None:
    state = state_of(family, family.agents[2])
    del state[UP]
    rewrite(family.agents[2], state)


@kind(
    "warning",
    "agent2 holds 1 tensor that MergeKit does not merge; .* lacks it: v_head.weight",
)
def an_extra_tensor(family: Family, config: dict[str, Any]) -> None:
    state = state_of(family, family.agents[2])
    state["v_head.weight"] = torch.ones(1, 32)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    rewrite(family.agents[2], state)


@kind("error", "differ in num_hidden_layers .*2 in .*base.*1 in .*agent0")
def layer_counts(family: Family, config: dict[str, Any]) -> None:
    edit(family.agents[0], num_hidden_layers=1)


@kind("warning", r"'paramters': MergeKit knows no such key there.*Did you mean 'parameters'\?")
def paramters(family: Family, config: dict[str, Any]) -> None:
    config["paramters"] = {"epsilon": 1e-4}


@kind("warning", r"'epsilon' has no effect there: parameters .* under `parameters:`")
def a_parameter_at_the_top(family: Family, config: dict[str, Any]) -> None:
    config["epsilon"] = 1e-4


@kind("warning", r"'r' in models\[0\] has no effect there: .* under `parameters:`")
def a_parameter_beside_model(family: Family, config: dict[str, Any]) -> None:
    config["models"][0]["r"] = 0.2


@kind("warning", r"'epsilom' in parameters: .*no such parameter.*Did you mean 'epsilon'\?")
def epsilom(family: Family, config: dict[str, Any]) -> None:
    config["parameters"] = {"epsilom": 1e-4}


@kind("warning", r"models\[3\] .*base.*the base model has no parameters of its own")
def parameters_of_the_base(family: Family, config: dict[str, Any]) -> None:
    config["models"].append({"model": str(family.base), "parameters": {"weight": 0.5}})


@kind("error", r"models\[1\] .*epsilon: -1 is not allowed")
def a_value_that_is_not_allowed(family: Family, config: dict[str, Any]) -> None:
    config["models"][1]["parameters"] = {"epsilon": -1}


@kind("error", "are the same model .* List it once")
def one_agent_under_two_paths(family: Family, config: dict[str, Any]) -> None:
    link = family.folder / "link"
    link.symlink_to(family.agents[0])
    config["models"].append({"model": str(link)})


@kind("error", "models: .*agent0 is listed twice")
def one_agent_twice(family: Family, config: dict[str, Any]) -> None:
    config["models"].append(config["models"][0])


@kind("warning", "is the base model .* under another name")
def the_base_under_another_name(family: Family, config: dict[str, Any]) -> None:
    config["models"].append({"model": f"{family.folder}/./base"})


@kind("error", "models: RAM needs a base model")
def no_base(family: Family, config: dict[str, Any]) -> None:
    del config["base_model"]


@kind("error", "models: no agent besides the base model")
def no_agent(family: Family, config: dict[str, Any]) -> None:
    config["models"] = [{"model": str(family.base)}]


@kind("error", r"dtype: 'bf16' is not one of bfloat16.*Did you mean 'bfloat16'\?")
def an_unknown_dtype(family: Family, config: dict[str, Any]) -> None:
    config["dtype"] = "bf16"


@kind("error", "out_dtype: 'int64' is not one of")
def an_integer_dtype(family: Family, config: dict[str, Any]) -> None:
    config["out_dtype"] = "int64"


@kind("error", r"modules.defalt: .*no such module.*Did you mean 'default'\?")
def a_wrong_module(family: Family, config: dict[str, Any]) -> None:
    config["modules"] = {"defalt": {"models": config.pop("models")}}


@kind("error", r"agent1: .*model-00002-of-00002.safetensors missing from .*agent1, though model.")
def a_missing_shard(family: Family, config: dict[str, Any]) -> None:
    shutil.rmtree(family.agents[1])
    save(family.agents[1], tiny_config(), family.states[family.agents[1]], shards=2)
    (family.agents[1] / "model-00002-of-00002.safetensors").unlink()


@kind("error", "agent1: .*model.safetensors is a Git LFS pointer.*git lfs pull")
def a_git_lfs_pointer(family: Family, config: dict[str, Any]) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234\n"
    (family.agents[1] / "model.safetensors").write_text(pointer)


@kind("error", "agent1: .*model.safetensors cannot be read, it is damaged or incomplete")
def a_truncated_file(family: Family, config: dict[str, Any]) -> None:
    file = family.agents[1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


@kind("error", "agent1: .*holds no model.safetensors")
def no_weights(family: Family, config: dict[str, Any]) -> None:
    (family.agents[1] / "model.safetensors").unlink()


@kind("error", "architectures differ .*Qwen2ForCausalLM.*LlamaForCausalLM: .*agent1")
def another_architecture(family: Family, config: dict[str, Any]) -> None:
    edit(family.agents[1], architectures=["LlamaForCausalLM"], model_type="llama")


@kind("error", "adapter.* Give --lora-merge-cache FOLDER")
def an_adapter_without_a_cache(family: Family, config: dict[str, Any]) -> None:
    config["models"][0]["model"] = f"{family.base}+{family.folder / 'adapter'}"


@kind("error", "could not be looked up on the hub")
def a_model_that_is_nowhere(family: Family, config: dict[str, Any]) -> None:
    config["models"][0]["model"] = "nobody/no-such-model"


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str, tmp_path: Path) -> None:
    level, breaks, says = KINDS[name]
    family = make_family(tmp_path / "models", dtype=torch.bfloat16)
    config = config_of(family)
    breaks(family, config)
    status, output = check(config, tmp_path)
    assert status == (1 if level == "error" else 0), output
    assert re.search(rf"{level}: [^:]*.*{says}", output), output
    assert ("error: " in output) == (level == "error"), output


def test_no_false_alarm(tmp_path: Path) -> None:
    """The example configs, and configs that are as they should be."""
    for example in EXAMPLES.glob("*.yml"):
        config = yaml.safe_load(example.read_text())
        status, output = check(config, tmp_path, str(tmp_path / "out"))
        assert (status, output.rpartition(": ")[2]) == (
            0,
            "0 errors, 0 warnings; 30 tensors planned.",
        )
    tied = make_family(tmp_path / "tied", dtype=torch.float32, tie_word_embeddings=True, shards=2)
    llama = make_family(tmp_path / "llama", "llama", pickled=True)
    base, *agents = (str(folder) for folder in (llama.base, *llama.agents))
    sources = [{"model": m, "layer_range": [0, 1]} for m in (base, *agents)]
    files = [f"{folder}/pytorch_model.bin" for folder in (base, *agents)]
    for config in (
        config_of(tied, "ram_plus", dtype="float32", out_dtype="bfloat16"),
        config_of(tied, parameters={"epsilon": "1e-5", "weight": [{"filter": "mlp", "value": 1}]}),
        config_of(llama, "ramplus_tl", dtype="float32", chat_template="auto"),
        {"merge_method": "ram", "base_model": base, "slices": [{"sources": sources}]},
        {
            "merge_method": "ram",
            "base_model": files[0],
            "models": [{"model": file} for file in files[1:]],
        },
    ):
        status, output = check(config, tmp_path)
        assert status == 0, output
        assert "0 errors, 0 warnings" in output, output


def test_the_same_checks_come_before_a_merge(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors before anything is read or written, all of one stage together; warnings once."""
    family = make_family(tmp_path / "models")
    a_git_lfs_pointer(family, {})
    quantization_config(family, {})
    out = tmp_path / "out"

    def merge(config: dict[str, Any], folder: Path = out) -> None:
        parsed = MergeConfiguration.model_validate(config)
        run_merge(parsed, str(folder), MergeOptions(quiet=True, copy_tokenizer=False))

    with pytest.raises(ConfigError, match=r"(?s)Git LFS pointer.*quantization_config"):
        merge(config_of(family))
    family = make_family(tmp_path / "more", dtype=torch.float32)
    config = config_of(family, "ram_plus", dtype="bfloat16", paramters={}, out_dtype="int8")
    with pytest.raises(ConfigError, match="out_dtype: 'int8'"):
        merge(config)
    an_extra_tensor(family, config)
    del config["out_dtype"]
    caplog.clear()
    with pytest.raises(AssertionError, match="a check read the weight"):
        merge(config)  # it goes on to work, which this module forbids
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("mergekit_ram")]
    assert len(messages) == 6, messages  # the key, four models' dtypes, the extra tensor
    assert len(set(messages)) == 6
    assert not out.exists()
    with pytest.raises(ConfigError, match="output folder is the folder of"):
        merge(config, family.agents[1])
    assert load(family.agents[1]).keys() == family.states[family.base].keys()


def test_output_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = make_family(tmp_path / "models")
    config = config_of(family, out_dtype="float32")
    link = tmp_path / "link"
    link.symlink_to(family.agents[2])
    status, output = check(config, tmp_path, str(link))
    assert status == 1
    assert f"the output folder is the folder of {family.agents[2]}" in output
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file" in check(config, tmp_path, str(file))[1]
    elements = sum(tensor.numel() for tensor in family.states[family.base].values())
    for free, wanted in ((elements * 4 - 1, 1), (elements * 4, 0)):
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        status, output = check(config, tmp_path, str(tmp_path / "new" / "folder"))
        assert status == wanted, output
    monkeypatch.undo()


def test_adapters_and_models_elsewhere_are_checked_by_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No adapter is merged and nothing is downloaded."""
    family = make_family(tmp_path / "models")
    config = config_of(family)
    adapter = tmp_path / "adapter"
    config["models"][0]["model"] = f"{family.base}+{adapter}"
    options = "--lora-merge-cache", str(tmp_path / "cache")
    assert f"{adapter} does not exist" in check(config, tmp_path, *options)[1]
    adapter.mkdir()
    assert "holds no adapter_config.json" in check(config, tmp_path, *options)[1]
    (adapter / "adapter_config.json").write_text("{}")
    for out in (adapter, family.base):
        status, output = check(config, tmp_path, str(out), *options)
        assert status == 1
        assert "the output folder is the folder of" in output
    status, output = check(config, tmp_path, "--lora-merge-cache", str(tmp_path / "cache"))
    assert status == 0, output
    assert "0 errors, 0 warnings; 27 tensors planned" in output, output
    assert not (tmp_path / "cache").exists()

    tensor = SimpleNamespace(dtype="F8_E4M3", shape=[48, 32])
    file = SimpleNamespace(tensors={UP: tensor})
    found = SimpleNamespace(files_metadata={"model.safetensors": file})
    hub = preflight_models.headers.huggingface_hub
    monkeypatch.setattr(hub, "get_safetensors_metadata", lambda name, revision: found)
    monkeypatch.setattr(
        hub, "hf_hub_download", lambda name, file, revision: family.base / "config.json"
    )
    monkeypatch.setattr(
        "mergekit.common.ModelReference.config", lambda self, **kwargs: tiny_config()
    )
    config["models"][0]["model"] = "somebody/agent"
    status, output = check(config, tmp_path)
    assert status == 1
    assert "somebody/agent is quantised (F8_E4M3 values" in output, output
    assert "somebody/agent lacks 25 tensors" in output, output


@pytest.mark.parametrize(
    ("damage", "level", "says"),
    [
        ("lost", "error", "agent1 lacks 1 tensor that the merge needs: {name}"),
        (
            "lost layer",
            "error",
            "agent1 lacks 12 tensors .* model.layers.1.mlp.experts.0.down_",
        ),
        ("shape", "error", "'{name}': shapes differ .*3 x 3 in .*agent1"),
        ("float8", "error", "agent1 is quantised .*F8_E4M3 values in {name}"),
        ("float32", "warning", "agent1 holds float32 in 1 tensor .*`dtype: float32`"),
        ("none", "", "0 errors, 0 warnings"),
    ],
)
def test_experts_that_are_stored_one_by_one(
    tmp_path: Path, damage: str, level: str, says: str
) -> None:
    """MergeKit fuses them: the checks look at what each model stores."""
    family = write_family(
        tmp_path / "models", replace(KINDS_OF_MODELS["qwen3-moe"], dtype=torch.bfloat16)
    )
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    state = load(family.agents[1])
    assert name in state
    if damage == "lost layer":
        state = {n: t for n, t in state.items() if "layers.1.mlp.experts" not in n}
    elif damage == "lost":
        del state[name]
    elif damage != "none":
        state[name] = {
            "shape": torch.ones(3, 3, dtype=torch.bfloat16),
            "float8": state[name].to(torch.float8_e4m3fn),
            "float32": state[name].float(),
        }[damage]
    for file in family.agents[1].glob("model*.safetensors*"):
        file.unlink()
    rewrite(family.agents[1], state)
    status, output = check(config_of(family, dtype="bfloat16"), tmp_path)
    assert status == (level == "error"), output
    assert re.search(f"{level}.*{says.format(name=re.escape(name))}", output), output
    assert output.count("error: ") == (level == "error"), output
    assert output.count("warning: ") == (level == "warning"), output


@pytest.mark.parametrize(
    ("name", "quantised"),
    [
        ("model.layers.0.self_attn.q_proj.weight_scale", True),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", True),
        ("model.layers.0.self_attn.q_proj.input_scale", True),
        ("model.layers.0.mlp.experts.w13_weight_scale", True),
        ("model.layers.0.mlp.experts.gate_up_proj_scales", True),
        ("model.layers.0.self_attn.q_proj.qweight", True),
        ("model.layers.0.self_attn.q_proj.weight.absmax", True),
        ("model.layers.0.altup.correct_output_scale", False),
        ("logit_scale", False),
        ("model.layers.0.layer_scale", False),
        ("model.layers.0.router.scale", False),
    ],
)
def test_names_of_quantised_checkpoints(tmp_path: Path, name: str, quantised: bool) -> None:
    family = make_family(tmp_path / "models")
    rewrite(family.agents[0], state_of(family, family.agents[0]) | {name: torch.ones(2)})
    status, output = check(config_of(family), tmp_path)
    assert ("is quantised" in output) == quantised == (status == 1), output


def test_settings_that_would_fail_late(tmp_path: Path) -> None:
    """Tokenizers, chat templates, layer ranges, adapters and odd configurations."""
    family = make_family(tmp_path / "models")
    base, first = str(family.base), str(family.agents[0])
    sources = [{"model": m, "layer_range": [0, 5]} for m in (base, first)]
    edit(family.agents[2], num_layers=None, text_config="none")
    for change, says in (
        ({"tokenizer": {"source": "unoin"}}, "tokenizer source 'unoin': did you mean 'union'?"),
        ({"tokenizer": {"source": "./no/folder"}}, "there is no such folder"),
        ({"tokenizer_source": "union"}, "holds no tokenizer"),
        ({"chat_template": "nope"}, "neither a Jinja template nor one of auto, alpaca"),
        ({"models": None, "slices": [{"sources": sources}]}, "[0, 5] goes beyond the 2 layers"),
        ({"parameters": {"epsilon": []}}, "epsilon: [] is not allowed"),
        ({"merge_method": ["ram"]}, "merge_method is ['ram']"),
    ):
        config = {k: v for k, v in (config_of(family) | change).items() if v is not None}
        status, output = check(config, tmp_path)
        assert status == 1, change
        assert says in output, output
        assert "MergeKit cannot plan" not in output, output
    assert check(config_of(family), tmp_path)[0] == 0
    with pytest.raises(ConfigError, match="MergeKit finds no tensor to merge"):
        check_plan(MergeConfiguration.model_validate(config_of(family)), [])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("merge_method: ties\nmodels: []", "merge_method is 'ties'; mergekit-ram looks at ram,"),
        ("a: [1", "is not valid YAML"),
        ("merge_method: ram\n---\nmerge_method: ram\n", "holds 2 documents"),
        ("just text", "is no merge config"),
        ("merge_method: ram\nbase_model: x\nmodels: 3", "models"),
        ("merge_method: ram\nbase_model: x", "Exactly one of 'models', 'slices', or 'modules'"),
    ],
)
def test_what_is_no_config(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "config.yml"
    file.write_text(text)
    for command in ("check", "overlap", "verify"):
        folder = [str(tmp_path)] if command == "verify" else []
        result = CliRunner().invoke(main, [command, str(file), *folder])
        assert result.exit_code == 1, result.output
        assert says in " ".join(result.output.split()), result.output


def test_errors_have_one_base() -> None:
    assert issubclass(ConfigError, RamError)
    assert issubclass(ConfigError, ValueError)
