"""The shipped agents are what their README says, and merge by the rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import assert_same_bits
from mergekit.merge_methods import merge_state_dicts
from safetensors.torch import load_file

from benchmarks.agents.evaluate import load, score
from benchmarks.agents.tasks import TASKS
from benchmarks.agents.vectors import EPSILON, supports
from mergekit_ram import reference

AGENTS = Path(__file__).parents[1] / "example_configs" / "agents"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, which stall where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("task", TASKS)
def test_agents_can_do_their_task(task: str) -> None:
    assert score(load(AGENTS / task))[task] >= 95


def test_agents_changed_few_elements() -> None:
    agents = {task: load(AGENTS / task) for task in TASKS}
    for support in supports(load(AGENTS / "base"), agents).values():
        assert 0.05 < support.density < 0.5


def test_merge_of_agents_is_the_reference() -> None:
    states = {name: load_file(AGENTS / name / "model.safetensors") for name in ("base", *TASKS)}
    merged = merge_state_dicts(states, "ram", base="base")
    assert merged.keys() == states["base"].keys()
    for key, tensor in merged.items():
        assert tensor.dtype == torch.bfloat16
        wanted = reference.merge(
            states["base"][key],
            [states[task][key] for task in TASKS],
            epsilon=[EPSILON] * len(TASKS),
        )
        assert_same_bits(tensor, wanted)
