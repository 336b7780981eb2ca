"""Watches for MergeKit being imported; torch loads this module for us.

MergeKit has no plugin mechanism, but ``import torch`` calls the entry points of the group
``torch.backends``, and MergeKit imports torch. ``activate`` waits for the four MergeKit modules
that the plugin extends; ``_extend`` extends each right after it has been executed.

Standard library only, and nothing here may raise: an error would make ``import torch`` fail. It is
small, since whoever imports torch without MergeKit pays for it, without byte code perhaps.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# By what each is extended.
TARGETS = {
    "mergekit.merge_methods.registry": "mergekit_ram.methods:install",
    "mergekit.plan": "mergekit_ram.planning:install",
    "mergekit.merge": "mergekit_ram.planning:install_merging",
    "mergekit.scripts.merge_raw_pytorch": "mergekit_ram.planning:install_flat",
}

_failed = False


def activate() -> None:
    """Extend MergeKit, now where it is loaded and at its import where it is not. Idempotent."""
    if os.environ.get("MERGEKIT_RAM_DISABLE", "").strip().lower() not in ("", "0", "false", "no"):
        return
    if not any(getattr(finder, "of_mergekit_ram", False) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
    for name, extension in TARGETS.items():
        module = sys.modules.get(name)
        extend = _rest_of_the_hook() if module is not None else None
        if extend is not None:
            extend.when_executed(module, extension)


def _rest_of_the_hook() -> Any:
    """Import ``_extend``; None, with a warning, once, where that fails."""
    global _failed
    try:
        from mergekit_ram import _extend
    except Exception as error:
        if not _failed:
            print(f"warning: mergekit-ram is not active: {error!r}", file=sys.stderr)
        _failed = True
        return None
    return _extend


class Finder:
    """Finds the target modules by way of the other finders, to learn when they are executed."""

    of_mergekit_ram = True

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's specification with a loader that extends it, or None."""
        extension = TARGETS.get(name)
        if extension is None and not name.startswith("mergekit_ram."):
            return None
        if name == "mergekit_ram._extend":
            return None
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: Any = finder.find_spec(name, path, target)
            if spec is not None:
                extend = _rest_of_the_hook()
                if extend is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = extend.Loader(spec.loader, extension)
                return spec
        return None
