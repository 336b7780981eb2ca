"""Shared helpers for running MergeKit 0.1.5's released tests.

The source distribution ships the tests but not the module of helpers that they
import. This is an independent replacement, derived only from how the tests call
it: it writes miniature randomly initialised checkpoints, runs a merge
configuration end to end, and verifies the checkpoint that comes out.
"""

import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from mergekit.architecture import arch_info_for_config, get_architecture_info
from mergekit.config import MergeConfiguration
from mergekit.io import LazyTensorLoader
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from transformers import (
    AutoConfig,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

PathLike = str | Path

# Dimensions shared by every decoder built here. The tests rely on a hidden size
# of 32 (embedding shapes) and, by default, on a vocabulary of 64 tokens.
_DECODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _write_checkpoint(
    model_cls: type[transformers.PreTrainedModel],
    config: transformers.PretrainedConfig,
    path: PathLike,
) -> str:
    """Initialise a model, save it under ``path``, and return the path as text.

    The directory's own name seeds the weights: differently named checkpoints
    differ, runs are repeatable, and the caller's random state is left alone.

    Tensors keep the names that Transformers uses in memory. Under the older names
    that it would write for LLaVA, MergeKit's architecture inference regards the
    language model as optional, and leaves it out of the merged checkpoint.
    """
    directory = Path(path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(directory.name.encode()))
        model_cls(config).save_pretrained(directory, save_original_format=False)
    return str(directory)


def make_picollama(path: PathLike, vocab_size: int = 64) -> str:
    """Write a two-layer Llama with untied embeddings."""
    return _write_checkpoint(LlamaForCausalLM, LlamaConfig(vocab_size=vocab_size, **_DECODER), path)


def make_picogranite(path: PathLike, vocab_size: int = 64) -> str:
    """Write a two-layer Granite model."""
    return _write_checkpoint(
        GraniteForCausalLM, GraniteConfig(vocab_size=vocab_size, **_DECODER), path
    )


def make_gpt2size(path: PathLike, vocab_size: int = 64) -> str:
    """Write a narrow GPT-2 that keeps the twelve layers of the smallest original."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_layer=12,
        n_embd=32,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    return _write_checkpoint(GPT2LMHeadModel, config, path)


def make_picoLlaVa(path: PathLike, vocab_size: int = 64) -> str:
    """Write a vision-language model: a small CLIP tower joined to a small Llama.

    MergeKit has no architecture definition for LLaVA, which makes this the input
    for tests of inferred architectures.
    """
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
            projection_dim=16,
        ),
        text_config=LlamaConfig(vocab_size=vocab_size, **_DECODER),
        image_token_index=vocab_size - 1,
        image_seq_length=4,
    )
    return _write_checkpoint(LlavaForConditionalGeneration, config, path)


def _check_architecture_is_inferred(config: MergeConfiguration) -> set[str]:
    """Check that no input has a built-in definition; return all their tensor names."""
    names: set[str] = set()
    for model in config.referenced_models():
        assert arch_info_for_config(model.config()) is None, (
            f"{model} has a predefined architecture; nothing would be inferred"
        )
        names.update(LazyTensorLoader.from_disk(model.model.path).index.tensor_paths)
    return names


def run_and_check_merge(
    config: MergeConfiguration,
    validate: Callable[[str], object] | None = None,
    auto_arch: bool = False,
) -> None:
    """Run a merge on the CPU into a temporary directory and verify the output.

    Every merge must produce a loadable configuration, each mandatory weight of
    the architecture (under its own or an alternative name), and only finite
    values.

    Args:
        config: The merge to run. Planning may rewrite it, as in MergeKit itself.
        validate: Called with the output directory for checks specific to a test.
        auto_arch: The inputs are expected to need an inferred architecture. Because
            inference may declare weights optional, the output must then contain
            every tensor that any input has.
    """
    options = MergeOptions(quiet=True)
    expected = _check_architecture_is_inferred(config) if auto_arch else set()
    architecture = get_architecture_info(config, options)

    with tempfile.TemporaryDirectory() as output:
        run_merge(config, output, options)

        loader = LazyTensorLoader.from_disk(output)
        written = set(loader.index.tensor_paths)
        assert written, "The merge wrote no tensors"
        assert expected <= written, f"Not merged: {sorted(expected - written)}"
        for weight in architecture.all_weights(AutoConfig.from_pretrained(output)):
            names = {weight.name, *(weight.aliases or ()), *(weight.tied_names or ())}
            assert weight.optional or names & written, (
                f"Mandatory weight {weight.name} is missing from the output"
            )
        for name in sorted(written):
            assert loader.get_tensor(name).isfinite().all(), (
                f"Tensor {name} contains non-finite values"
            )

        if validate is not None:
            validate(output)
