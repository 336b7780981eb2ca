"""Runs functions in forks of one warm process, so that each starts in milliseconds.

Importing MergeKit takes seconds. The process that forks is not pytest's, whose threads and loaded
models a fork would inherit, and the fork ends as every interpreter does: with its own status, by
its own signal, and with its threads joined.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent

_SERVER = """
import faulthandler, gc, importlib, json, os, sys

for name in sys.argv[1:]:
    importlib.import_module(name)
gc.collect(), gc.freeze()  # or each fork takes seconds to end, copying what it collects
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for stream, file in enumerate(job["streams"], 1):
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
faulthandler.dump_traceback_later(job["timeout"], exit=True)
module, function = job["function"].split(":")
getattr(importlib.import_module(module), function)(**job["arguments"])
"""


class Forks:
    """A warm process.

    Args:
        folder: for what the forks print.
        modules: are imported before the first fork.
        environment: what differs from this process's.
    """

    def __init__(self, folder: Path, *modules: str, **environment: str) -> None:
        self._streams = [str(folder / name) for name in ("stdout", "stderr")]
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, *modules],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **environment},
            cwd=TESTS.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Forks:
        assert self._answer() == "ready"
        return self

    def __exit__(self, *error: object) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(60)
        self._server.stdout.close()

    def run(
        self, function: str, timeout: float = 100, **arguments: Any
    ) -> subprocess.CompletedProcess[str]:
        """Call ``module:function`` in a fork. What takes too long shows where, and fails."""
        job = {"function": function, "arguments": arguments, "timeout": timeout}
        assert self._server.stdin is not None
        print(json.dumps({**job, "streams": self._streams}), file=self._server.stdin, flush=True)
        status = int(self._answer())
        out, err = (Path(file).read_text(errors="replace") for file in self._streams)
        assert "Timeout (" not in err, err
        return subprocess.CompletedProcess([function], status, out, err)

    def _answer(self) -> str:
        assert self._server.stdout is not None
        return self._server.stdout.readline().strip()
