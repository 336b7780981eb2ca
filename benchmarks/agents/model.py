"""The model, its tokenizer, and how it writes an answer."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from benchmarks.agents.tasks import BEGIN, DIGITS, END, IDS, PROMPT_LENGTH, VOCABULARY


def new_model(seed: int) -> LlamaForCausalLM:
    """A float32 model of 335,520 random parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=IDS[BEGIN],
        eos_token_id=IDS[END],
        pad_token_id=IDS[END],
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def write_answers(
    model: PreTrainedModel, prompts: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """(n, 11) int64 prompts to (n, 8) int64 answers: greedy, or sampled with a generator."""
    # Transformers renamed this argument within 5.x.
    known = inspect.signature(model.forward).parameters
    cache = {"cache" if "cache" in known else "past_key_values": DynamicCache(config=model.config)}
    tokens, answers = prompts, []
    for _ in range(DIGITS):
        output = model(tokens, use_cache=True, logits_to_keep=1, **cache)
        logits = output.logits[:, -1].float()
        if generator is None:
            tokens = logits.argmax(dim=-1, keepdim=True)
        else:
            tokens = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
        answers.append(tokens)
    return torch.cat(answers, dim=1)


def answer_log_probabilities(model: PreTrainedModel, rows: Tensor) -> Tensor:
    """(n, 11 + k) int64 rows to the (n, k) float32 log-probabilities of their last k tokens."""
    logits = model(rows[:, :-1], use_cache=False).logits[:, PROMPT_LENGTH - 1 :].float()
    targets = rows[:, PROMPT_LENGTH:, None]
    return logits.log_softmax(dim=-1).gather(-1, targets).squeeze(-1)


def new_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; it adds nothing, so a prompt writes its own ``B``."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(IDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=32,
    )


def save(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write a checkpoint of ``dtype`` that the Auto classes load without network."""
    model = copy.deepcopy(model).to(dtype)  # type: ignore[arg-type]
    model.generation_config = GenerationConfig(
        max_new_tokens=DIGITS + 1,
        bos_token_id=IDS[BEGIN],
        eos_token_id=IDS[END],
        pad_token_id=IDS[END],
    )
    model.save_pretrained(folder)
    new_tokenizer().save_pretrained(folder)
