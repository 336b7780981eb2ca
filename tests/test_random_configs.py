"""Random configs: every merge equals an independent recomputation, or the config is refused.

The recomputation reads the files, the config as it is written, and MergeKit's documentation: which
setting of a parameter holds for which tensor of which agent (source before slice before module
before global; the first filter that matches, gradients over a slice's layers, the next scope where
no filter matches), what is rounded when, and over what rho is counted. It uses the reference rule,
and neither MergeKit's resolver nor anything of the plugin.

200 configs by default, always the same ones. ``MERGEKIT_RAM_CONFIGS=5000`` tries as many others.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import StateDict, changed, initial_state, load, save, tiny_config
from helpers import assert_same_bits
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from mergekit.io.tasks import LoaderCache
from test_end_to_end import merged
from test_whole_model import write_tokenizer

from mergekit_ram import reference
from mergekit_ram.errors import RamError

NUMBER = int(os.environ.get("MERGEKIT_RAM_CONFIGS", "200"))
SETTINGS = settings(
    max_examples=NUMBER,
    derandomize="MERGEKIT_RAM_CONFIGS" not in os.environ,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

LAYERS, VOCABULARY = 2, 32
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
DEFAULTS = {"epsilon": 1e-5, "weight": 1.0, "r": 0.1, "alpha": 0.2}

Config = dict[str, Any]


# --- Models: a few, written once ------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A checkpoint; 0 is the base model, the rest are agents.

    Attributes:
        number: which one.
        dtype: of its files.
        files: ``safetensors``, ``pickled``, each in one file or in ``shards``.
        head: ``untied``, ``tied``, or tied and ``stored`` as a copy of the embedding.
    """

    number: int
    dtype: str
    files: str
    head: str


class Pool:
    """Writes models when they are asked for first, and keeps them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = functools.cache(self._write)
        self.read = functools.cache(load)

    @functools.cached_property
    def _start(self) -> dict[bool, StateDict]:
        return {tied: initial_state(self._config(tied)) for tied in (False, True)}

    @staticmethod
    def _config(tied: bool, dtype: str = "float32") -> Any:
        # Llama: MergeKit cannot stack layers of configs that list the type of each layer.
        return tiny_config(
            "llama",
            hidden_size=16,
            intermediate_size=24,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=VOCABULARY,
            num_hidden_layers=LAYERS,
            tie_word_embeddings=tied,
            dtype=DTYPES[dtype],
        )

    def _write(self, model: Model) -> Path:
        tied = model.head != "untied"
        state = self._start[tied]
        if model.number:
            density = (0.1, 0.5, 0.4, 0.9)[model.number - 1]
            state = changed(state, seed=model.number, density=density)
            # Changes around every epsilon that is tried.
            small = changed(self._start[tied], seed=9, density=0.2, scale=3e-6 * model.number)
            state = {n: t + small[n] - self._start[tied][n] for n, t in state.items()}
            if model.number == 2:
                state["model.layers.0.mlp.up_proj.weight"] = self._start[tied][
                    "model.layers.0.mlp.up_proj.weight"
                ]
        state = {n: t.to(DTYPES[model.dtype]) for n, t in state.items()}
        if model.head == "stored":
            state[HEAD] = state[EMBEDDING].clone()
        folder = self.folder / f"{model.number}-{model.dtype}-{model.files}-{model.head}"
        save(
            folder,
            self._config(tied, model.dtype),
            state,
            shards=2 if "shards" in model.files else 1,
            pickled="pickled" in model.files,
        )
        write_tokenizer(folder, [f"w{i}" for i in range(VOCABULARY)])
        return folder


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Without the warnings of hundreds of merges in the report of a failure."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return Pool(tmp_path_factory.mktemp("models"))


# --- Configs --------------------------------------------------------------------------------


def rarely(strategy: st.SearchStrategy, usual: Any) -> st.SearchStrategy:
    """A strategy that gives ``usual`` in two cases of three."""
    return st.one_of(st.just(usual), st.just(usual), strategy)


VALUES = {
    "epsilon": st.sampled_from([0, 1e-6, 1e-5, "1e-4", 1e-3]),
    "weight": st.sampled_from([1, 1.0, 0, 0.5, -1, "2", 0.3]),
    "r": st.sampled_from([0, 0.1, "0.5", 2]),
    "alpha": st.sampled_from([0, 0.2, "1.0", 10]),
}
FILTERS = st.sampled_from(
    ["mlp", "self_attn", "layers.1.", "lm_head", "embed_tokens", "norm", "layers.0.mlp.up", "*"]
)


def settings_of(name: str) -> st.SearchStrategy:
    """A parameter's setting: a scalar, a gradient, or either under filters."""
    scalar = VALUES[name]
    if name == "alpha":
        scalar = scalar | st.just(float("inf"))
    plain = scalar | st.lists(VALUES[name], min_size=1, max_size=3)
    filtered = st.builds(lambda text, value: {"filter": text, "value": value}, FILTERS, plain)
    rest = st.builds(lambda value: [{"value": value}], plain) | st.just([])
    conditional = st.builds(
        lambda some, last: [*some, *last], st.lists(filtered, min_size=1, max_size=2), rest
    )
    return plain | conditional | filtered


PARAMETERS = rarely(st.fixed_dictionaries({}, optional={n: settings_of(n) for n in VALUES}), {})


def with_parameters(draw: Callable[..., Any], entry: Config) -> Config:
    """Add parameters to an entry of a config, or none."""
    parameters = draw(PARAMETERS)
    return entry | ({"parameters": parameters} if parameters else {})


# What cannot be merged: breaks a config.
FAULTS: dict[str, Callable[[Config], object]] = {
    "epsilon": lambda config: config.update(parameters={"epsilon": -1e-5}),
    "r": lambda config: config.update(parameters={"r": [0.1, float("nan")]}),
    "alpha": lambda config: config.update(parameters={"alpha": True}),
    "weight": lambda config: config.update(parameters={"weight": {"filter": "q", "value": "x"}}),
    "dtype": lambda config: config.update(dtype="bf16"),
    "out_dtype": lambda config: config.update(out_dtype="int8"),
    "base": lambda config: config.pop("base_model"),
}


@dataclass(frozen=True)
class Case:
    """A config whose models are still to be written, and what is wrong with it."""

    config: Config
    fault: str | None
    lazy_unpickle: bool


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    head = draw(rarely(st.sampled_from(["tied", "stored"]), "untied"))
    dtypes = st.sampled_from([*DTYPES, "bfloat16", "float32"])
    files = rarely(
        st.sampled_from(["safetensors in shards", "pickled", "pickled shards"]), "safetensors"
    )
    of_all = draw(st.booleans()) and draw(dtypes)
    numbers = draw(st.permutations(range(1, 5)))[: draw(st.integers(1, 4))]
    base, *agents = (Model(i, of_all or draw(dtypes), draw(files), head) for i in (0, *numbers))
    config: Config = {
        "merge_method": draw(st.sampled_from(["ram", "ram_plus", "ram_plus", "ramplus_tl"])),
        "base_model": base,
        "dtype": draw(rarely(st.sampled_from(list(DTYPES)), None)),
        "out_dtype": draw(rarely(st.sampled_from(list(DTYPES)), None)),
    }
    if draw(st.integers(0, 7)) == 7:
        config["tokenizer"] = {"source": draw(st.sampled_from(["base", "union"]))}
    config = with_parameters(draw, config)
    if draw(st.booleans()):
        # Limits above most ratios, so that every count shows in the result.
        config["parameters"] = {"r": 0.5, "alpha": 10} | config.get("parameters", {})

    shape = draw(st.sampled_from(["models", "models", "slices"]))
    inner: Config = {}
    if shape == "models":
        listed = draw(st.permutations([base, *agents])) if draw(st.booleans()) else agents
        inner["models"] = [
            {"model": m} if m == base else with_parameters(draw, {"model": m}) for m in listed
        ]
    else:
        order = draw(st.permutations([base, *agents]))
        ranges = draw(
            st.sampled_from([[(0, 2)], [(0, 1), (1, 2)], [(0, 2), (1, 2)], [(1, 2)], [(1, 2)] * 2])
        )
        inner["slices"] = []
        for low, high in ranges:
            # An agent's layers can come from another place, as long as there are as many.
            shift = draw(st.booleans()) and high - low == 1 and draw(st.sampled_from(order))
            sources = []
            for model in order:
                place = (1 - low, 2 - low) if model == shift else (low, high)
                entry = {"model": model, "layer_range": list(place)}
                sources.append(entry if model == base else with_parameters(draw, entry))
            inner["slices"].append(with_parameters(draw, {"sources": sources}))
    if draw(st.integers(0, 3)) == 3:
        config["modules"] = {"default": with_parameters(draw, inner)}
    else:
        config |= inner
    fault = draw(st.sampled_from(list(FAULTS))) if draw(st.integers(0, 9)) == 3 else None
    return Case(config, fault, draw(st.booleans()))


def located(part: Any, pool: Pool) -> Any:
    """The config with the models' folders."""
    if isinstance(part, Model):
        return str(pool.path(part))
    if isinstance(part, dict):
        return {key: located(value, pool) for key, value in part.items() if value is not None}
    return [located(value, pool) for value in part] if isinstance(part, list) else part


# --- The recomputation ----------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """What one model contributes to one tensor: its tensor's name, its settings nearest first."""

    model: str
    name: str
    scopes: tuple[Mapping[str, Any], ...]


def planned(config: Config, names: Sequence[str]) -> Iterator[tuple[str, float, list[Source]]]:
    """Tensors of the output, each with its place among a slice's layers and its sources."""
    module = config.get("modules", {}).get("default", config)
    around = [part.get("parameters", {}) for part in (module, config)]
    if "slices" in module:
        slices = module["slices"]
    else:
        models = [dict(entry, layer_range=[0, LAYERS]) for entry in module["models"]]
        if config["base_model"] not in [entry["model"] for entry in models]:
            models.append({"model": config["base_model"], "layer_range": [0, LAYERS]})
        slices = [{"sources": models}]

    def sources(part: Config, rename: Callable[[Config], str]) -> list[Source]:
        inner = part.get("parameters", {})
        return [
            Source(s["model"], rename(s), (s.get("parameters", {}), inner, *around))
            for s in part["sources"]
        ]

    yield EMBEDDING, 0.0, sources(slices[0], lambda s: EMBEDDING)
    kinds = [n.removeprefix("model.layers.0.") for n in names if n.startswith("model.layers.0.")]
    layer = itertools.count()
    for part in slices:
        low, high = part["sources"][0]["layer_range"]
        for i in range(high - low):
            number, t = next(layer), i / (high - low - 1) if high - low > 1 else 1.0
            for kind in kinds:
                yield (
                    f"model.layers.{number}.{kind}",
                    t,
                    sources(part, lambda s: f"model.layers.{s['layer_range'][0] + i}.{kind}"),  # noqa: B023
                )
    yield NORM, 0.0, sources(slices[-1], lambda s: NORM)
    if HEAD in names:
        yield HEAD, 0.0, sources(slices[-1], lambda s: HEAD)


def value_of(setting: Any, name: str, t: float) -> float | None:
    """A setting's value for a tensor; None where no filter matches."""
    if isinstance(setting, dict):
        setting = [setting]
    if not isinstance(setting, list):
        return float(setting)
    if isinstance(setting[0], dict):
        for entry in setting:
            if entry.get("filter") in (None, "*") or entry["filter"] in name:
                return value_of(entry["value"], name, t)
        return None
    values = [float(value) for value in setting]
    place = t * (len(values) - 1)
    low = int(place)
    if low == len(values) - 1:
        return values[low]
    return (1 - (place - low)) * values[low] + (place - low) * values[low + 1]


def parameter(key: str, source: Source, t: float, method: str) -> float:
    for scope in source.scopes:
        value = value_of(scope[key], source.name, t) if key in scope else None
        if value is not None:
            return value
    return 0.0 if (key, method) == ("r", "ram") else DEFAULTS[key]


@dataclass
class Unit:
    """One tensor to merge: inputs as they are merged, and the settings of each agent."""

    base: torch.Tensor
    agents: dict[str, torch.Tensor]
    values: dict[str, list[float]]

    @functools.cached_property
    def active(self) -> np.ndarray:
        """Where each agent changed something, agents x elements."""
        wide = np.float64 if self.base.dtype == torch.float64 else np.float32
        base, *agents = (
            tensor.double().numpy().astype(wide).ravel()
            for tensor in (self.base, *self.agents.values())
        )
        limits = [wide(value) for value in self.values["epsilon"]]
        return np.array([np.abs(a - base) > limit for a, limit in zip(agents, limits, strict=True)])

    def classes(self) -> dict[str, tuple[int, int]]:
        """Shared and unique elements of each agent."""
        number = self.active.sum(0)
        return {
            agent: (int((on & (number > 1)).sum()), int((on & (number == 1)).sum()))
            for agent, on in zip(self.agents, self.active, strict=True)
        }

    def is_copy_of(self, other: Unit) -> bool:
        """Whether two tensors are one that stands under two names, merged alike."""
        return (
            list(self.agents) == list(other.agents)
            and torch.equal(self.base, other.base)
            and np.array_equal(self.active, other.active)
            and bool(self.active.any())
        )


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round once; torch goes from float64 to 16 bits by way of float32, and rounds twice."""
    if tensor.dtype != torch.float64 or dtype.itemsize > 2:
        return tensor.to(dtype)
    single = tensor.float()
    # To float32 towards zero, with the last bit set where something is lost: no tie is made up.
    inexact = single.double() != tensor
    away = single.double().abs() > tensor.abs()
    integers = single.view(torch.int32) - away.int()
    return torch.where(inexact, integers | 1, integers).view(torch.float32).to(dtype)


def recomputed(config: Config, pool: Pool) -> StateDict:
    """The whole merge."""
    method = config["merge_method"]
    read = {path: pool.read(Path(path)) for path in models_in(config)}
    units = {}
    for name, t, sources in planned(config, list(read[config["base_model"]])):
        loaded = {source.model: read[source.model][source.name] for source in sources}
        if "dtype" in config:
            loaded = {m: rounded(t, DTYPES[config["dtype"]]) for m, t in loaded.items()}
        # MergeKit promotes over all inputs, before it asks a method which of them take part.
        dtype = functools.reduce(torch.promote_types, (t.dtype for t in loaded.values()))
        inputs = {}
        values: dict[str, list[float]] = {key: [] for key in DEFAULTS}
        for source in sources:
            if source.model != config["base_model"]:
                found = {key: parameter(key, source, t, method) for key in DEFAULTS}
                if found["weight"] == 0:
                    continue  # as if it were not listed
                for key, value in found.items():
                    values[key].append(value)
            inputs[source.model] = loaded[source.model].to(dtype)
        units[name] = Unit(inputs.pop(config["base_model"]), inputs, values)

    counted: dict[str, tuple[int, int]] = {}
    for name, unit in units.items():
        if name == HEAD and unit.is_copy_of(units[EMBEDDING]):
            continue
        for agent, (shared, unique) in unit.classes().items():
            before = counted.get(agent, (0, 0))
            counted[agent] = (before[0] + shared, before[1] + unique)

    result = {}
    for name, unit in units.items():
        counts = unit.classes() if method == "ramplus_tl" else counted
        factors = []
        for agent, r, alpha in zip(
            unit.agents, unit.values["r"], unit.values["alpha"], strict=True
        ):
            shared, unique = counts[agent]
            # Without unique elements there is nothing to rescale.
            factors.append(1 + r * min(shared / unique, alpha) if unique and r else 1.0)
        inner = unit.base.dtype
        out = DTYPES[config["out_dtype"]] if "out_dtype" in config else inner
        if out.itemsize == 2:  # rounded once, from what the arithmetic gives
            inner = torch.promote_types(inner, torch.float32)
        exact = reference.merge(
            unit.base.to(inner),
            [tensor.to(inner) for tensor in unit.agents.values()],
            epsilon=unit.values["epsilon"],
            weight=unit.values["weight"],
            rescale=factors,
        )
        result[name] = rounded(exact, out)
    return result


def models_in(part: Any) -> set[str]:
    """All models of a config."""
    if isinstance(part, dict):
        own = {part[key] for key in ("model", "base_model") if key in part}
        return own.union(*(models_in(value) for value in part.values()))
    return set().union(*map(models_in, part)) if isinstance(part, list) else set()


# --- The property ---------------------------------------------------------------------------


@SETTINGS
@given(case=cases())
def test_a_merge_is_its_recomputation_or_is_refused(case: Case, pool: Pool) -> None:
    config = located(case.config, pool)
    out = pool.folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    # Loaders are kept from one merge to the next, with the way to unpickle of the first.
    LoaderCache.loaders.clear()
    options = {"lazy_unpickle": case.lazy_unpickle, "write_model_card": False}
    if case.fault is not None:
        event(f"refused for its {case.fault}")
        FAULTS[case.fault](config)
        with pytest.raises(RamError) as caught:
            merged(config, out, **options)
        assert case.fault in caught.value.message
        assert not out.exists()
        return
    event(f"{config['merge_method']}, {'slices' if 'slices' in str(config) else 'models'}")
    got = merged(config, out, **options)
    wanted = recomputed(config, pool)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(got[name], tensor)
