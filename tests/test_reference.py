"""The readable rule against values worked out by hand."""

import pytest
import torch
from helpers import assert_same_bits

from mergekit_ram import reference

CODE = torch.tensor([[0, 0.3, 0], [0.6, 0.7, 0], [0.1, 0, 0]])
TOOL = torch.tensor([[0, 0.7, 0], [0.5, 0.8, 0.2], [0, 0, 0]])
MEMORY = torch.tensor([[0, 0.5, 0], [0.4, 0.9, 0], [0, 0, 0.1]])


@pytest.mark.parametrize(
    ("factor", "wanted"),
    [
        (2.0, [[0, 0.5, 0], [0.5, 0.8, 0.4], [0.2, 0, 0.2]]),
        (1.0, [[0, 0.5, 0], [0.5, 0.8, 0.2], [0.1, 0, 0.1]]),
    ],
)
def test_the_papers_worked_example(factor: float, wanted: list[list[float]]) -> None:
    merged = reference.merge(
        torch.zeros(3, 3), [CODE, TOOL, MEMORY], epsilon=[1e-5] * 3, rescale=[factor] * 3
    )
    torch.testing.assert_close(merged, torch.tensor(wanted))


def test_counts_of_the_worked_example() -> None:
    counts = reference.count(torch.zeros(3, 3), [CODE, TOOL, MEMORY], epsilon=[1e-5] * 3)
    assert counts["elements"] == 9
    assert (counts["unchanged"], counts["unique"], counts["shared"]) == (3, 3, 3)
    assert counts["changed"] == [4, 4, 4]
    assert counts["overlap"] == [[1, 0, 3], [1, 0, 3], [1, 0, 3]]
    assert counts["pairs"] == [[4, 3, 3], [3, 4, 3], [3, 3, 4]]
    assert counts["sign_conflicts"] == 0
    assert counts["below_epsilon"] == [0, 0, 0]


def test_each_class_in_one_vector() -> None:
    #                      unchanged  unique to 0  unique to 1  shared  opposite  below epsilon
    base = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    first = torch.tensor([1.0, 1.5, 1.0, 1.5, 1.5, 1.0 + 2**-20])
    second = torch.tensor([1.0, 1.0, 3.0, 2.0, 0.0, 1.0])
    merged = reference.merge(
        base, [first, second], epsilon=[1e-5, 1e-5], weight=[1.0, 0.5], rescale=[1.0, 4.0]
    )
    # unique to 1: 1 + 4 * (0.5 * 2); shared: 1 + (0.5 + 0.5 * 1) / 2; opposite: 1 + (0.5 - 0.5) / 2
    assert merged.tolist() == [1.0, 1.5, 5.0, 1.5, 1.0, 1.0]
    counts = reference.count(base, [first, second], epsilon=[1e-5, 1e-5])
    assert counts["sign_conflicts"] == 1
    assert counts["below_epsilon"] == [1, 0]


def test_epsilon_is_a_strict_bound() -> None:
    base, agent = torch.zeros(3), torch.tensor([0.25, 0.125, -0.25])
    assert reference.merge(base, [agent], epsilon=[0.125]).tolist() == [0.25, 0.0, -0.25]
    assert reference.merge(base, [agent], epsilon=[0.25]).tolist() == [0.0, 0.0, 0.0]


def test_unique_values_are_copied_not_computed() -> None:
    # In float32, 1 + (1e-10 - 1) is 0.
    base, agent = torch.tensor([1.0]), torch.tensor([1e-10])
    assert_same_bits(reference.merge(base, [agent], epsilon=[1e-5]), agent)


def test_negative_zero_and_nan_survive_where_nothing_changed() -> None:
    base = torch.tensor([-0.0, float("nan"), 1.0])
    agent = torch.tensor([-0.0, float("nan"), -0.0])
    merged = reference.merge(base, [agent], epsilon=[0.0])
    assert_same_bits(merged, agent)
