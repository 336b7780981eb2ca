"""The tokens, the three tasks on eight digits, and which prompts are held out of all training.

A row is ``B``, the task's letter, eight digits, ``=``, eight digits of answer and ``$``:
``BS73166986=13666789$``. Tokens are int64 ids; digits are their own ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

VOCABULARY = "0123456789=SCRB$"
BEGIN, END = "B", "$"
IDS = {token: index for index, token in enumerate(VOCABULARY)}

DIGITS = 8
PROMPT_LENGTH = DIGITS + 3
TEST_PROMPTS = 512
TEST_SEED = 20261201

# How often the base model's demonstrator is right, by whether the first digit is below five.
DEMONSTRATOR_EASY, DEMONSTRATOR_HARD = 0.85, 0.35


@dataclass(frozen=True)
class Task:
    """A function of eight digits, and the mistake that the demonstrator makes about it.

    Both map (n, 8) int64 digits to (n, 8) int64 digits.
    """

    name: str
    letter: str
    answer: Callable[[Tensor], Tensor]
    mistake: Callable[[Tensor], Tensor]

    def prompts(self, digits: Tensor) -> Tensor:
        """(n, 8) int64 digits to (n, 11) int64 prompt ids."""
        n = digits.shape[0]
        head = torch.tensor([IDS[BEGIN], IDS[self.letter]]).expand(n, 2)
        return torch.cat([head, digits, torch.full((n, 1), IDS["="])], dim=1)


def _sort(digits: Tensor) -> Tensor:
    return digits.sort(dim=1).values


def _sort_descending(digits: Tensor) -> Tensor:
    return digits.sort(dim=1, descending=True).values


def _cumulative_sum(digits: Tensor) -> Tensor:
    return digits.cumsum(dim=1) % 10


def _pairwise_sum(digits: Tensor) -> Tensor:
    previous = torch.nn.functional.pad(digits[:, :-1], (1, 0))
    return (digits + previous) % 10


def _reverse(digits: Tensor) -> Tensor:
    return digits.flip(1)


TASKS = {
    task.name: task
    for task in (
        Task("sort", "S", _sort, _sort_descending),
        Task("cumsum", "C", _cumulative_sum, _pairwise_sum),
        Task("reverse", "R", _reverse, torch.clone),
    )
}


def held_out(digits: Tensor) -> Tensor:
    """(n, 8) int64 digits to (n,) bool: whether no training may see them."""
    return digits.sum(dim=1) % 7 == 3


def draw_digits(n: int, generator: torch.Generator, *, test: bool = False) -> Tensor:
    """(n, 8) int64 digits, uniform over those for training, or over those held out of it."""
    kept = torch.empty((0, DIGITS), dtype=torch.int64)
    while kept.shape[0] < n:
        digits = torch.randint(10, (2 * n + 64, DIGITS), generator=generator)
        kept = torch.cat([kept, digits[held_out(digits) == test]])
    return kept[:n]


def test_digits() -> Tensor:
    """(512, 8) int64: the digits of the fixed test set, which all the tasks share."""
    return draw_digits(TEST_PROMPTS, torch.Generator().manual_seed(TEST_SEED), test=True)


def demonstrations(n: int, generator: torch.Generator) -> Tensor:
    """(n, 20) int64: whole rows by the imperfect demonstrator, the tasks in random proportion."""
    digits = draw_digits(n, generator)
    chosen = torch.randint(len(TASKS), (n, 1), generator=generator)
    chance = torch.where(digits[:, :1] < 5, DEMONSTRATOR_EASY, DEMONSTRATOR_HARD)
    right = torch.rand((n, 1), generator=generator) < chance
    end = torch.full((n, 1), IDS[END])
    rows = torch.empty((n, PROMPT_LENGTH + DIGITS + 1), dtype=torch.int64)
    for index, task in enumerate(TASKS.values()):
        answers = torch.where(right, task.answer(digits), task.mistake(digits))
        of_task = torch.cat([task.prompts(digits), answers, end], dim=1)
        rows = torch.where(chosen == index, of_task, rows)
    return rows
