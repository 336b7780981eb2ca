"""The merges that are compared: RAM, RAM+, MergeKit's own methods, and two controls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from mergekit.merge_methods import merge_state_dicts
from torch import Tensor

from benchmarks.agents.tasks import TASKS
from benchmarks.agents.vectors import EPSILON
from mergekit_ram import kernels
from mergekit_ram.overlap import OverlapCounts, overlap_unique_ratio, rescale_factor

StateDict = dict[str, Tensor]
Models = Mapping[str, StateDict]


@dataclass(frozen=True)
class Method:
    """One of MergeKit's methods, the plugin's among them, with its parameters."""

    name: str
    parameters: dict[str, float] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """Name and parameters, weights as two decimals."""
        told = [f"{key} {round(value, 2):g}" for key, value in self.parameters.items()]
        return " ".join([self.name, *told])


RAM = Method("ram")
METHODS = (
    RAM,
    Method("ram_plus"),
    Method("ram_plus", {"r": 0.2, "alpha": 1.0}),
    Method("ram_plus", {"r": 0.1, "alpha": 10.0}),
    Method("ram_plus", {"r": 0.5, "alpha": 10.0}),
    Method("ramplus_tl"),
    *(Method("task_arithmetic", {"weight": w}) for w in (1 / 3, 1 / 2, 2 / 3, 1.0)),
    *(Method("ties", {"weight": 1.0, "density": d}) for d in (0.2, 0.5, 1.0)),
    *(
        Method(name, {"weight": w, "density": 0.5})
        for name in ("dare_linear", "dare_ties")
        for w in (1 / 3, 1.0)
    ),
)
PERMUTED, MATCHED = "control: permuted factors", "control: matched scale"


def merge(models: Models, method: Method, dtype: torch.dtype, seed: int) -> StateDict:
    """Merge base and agents in float32, rounded once to ``dtype``; ``seed`` is for DARE."""
    torch.manual_seed(seed)
    merged: StateDict = merge_state_dicts(
        models,
        method.name,
        base="base",
        parameters=method.parameters,
        dtype=torch.float32,
        out_dtype=dtype,
    )
    return merged


def _tau(models: Models, key: str) -> Tensor:
    """(agents, ...) float32 task vectors of one tensor."""
    return torch.stack([models[task][key].float() - models["base"][key].float() for task in TASKS])


def permuted_factors(models: Models, dtype: torch.dtype, seed: int) -> StateDict:
    """RAM's factors of the summed task vector, dealt out at random to each tensor's elements.

    The factor is 1 for what one agent changed and 1 / c for what c did. Each tensor keeps all its
    factors; which changed element gets which is lost.
    """
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for key, base in models["base"].items():
        tau = _tau(models, key)
        active = tau.abs() > EPSILON
        count = active.sum(dim=0)
        changed = count > 0
        factors = 1 / count[changed].float()
        factors = factors[torch.randperm(len(factors), generator=generator)]
        merged = base.float()
        merged[changed] += factors * (tau * active).sum(dim=0)[changed]
        result[key] = merged.to(dtype)
    return result


def matched_weight(models: Models) -> float:
    """The one weight w for which w * (summed task vectors) is closest to what RAM adds."""
    ram = merge(models, RAM, torch.float32, 0)
    along, size = 0.0, 0.0
    for key, base in models["base"].items():
        total = _tau(models, key).double().sum(dim=0)
        along += ((ram[key].double() - base.double()) * total).sum().item()
        size += (total * total).sum().item()
    return along / size


def all_merges(models: Models, dtype: torch.dtype, seed: int) -> dict[str, Callable[[], StateDict]]:
    """Every merge by its label; calling it does the work."""
    merges: dict[str, Callable[[], StateDict]] = {
        method.label: partial(merge, models, method, dtype, seed) for method in METHODS
    }
    merges[PERMUTED] = partial(permuted_factors, models, dtype, seed)
    matched = Method("task_arithmetic", {"weight": matched_weight(models)})
    merges[MATCHED] = partial(merge, models, matched, dtype, seed)
    return merges


def overlap(models: Models) -> dict[str, Any]:
    """Per agent density, shares, rho and RAM+'s lambda; over all, sign conflicts and unchanged."""
    total = OverlapCounts.zero(tuple(TASKS))
    for key, base in models["base"].items():
        counts, bad = kernels.count(
            base,
            [models[task][key] for task in TASKS],
            epsilon=[EPSILON] * len(TASKS),
            names=list(TASKS),
            dtype=torch.float32,
        )
        assert not bad
        total += counts
    agents = {}
    for index, task in enumerate(TASKS):
        changed, unique, shared = (
            int(numbers[index]) for numbers in (total.changed, total.unique, total.shared)
        )
        agents[task] = {
            "density": total.density[index],
            "unique": unique / max(1, changed),
            "shared_with": [int(n) / max(1, changed) for n in total.overlap[index, 1:]],
            "rho": overlap_unique_ratio(shared, unique),
            "lambda": {
                method.label: rescale_factor(
                    shared, unique, **({"r": 0.1, "alpha": 0.2} | method.parameters)
                )
                for method in METHODS
                if method.name == "ram_plus"
            },
        }
    return {
        "epsilon": EPSILON,
        "elements": total.elements,
        "unchanged": total.unchanged_elements / total.elements,
        "sign_conflicts_of_shared": total.sign_conflicts / max(1, total.shared_elements),
        "agents": agents,
    }
