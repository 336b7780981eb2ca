"""Exceptions for the person who wrote the config, and warnings that are given once."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import click

LOG = logging.getLogger("mergekit_ram")

_given: set[Hashable] = set()
_lock = threading.Lock()


class RamError(click.ClickException):
    """A merge that cannot be done as configured.

    As a ``ClickException`` it ends MergeKit's commands with its message alone and exit
    status 1; from Python it is an ordinary exception.
    """


class ParameterError(RamError, ValueError):
    """A parameter has a value that the method does not take."""


class UnsupportedInputError(RamError, ValueError):
    """The tensors cannot be merged: quantised, of different shapes, not floating."""


class NonFiniteError(RamError, ValueError):
    """A tensor holds NaN or infinity where a model changed it, or its merge overflows."""


class PipelineError(RamError, RuntimeError):
    """A merge task runs in a way that cannot give the method's result."""


class ReadError(RamError, RuntimeError):
    """A file of a model cannot be read although it could be when the merge began."""


class ConfigError(RamError, ValueError):
    """A config, or the checkpoints that it names, cannot be merged; found before any work."""


@dataclass(frozen=True)
class Finding:
    """Something that a check found; ``message`` says what is wrong and what to do."""

    level: Literal["error", "warning"]
    message: str


_collected: list[Finding] | None = None


@contextlib.contextmanager
def collecting() -> Iterator[list[Finding]]:
    """Collect warnings and errors of checks, instead of logging the ones and raising the others."""
    global _collected
    before, _collected = _collected, []
    try:
        yield _collected
    finally:
        _collected = before


def fail(messages: Sequence[str]) -> None:
    """Raise one ``ConfigError`` of all messages, if there are any."""
    if _collected is not None:
        _collected.extend(Finding("error", message) for message in messages)
    elif messages:
        raise ConfigError("\n".join(messages))


def warn_once(message: str, *, key: Hashable | None = None) -> None:
    """Log ``message`` as a warning, unless ``key`` (the message itself) was warned about before.

    Safe to call from several threads.
    """
    key = message if key is None else key
    with _lock:
        if key in _given:
            return
        _given.add(key)
    if _collected is not None:
        _collected.append(Finding("warning", message))
    else:
        LOG.warning(message)


def forget_warnings() -> None:
    """Give every warning once more: called when a new merge is planned, and by tests."""
    with _lock:
        _given.clear()
