"""What a weight is for, and where it sits, by its name: for reports, never for merging."""

from __future__ import annotations

import re
from collections.abc import Sequence

EMBEDDING, ATTENTION, MLP, NORM, HEAD, OTHER = KINDS = (
    "embedding",
    "attention",
    "MLP",
    "norm",
    "head",
    "other",
)

# The first that matches decides: a norm inside an attention block is a norm.
_PATTERNS = (
    (NORM, r"norm|(^|[._])ln(_?\w+)?(\.|$)|layer_?norm"),
    (HEAD, r"(^|\.)(lm_head|embed_out|output_projection|score|classifier|v_head|cls)(\.|$)"),
    (HEAD, r"^output\.(weight|bias)$"),
    (MLP, r"merger|multi_modal_projector|\.mlp\.|feed_?forward|(^|\.)(ffn|mlp\w*|fc\d*)\."),
    (MLP, r"\.moe\.|expert|\.(intermediate|router)\.|\.(w1|w2|w3|fc1|fc2|fc_in|fc_out)\."),
    (MLP, r"\.(gate_proj|up_proj|down_proj|gate_up_proj|dense_h_to_4h|dense_4h_to_h)\."),
    (ATTENTION, r"att(n|ention)|\.(q|k|v|o|qkv)_proj\.|\.mixer\.(Wqkv|out_proj)\."),
    (EMBEDDING, r"embed|(^|\.)(wte|wpe|tok_embeddings)\."),
    (MLP, r"\.\d+\.output\."),  # BERT's second MLP matrix
)
_COMPILED = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _PATTERNS)
_LAYER = re.compile(r"(?:^|\.)(?:h|\w*(?:layers?|blocks?|stages?))\.\d+(?=\.)")
_COMMON_WORD = re.compile(r"model|transformer|layers?|blocks?|h")
_DIGITS = re.compile(r"(\d+)")


def kind_of(name: str) -> str:
    """Kind of weight: one of ``KINDS``."""
    return next((kind for kind, pattern in _COMPILED if pattern.search(name)), OTHER)


def layer_of(name: str) -> str | None:
    """Layer that a weight belongs to, as ``model.layers.3``; None outside of layers."""
    match = _LAYER.search(name)
    return name[: match.end()] if match else None


def layer_labels(layers: Sequence[str]) -> dict[str, str]:
    """Short distinct labels: numbers, with the part of the model where there are several."""
    labels = {}
    for name in layers:
        *words, number = name.split(".")
        labels[name] = " ".join([*(w for w in words if not _COMMON_WORD.fullmatch(w)), number])
    if len({name.rpartition(".")[0] for name in layers}) == 1:
        labels = {name: name.rpartition(".")[2] for name in layers}
    return labels if len(set(labels.values())) == len(labels) else {name: name for name in layers}


def natural_order(name: str) -> tuple[tuple[bool, int, str], ...]:
    """Sort key that puts layer 2 before layer 10."""
    parts = _DIGITS.split(name)
    return tuple((p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts)
