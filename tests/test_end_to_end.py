"""Whole merges through MergeKit's commands and its Python API, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from checkpoints import Family, load, make_family
from helpers import assert_same_bits, ordinary
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.merge_methods import merge_state_dicts, merge_tensors
from mergekit.options import MergeOptions
from safetensors.torch import save_file

from mergekit_ram import reference
from mergekit_ram.errors import NonFiniteError, ParameterError
from mergekit_ram.overlap import rescale_factor


def config_of(family: Family, method: str = "ram", **entries: Any) -> dict[str, Any]:
    return {
        "merge_method": method,
        "base_model": str(family.base),
        "models": [{"model": str(agent)} for agent in family.agents],
    } | entries


def merged(config: dict[str, Any], out: Path, **options: Any) -> dict[str, torch.Tensor]:
    run_merge(
        MergeConfiguration.model_validate(config),
        str(out),
        MergeOptions(quiet=True, copy_tokenizer=False, **options),
    )
    return load(out)


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name in wanted:
        assert_same_bits(got[name], wanted[name])


def command(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of this environment as a person would."""
    program = Path(sys.executable).parent / str(arguments[0])
    return subprocess.run(
        [program, *map(str, arguments[1:])],
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize(("tied", "shards"), [(False, 1), (True, 3)])
def test_models(tmp_path: Path, kind: str, dtype: torch.dtype, tied: bool, shards: int) -> None:
    family = make_family(tmp_path, kind, dtype=dtype, shards=shards, tie_word_embeddings=tied)
    assert_same(merged(config_of(family), tmp_path / "out"), family.expected())


def test_options_that_change_how_and_not_what(tmp_path: Path) -> None:
    family = make_family(tmp_path, pickled=True, shards=2)
    wanted = family.expected()
    for i, options in enumerate(
        (
            {"lazy_unpickle": True},
            {"async_write": True, "write_threads": 2},
            {"out_shard_size": 5000},
            {"low_cpu_memory": True, "clone_tensors": True},
            {"safe_serialization": False},
        )
    ):
        assert_same(merged(config_of(family), tmp_path / f"out{i}", **options), wanted)


def test_dtypes_of_input_and_output(tmp_path: Path) -> None:
    family = make_family(tmp_path, dtype=torch.float32)
    exact = family.expected()
    got = merged(
        config_of(family, dtype="float32", out_dtype="bfloat16"), tmp_path / "rounded at the end"
    )
    assert_same(got, {k: v.bfloat16() for k, v in exact.items()})
    got = merged(config_of(family, dtype="bfloat16"), tmp_path / "rounded at the start")
    assert_same(got, family.expected(dtype=torch.bfloat16))


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
def test_what_does_not_fit_is_an_error(tmp_path: Path, method: str) -> None:
    """MergeKit's own rounding, at either end, would write infinity."""
    family = make_family(tmp_path, dtype=torch.float32)
    name = "model.layers.0.mlp.up_proj.weight"
    state = {n: t.clone() for n, t in family.states[family.agents[0]].items()}
    state[name][0, 0] = 3e5
    save_file(state, family.agents[0] / "model.safetensors", metadata={"format": "pt"})
    config = config_of(family, method, dtype="float32", out_dtype="float16")
    with pytest.raises(NonFiniteError, match=rf"'{name}'.* fit into float16.*`out_dtype: "):
        merged(config, tmp_path / "out")
    config = config_of(family, method, dtype="float16")
    with pytest.raises(NonFiniteError, match=rf"'{name}'.*do not fit into float16 \(`dtype`\)"):
        merged(config, tmp_path / "in")
    assert_same(
        merged(config_of(family, out_dtype="bfloat16"), tmp_path / "wide"),
        {n: t.bfloat16() for n, t in family.expected().items()},
    )


def test_parameters_everywhere(tmp_path: Path) -> None:
    """Global, per agent, with filters and gradients, the nearest setting first."""
    family = make_family(tmp_path, dtype=torch.float32)
    first, second, third = family.agents
    config = config_of(family, parameters={"epsilon": "1e-3", "weight": [1.0, 0.5]})
    config["models"][1]["parameters"] = {
        "weight": [{"filter": "mlp", "value": -1.0}, {"value": 0.25}],
        "epsilon": 0,
    }
    config["models"][2]["parameters"] = {"weight": [{"filter": "self_attn", "value": 0}]}

    def layer_gradient(name: str) -> float:
        # Two layers: the gradient's ends. Weights outside of layers are planned at its start.
        return 0.5 if "layers.1." in name else 1.0

    def weight(name: str, agent: Path) -> float:
        if agent == second:
            return -1.0 if "mlp" in name else 0.25
        if agent == third and "self_attn" in name:
            return 0.0
        return layer_gradient(name)

    def epsilon(name: str, agent: Path) -> float:
        return 0.0 if agent == second else 1e-3

    assert first in family.agents
    wanted = family.expected(weight=weight, epsilon=epsilon)
    assert_same(merged(config, tmp_path / "out"), wanted)


def test_slices_and_modules_take_parameters(tmp_path: Path) -> None:
    family = make_family(tmp_path, dtype=torch.float32)
    slices = [
        {
            "sources": [
                {"model": str(m), "layer_range": [i, i + 1]} for m in (family.base, *family.agents)
            ],
            "parameters": {"epsilon": eps},
        }
        for i, eps in enumerate((1e-5, 1e-3))
    ]
    config = {"merge_method": "ram", "base_model": str(family.base)}

    def epsilon(name: str, agent: Path) -> float:
        return 1e-5 if "layers.0." in name or "embed" in name else 1e-3

    wanted = family.expected(epsilon=epsilon)
    assert_same(merged(config | {"slices": slices}, tmp_path / "slices"), wanted)
    modules = {"default": {"slices": slices}}
    assert_same(merged(config | {"modules": modules}, tmp_path / "modules"), wanted)


def tensor_local(
    family: Family, r: float = 0.1, alpha: float = 0.2, epsilon: float = 1e-5
) -> dict[str, torch.Tensor]:
    """RAM+ with rho counted in each tensor, recomputed."""
    base = load(family.base)
    loaded = [load(agent) for agent in family.agents]
    result = {}
    for name, tensor in base.items():
        tensors = [state[name] for state in loaded]
        counts = reference.count(tensor, tensors, epsilon=[epsilon] * len(tensors))
        factors = [rescale_factor(sum(row[1:]), row[0], r, alpha) for row in counts["overlap"]]
        result[name] = reference.merge(
            tensor, tensors, epsilon=[epsilon] * len(tensors), rescale=factors
        )
    return result


def test_tensor_local_ram_plus(tmp_path: Path) -> None:
    family = make_family(tmp_path)
    got = merged(config_of(family, "ramplus_tl"), tmp_path / "out")
    wanted = tensor_local(family)
    assert_same(got, wanted)
    # An agent that leaves a tensor alone makes the built-in write NaN at epsilon 0.
    config = config_of(family, "ramplus_tl", parameters={"epsilon": 0, "r": 0.5, "alpha": 3})
    assert_same(merged(config, tmp_path / "zero"), tensor_local(family, 0.5, 3, 0.0))


@pytest.mark.parametrize(
    "agents", [["agent0"], ["base", "agent0", "agent1"], ["agent0", "agent1", "base"]]
)
def test_lists_of_models(tmp_path: Path, agents: list[str]) -> None:
    """One agent is copied; a base among the models is the same as one not listed."""
    family = make_family(tmp_path)
    listed = [tmp_path / name for name in agents]
    config = config_of(family, models=[{"model": str(path)} for path in listed])
    without_base = [path for path in listed if path != family.base]
    wanted = family.expected(agents=without_base)
    assert_same(merged(config, tmp_path / "out"), wanted)


def test_the_same_agent_twice_is_an_error(tmp_path: Path) -> None:
    family = make_family(tmp_path)
    config = config_of(family)
    config["models"].append(config["models"][0])
    with pytest.raises(ValueError, match=r"models: .* is listed twice"):
        merged(config, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("epsilon", -1),
        ("epsilon", float("nan")),
        ("epsilon", float("inf")),
        ("epsilon", True),
        ("epsilon", "small"),
        ("weight", float("inf")),
        ("weight", [1.0, float("nan")]),
        ("r", -0.1),
        ("r", [{"filter": "mlp", "value": "x"}, {"value": 0}]),
        ("alpha", -1),
        ("alpha", float("nan")),
        ("alpha", [0.2, float("inf")]),
        ("weight", "1" + 400 * "0"),
    ],
)
def test_bad_values_are_errors_before_any_weight_is_read(
    tmp_path: Path, key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = make_family(tmp_path)
    monkeypatch.setattr(
        "mergekit.io.lazy_tensor_loader.LazyTensorLoader.get_tensor",
        lambda *args, **kwargs: pytest.fail("a weight was read"),
    )
    config = config_of(family)
    config["models"][1]["parameters"] = {key: value}
    with pytest.raises(ParameterError, match=key) as caught:
        merged(config, tmp_path / "out")
    assert f"models[1] ({family.agents[1]}).parameters.{key}: " in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_mergekit_yaml(tmp_path: Path) -> None:
    """The command as a person runs it: a merge, a typo, and two mistakes."""
    family = make_family(tmp_path, shards=2)
    config = tmp_path / "config.yml"
    out = tmp_path / "out"
    config.write_text(yaml.safe_dump(config_of(family, parameters={"epsilom": "1e-4"})))
    result = command("mergekit-yaml", config, out)
    assert result.returncode == 0, result.stderr
    assert_same(load(out), family.expected())
    assert "Reinforced Agent Merging" in (out / "README.md").read_text()
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert result.stderr.count("epsilom") == 1
    assert "Did you mean 'epsilon'?" in result.stderr

    config.write_text(yaml.safe_dump(config_of(family, parameters={"epsilon": -1})))
    result = command("mergekit-yaml", config, tmp_path / "negative")
    assert result.returncode == 1
    assert "parameters.epsilon: -1 is not allowed; it must be a finite number" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "negative").exists()

    broken = {k: v.clone() for k, v in family.states[family.agents[1]].items()}
    name = "model.layers.1.mlp.up_proj.weight"
    broken[name][0, :2] = float("inf")
    family.states[family.agents[1]] = broken
    other = make_family(tmp_path / "other")
    save_file(broken, other.agents[1] / "model.safetensors", metadata={"format": "pt"})
    config.write_text(yaml.safe_dump(config_of(other)))
    result = command("mergekit-yaml", config, tmp_path / "infinite")
    assert result.returncode == 1
    assert f"'{name}'" in result.stderr
    assert f"2 elements in {other.agents[1]}" in result.stderr
    assert not list((tmp_path / "infinite").glob("model*"))
    assert not (tmp_path / "infinite" / "config.json").exists()


def test_mergekit_pytorch_and_multi(tmp_path: Path) -> None:
    family = make_family(tmp_path)
    raw = {
        "merge_method": "ram",
        "base_model": str(family.base / "model.safetensors"),
        "models": [
            {"model": str(a / "model.safetensors"), "parameters": {"epsilonn": 1}}
            for a in family.agents
        ],
        "out_dtype": "float32",
    }
    config = tmp_path / "raw.yml"
    config.write_text(yaml.safe_dump(raw))
    result = command("mergekit-pytorch", config, tmp_path / "raw")
    assert result.returncode == 0, result.stderr
    exact = {
        name: reference.merge(
            tensor.float(),
            [family.states[a][name].float() for a in family.agents],
            epsilon=[1e-5] * 3,
        )
        for name, tensor in family.states[family.base].items()
    }
    assert_same(load(tmp_path / "raw"), exact)
    assert result.stderr.count("epsilonn") == 1

    config.write_text(
        yaml.safe_dump_all(
            [
                config_of(family, models=[{"model": str(a)} for a in family.agents[:2]])
                | {"name": "first"},
                config_of(family, models=[{"model": "first"}, {"model": str(family.agents[2])}]),
            ]
        )
    )
    result = command(
        "mergekit-multi", config, "--out-path", tmp_path / "multi", "-I", tmp_path / "steps"
    )
    assert result.returncode == 0, result.stderr
    first = family.expected(agents=family.agents[:2])
    assert_same(load(tmp_path / "steps" / "first"), first)
    base, third = load(family.base), load(family.agents[2])
    wanted = {n: reference.merge(base[n], [first[n], third[n]], epsilon=[1e-5] * 2) for n in base}
    assert_same(load(tmp_path / "multi"), wanted)


class TestInMemory:
    """``merge_tensors`` and ``merge_state_dicts``."""

    def test_tensors(self) -> None:
        base, agents = ordinary((20, 30), 3, torch.bfloat16)
        wanted = reference.merge(base, agents, epsilon=[1e-4, 0, 1e-5], weight=[1, 2, -1])
        got = merge_tensors(
            [agents[0], base, *agents[1:]],
            "ram",
            base_index=1,
            parameters={"epsilon": [1e-4, 0.0, 1e-5], "weight": {0: 1.0, 2: 2.0, 3: -1.0}},
        )
        assert_same_bits(got, wanted)

    def test_state_dicts(self) -> None:
        states = [
            dict(zip(("x", "y"), pair, strict=True))
            for pair in zip(
                *(
                    [base, *agents]
                    for base, agents in (
                        ordinary((9, 5), 2, torch.float16, 1),
                        ordinary((40,), 2, torch.float32, 2),
                    )
                ),
                strict=True,
            )
        ]
        for state in states:
            state["steps"] = torch.tensor(3)
        got = merge_state_dicts(dict(zip("bac", states, strict=True)), "ram", base="b")
        for name in ("x", "y"):
            wanted = reference.merge(
                states[0][name], [s[name] for s in states[1:]], epsilon=[1e-5] * 2
            )
            assert_same_bits(got[name], wanted)
        assert got["steps"] == 3

    def test_an_agent_with_weight_0_is_as_if_not_listed(self) -> None:
        base, agents = ordinary((20, 30), 3, torch.bfloat16)
        agents[1] = torch.full_like(base, float("nan"))
        got = merge_tensors(
            [base, *agents], "ram", base_index=0, parameters={"weight": [1.0, 0.0, 1.0]}
        )
        assert_same_bits(got, reference.merge(base, agents[::2], epsilon=[1e-5] * 2))
        got = merge_tensors([base, *agents], "ram", base_index=0, parameters={"weight": 0})
        assert_same_bits(got, base)

    def test_the_base_alone(self) -> None:
        base, _ = ordinary((4,), 0, torch.float32)
        assert_same_bits(merge_tensors([base], "ram", base_index=0), base)

    def test_numbers_of_other_kinds(self) -> None:
        base, agents = ordinary((20,), 2, torch.float32)
        wanted = reference.merge(base, agents, epsilon=[1e-5] * 2, weight=[0.5, 0.5])
        for half in (torch.tensor(0.5), np.float32(0.5), "0.5"):
            got = merge_tensors([base, *agents], "ram", base_index=0, parameters={"weight": half})
            assert_same_bits(got, wanted)

    def test_inputs_that_are_rounded_first(self) -> None:
        base = torch.tensor([9e4, 1.0])
        with pytest.raises(NonFiniteError, match="does not fit into float16"):
            merge_tensors([base, base + 1], "ram", base_index=0, dtype=torch.float16)
        with pytest.raises(NonFiniteError, match=r"does not fit into float16.*`out_dtype: float32"):
            merge_tensors([base], "ram", base_index=0, out_dtype=torch.float16)

    def test_without_a_base(self) -> None:
        with pytest.raises(ValueError, match="requires a base"):
            merge_tensors([torch.zeros(2)] * 2, "ram")

    def test_errors_name_the_tensor(self) -> None:
        base = torch.zeros(3)
        with pytest.raises(ValueError, match=r"ram: tensor 'w'.*1 element in 1"):
            merge_tensors([base, torch.tensor([1, float("nan"), 0])], "ram", base_index=0, name="w")
        half = torch.tensor([4e4], dtype=torch.float16)
        with pytest.raises(ValueError, match=r"does not fit into float16 in 1 element"):
            merge_tensors(
                [half, -half, -half],
                "ram",
                base_index=0,
                name="w",
                parameters={"weight": 3},
            )
        quantised = torch.zeros(3, dtype=torch.float8_e4m3fn)
        with pytest.raises(ValueError, match=r"tensor 'w'.*dequantised.*models: 0, 1"):
            merge_tensors([quantised] * 2, "ram", base_index=0, name="w")

    def test_unknown_parameters(self) -> None:
        with pytest.raises(TypeError, match="epsilom"):
            merge_tensors([torch.zeros(2)] * 2, "ram", base_index=0, parameters={"epsilom": 1})
        with pytest.raises(ParameterError, match="epsilon: -1 is not allowed"):
            merge_tensors([torch.zeros(2)] * 2, "ram", base_index=0, parameters={"epsilon": -1})
