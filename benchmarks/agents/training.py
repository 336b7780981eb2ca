"""Training: a base model by supervised learning, and agents from it by GRPO."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.agents.model import answer_log_probabilities, new_model, write_answers
from benchmarks.agents.tasks import TASKS, Task, demonstrations, draw_digits

Report = Callable[[int, float], None]


@dataclass(frozen=True)
class Regime:
    """How the agents of a run train; ``dataclasses.replace`` makes another of it.

    In regime E the weights themselves are bfloat16, so an update below half a unit in a weight's
    last place rounds away, and few weights change. In regime A they are float32, and most change.
    """

    name: str
    dtype: torch.dtype
    optimizer: Callable[[Iterable[Tensor], float], torch.optim.Optimizer]
    learning_rate: float
    max_steps: int
    min_steps: int = 0
    target: float = 0.95
    window: int = 10
    prompts: int = 32
    samples: int = 8


def _sgd(parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9)


def _adamw(parameters: Iterable[Tensor], learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.99), weight_decay=0.0)


REGIMES = {
    "E": Regime("E", torch.bfloat16, _sgd, learning_rate=1e-2, max_steps=600),
    "A": Regime("A", torch.float32, _adamw, learning_rate=1e-4, max_steps=250, min_steps=100),
}


@dataclass(frozen=True)
class Trained:
    """An agent, the GRPO steps it took, and the moving average of its reward at the last."""

    model: PreTrainedModel
    steps: int
    reward: float


def train_base(
    seed: int,
    *,
    steps: int = 1000,
    batch: int = 128,
    learning_rate: float = 2e-3,
    report: Report | None = None,
) -> PreTrainedModel:
    """A float32 model that imitates the demonstrator, its final weights rounded to bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    model = new_model(seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / steps))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step in range(steps):
        loss = -answer_log_probabilities(model, demonstrations(batch, generator)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if report is not None:
            report(step + 1, loss.item())
    # Not model.to(bfloat16): that would round the rotary frequencies too, which no file stores.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model.eval()


def train_agent(
    base: PreTrainedModel,
    task: Task,
    *,
    regime: Regime,
    seed: int,
    report: Report | None = None,
) -> Trained:
    """Train a copy of ``base`` on one task by GRPO: one update a batch, no KL term.

    The weights are of ``regime.dtype``, and so is what the optimizer keeps of them; the model
    computes in float32, and comes back in it. Training stops when the mean reward of the last
    ``regime.window`` batches reaches ``regime.target``, or after ``regime.max_steps``.
    """
    # Each task draws prompts of its own, so the agents of one seed differ in more than the reward.
    generator = torch.Generator().manual_seed(1000 * seed + 1 + list(TASKS).index(task.name))
    model = copy.deepcopy(base).float().train()
    computed = list(model.parameters())
    weights = [parameter.detach().to(regime.dtype, copy=True) for parameter in computed]
    optimizer = regime.optimizer(weights, regime.learning_rate)
    rewards: deque[float] = deque(maxlen=regime.window)
    step, average = 0, 0.0
    while step < regime.max_steps:
        digits = draw_digits(regime.prompts, generator).repeat_interleave(regime.samples, dim=0)
        prompts = task.prompts(digits)
        answers = write_answers(model, prompts, generator)
        reward = (answers == task.answer(digits)).all(dim=1).float()
        grouped = reward.view(regime.prompts, regime.samples)
        centred = grouped - grouped.mean(dim=1, keepdim=True)
        advantage = (centred / (grouped.std(dim=1, keepdim=True) + 1e-6)).view(-1, 1)

        # Where a prompt's samples all earned the same, the advantage and so the gradient are zero.
        counts = advantage[:, 0] != 0
        if counts.any():
            rows = torch.cat([prompts, answers], dim=1)[counts]
            gains = advantage[counts] * answer_log_probabilities(model, rows)
            model.zero_grad()
            (-gains.sum() / answers.numel()).backward()
            torch.nn.utils.clip_grad_norm_(computed, 1.0)
            for weight, parameter in zip(weights, computed, strict=True):
                assert parameter.grad is not None
                weight.grad = parameter.grad.to(regime.dtype)
            optimizer.step()
            with torch.no_grad():
                for weight, parameter in zip(weights, computed, strict=True):
                    parameter.copy_(weight)

        step += 1
        rewards.append(reward.mean().item())
        average = sum(rewards) / len(rewards)
        if report is not None:
            report(step, average)
        if len(rewards) == regime.window and step >= regime.min_steps and average >= regime.target:
            break
    return Trained(model.eval(), step, average)
