"""Tiny checkpoints as people's models lie on disk, and an independent merge of whole folders."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from mergekit_ram import reference

StateDict = dict[str, torch.Tensor]


def tiny_config(kind: str = "qwen2", **changes: Any) -> transformers.PretrainedConfig:
    """Configuration of a language model of some thousand parameters."""
    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    } | changes
    cls, architecture = {
        "qwen2": (transformers.Qwen2Config, "Qwen2ForCausalLM"),
        "llama": (transformers.LlamaConfig, "LlamaForCausalLM"),
    }[kind]
    config = cls(**settings)
    config.architectures = [architecture]
    return config


def initial_state(config: transformers.PretrainedConfig, seed: int = 0) -> StateDict:
    """Weights of a new model, float32, without a tied head."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    state = {k: v.detach().clone().float() for k, v in model.state_dict().items()}
    if config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def changed(state: StateDict, seed: int, density: float = 0.4, scale: float = 2e-3) -> StateDict:
    """An agent: some elements of each tensor changed."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for name, tensor in state.items():
        on = torch.rand(tensor.shape, generator=generator) < density
        change = torch.randn(tensor.shape, generator=generator) * scale
        result[name] = torch.where(on, tensor + change, tensor)
    return result


def save(
    folder: Path,
    config: transformers.PretrainedConfig,
    state: Mapping[str, torch.Tensor],
    *,
    shards: int = 1,
    pickled: bool = False,
) -> Path:
    """Write a model folder: safetensors or pickle, in one file or in shards with an index."""
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")

    def write(tensors: StateDict, name: str) -> None:
        tensors = {k: v.clone().contiguous() for k, v in tensors.items()}
        if pickled:
            torch.save(tensors, folder / name)
        else:
            save_file(tensors, folder / name, metadata={"format": "pt"})

    if shards == 1:
        write(dict(state), f"{stem}.{suffix}")
        return folder
    names = list(state)
    weight_map = {}
    for shard in range(shards):
        file = f"{stem}-{shard + 1:05d}-of-{shards:05d}.{suffix}"
        mine = names[shard::shards]
        write({n: state[n] for n in mine}, file)
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return folder


def load(folder: Path) -> StateDict:
    """All tensors of a model folder, safetensors or pickle."""
    state: StateDict = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
    for file in sorted(folder.glob("*.bin")):
        state |= torch.load(file, weights_only=True)
    return state


@dataclass
class Family:
    """A base model and its agents, on disk and as tensors."""

    folder: Path
    base: Path
    agents: list[Path]
    states: dict[Path, StateDict] = field(repr=False)

    def expected(
        self,
        *,
        agents: Sequence[Path] | None = None,
        epsilon: Callable[[str, Path], float] = lambda name, agent: 1e-5,
        weight: Callable[[str, Path], float] = lambda name, agent: 1.0,
        rescale: Callable[[str, Path], float] = lambda name, agent: 1.0,
        dtype: torch.dtype | None = None,
    ) -> StateDict:
        """The merge of every tensor by the reference, read from the files."""
        agents = list(self.agents if agents is None else agents)
        base = load(self.base)
        loaded = {agent: load(agent) for agent in agents}
        result = {}
        for name, tensor in base.items():
            taking = [a for a in agents if weight(name, a) != 0]
            result[name] = reference.merge(
                tensor.to(dtype or tensor.dtype),
                [loaded[a][name].to(dtype or tensor.dtype) for a in taking],
                epsilon=[epsilon(name, a) for a in taking],
                weight=[weight(name, a) for a in taking],
                rescale=[rescale(name, a) for a in taking],
            )
        return result


def make_family(
    folder: Path,
    kind: str = "qwen2",
    *,
    dtype: torch.dtype = torch.bfloat16,
    n: int = 3,
    densities: Sequence[float] = (0.1, 0.5, 0.4),
    shards: int = 1,
    pickled: bool = False,
    **config: Any,
) -> Family:
    """Write a base model and ``n`` agents of unlike density."""
    settings = tiny_config(kind, dtype=dtype, **config)
    start = initial_state(settings)
    states = {folder / "base": {k: v.to(dtype) for k, v in start.items()}}
    for i in range(n):
        agent = changed(start, seed=i + 1, density=densities[i % len(densities)])
        kept = states[folder / "base"]
        # What training left alone is the base bit for bit, in 16 bits too.
        states[folder / f"agent{i}"] = {
            k: torch.where(agent[k] == start[k], kept[k], agent[k].to(dtype)) for k in start
        }
    for path, state in states.items():
        save(path, settings, state, shards=shards, pickled=pickled)
    base, *agents = states
    return Family(folder, base, agents, states)
