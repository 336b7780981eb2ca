"""Environments with the plugin in every state; run by ``forks``, with torch imported before."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import networkx  # noqa: F401 (these are what takes long to import)
import numba  # noqa: F401
import peft  # noqa: F401
import pydantic  # noqa: F401
import torch
import transformers  # noqa: F401

assert not [m for m in sys.modules if m.startswith("mergekit")]

NAMES = ("ram", "ram_plus", "ramplus_tl")


def look(path: list[str], script: str = "", merge: list[str] | None = None) -> None:
    """Load torch's backends with these folders on the path, and print what became of MergeKit.

    Args:
        path: folders, in place of all those of packages.
        script: is executed first.
        merge: config and output folder of a merge to do.
    """
    # Without an editable installation of the plugin, whichever way that is done.
    modules = [getattr(finder, "__module__", "") for finder in sys.meta_path]
    finders = zip(list(sys.meta_path), modules, strict=True)
    sys.meta_path[:] = [finder for finder, name in finders if "__editable__" not in name]
    packages = [p for p in sys.path if not p or next(Path(p).glob("*.dist-info"), None)]
    packages += [p for p in sys.path if (Path(p) / "mergekit_ram").exists()]
    sys.path[:] = [*path, *(p for p in sys.path if p not in packages)]
    importlib.invalidate_caches()
    warnings.simplefilter("always", RuntimeWarning)
    # What `import torch` ends with.
    torch._import_device_backends()  # type: ignore[attr-defined]
    assert torch.ones(2).sum() == 2
    exec(script, {})
    state: dict[str, Any] = {"loaded": sorted(m for m in sys.modules if m.startswith("mergekit"))}
    try:
        state |= _mergekit(merge)
    except ModuleNotFoundError as error:
        state["missing"] = error.name
    print(json.dumps(state))


def _mergekit(merge: list[str] | None) -> dict[str, Any]:
    merging = importlib.import_module("mergekit.merge")
    methods = importlib.import_module("mergekit.merge_methods")
    planning = importlib.import_module("mergekit.plan")
    flat = importlib.import_module("mergekit.scripts.merge_raw_pytorch")
    table = {m.spec.name: type(m).__module__ for m in methods.registered_methods()}
    if merge is not None:
        config_file, out = merge
        config = importlib.import_module("mergekit.config").MergeConfiguration.model_validate(
            json.loads(Path(config_file).read_text())
        )
        options = importlib.import_module("mergekit.options").MergeOptions
        merging.run_merge(config, out, options(quiet=True, copy_tokenizer=False))
    ours = sys.modules.get("mergekit_ram")
    return {
        "methods": [table.get(name) for name in NAMES],
        "wrapped": [
            _depth(planning.MergePlanner._plan),
            _depth(planning.MergePlanner.plan_to_disk),
            _depth(flat.plan_flat_merge),
            _depth(merging.generate_card),
            _depth(merging.get_architecture_info),
        ],
        "file": getattr(ours, "__file__", None),
        "version": getattr(ours, "__version__", None),
    }


def _depth(function: Any) -> int:
    layers: list[Any] = []
    inspect.unwrap(function, stop=lambda layer: bool(layers.append(layer)))
    return len(layers)
