"""Architectures in tiny sizes, as transformers writes them: merged, recomputed, loaded and run.

Every merge is recomputed from the files, tensor by tensor and bit for bit, by the reference rule,
with rho counted over all tensors of the output. Then transformers loads the output, which must
neither lack nor have anything too much, and runs it once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from checkpoints import Family, StateDict, changed, load
from mergekit.common import ModelReference
from safetensors.torch import load_file, save_file
from test_end_to_end import assert_same, config_of, merged

from mergekit_ram import reference
from mergekit_ram.errors import ConfigError

BF16, FP32 = torch.bfloat16, torch.float32
EPSILON = 1e-5
# Below every alpha, rho differs between agents and between tensors.
PLUS = {"r": 0.5, "alpha": 10.0}
IMAGE = 60

FamilyOf = Callable[[str], Family]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models of some thousand parameters wait for threads longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def as_it_is(state: StateDict) -> StateDict:
    return state


def renamed(*rules: tuple[str, str]) -> Callable[[StateDict], StateDict]:
    """Change names by regular expressions, one after the other."""

    def rename(state: StateDict) -> StateDict:
        result = {}
        for name, tensor in state.items():
            for pattern, replacement in rules:
                name = re.sub(pattern, replacement, name)
            result[name] = tensor
        return result

    return rename


def fused(state: StateDict) -> StateDict:
    """Stack experts that have a file entry each: MergeKit merges and writes them as one tensor."""
    state = renamed(
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"(experts\.\d+)\.w1\.", r"\1.gate_proj."),
        (r"(experts\.\d+)\.w2\.", r"\1.down_proj."),
        (r"(experts\.\d+)\.w3\.", r"\1.up_proj."),
    )(state)
    pattern = re.compile(r"(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    parts: dict[str, dict[str, dict[int, torch.Tensor]]] = {}
    result = {}
    for name, tensor in state.items():
        if match := pattern.fullmatch(name):
            layer, expert, kind = match.groups()
            parts.setdefault(layer, {}).setdefault(kind, {})[int(expert)] = tensor
        else:
            result[name] = tensor
    for layer, kinds in parts.items():
        gate, up, down = ([kinds[k][e] for e in range(4)] for k in ("gate", "up", "down"))
        result[f"{layer}.gate_up_proj"] = torch.stack(
            [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        )
        result[f"{layer}.down_proj"] = torch.stack(down)
    return result


def gpt2_of_the_hub(state: StateDict) -> StateDict:
    """Names without a prefix, and the causal mask among the tensors."""
    state = renamed((r"^transformer\.", ""))(state)
    return state | {f"h.{i}.attn.bias": torch.ones(1, 1, 32, 32).tril() for i in range(2)}


def bert_of_the_hub(state: StateDict) -> StateDict:
    """Old names of the norms, and a buffer of integers."""
    state = renamed(
        (r"\.LayerNorm\.weight$", ".LayerNorm.gamma"), (r"\.LayerNorm\.bias$", ".LayerNorm.beta")
    )(state)
    return state | {"bert.embeddings.position_ids": torch.arange(32)[None]}


@dataclass(frozen=True)
class Kind:
    """One architecture.

    Attributes:
        model: name of transformers' class of the model.
        config: name of transformers' class of its configuration.
        settings: what makes it small.
        dtype: of the files.
        architecture: named by the files' configuration where it is not ``model``.
        on_disk: from what ``save_pretrained`` writes to how published files are laid out.
        in_output: from the tensors in the files to those that MergeKit writes.
        save: further arguments of ``save_pretrained``.
    """

    model: str
    config: str
    settings: Mapping[str, Any]
    dtype: torch.dtype = FP32
    architecture: str | None = None
    on_disk: Callable[[StateDict], StateDict] = as_it_is
    in_output: Callable[[StateDict], StateDict] = as_it_is
    save: Mapping[str, Any] = field(default_factory=dict)

    def read(self, folder: Path) -> StateDict:
        """Return a model's tensors as MergeKit names and stacks them."""
        return self.in_output(load(folder))


TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = TOKENS | {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
HEADS = TEXT | {"head_dim": 8}
GEMMA = HEADS | {"query_pre_attn_scalar": 8}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "decoder_sparse_step": 1,
}
DELTA_NET = HEADS | {
    # Three layers of linear attention and one of full attention.
    "num_hidden_layers": 4,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
ENCODER = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
# MergeKit's definitions know three of the mergers that take tokens from inner layers.
VISION = {
    "depth": 3,
    "hidden_size": 16,
    "out_hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
}
DEEPSTACK = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1, 2]}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}


def vision(model: str, text: dict[str, Any], tower: dict[str, Any], **settings: Any) -> Kind:
    """A vision-language model of Qwen's kind."""
    return Kind(
        f"{model}ForConditionalGeneration",
        f"{model}Config",
        {"text_config": text, "vision_config": tower, "image_token_id": IMAGE} | settings,
    )


TIED = {"tie_word_embeddings": True}

KINDS = {
    "qwen2": Kind("Qwen2ForCausalLM", "Qwen2Config", TEXT, BF16),
    "qwen3": Kind("Qwen3ForCausalLM", "Qwen3Config", HEADS | TIED, BF16),
    "llama": Kind("LlamaForCausalLM", "LlamaConfig", TEXT),
    "llama-tied": Kind("LlamaForCausalLM", "LlamaConfig", TEXT | TIED, BF16),
    "mistral": Kind("MistralForCausalLM", "MistralConfig", TEXT, BF16),
    "gemma2": Kind("Gemma2ForCausalLM", "Gemma2Config", GEMMA),
    "gemma3": Kind("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA, BF16),
    "phi3": Kind("Phi3ForCausalLM", "Phi3Config", TEXT),
    "gpt2": Kind(
        "GPT2LMHeadModel",
        "GPT2Config",
        TOKENS | {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    ),
    "mamba": Kind("MambaForCausalLM", "MambaConfig", ENCODER | {"state_size": 4}),
    "t5": Kind(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 64,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "feed_forward_proj": "gated-gelu",
            "decoder_start_token_id": 0,
        },
    ),
    "bert-classifier": Kind("BertForSequenceClassification", "BertConfig", ENCODER),
    "roberta": Kind("RobertaForMaskedLM", "RobertaConfig", ENCODER, BF16),
    # Experts with a file entry each, as on the hub and as transformers writes them.
    "qwen3-moe": Kind(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", HEADS | EXPERTS, BF16, in_output=fused
    ),
    "glm4-moe": Kind(
        "Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        HEADS
        | {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        in_output=fused,
    ),
    "mixtral": Kind(
        "MixtralForCausalLM",
        "MixtralConfig",
        TEXT | {"num_local_experts": 4, "num_experts_per_tok": 2},
        in_output=fused,
    ),
    "qwen2.5-vl": vision("Qwen2_5_VL", TEXT | MROPE, VISION),
    "qwen3-vl": vision("Qwen3VL", HEADS | MROPE, VISION | DEEPSTACK),
    # Architectures that MergeKit has no definition of, and infers.
    "olmo": Kind("OlmoForCausalLM", "OlmoConfig", TEXT),
    "smollm3": Kind("SmolLM3ForCausalLM", "SmolLM3Config", TEXT | TIED, BF16),
    "qwen3-next": Kind(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        DELTA_NET | EXPERTS | {"shared_expert_intermediate_size": 8},
        in_output=fused,
    ),
    "qwen3.5": vision("Qwen3_5", DELTA_NET | MROPE, VISION | {"num_position_embeddings": 16}),
}
KINDS |= {
    "gpt2-hub": replace(
        KINDS["gpt2"],
        on_disk=gpt2_of_the_hub,
        in_output=lambda state: {
            f"transformer.{n}": t for n, t in state.items() if not n.endswith(".attn.bias")
        },
    ),
    # The layout of transformers 5 in memory, which it writes on request.
    "qwen3-moe-stacked": replace(KINDS["qwen3-moe"], save={"save_original_format": False}),
    "gemma3-vl": Kind(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": GEMMA,
            "vision_config": TOWER | {"vision_use_head": False},
            "mm_tokens_per_image": 4,
            "image_token_id": IMAGE,
        },
        BF16,
        # transformers 5 leaves out a part of the published names, which MergeKit asks for.
        on_disk=renamed((r"^vision_tower\.", "vision_tower.vision_model.")),
    ),
    "mistral3": Kind(
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        {
            "text_config": HEADS | {"model_type": "mistral"},
            "vision_config": TOWER | {"model_type": "pixtral", "head_dim": 8},
            "image_token_id": IMAGE,
        },
    ),
}


def write_family(
    folder: Path,
    kind: Kind,
    *,
    densities: Sequence[float] = (0.1, 0.5, 0.4),
    scale: float = 2e-3,
    agents_dtype: torch.dtype | None = None,
) -> Family:
    """Write a new model and agents that differ from it in some elements of every parameter."""
    torch.manual_seed(0)
    config = getattr(transformers, kind.config)(**kind.settings)
    model = getattr(transformers, kind.model)(config).to(kind.dtype)
    start = {n: p.detach().float().clone() for n, p in model.named_parameters()}

    def save(name: str) -> Path:
        path = folder / name
        model.save_pretrained(path, **kind.save)
        if kind.architecture:
            model.config.architectures = [kind.architecture]
            model.config.save_pretrained(path)
        if kind.on_disk is not as_it_is:
            tensors = {n: t.contiguous() for n, t in kind.on_disk(load(path)).items()}
            save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path

    base = save("base")
    model.to(agents_dtype or kind.dtype)
    agents = []
    for i, density in enumerate(densities):
        state = changed(start, seed=i + 1, density=density, scale=scale)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(state[name])
        agents.append(save(f"agent{i}"))
    return Family(folder, base, agents, {})


@pytest.fixture(scope="session")
def family_of(tmp_path_factory: pytest.TempPathFactory) -> FamilyOf:
    """Families of the kinds above, each written once."""

    @functools.cache
    def family(name: str) -> Family:
        return write_family(tmp_path_factory.mktemp(name), KINDS[name])

    return family


def overlaps(base: StateDict, agents: Sequence[StateDict]) -> list[tuple[int, int]]:
    """Elements that each agent shares and that it alone changed, over all tensors."""
    shared, unique = [0] * len(agents), [0] * len(agents)
    for name, tensor in base.items():
        if not tensor.is_floating_point():
            continue
        tensors = [agent[name] for agent in agents]
        counts = reference.count(tensor, tensors, epsilon=[EPSILON] * len(agents))
        for i, row in enumerate(counts["overlap"]):
            unique[i] += row[0]
            shared[i] += sum(row[1:])
    return list(zip(shared, unique, strict=True))


def ratios(base: StateDict, agents: Sequence[StateDict]) -> list[float]:
    """rho of each agent over all tensors, where each alone changed some element."""
    return [shared / unique for shared, unique in overlaps(base, agents)]


def recomputed(
    base: StateDict,
    agents: Sequence[StateDict],
    factors: Callable[[str], Sequence[float]],
    *,
    weight: Sequence[float] | None = None,
) -> StateDict:
    """The merge of all tensors, with each agent's rescale factor by the tensor's name."""
    return {
        name: reference.merge(
            tensor,
            [agent[name] for agent in agents],
            epsilon=[EPSILON] * len(agents),
            rescale=factors(name),
            weight=weight,
        )
        if tensor.is_floating_point()
        else tensor
        for name, tensor in base.items()
    }


def read(family: Family, kind: Kind) -> tuple[StateDict, list[StateDict]]:
    return kind.read(family.base), [kind.read(agent) for agent in family.agents]


def loaded(folder: Path) -> tuple[transformers.PreTrainedModel, dict[str, set[str]]]:
    """A model folder as transformers loads it, and what it says of keys that do not fit."""
    (architecture,) = transformers.AutoConfig.from_pretrained(folder).architectures
    cls = getattr(transformers, architecture)
    model, report = cls.from_pretrained(folder, output_loading_info=True)
    return model, {key: set(values) for key, values in report.items() if values}


def runs(model: transformers.PreTrainedModel) -> bool:
    """Whether one run gives finite values, with an image if the model takes any."""
    name = type(model).__name__
    inputs: dict[str, Any] = {"input_ids": torch.tensor([[3, 4, 5, 6, 7, 8]])}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor([[0, 3]])
    if hasattr(model.config, "vision_config"):
        image = (1, 3, 16, 16)
        if "Qwen" in name:
            # Four patches of two frames and three colours, of which the merger makes one token.
            image = (4, 2 * 3 * 4 * 4)
            inputs["input_ids"][0, 2] = IMAGE
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
            inputs["image_grid_thw"] = torch.tensor([[1, 2, 2]])
        else:
            inputs["input_ids"][0, 1:5] = IMAGE
            if "Mistral" in name:
                inputs["image_sizes"] = torch.tensor([[16, 16]])
        generator = torch.Generator().manual_seed(0)
        inputs["pixel_values"] = torch.randn(image, generator=generator).to(model.dtype)
    with torch.no_grad():
        return bool(model(**inputs).logits.isfinite().all())


def assert_loads_and_runs(folder: Path, dtype: torch.dtype) -> None:
    model, misfits = loaded(folder)
    assert not misfits
    assert model.dtype == dtype
    assert runs(model)


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
@pytest.mark.parametrize("name", KINDS)
def test_architectures(name: str, method: str, family_of: FamilyOf, tmp_path: Path) -> None:
    kind, family = KINDS[name], family_of(name)
    plus = method == "ram_plus"
    config = config_of(family, method, parameters=PLUS if plus else {})
    got = merged(config, tmp_path / "out")
    base, agents = read(family, kind)
    factors = [1.0] * len(agents)
    if plus:
        rho = ratios(base, agents)
        # The case tests something: no factor is 1 or at its limit, and no two are equal.
        assert 0 < min(rho) < max(rho) < PLUS["alpha"]
        assert len(set(rho)) == len(rho)
        factors = [1 + PLUS["r"] * x for x in rho]
    assert_same(got, recomputed(base, agents, lambda _: factors))
    assert {tensor.dtype for tensor in got.values()} == {kind.dtype}
    assert_loads_and_runs(tmp_path / "out", kind.dtype)


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-moe-stacked", "mixtral"])
def test_experts_stay_in_their_place(name: str, family_of: FamilyOf, tmp_path: Path) -> None:
    """What transformers loads is the merge of what it loads, whatever the layout of the files."""
    family = family_of(name)
    merged(config_of(family), tmp_path / "out")
    base, *agents, out = (
        {n: p.detach() for n, p in loaded(folder)[0].named_parameters()}
        for folder in (family.base, *family.agents, tmp_path / "out")
    )
    assert_same(out, recomputed(base, agents, lambda _: [1.0] * len(agents)))


# MergeKit's modules of each, and the names of the last module's tensors.
PARTS = ("text_decoder", "multi_modal_projector", "vision_tower")
MODULES = {
    "qwen2.5-vl": (PARTS, r"visual\.(?!merger)"),
    "qwen3-vl": (PARTS, r"model\.visual\.(patch_embed|pos_embed|blocks)\."),
    "gemma3-vl": (PARTS, r"vision_tower\."),
    "mistral3": (PARTS, r"vision_tower\."),
    "qwen3.5": (
        ("default", "model.language_model.layers", "model.visual.blocks"),
        r"model\.visual\.blocks\.",
    ),
}


def modular(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The same config with the models listed under each module."""
    models = config.pop("models")
    return config | {"modules": {part: {"models": models} for part in MODULES[name][0]}}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, family_of: FamilyOf, tmp_path: Path) -> None:
    """rho is counted over all modules, and settings of a module are its own."""
    kind, family = KINDS[name], family_of(name)
    modules, last = MODULES[name]
    config = modular(config_of(family, "ram_plus", parameters=PLUS), name)
    config["modules"][modules[-1]]["parameters"] = {"r": 0.25}
    got = merged(config, tmp_path / "out")
    base, agents = read(family, kind)
    rho = ratios(base, agents)

    def factors(tensor: str) -> list[float]:
        return [1 + (0.25 if re.match(last, tensor) else PLUS["r"]) * x for x in rho]

    assert 0 < sum(bool(re.match(last, tensor)) for tensor in base) < len(base)
    assert_same(got, recomputed(base, agents, factors))
    assert_loads_and_runs(tmp_path / "out", kind.dtype)


def store_head(folder: Path, embedding: str) -> None:
    """Store a copy of a tied head, as some exporters do."""
    state = load(folder)
    assert "lm_head.weight" not in state
    state["lm_head.weight"] = state[embedding].clone()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_tied_duplicate_counts_once_in_an_inferred_architecture(tmp_path: Path) -> None:
    """MergeKit does not know there which weights are tied, but which have a row per token."""
    kind = KINDS["smollm3"]
    family = write_family(tmp_path, kind)
    base, agents = read(family, kind)
    for folder in (family.base, *family.agents):
        store_head(folder, "model.embed_tokens.weight")
    got = merged(config_of(family, "ram_plus", parameters=PLUS), tmp_path / "out")
    factors = [1 + PLUS["r"] * x for x in ratios(base, agents)]
    wanted = recomputed(base, agents, lambda _: factors)
    assert_same(got, wanted | {"lm_head.weight": wanted["model.embed_tokens.weight"]})
    assert_loads_and_runs(tmp_path / "out", BF16)


def lacking(tensor: str) -> str:
    """Pattern of errors, MergeKit's and ours, that say which tensor the first agent lacks."""
    return rf"{tensor}.* required but not present in .*agent0|agent0 lacks .* needs: {tensor}"


class TestLimitsOfMergeKit:
    """What MergeKit 0.1.5 does not do, it does not do for its own methods either."""

    @pytest.mark.parametrize("method", ["linear", "ram", "ram_plus"])
    @pytest.mark.parametrize(
        ("kind", "message"),
        [
            # The number of layers is looked up where older versions of transformers had it.
            (
                vision("Qwen2VL", TEXT | MROPE, VISION | {"embed_dim": 16, "mlp_ratio": 2}),
                "no attribute num_hidden_layers",
            ),
            # The published checkpoint has a pooler. Models trained from it do not.
            (
                Kind("BertForMaskedLM", "BertConfig", ENCODER),
                lacking(r"bert\.pooler\.dense\."),
            ),
            # Published names have a part more than those that transformers 5 writes.
            (
                replace(KINDS["gemma3-vl"], on_disk=as_it_is),
                lacking(r"vision_tower\.vision_model\."),
            ),
        ],
        ids=["qwen2-vl", "bert", "gemma3-vl"],
    )
    def test_what_it_refuses(self, kind: Kind, message: str, method: str, tmp_path: Path) -> None:
        family = write_family(tmp_path, kind)
        config = config_of(family, method, parameters={"weight": 1.0})
        with pytest.raises((RuntimeError, ValueError), match=message):
            merged(config, tmp_path / "out")
        assert not (tmp_path / "out" / "config.json").exists()

    @pytest.mark.parametrize(
        ("kind", "missing", "unexpected"),
        [
            # As published: saved by the pre-training class, for the masked language model.
            (
                Kind(
                    "BertForPreTraining",
                    "BertConfig",
                    ENCODER,
                    architecture="BertForMaskedLM",
                    on_disk=bert_of_the_hub,
                    in_output=renamed((r"\.gamma$", ".weight"), (r"\.beta$", ".bias")),
                ),
                r"cls\.predictions\.transform\..*",
                r"bert\.pooler\..*",
            ),
            # Experts that not every layer has, and that have a file entry each.
            (
                Kind(
                    "DeepseekV3ForCausalLM",
                    "DeepseekV3Config",
                    TEXT
                    | {
                        "num_key_value_heads": 2,
                        "n_routed_experts": 4,
                        "num_experts_per_tok": 2,
                        "moe_intermediate_size": 8,
                        "n_group": 1,
                        "topk_group": 1,
                        "first_k_dense_replace": 1,
                        "q_lora_rank": 8,
                        "kv_lora_rank": 8,
                        "qk_rope_head_dim": 4,
                        "qk_nope_head_dim": 4,
                        "v_head_dim": 8,
                    },
                    in_output=fused,
                ),
                r"model\.layers\.1\.mlp\.experts\.(gate_up|down)_proj",
                "",
            ),
            # Names of the text model lose a part in loading that MergeKit's conversion keeps.
            (
                Kind(
                    "LlavaForConditionalGeneration",
                    "LlavaConfig",
                    {
                        "text_config": TEXT | {"model_type": "llama"},
                        "vision_config": TOWER
                        | {"model_type": "clip_vision_model"}
                        | {"patch_size": 8},
                        "image_token_id": IMAGE,
                    },
                    in_output=renamed(
                        (r"^language_model\.lm_head", "lm_head"),
                        (r"^language_model\.model\.", "model.language_model."),
                        (r"^(vision_tower|multi_modal_projector)\.", r"model.\1."),
                    ),
                ),
                r"lm_head\.weight|model\.language_model\..*",
                "",
            ),
        ],
        ids=["bert", "deepseek-v3", "llava"],
    )
    def test_what_it_leaves_out(
        self,
        kind: Kind,
        missing: str,
        unexpected: str,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """What is written is right, and of what is not, by any method, we warn."""
        family = write_family(tmp_path, kind)
        outputs = {
            method: merged(config_of(family, method, parameters=parameters), tmp_path / method)
            for method, parameters in (("linear", {"weight": 1.0}), ("ram_plus", PLUS))
        }
        got = outputs["ram_plus"]
        assert caplog.text.count("that MergeKit does not merge; the output lacks them") == 1
        assert got.keys() == outputs["linear"].keys()
        base, agents = read(family, kind)
        assert got.keys() < base.keys()
        base = {name: base[name] for name in got}
        factors = [1 + PLUS["r"] * x for x in ratios(base, agents)]
        assert_same(got, recomputed(base, agents, lambda _: factors))
        model, misfits = loaded(tmp_path / "ram_plus")
        names = {name for name, _ in model.named_parameters()}
        wanted = {
            "missing_keys": {name for name in names if re.fullmatch(missing, name)},
            "unexpected_keys": {name for name in got if re.fullmatch(unexpected, name)},
        }
        assert misfits == {key: found for key, found in wanted.items() if found}
        assert runs(model)

    @pytest.mark.parametrize("storing", ["base", "agents"])
    def test_inferred_heads_that_not_all_files_store(self, storing: str, tmp_path: Path) -> None:
        """MergeKit writes a head that no agent changed and loading does not tie; or fails late."""
        family = write_family(tmp_path, KINDS["smollm3"])
        for folder in (family.base,) if storing == "base" else family.agents:
            store_head(folder, "model.embed_tokens.weight")
        for method in ("ram", "ram_plus"):
            with pytest.raises(ConfigError, match=r"'lm_head\.weight' is stored in .* but not in"):
                merged(config_of(family, method), tmp_path / method)
            assert not (tmp_path / method).exists()
        config = config_of(family, "task_arithmetic", parameters={"weight": 1.0})
        if storing == "agents":
            with pytest.raises(ValueError, match=r"Base input is not present .* lm_head\.weight"):
                merged(config, tmp_path / "out")
            return
        merged(config, tmp_path / "out")
        model, misfits = loaded(tmp_path / "out")
        assert not misfits
        assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


class TestRealConfigs:
    """Merges that people have published, with tiny models of the same families."""

    def test_the_authors_own(self, tmp_path: Path) -> None:
        """Three agents of the paper's densities and the factor of the released script."""
        kind = KINDS["qwen2"]
        family = write_family(tmp_path, kind, densities=(0.032, 0.462, 0.543))
        config = config_of(family, "ram", dtype="bfloat16", parameters={"r": 0.2, "alpha": 1.0})
        got = merged(config, tmp_path / "out")
        base, agents = read(family, kind)
        rho = ratios(base, agents)
        assert min(rho) < 1 < max(rho)
        factors = [1 + (1.2 - 1) * min(1.0, x) for x in rho]
        assert_same(got, recomputed(base, agents, lambda _: factors))
        assert_loads_and_runs(tmp_path / "out", BF16)

    @pytest.mark.parametrize("method", ["ram", "ram_plus"])
    def test_four_web_agents(self, method: str, tmp_path: Path) -> None:
        """Exported in float32, with changes that bfloat16 would round away, on a bfloat16 base."""
        kind = KINDS["qwen3"]
        family = write_family(
            tmp_path, kind, densities=(0.3, 0.2, 0.1, 0.4), scale=5e-5, agents_dtype=FP32
        )
        config = config_of(
            family,
            method,
            dtype="float32",
            out_dtype="bfloat16",
            parameters=PLUS if method == "ram_plus" else {},
        )
        got = merged(config, tmp_path / "out")
        base, agents = read(family, kind)
        assert {t.dtype for t in base.values()} == {BF16}
        assert {t.dtype for agent in agents for t in agent.values()} == {FP32}
        base = {name: tensor.float() for name, tensor in base.items()}
        factors = [1.0] * 4
        if method == "ram_plus":
            factors = [1 + PLUS["r"] * x for x in ratios(base, agents)]
        wanted = recomputed(base, agents, lambda _: factors)
        assert_same(got, {name: tensor.bfloat16() for name, tensor in wanted.items()})
        assert_loads_and_runs(tmp_path / "out", BF16)

    @pytest.mark.parametrize("name", ["gemma3-vl", "qwen3.5"])
    def test_seven_fine_tunes_of_three_modules(self, name: str, tmp_path: Path) -> None:
        """rho is counted in each tensor, where it is below the limit in some."""
        kind = replace(KINDS[name], dtype=BF16)
        family = write_family(tmp_path, kind, densities=[0.02 + 0.01 * i for i in range(7)])
        config = config_of(family, "ramplus_tl", dtype="bfloat16", parameters={"r": 0.25})
        got = merged(modular(config, name), tmp_path / "out")
        base, agents = read(family, kind)
        seen = set()

        def factors(tensor: str) -> list[float]:
            result = []
            one = [{tensor: agent[tensor]} for agent in agents]
            for shared, unique in overlaps({tensor: base[tensor]}, one):
                rho = shared / unique if unique else (0.2 if shared else 0.0)
                result.append(1 + 0.25 * min(rho, 0.2))
            seen.update(result)
            return result

        assert_same(got, recomputed(base, agents, factors))
        assert min(seen) == 1.0
        assert max(seen) == 1.05
        assert len(seen) > 10
        assert_loads_and_runs(tmp_path / "out", BF16)

    @pytest.mark.parametrize("method", ["ram", "ram_plus"])
    def test_lora_agents(self, method: str, tmp_path: Path) -> None:
        """Adapters on the same base, that have a part of their target modules in common."""
        kind = KINDS["qwen3"]
        family = write_family(tmp_path, kind, densities=())
        modules = (["q_proj", "k_proj", "v_proj"], ["q_proj", "o_proj"], ["v_proj", "down_proj"])
        models = []
        for i, targets in enumerate(modules):
            model, _ = loaded(family.base)
            torch.manual_seed(i)
            settings = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
            adapter = tmp_path / f"adapter{i}"
            peft.get_peft_model(model, settings).save_pretrained(adapter)
            models.append(f"{family.base}+{adapter}")
        cache = str(tmp_path / "cache")
        config = config_of(
            family,
            method,
            models=[{"model": model} for model in models],
            parameters=PLUS if method == "ram_plus" else {},
        )
        got = merged(config, tmp_path / "out", lora_merge_cache=cache)
        base = load(family.base)
        agents = []
        for i, model in enumerate(models):
            folder = Path(ModelReference.model_validate(model).merged(cache_dir=cache).model.path)
            agents.append(load(folder))
            weights = load_file(tmp_path / f"adapter{i}" / "adapter_model.safetensors")
            products = {}
            for key, down in weights.items():
                if key.endswith("lora_A.weight"):
                    up = weights[key.replace("lora_A", "lora_B")]
                    # LoraConfig's own alpha is 8.
                    name = key.removeprefix("base_model.model.").replace("lora_A.", "")
                    products[name] = up.float() @ down.float() * 8 / 2
            for name, tensor in agents[i].items():
                wanted = base[name].float() + products.get(name, 0)
                torch.testing.assert_close(tensor.float(), wanted, rtol=0.02, atol=0.02)
        factors = [1.0] * 3
        if method == "ram_plus":
            rho = ratios(base, agents)
            assert len(set(rho)) == 3
            factors = [1 + PLUS["r"] * min(x, PLUS["alpha"]) for x in rho]
        assert_same(got, recomputed(base, agents, lambda _: factors))
        assert_loads_and_runs(tmp_path / "out", BF16)

    @pytest.mark.parametrize("exporters", [(0, 1, 2), (1,)], ids=["all", "one"])
    def test_an_exporter_that_duplicates_the_tied_head(
        self, exporters: tuple[int, ...], tmp_path: Path
    ) -> None:
        """The copies count once, and the output is that of files without them, and its head."""
        kind = replace(
            vision("Qwen3VLMoe", HEADS | MROPE | EXPERTS, VISION | DEEPSTACK, **TIED), dtype=BF16
        )
        embedding = "model.language_model.embed_tokens.weight"
        family = write_family(tmp_path, kind)
        base, agents = read(family, kind)
        for i in exporters:
            store_head(family.agents[i], embedding)
        got = merged(config_of(family, "ram_plus", parameters=PLUS), tmp_path / "out")
        factors = [1 + PLUS["r"] * x for x in ratios(base, agents)]
        wanted = recomputed(base, agents, lambda _: factors)
        assert_same(got, wanted | {"lm_head.weight": wanted[embedding]})
        assert_loads_and_runs(tmp_path / "out", BF16)

    @pytest.mark.parametrize("method", ["ram", "ram_plus"])
    def test_one_coefficient_per_agent(
        self, method: str, family_of: FamilyOf, tmp_path: Path
    ) -> None:
        kind, family = KINDS["qwen2"], family_of("qwen2")
        weight = [0.7, 1.3, -0.4]
        config = config_of(family, method, parameters=PLUS if method == "ram_plus" else {})
        for entry, value in zip(config["models"], weight, strict=True):
            entry["parameters"] = {"weight": value}
        got = merged(config, tmp_path / "out")
        base, agents = read(family, kind)
        factors = [1.0] * 3
        if method == "ram_plus":
            factors = [1 + PLUS["r"] * x for x in ratios(base, agents)]
        assert_same(got, recomputed(base, agents, lambda _: factors, weight=weight))
        assert_loads_and_runs(tmp_path / "out", BF16)
