"""Integer counts of how agents' changes overlap, and the RAM+ factors that follow from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class OverlapCounts:
    """How the changes of ``n`` agents overlap, in elements.

    Attributes:
        agents: identifiers of the agents, in the order of the config.
        elements: number of elements that were looked at.
        overlap: ``(n, n)`` int64. ``overlap[i, k]`` elements are active in agent ``i`` and in
            exactly ``k`` others; column 0 is what is unique to ``i`` (paper, figure 2).
        pairs: ``(n, n)`` int64, symmetric. ``pairs[i, j]`` elements are active in both;
            the diagonal is the number that the agent changed.
        below_epsilon: ``(n,)`` int64. Elements whose bits differ from the base model's but
            whose task vector is not larger than epsilon.
        sign_conflicts: shared elements whose active task vectors disagree in sign.
    """

    agents: tuple[Hashable, ...]
    elements: int
    overlap: Counts
    pairs: Counts
    below_epsilon: Counts
    sign_conflicts: int

    @classmethod
    def zero(cls, agents: Sequence[Hashable]) -> OverlapCounts:
        """Counts of no element at all."""
        n = len(agents)
        square = (n, n)
        return cls(
            agents=tuple(agents),
            elements=0,
            overlap=np.zeros(square, np.int64),
            pairs=np.zeros(square, np.int64),
            below_epsilon=np.zeros(n, np.int64),
            sign_conflicts=0,
        )

    @property
    def changed(self) -> Counts:
        """Elements active in each agent, ``(n,)``."""
        return np.asarray(self.overlap.sum(axis=1))

    @property
    def unique(self) -> Counts:
        """Elements active in this agent alone, ``(n,)``."""
        return np.asarray(self.overlap[:, :1].sum(axis=1))

    @property
    def shared(self) -> Counts:
        """Elements active in this agent and at least one other, ``(n,)``."""
        return np.asarray(self.overlap[:, 1:].sum(axis=1))

    @property
    def unique_elements(self) -> int:
        """Elements that exactly one agent changed."""
        return int(self.unique.sum())

    @property
    def shared_elements(self) -> int:
        """Elements that two or more agents changed."""
        # An element shared by k + 1 agents stands once in each of their rows.
        rows = self.overlap.sum(axis=0)
        return sum(int(rows[k]) // (k + 1) for k in range(1, len(rows)))

    @property
    def unchanged_elements(self) -> int:
        """Elements that no agent changed."""
        return self.elements - self.unique_elements - self.shared_elements

    @property
    def density(self) -> tuple[float, ...]:
        """Share of the elements that each agent changed, 0 to 1."""
        return tuple(int(c) / self.elements if self.elements else 0.0 for c in self.changed)

    def key(self) -> tuple[Hashable, ...]:
        """Return all counts as one hashable value: copies of a tensor have the same."""
        arrays = (self.overlap, self.pairs, self.below_epsilon)
        return (
            self.agents,
            self.elements,
            self.sign_conflicts,
            *(array.tobytes() for array in arrays),
        )

    def __add__(self, other: OverlapCounts) -> OverlapCounts:
        """Counts of both sets of elements; agents that only one of them knows keep theirs."""
        order = self.agents + tuple(a for a in other.agents if a not in self.agents)
        left, right = self._spread(order), other._spread(order)
        return OverlapCounts(
            agents=order,
            elements=left.elements + right.elements,
            overlap=left.overlap + right.overlap,
            pairs=left.pairs + right.pairs,
            below_epsilon=left.below_epsilon + right.below_epsilon,
            sign_conflicts=left.sign_conflicts + right.sign_conflicts,
        )

    def _spread(self, order: tuple[Hashable, ...]) -> OverlapCounts:
        if order == self.agents:
            return self
        wide = OverlapCounts.zero(order)
        rows = [order.index(agent) for agent in self.agents]
        wide.overlap[rows, : len(rows)] = self.overlap
        wide.pairs[np.ix_(rows, rows)] = self.pairs
        wide.below_epsilon[rows] = self.below_epsilon
        return OverlapCounts(
            agents=order,
            elements=self.elements,
            overlap=wide.overlap,
            pairs=wide.pairs,
            below_epsilon=wide.below_epsilon,
            sign_conflicts=self.sign_conflicts,
        )


@dataclass(frozen=True)
class ModelOverlap:
    """How the agents' changes overlap in every tensor of a merge.

    Attributes:
        agents: identifiers of all agents of the merge, in the order of the config. A tensor's
            counts may know fewer of them, where a weight of 0 leaves an agent out.
        tensors: counts by the name of the output tensor.
        copies: tensors that hold the same values as another one in all models, as a stored tied
            head does, with the name of that other; they count once in ``total``.
    """

    agents: tuple[Hashable, ...]
    tensors: Mapping[str, OverlapCounts]
    copies: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def total(self) -> OverlapCounts:
        """Counts over the whole model."""
        return self.grouped(lambda name: "").get("", OverlapCounts.zero(self.agents))

    def grouped(self, key: Callable[[str], Hashable]) -> dict[Hashable, OverlapCounts]:
        """Counts over the tensors of each ``key(name)``, without copies; None is left out."""
        groups: dict[Hashable, OverlapCounts] = {}
        for name, counts in self.tensors.items():
            group = key(name)
            if name not in self.copies and group is not None:
                before = groups.get(group) or OverlapCounts.zero(self.agents)
                groups[group] = before + counts
        return groups


def overlap_unique_ratio(shared: int, unique: int) -> float | None:
    """Return rho = shared / unique, the overlap-unique ratio (paper, section 3.3).

    None where the agent has no unique element, so that the ratio has no value.
    """
    return shared / unique if unique else None


def rescale_factor(shared: int, unique: int, r: float, alpha: float) -> float:
    """Return lambda = 1 + r * clip(rho, 0, alpha), the factor of the agent's unique elements.

    An agent without unique elements never applies it: it counts as saturated
    (1 + r * alpha) when it shares elements, and as 1 when it changed nothing.
    """
    rho = overlap_unique_ratio(shared, unique)
    clipped = (alpha if shared else 0.0) if rho is None else min(rho, alpha)
    # r == 0 switches RAM+ off, whatever alpha is: 0 * inf must not become NaN.
    return 1.0 + r * clipped if r and clipped else 1.0


def rescale_factors(
    counts: OverlapCounts, r: Mapping[Hashable, float], alpha: Mapping[Hashable, float]
) -> dict[Hashable, float]:
    """Return lambda for every agent of ``r``; an agent without counts changed nothing."""
    table = {
        agent: (int(shared), int(unique))
        for agent, shared, unique in zip(counts.agents, counts.shared, counts.unique, strict=True)
    }
    return {agent: rescale_factor(*table.get(agent, (0, 0)), r[agent], alpha[agent]) for agent in r}
