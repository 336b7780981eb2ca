"""Registers the methods as soon as MergeKit is imported; torch loads this module for us.

MergeKit has no plugin mechanism, but ``import torch`` calls the entry points of the group
``torch.backends``, and MergeKit imports torch. ``activate`` watches for the three MergeKit modules
that the plugin extends and extends each right after it has been executed.

Standard library only, and nothing here may raise: an error would make ``import torch`` fail.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from importlib import import_module
from types import ModuleType
from typing import Any

DISABLE = "MERGEKIT_RAM_DISABLE"
OLDEST, BEFORE = (0, 1, 5), (0, 2)

# What extends each module: a function of ours that is called with it.
TARGETS = {
    "mergekit.merge_methods.registry": "mergekit_ram.methods:install",
    "mergekit.plan": "mergekit_ram.planning:install",
    "mergekit.scripts.merge_raw_pytorch": "mergekit_ram.planning:install_flat",
}

_OURS = "mergekit_ram."

_lock = threading.RLock()
_installed: set[str] = set()
_waiting: list[ModuleType] = []
_complained = False


def activate() -> None:
    """Extend MergeKit, now where it is loaded and at its import where it is not. Idempotent."""
    try:
        if os.environ.get(DISABLE, "").strip().lower() not in ("", "0", "false", "no"):
            return
        if not any(getattr(finder, "of_mergekit_ram", False) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
        for name in TARGETS:
            module = sys.modules.get(name)
            if module is not None:
                _when_executed(module)
    except Exception as error:
        _complain(f"its import hook failed ({type(error).__name__}: {error})")


class _Finder:
    """Finds the target modules by way of the other finders, to learn when they are executed."""

    of_mergekit_ram = True

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in TARGETS and not name.startswith(_OURS):
            return None
        spec: Any
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    """Executes a module with its own loader, then extends it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Nobody who looks at the module later should find this wrapper.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if module.__name__ in TARGETS:
            _install(module)
        elif _waiting and not _ours_executing(besides=module):
            while _waiting:
                _install(_waiting.pop(), imported=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _is_executing(module: ModuleType) -> bool:
    spec = object.__getattribute__(module, "__dict__").get("__spec__")
    return bool(getattr(spec, "_initializing", False))


def _ours_executing(besides: ModuleType | None = None) -> bool:
    """Whether a module of this package is half imported."""
    return any(
        name.startswith(_OURS) and module is not besides and _is_executing(module)
        for name, module in list(sys.modules.items())
        if module is not None
    )


def _when_executed(module: ModuleType) -> None:
    """Extend ``module`` now, or, where it is what imported torch, at its first use after that."""
    if not _is_executing(module):
        _install(module)
        return
    original = type(module)

    class Deferred(original):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            if not _is_executing(self):
                object.__setattr__(self, "__class__", original)
                _install(self)
            return original.__getattribute__(self, name)

    module.__class__ = Deferred


def _install(module: ModuleType, imported: ModuleType | None = None) -> None:
    """Extend a target module; ``imported`` is one of ours that has just been executed."""
    name = module.__name__
    try:
        with _lock:
            if name in _installed:
                return
            if _ours_executing(besides=imported):
                # One of our modules is what imported MergeKit: importing more of ours now would
                # find it half executed. Its loader, above, comes back to this when it is done.
                _waiting.append(module)
                return
            _installed.add(name)
            unsupported = _unsupported_version()
            if unsupported:
                _complain(unsupported)
                return
            extension, function = TARGETS[name].split(":")
            getattr(import_module(extension), function)(module)
    except Exception as error:
        _complain(f"{name} could not be extended ({type(error).__name__}: {error})")


def _unsupported_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("mergekit")
    except PackageNotFoundError:  # a source tree on the path: let the interfaces decide
        return None
    numbers = tuple(int(n) for n in re.findall(r"\d+", found.split("+")[0])[:3])
    if OLDEST <= numbers < BEFORE:
        return None
    oldest, before = (".".join(map(str, v)) for v in (OLDEST, BEFORE))
    return f"it supports MergeKit >={oldest},<{before} and found {found}"


def _complain(reason: str) -> None:
    """Warn, once, that the plugin is not active; never raise, even where warnings are errors."""
    global _complained
    if _complained:
        return
    _complained = True
    message = (
        f"mergekit-ram is not active: {reason}. MergeKit goes on with its built-in methods. "
        f"Set {DISABLE}=1 to switch the plugin off and this warning with it."
    )
    try:
        import warnings

        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except Exception:
        print(f"warning: {message}", file=sys.stderr)
