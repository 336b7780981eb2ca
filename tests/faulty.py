"""MergeKit's commands with something happening to them at a given point; run by ``forks``."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mergekit.io.tasks import SaveTensor
from mergekit.scripts import merge_raw_pytorch, run_yaml

from mergekit_ram import kernels
from mergekit_ram.kernels import _cpu, _threads
from mergekit_ram.tasks import CountOverlap, MeasureOverlap

COMMANDS = {"mergekit-yaml": run_yaml.main, "mergekit-pytorch": merge_raw_pytorch.main}

# Compiled code is loaded once, before the first fork.
_base = torch.zeros(8, dtype=torch.bfloat16)
_settings: dict[str, Any] = {"epsilon": [0.0], "names": ["agent"]}
kernels.count(_base, [_base + 1], **_settings)
kernels.merge_and_count(_base, [_base + 1], weight=[1.0], rescale=[1.0], **_settings)
kernels.merge(_base, [_base + 1], epsilon=[0.0], weight=[1.0], rescale=[1.0])


def run(
    command: str, arguments: list[str], point: str | None = None, event: str = "", file: str = ""
) -> None:
    """Run a command of MergeKit as a person would, up to the event.

    Args:
        command: its name.
        arguments: its arguments.
        point: where the event happens; see ``POINTS``.
        event: what happens; see ``EVENTS``.
        file: what it happens to.
    """
    # Where the tests run in the background of a shell, Ctrl-C is ignored from the start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if point is not None:
        POINTS[point](lambda: EVENTS[event](file))
    COMMANDS[command](arguments, prog_name=command)


def _before(cls: Any, call: int) -> Callable[[Callable[[], None]], None]:
    """Let it happen before the given call of a task's ``execute``."""

    def arrange(event: Callable[[], None]) -> None:
        execute, calls = cls.execute, itertools.count()

        def watched(self: Any, **inputs: Any) -> Any:
            if next(calls) == call:
                event()
            return execute(self, **inputs)

        cls.execute = watched

    return arrange


def _after_first_pass(event: Callable[[], None]) -> None:
    execute = MeasureOverlap.execute

    def watched(self: Any) -> Any:
        result = execute(self)
        event()
        return result

    MeasureOverlap.execute = watched  # type: ignore[method-assign]


def _in_kernel(measuring: bool) -> Callable[[Callable[[], None]], None]:
    """Let it happen in a helper thread, while that and the main thread compute."""

    def arrange(event: Callable[[], None]) -> None:
        passes: list[str] = []
        _before(CountOverlap, 3)(lambda: passes.append("measuring"))
        _before(SaveTensor, 3)(lambda: passes.append("merging"))
        over_chunks = _cpu.over_chunks
        happened = threading.Lock()

        def watched(work: Callable[[int, int], Any], elements: int) -> list[Any]:
            def watched_work(start: int, stop: int) -> Any:
                result = work(start, stop)
                here = passes[-1:] == ["measuring" if measuring else "merging"]
                helper = threading.current_thread() is not threading.main_thread()
                if here and helper and happened.acquire(blocking=False):
                    event()
                return result

            return over_chunks(watched_work, elements)

        _cpu.over_chunks = watched
        _threads.CHUNK = 16
        torch.set_num_threads(4)

    return arrange


POINTS: dict[str, Callable[[Callable[[], None]], None]] = {
    "in the first pass": _before(CountOverlap, 5),
    "between the passes": _after_first_pass,
    "in the second pass": _before(SaveTensor, 9),
    "in a kernel of the first pass": _in_kernel(measuring=True),
    "in a kernel of the second pass": _in_kernel(measuring=False),
}


def _kill(file: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _interrupt(file: str) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _remove(file: str) -> None:
    Path(file).unlink()


def _truncate(file: str) -> None:
    os.truncate(file, Path(file).stat().st_size // 2)


def _replace_by_half(file: str) -> None:
    half = Path(file).read_bytes()[: Path(file).stat().st_size // 2]
    Path(file).unlink()
    Path(file).write_bytes(half)


def _fill(file: str) -> None:
    """Leave no room on the disk of a file, a small one."""
    with contextlib.suppress(OSError), open(file, "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1 << 12))


def _limit(file: str) -> None:
    """Let no file grow beyond 8 KB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, 1 << 13))


EVENTS: dict[str, Callable[[str], None]] = {
    "kill": _kill,
    "interrupt": _interrupt,
    "remove": _remove,
    "truncate": _truncate,
    "replace": _replace_by_half,
    "fill": _fill,
    "limit": _limit,
}
