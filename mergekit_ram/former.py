"""What a former merge left in an output folder, and what loaders would make of it.

MergeKit writes over files of the same names and leaves the others: beside a single
``model.safetensors`` the index and shards of a former merge, or the other way round. Loaders
differ in which of the two they take (transformers the single file, MergeKit and vLLM the index),
so that some would load the former merge without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from mergekit_ram.record import FILE
from mergekit_ram.report import FORMAT

# Names that loaders look for, and those that MergeKit gives to shards until it knows their number.
_FINISHED = re.compile(
    r"(model|pytorch_model)(-\d{5,6}-of-\d{5,6})?\.(safetensors|bin)"
    r"|(model\.safetensors|pytorch_model\.bin)\.index\.json"
)
_UNFINISHED = re.compile(r"(model|pytorch_model)-\d{1,4}\.(safetensors|bin)")


def weight_files(folder: Path) -> frozenset[str]:
    """Names of the files in a folder that loaders take weights from."""
    return _names(folder, _FINISHED)


def unfinished_files(folder: Path) -> frozenset[str]:
    """Names of shards that a merge wrote and did not get to finish."""
    return _names(folder, _UNFINISHED)


def files_of_merges(folder: Path) -> frozenset[str]:
    """Names of the weight files in a folder that are the work of former merges for sure.

    All of them, where a merge left its config or its record beside them; or else those that an
    index lists which MergeKit wrote.
    """
    found = weight_files(folder) | unfinished_files(folder)
    if not found:
        return found
    if (folder / "mergekit_config.yml").exists() or _json(folder / FILE).get("format") == FORMAT:
        return found
    listed: set[str] = set()
    for index in found:
        content = _json(folder / index) if index.endswith(".json") else {}
        if "mergekit_version" in (content.get("metadata") or {}):
            listed |= {index, *content.get("weight_map", {}).values()}
    return found & listed


def remove(folder: Path, former: Collection[str], written: Collection[str]) -> list[str]:
    """Remove the files of former merges that the one just finished has not written itself."""
    stale = sorted(set(former) - set(written))
    for name in stale:
        (folder / name).unlink(missing_ok=True)
    return stale


def _names(folder: Path, pattern: re.Pattern[str]) -> frozenset[str]:
    if not folder.is_dir():
        return frozenset()
    return frozenset(p.name for p in folder.iterdir() if pattern.fullmatch(p.name))


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
