"""Extends MergeKit's modules once they are executed; standard library only, and never raises."""

from __future__ import annotations

import re
import sys
import threading
from importlib import import_module
from types import ModuleType
from typing import Any

OLDEST, BEFORE = (0, 1, 5), (0, 2)

_OURS = "mergekit_ram."
# Set in a module that is extended: it outlives this one, which may be imported again.
_MARK = "__extended_by_mergekit_ram__"

_lock = threading.RLock()
_waiting: list[tuple[ModuleType, str]] = []
_complained = False


class Loader:
    """Executes a module with its own loader, then extends it.

    Args:
        loader: the module's own.
        extension: ``module:function`` of ours that is called with the module; None for a module of
            ours, after which those are extended that had to wait for it.
    """

    def __init__(self, loader: Any, extension: str | None) -> None:
        self._loader = loader
        self._extension = extension

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Nobody who looks at the module later should find this wrapper.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._extension is not None:
            extend(module, self._extension)
        elif _waiting and not _ours_executing(besides=module):
            while _waiting:
                extend(*_waiting.pop(), imported=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def when_executed(module: ModuleType, extension: str) -> None:
    """Extend ``module`` now, or, where it is what imported torch, at its first use after that."""
    if not _is_executing(module):
        extend(module, extension)
        return
    original = type(module)

    class Deferred(original):  # type: ignore[misc, valid-type]
        def __getattribute__(self, name: str) -> Any:
            if not _is_executing(self):
                object.__setattr__(self, "__class__", original)
                extend(self, extension)
            return original.__getattribute__(self, name)

    module.__class__ = Deferred


def extend(module: ModuleType, extension: str, imported: ModuleType | None = None) -> None:
    """Extend a module of MergeKit, once; ``imported`` is one of ours that is just executed."""
    name = module.__name__
    try:
        with _lock:
            if _MARK in vars(module) or _complained:
                return
            if _ours_executing(besides=imported):
                # One of our modules is what imported MergeKit: importing more of ours now would
                # find it half executed. Its loader, above, comes back to this when it is done.
                _waiting.append((module, extension))
                return
            setattr(module, _MARK, True)
            unsupported = _unsupported_version()
            if unsupported:
                complain(unsupported)
                return
            ours, function = extension.split(":")
            getattr(import_module(ours), function)(module)
    except Exception as error:
        _give_up()
        complain(f"{name} could not be extended ({type(error).__name__}: {error})")


def _give_up() -> None:
    """Take back what is extended: methods without the planner's help would give half a plugin."""
    methods = sys.modules.get(f"{_OURS}methods")
    try:
        if methods is not None:
            methods.uninstall()
    except Exception:  # it is half imported: nothing is registered yet
        return


def complain(reason: str) -> None:
    """Warn, once, that the plugin is not active; never raise, even where warnings are errors."""
    global _complained
    if _complained:
        return
    _complained = True
    message = (
        f"mergekit-ram is not active: {reason}. MergeKit goes on with its built-in methods. "
        "Set MERGEKIT_RAM_DISABLE=1 to switch the plugin off and this warning with it."
    )
    try:
        import warnings

        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except Exception:
        print(f"warning: {message}", file=sys.stderr)


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
