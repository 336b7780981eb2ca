"""Checkpoints of several seeds and regimes, trained two at a time and kept between runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch
from transformers.utils import logging

from benchmarks.agents.evaluate import load
from benchmarks.agents.model import save
from benchmarks.agents.tasks import TASKS
from benchmarks.agents.training import REGIMES, Regime, train_agent, train_base

WORKERS = 2
_RECORD = "training.json"
# Two agents train on after they have learnt their task, and one takes small steps, so that the
# densities of the three are unlike.
_LONG = replace(REGIMES["E"], name="U", min_steps=100, max_steps=200)
_SPARSE = replace(REGIMES["E"], name="U", learning_rate=3e-3, max_steps=100)


@dataclass(frozen=True)
class Design:
    """How the three agents of a regime train, and the dtype that they are saved in."""

    agents: dict[str, Regime]
    dtype: torch.dtype


DESIGNS = {
    "E": Design(dict.fromkeys(TASKS, REGIMES["E"]), torch.bfloat16),
    "A": Design(dict.fromkeys(TASKS, REGIMES["A"]), torch.float32),
    "U": Design({"sort": _LONG, "cumsum": _LONG, "reverse": _SPARSE}, torch.bfloat16),
}


@dataclass(frozen=True)
class Job:
    """One model to train: a seed's base, or with a regime the agent of a task."""

    root: Path
    seed: int
    regime: str = ""
    task: str = "base"

    @property
    def folder(self) -> Path:
        """Where its checkpoint lies."""
        return self.root / f"seed{self.seed}" / self.regime / self.task

    @property
    def done(self) -> bool:
        """Whether it is trained already; the record is the last file to be written."""
        return (self.folder / _RECORD).is_file()

    def record(self) -> dict[str, Any]:
        """Its steps, last loss or mean reward, and seconds."""
        record: dict[str, Any] = json.loads((self.folder / _RECORD).read_text(encoding="utf-8"))
        return record

    def run(self) -> None:
        """Train and save it; an agent's base must be there."""
        began = time.perf_counter()
        if not self.regime:
            losses = []
            base = train_base(self.seed, report=lambda _, loss: losses.append(loss))
            save(base, self.folder, torch.bfloat16)
            steps, final = len(losses), losses[-1]
        else:
            base = load(replace(self, regime="", task="base").folder)
            design = DESIGNS[self.regime]
            regime = design.agents[self.task]
            agent = train_agent(base, TASKS[self.task], regime=regime, seed=self.seed)
            save(agent.model, self.folder, design.dtype)
            steps, final = agent.steps, agent.reward
        seconds = round(time.perf_counter() - began, 1)
        record = {"steps": steps, "final": round(final, 4), "seconds": seconds}
        (self.folder / _RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")


def start_worker() -> None:
    """Set up a process of a pool: one thread, and no chatter."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def train(root: Path, seeds: Iterable[int], regimes: Iterable[str]) -> None:
    """Train what is not there yet, ``WORKERS`` models at a time, each in one thread."""
    regimes = list(regimes)
    waiting: dict[Future[None], Job] = {}
    with ProcessPoolExecutor(WORKERS, get_context("spawn"), start_worker) as pool:

        def start(jobs: Iterable[Job]) -> None:
            for job in jobs:
                if not job.done:
                    waiting[pool.submit(job.run)] = job
                elif not job.regime:
                    start(agents(job))

        def agents(base: Job) -> list[Job]:
            return [replace(base, regime=r, task=task) for r in regimes for task in TASKS]

        start(Job(root, seed) for seed in seeds)
        while waiting:
            finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                job = waiting.pop(future)
                future.result()
                click.echo(f"trained {job.folder.relative_to(root)}: {job.record()}")
                if not job.regime:
                    start(agents(job))
