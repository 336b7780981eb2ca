"""Checkpoints and configs as they really come: every kind through a whole merge.

A kind that can be merged is compared, bit for bit, with a recomputation from the files by the
reference rule; one that cannot has to say why and what to do, and must not leave a folder behind
that looks like a merge. More mistakes are in ``test_preflight.py``, more architectures in
``test_architectures.py``; here each kind that people were seen to run into stands once.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import yaml
from checkpoints import StateDict, changed, initial_state, load, make_family, save, tiny_config
from helpers import assert_same_bits
from mergekit.graph import Executor
from mergekit.io import LazyTensorLoader
from mergekit.options import MergeOptions
from mergekit.scripts import merge_raw_pytorch as flat
from safetensors.torch import save_file
from test_architectures import (
    BF16,
    FP32,
    KINDS,
    PLUS,
    modular,
    ratios,
    read,
    recomputed,
    store_head,
    write_family,
)
from test_end_to_end import assert_same, command, config_of, merged, tensor_local
from test_kernels import _Allocations
from test_whole_model import plan, write_tokenizer

from mergekit_ram import kernels, record
from mergekit_ram.errors import (
    ConfigError,
    NonFiniteError,
    ParameterError,
    RamError,
    ReadError,
)
from mergekit_ram.kernels import _staging
from mergekit_ram.tasks import MeasureOverlap

UP = "model.layers.1.mlp.up_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Config = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models of some thousand parameters wait for threads longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """The warnings of ours since the last call that match a pattern."""

    def take(pattern: str) -> list[str]:
        found = [
            r.getMessage()
            for r in caplog.records
            if r.name == "mergekit_ram" and r.levelno == logging.WARNING
        ]
        caplog.clear()
        return [message for message in found if re.search(pattern, message, re.S)]

    return take


Warned = Callable[..., list[str]]


def refused(
    config: Config,
    out: Path,
    says: str,
    error: type[Exception] = RamError,
    **options: Any,
) -> None:
    """A merge that ends with an error that says ``says``, and leaves nothing to mistake for one."""
    with pytest.raises(error, match=says):
        merged(config, out, **options)
    assert_unfinished(out)


def assert_unfinished(out: Path) -> None:
    left = {f.name for f in out.iterdir()} if out.exists() else set()
    assert not [n for n in left if n == "config.json" or n.startswith(("model.", "pytorch_model."))]


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a weight fails."""

    def refuse(self: LazyTensorLoader, key: str, *args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"the weight {key} was read")

    monkeypatch.setattr(LazyTensorLoader, "get_tensor", refuse)


def rewrite(folder: Path, change: Callable[[StateDict], object]) -> None:
    """Change the tensors of a model of one file."""
    state = {name: tensor.clone() for name, tensor in load(folder).items()}
    change(state)
    save_file(
        {n: t.contiguous() for n, t in state.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def edit(folder: Path, **entries: Any) -> None:
    """Change a model's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def recorded(out: Path) -> Any:
    return json.loads((out / record.FILE).read_text())


def factors_of(base: StateDict, agents: Sequence[StateDict]) -> list[float]:
    """Rescale factors by ``PLUS`` and rho over all tensors."""
    found = ratios(base, agents)
    assert len(set(found)) == len(found)
    return [1 + PLUS["r"] * min(rho, PLUS["alpha"]) for rho in found]


def whole_model(base: StateDict, agents: Sequence[StateDict]) -> StateDict:
    """RAM+ by ``PLUS``, recomputed."""
    factors = factors_of(base, agents)
    return recomputed(base, agents, lambda _: factors)


# --- The base and the agents ----------------------------------------------------------------


def test_fp32_agents_on_a_bf16_base(tmp_path: Path, warned: Warned) -> None:
    """RL trainers export float32: `dtype: bfloat16` rounds before the method sees anything."""
    kind = KINDS["qwen2"]
    family = write_family(tmp_path, kind, densities=(0.3,), scale=5e-5, agents_dtype=FP32)
    got = merged(config_of(family, dtype="bfloat16"), tmp_path / "rounded")
    assert_same(got, family.expected(dtype=BF16))
    (message,) = warned("holds float32")
    for part in (str(family.agents[0]), "model.safetensors", "`dtype: float32`", "`out_dtype: b"):
        assert part in message

    config = config_of(family, dtype="float32", out_dtype="bfloat16")
    got = merged(config, tmp_path / "advised")
    assert_same(got, {n: t.bfloat16() for n, t in family.expected(dtype=FP32).items()})
    assert not warned("float32")
    rounded, advised = (
        recorded(tmp_path / name)["agents"][0]["changed"] for name in ("rounded", "advised")
    )
    assert 0 < rounded < 0.8 * advised


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
def test_epsilon_against_16_bit_steps(method: str, tmp_path: Path) -> None:
    """One step of bfloat16 at 1e-3 is 7.6e-6, below the default: counted, and kept with 0."""
    family = make_family(tmp_path, n=2)
    rewrite(family.base, lambda s: s[UP].fill_(1e-3))
    base = load(family.base)
    step = base[UP].view(torch.int16) + 1
    for i, agent in enumerate(family.agents):
        rewrite(agent, lambda s, i=i: s[UP].copy_(base[UP])[i:9].copy_(step.view(BF16)[i:9]))
    got = merged(config_of(family, method), tmp_path / "default")
    assert_same_bits(got[UP], base[UP])
    for i, counts in enumerate(recorded(tmp_path / "default")["tensors"][UP]["agents"]):
        assert (counts["changed"], counts["below_epsilon"]) == (0, (9 - i) * 32)
    total = recorded(tmp_path / "default")["agents"]
    assert all(agent["below_epsilon"] >= 8 * 32 for agent in total)

    got = merged(config_of(family, method, parameters={"epsilon": 0}), tmp_path / "zero")
    assert_same_bits(got[UP][:9], load(family.agents[0])[UP][:9])
    assert not torch.equal(got[UP], base[UP])


def test_wrong_base_model(tmp_path: Path, warned: Warned) -> None:
    family = make_family(tmp_path / "models", n=2)
    other = initial_state(tiny_config(), seed=1)
    save(tmp_path / "other", tiny_config(dtype=BF16), {n: t.to(BF16) for n, t in other.items()})
    config = config_of(family, base_model=str(tmp_path / "other"))
    got = merged(config, tmp_path / "out")
    messages = warned("the wrong base model")
    assert len(messages) == 2
    for message, agent in zip(messages, recorded(tmp_path / "out")["agents"], strict=True):
        # The norms of both are 1, and the rest has nothing in common.
        assert f"{agent['model']} changed {100 * agent['density']:.1f} % of all" in message
        assert agent["density"] > 0.95
    base, agents = load(tmp_path / "other"), [load(agent) for agent in family.agents]
    assert_same(got, recomputed(base, agents, lambda _: [1.0, 1.0]))


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
def test_an_agent_equal_to_the_base(method: str, tmp_path: Path, warned: Warned) -> None:
    family = make_family(tmp_path / "models", n=2)
    shutil.copytree(family.base, tmp_path / "failed-export")
    models = [*family.agents, tmp_path / "failed-export"]
    config = config_of(family, method, models=[{"model": str(m)} for m in models])
    got = merged(config | {"parameters": PLUS}, tmp_path / "out")
    (message,) = warned("does not differ from the base model in any element")
    assert message.startswith(str(tmp_path / "failed-export"))
    assert_same(got, whole_model(load(family.base), [load(a) for a in family.agents]))


def test_dense_task_vectors(tmp_path: Path, warned: Warned) -> None:
    """Supervised fine-tuning, or LoRA: RAM degenerates to averaging."""
    family = make_family(tmp_path, dtype=FP32, n=2, densities=(1.0, 1.0))
    got = merged(config_of(family), tmp_path / "out")
    messages = warned("dense task vector.*RAM degenerates to averaging")
    assert [m.split()[0] for m in messages] == [str(agent) for agent in family.agents]
    assert_same(got, family.expected())
    first, second = (load(agent)[UP] for agent in family.agents)
    # Elements that one agent changed by less than epsilon are the other's.
    average = (got[UP] - (first + second) / 2).abs() < 1e-6
    assert 0.95 < average.float().mean() < 1


# --- The config -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("epsilom", r"'epsilom' in parameters: .*ignored\. Did you mean 'epsilon'\?"),
        ("r beside model", r"'r' in models\[0\] has no effect there: .* under\s+`parameters:`"),
        ("paramters", r"'paramters': .*ignored\. Did you mean 'parameters'\?"),
    ],
)
def test_typos(place: str, says: str, tmp_path: Path, warned: Warned) -> None:
    family = make_family(tmp_path)
    config = config_of(family)
    if place == "epsilom":
        config["parameters"] = {"epsilom": 1}
    elif place == "paramters":
        config["paramters"] = {"epsilon": 1}
    else:
        config["models"][0]["r"] = 1
    got = merged(config, tmp_path / "out")
    assert len(warned(says)) == 1
    assert_same(got, family.expected())


@pytest.mark.parametrize("value", [".nan", "-1", "true", '"1e-5"'])
def test_values_of_epsilon(value: str, tmp_path: Path) -> None:
    family = make_family(tmp_path)
    config = config_of(family, parameters=yaml.safe_load(f"epsilon: {value}"))
    if value == '"1e-5"':
        assert_same(merged(config, tmp_path / "out"), family.expected())
    else:
        says = r"parameters\.epsilon: \S+ is not allowed; it must be a finite number of at least 0"
        refused(config, tmp_path / "out", says, ParameterError)


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_or_infinity_in_an_agent(value: float, method: str, tmp_path: Path) -> None:
    family = make_family(tmp_path)
    rewrite(family.agents[1], lambda s: s[UP][0, :2].fill_(value))
    says = rf"{method}: tensor '{UP}'.*2 elements in {family.agents[1]}.*Repair or leave out"
    refused(config_of(family, method), tmp_path / "out", says, NonFiniteError)


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
def test_overflow_in_fp16(method: str, tmp_path: Path) -> None:
    """A task vector beyond float16 is no matter; a result is an error."""
    family = make_family(tmp_path, dtype=torch.float16, n=2)
    rewrite(family.base, lambda s: s[UP][0].fill_(-4e4))
    rewrite(family.agents[0], lambda s: s[UP][0].fill_(4e4))
    rewrite(family.agents[1], lambda s: s[UP][0].fill_(-4e4))
    got = merged(config_of(family, method), tmp_path / "out")
    # The agent's change is its own: with RAM+ it is rescaled, and still fits.
    base, agents = load(family.base), [load(agent) for agent in family.agents]
    factors = [1 + 0.1 * min(rho, 0.2) for rho in ratios(base, agents)]
    plus = method == "ram_plus"
    assert_same(got, recomputed(base, agents, lambda _: factors if plus else [1.0, 1.0]))
    assert got[UP][0].isfinite().all()
    config = config_of(family, method, parameters={"weight": 1.5})
    says = rf"'{UP}': the merge does not fit into float16 in 32 elements.*smaller weights"
    refused(config, tmp_path / "beyond", says, NonFiniteError)


def test_ramplus_tl_with_a_16_bit_dtype(tmp_path: Path) -> None:
    """The built-in writes float32, and a config.json that says bfloat16."""
    family = make_family(tmp_path)
    got = merged(config_of(family, "ramplus_tl", dtype="bfloat16"), tmp_path / "out")
    assert {tensor.dtype for tensor in got.values()} == {BF16}
    assert_same(got, tensor_local(family))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"


def test_ramplus_tl_with_epsilon_0_and_a_tensor_left_alone(tmp_path: Path) -> None:
    """The built-in writes NaN there."""
    family = make_family(tmp_path, dtype=FP32)
    base = load(family.base)
    rewrite(family.agents[0], lambda s: s[UP].copy_(base[UP]))
    settings = {"epsilon": 0, "r": 0.5, "alpha": 10}
    got = merged(config_of(family, "ramplus_tl", parameters=settings), tmp_path / "out")
    assert got[UP].isfinite().all()
    assert_same(got, tensor_local(family, 0.5, 10, 0.0))


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
def test_one_agent(method: str, tmp_path: Path) -> None:
    """All that it changed is its own."""
    family = make_family(tmp_path, n=1)
    got = merged(config_of(family, method, parameters={"epsilon": 0}), tmp_path / "out")
    assert_same(got, load(family.agents[0]))


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
def test_the_base_among_the_models(method: str, tmp_path: Path) -> None:
    family = make_family(tmp_path)
    unlisted = merged(config_of(family, method), tmp_path / "unlisted")
    config = config_of(family, method)
    config["models"].insert(1, {"model": str(family.base)})
    assert_same(merged(config, tmp_path / "listed"), unlisted)
    counts = [recorded(tmp_path / name) for name in ("unlisted", "listed")]
    assert counts[0] == counts[1]


def test_the_same_agent_twice(tmp_path: Path, no_weights: None) -> None:
    family = make_family(tmp_path)
    config = config_of(family)
    config["models"].append(config["models"][0])
    says = f"models: {family.agents[0]} is listed twice. List each model once"
    refused(config, tmp_path / "out", says, ConfigError)
    config["models"][-1] = {"model": f"{tmp_path}/./agent0"}
    refused(config, tmp_path / "out", "are the same model .* List it once", ConfigError)


# --- Heads, vocabularies and files ----------------------------------------------------------


@pytest.mark.parametrize("stores", ["a copy", "a copy each", "a head that differs"])
def test_tied_embeddings(stores: str, tmp_path: Path, warned: Warned) -> None:
    """The output gains a head, which loaders drop; a copy of the embedding counts once in rho."""
    family = make_family(tmp_path, tie_word_embeddings=True)
    storing = family.agents if stores == "a copy each" else family.agents[:1]
    for agent in storing:
        store_head(agent, EMBEDDING)
    if stores == "a head that differs":
        rewrite(family.agents[0], lambda s: s[HEAD][0].add_(0.5))
    got = merged(config_of(family, "ram_plus", parameters=PLUS), tmp_path / "out")
    (message,) = warned(rf"'{HEAD}' is tied .*but stored\s+in .*agent0.*loaders drop")
    assert [str(agent) in message for agent in family.agents] == [
        a in storing for a in family.agents
    ]

    base, *agents = (load(folder) for folder in (family.base, *family.agents))
    if stores == "a head that differs":
        # It is a tensor like others; where a file has none, the embedding takes its place.
        base, *agents = ({HEAD: s[EMBEDDING]} | s for s in (base, *agents))
        assert_same(got, whole_model(base, agents))
    else:
        wanted = whole_model(base, [{n: s[n] for n in base} for s in agents])
        assert_same(got, wanted | {HEAD: wanted[EMBEDDING]})
    # Without any copy there is no head, and no warning.
    plain = make_family(tmp_path / "plain", tie_word_embeddings=True)
    got = merged(config_of(plain, "ram_plus", parameters=PLUS), tmp_path / "plain out")
    assert HEAD not in got
    assert not warned("tied")


def test_vocabulary_sizes_that_differ(tmp_path: Path, no_weights: None) -> None:
    family = make_family(tmp_path, n=2, vocab_size=32)
    family.agents[1] = make_family(tmp_path / "more", n=2, vocab_size=34).agents[1]
    says = rf"'{EMBEDDING}': vocabulary sizes differ \(32 x 32 in .*; 34 x 32 in .*`tokenizer: "
    for method in ("ram", "ram_plus"):
        refused(config_of(family, method), tmp_path / "out", says, ConfigError)


@pytest.mark.parametrize("rows", [30, 32])
@pytest.mark.parametrize("source", ["base", "union"])
def test_tokenizers(source: str, rows: int, tmp_path: Path) -> None:
    """An agent whose tokens come in another order merges as if they did not, in rho as well.

    With 32 rows for 30 tokens, as padded models have them, the padding goes.
    """
    family = make_family(tmp_path, n=2, vocab_size=rows)
    # transformers gives a Qwen2 model's tokenizer this token if it has none of the name.
    words = ["<|endoftext|>", *(f"w{i}" for i in range(1, 30))]
    order = [0, *range(29, 0, -1)]
    write_tokenizer(family.base, words)
    write_tokenizer(family.agents[0], [words[i] for i in order])
    write_tokenizer(family.agents[1], words)
    base, *agents = (load(folder) for folder in (family.base, *family.agents))

    def permute(state: StateDict) -> None:
        for name in (EMBEDDING, HEAD):
            state[name][:30] = state[name][order]

    rewrite(family.agents[0], permute)
    config = config_of(family, "ram_plus", parameters=PLUS, tokenizer={"source": source})
    got = merged(config, tmp_path / "out")
    for state in (base, *agents):
        state |= {name: state[name][:30] for name in (EMBEDDING, HEAD)}
    assert_same(got, whole_model(base, agents))


def test_tokens_of_one_agent(tmp_path: Path) -> None:
    """With `source: union` the others get its rows, so that nobody changed those."""
    from transformers import AutoTokenizer

    family = make_family(tmp_path, n=2, vocab_size=30)
    family.agents[1] = make_family(tmp_path / "more", n=2, vocab_size=33).agents[1]
    words = ["<|endoftext|>", *(f"w{i}" for i in range(1, 33))]
    for folder in (family.base, family.agents[0]):
        write_tokenizer(folder, words[:30])
    write_tokenizer(family.agents[1], words)
    base, *agents = (load(folder) for folder in (family.base, *family.agents))
    for state in (base, agents[0]):
        state |= {n: torch.cat([state[n], agents[1][n][30:]]) for n in (EMBEDDING, HEAD)}
    for source, rows in (("union", 33), ("base", 30)):
        config = config_of(family, "ram_plus", parameters=PLUS, tokenizer={"source": source})
        got = merged(config, tmp_path / f"{rows}-rows")
        # MergeKit gives new tokens numbers in any order.
        ids = AutoTokenizer.from_pretrained(tmp_path / f"{rows}-rows").get_vocab()
        order = [words.index(token) for token in sorted(ids, key=ids.__getitem__)]
        assert len(order) == rows
        states = [s | {n: s[n][order] for n in (EMBEDDING, HEAD)} for s in (base, *agents)]
        assert_same(got, whole_model(states[0], states[1:]))


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ("float8", rf"F8_E4M3 values in {UP}"),
        ("int8", rf"I8 values in {UP}"),
        ("scale tensors", rf"scale or code tensors: {UP}_scale_inv"),
        ("quantization_config", "`quantization_config` fp8"),
    ],
)
def test_quantised_files(files: str, found: str, tmp_path: Path, no_weights: None) -> None:
    """Under `dtype` MergeKit merges the codes and drops the scales without a word."""
    family = make_family(tmp_path)
    if files == "quantization_config":
        edit(family.agents[1], quantization_config={"quant_method": "fp8"})
    elif files == "scale tensors":
        rewrite(family.agents[1], lambda s: s.update({f"{UP}_scale_inv": torch.ones(1)}))
    else:
        code = torch.int8 if files == "int8" else torch.float8_e4m3fn
        rewrite(family.agents[1], lambda s: s.update({UP: s[UP].to(code)}))
    says = rf"{family.agents[1]} is quantised \({found}.*Dequantise it first"
    for method in ("ram", "ram_plus"):
        config = config_of(family, method, dtype="bfloat16")
        refused(config, tmp_path / "out", says, ConfigError)


@pytest.mark.parametrize("what", ["layer counts", "module name", "dtype name"])
def test_names_and_counts_that_do_not_fit(what: str, tmp_path: Path, no_weights: None) -> None:
    family = make_family(tmp_path)
    config = config_of(family)
    if what == "layer counts":
        family.agents[1] = make_family(tmp_path / "deep", n=2, num_hidden_layers=3).agents[1]
        config = config_of(family)
        says = f"differ in num_hidden_layers .*2 in .*base.*3 in {family.agents[1]}.*`slices:`"
    elif what == "module name":
        config["modules"] = {"text": {"models": config.pop("models")}}
        says = r"modules\.text: the model has no such module\. Its modules: default"
    else:
        config["dtype"] = "bf16"
        says = r"dtype: 'bf16' is not one of .*Did you mean 'bfloat16'\?"
    refused(config, tmp_path / "out", says, ConfigError)


def test_slices_whose_source_lists_differ(tmp_path: Path, warned: Warned) -> None:
    """MergeKit merges the head from as many models as the first slice has; said, and true."""
    family = make_family(tmp_path, "llama", n=2)
    listed = [str(family.base), *map(str, family.agents)]
    slices = [
        {"sources": [{"model": m, "layer_range": [i, i + 1]} for m in listed[: 2 + i]]}
        for i in range(2)
    ]
    config = {"merge_method": "ram", "base_model": listed[0], "slices": slices}
    got = merged(config, tmp_path / "out")
    says = rf"slices: the slices' source lists differ in length \(2, 3\).*{listed[2]}.*lost"
    assert len(warned(says)) == 1
    wanted = family.expected(
        weight=lambda name, agent: float(agent == family.agents[0] or ".layers.1." in name)
    )
    assert_same(got, wanted)


# --- Architectures and adapters -------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3.5"])
def test_modules(name: str, tmp_path: Path, warned: Warned) -> None:
    """Vision-language models, one with a definition and one inferred: rho over all modules."""
    kind = KINDS[name]
    family = write_family(tmp_path, kind, densities=(0.1, 0.5))
    config = modular(config_of(family, "ram_plus", parameters=PLUS), name)
    got = merged(config, tmp_path / "out")
    base, agents = read(family, kind)
    assert_same(got, whole_model(base, agents))
    assert not warned("only a part")
    # One module alone: a part of the model, with rho over what is merged.
    _, *others = config["modules"]
    for other in others:
        del config["modules"][other]
    got = merged(config, tmp_path / "part")
    (message,) = warned("only a part of the model. List all modules")
    assert all(other in message for other in others)
    assert 0 < len(got) < len(base)
    assert_same(got, whole_model({n: base[n] for n in got}, agents))


def test_mixture_of_experts(tmp_path: Path) -> None:
    """Files have an entry per expert, the output has fused tensors."""
    kind = KINDS["qwen3-moe"]
    family = write_family(tmp_path, kind)
    assert any(".experts.3." in name for name in load(family.base))
    got = merged(config_of(family, "ram_plus", parameters=PLUS), tmp_path / "out")
    base, agents = read(family, kind)
    assert any(name.endswith("experts.gate_up_proj") for name in got)
    assert_same(got, whole_model(base, agents))


def calls(function: Callable[[], object]) -> int:
    """How many calls of functions, Python's and built-in ones, a function makes."""
    number = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return number


def test_planning_is_linear_in_the_number_of_experts(tmp_path: Path) -> None:
    """Twice the tensors take twice the calls, in our checks, in MergeKit's plan and its graph.

    So that 18,000 take seconds; anything that compares all with all would take four times as many.
    """
    kind = replace(KINDS["qwen3-moe"], settings=KINDS["qwen3-moe"].settings | {"hidden_size": 2})
    work = []
    for experts in (32, 64):
        sized = replace(kind, settings=kind.settings | {"num_experts": experts})
        family = write_family(tmp_path / f"{experts}", sized, densities=(0.1,))
        assert len(load(family.base)) > 2 * 3 * experts
        config = config_of(family, "ram_plus")
        plan(config, tmp_path)  # MergeKit caches what it knows of the architecture
        work.append(calls(lambda config=config: plan(config, tmp_path)))
    assert work[1] < 2.2 * work[0]


def test_planning_is_linear_in_the_number_of_merge_tasks(tmp_path: Path) -> None:
    """Each of them waits for one measurement that knows them all."""
    out, work = tmp_path / "out", []
    for number in (200, 400):
        state = {f"experts.{i}.up_proj.weight": torch.ones(1) for i in range(number)}
        files = [tmp_path / f"{model}-{number}.safetensors" for model in ("base", "one", "two")]
        for file in files:
            save_file(state, file)
        config = flat.RawPyTorchMergeConfig.model_validate(flat_config(files, "ram_plus"))

        def prepare(config: Any = config, number: int = number) -> None:
            tasks = flat.plan_flat_merge(config, str(out), False, False, MergeOptions())
            executor = Executor(tasks)
            (first, *_) = (handle.task() for handle in executor.schedule.tasks)
            assert isinstance(first, MeasureOverlap)
            assert len(first.merges) == number

        prepare()  # opens the files
        work.append(calls(prepare))
    assert work[1] < 2.2 * work[0]


def test_lora_agents(tmp_path: Path) -> None:
    import peft
    import transformers

    family = make_family(tmp_path, n=1)
    adapter = tmp_path / "adapter"
    model = transformers.AutoModelForCausalLM.from_pretrained(family.base)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(model, settings).save_pretrained(adapter)
    models = [f"{family.base}+{adapter}", str(family.agents[0])]
    config = config_of(family, "ram_plus", models=[{"model": m} for m in models], parameters=PLUS)
    refused(config, tmp_path / "out", "Give --lora-merge-cache FOLDER", ConfigError)
    got = merged(config, tmp_path / "out", lora_merge_cache=str(tmp_path / "cache"))
    (folder,) = {file.parent for file in (tmp_path / "cache").rglob("*.safetensors")}
    base, agents = load(family.base), [load(folder), load(family.agents[0])]
    changes = {n for n, t in base.items() if not torch.equal(agents[0][n], t)}
    assert {name.split(".")[-2] for name in changes} == {"q_proj", "down_proj"}
    assert_same(got, whole_model(base, agents))


# --- Tensors and files ----------------------------------------------------------------------


def flat_config(files: Sequence[Path], method: str, **parameters: Any) -> Config:
    """A config of mergekit-pytorch."""
    base, *agents = map(str, files)
    return {
        "merge_method": method,
        "base_model": base,
        "models": [{"model": agent} for agent in agents],
        "parameters": parameters,
    }


def merged_flat(config: Config, out: Path) -> StateDict:
    """Merge as mergekit-pytorch does."""
    parsed = flat.RawPyTorchMergeConfig.model_validate(config)
    options = MergeOptions(quiet=True)
    list(Executor(flat.plan_flat_merge(parsed, str(out), False, False, options)).run(quiet=True))
    return load(out)


def test_a_missing_tensor(tmp_path: Path, no_weights: None) -> None:
    family = make_family(tmp_path)
    rewrite(family.agents[1], lambda s: s.pop(UP))
    says = rf"{family.agents[1]} lacks 1 tensor .*needs: {UP}\. Complete its files"
    for method in ("ram", "ram_plus"):
        refused(config_of(family, method), tmp_path / "out", says, ConfigError)


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
def test_extra_tensors(method: str, tmp_path: Path, warned: Warned) -> None:
    """Rotary buffers and value heads are dropped, the latter with a warning."""
    family = make_family(tmp_path)
    base, agents = load(family.base), [load(agent) for agent in family.agents]
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(family.agents[0], lambda s: s.update(rotary))
    rewrite(family.agents[2], lambda s: s.update({"v_head.weight": torch.ones(1, 32)}))
    got = merged(config_of(family, method, parameters=PLUS), tmp_path / "out")
    assert_same(got, whole_model(base, agents))
    (message,) = warned("not merge")
    assert message.startswith(f"{family.agents[2]} holds 1 tensor")
    assert "v_head.weight" in message


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
def test_buffers_that_are_not_floating(method: str, tmp_path: Path) -> None:
    """Copied where all agree; an error that names them where not."""
    files = [tmp_path / f"{i}.safetensors" for i in range(3)]
    base = {"weight": torch.linspace(0, 1, 60), "steps": torch.arange(3), "mask": torch.ones(2) > 0}
    states = [base, *(changed({"weight": base["weight"]}, i, 0.5) for i in range(2))]
    for file, state in zip(files, states, strict=True):
        save_file(base | state, file)
    got = merged_flat(flat_config(files, method, **PLUS), tmp_path / "out")
    wanted = whole_model({"weight": base["weight"]}, states[1:])
    assert_same_bits(got["weight"], wanted["weight"])
    assert torch.equal(got["steps"], base["steps"])
    assert torch.equal(got["mask"], base["mask"])
    save_file(base | states[1] | {"steps": torch.arange(1, 4)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"Non-floating buffer 'steps' differs between inputs"):
        merged_flat(
            flat_config([files[0], tmp_path / "other.safetensors"], method), tmp_path / "differs"
        )
    assert_unfinished(tmp_path / "differs")


@pytest.mark.parametrize(
    "files", ["sharded safetensors", "pickled", "pickled, lazily", "pickled shards"]
)
def test_layouts_of_files(files: str, tmp_path: Path) -> None:
    family = make_family(
        tmp_path,
        shards=1 if files in ("pickled", "pickled, lazily") else 3,
        pickled="pick" in files,
    )
    config = config_of(family, "ram_plus", parameters=PLUS)
    got = merged(config, tmp_path / "out", lazy_unpickle="lazily" in files)
    assert_same(got, whole_model(load(family.base), [load(agent) for agent in family.agents]))


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
@pytest.mark.parametrize("pickled", [False, True])
def test_a_shard_that_is_missing_or_a_pointer(pickled: bool, method: str, tmp_path: Path) -> None:
    family = make_family(tmp_path, shards=2, pickled=pickled)
    (shard,) = family.agents[1].glob("*-00002-of-00002.*")
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234\n")
    says = rf"{family.agents[1]}: {shard} is a Git LFS pointer.*`git lfs pull`"
    refused(config_of(family, method), tmp_path / "out", says, ConfigError)
    shard.unlink()
    says = rf"{family.agents[1]}: {shard.name} missing from {family.agents[1]}.*download"
    refused(config_of(family, method), tmp_path / "out", says, ConfigError)


@pytest.mark.parametrize("happens", ["vanishes", "is cut short"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_file_that_goes_wrong_after_the_checks(
    happens: str, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In our own pass, which comes before anything is written, the error names model and file."""
    family = make_family(tmp_path, shards=shards)
    file = sorted(family.agents[1].glob("*.safetensors"))[-1]
    execute = MeasureOverlap.execute

    def damage(self: MeasureOverlap) -> Any:
        if happens == "vanishes":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-100])
        return execute(self)

    monkeypatch.setattr(MeasureOverlap, "execute", damage)
    says = rf"{family.agents[1]}: '\S+' cannot be read from {file}, which was .*Mend the file"
    with pytest.raises(ReadError, match=says) as caught:
        merged(config_of(family, "ram_plus"), tmp_path / "out")
    # MergeKit's own error, which names no model, and that of a damaged file not even the file.
    assert str(family.agents[1]) not in str(caught.value.__cause__).replace(str(file), "")
    assert not (tmp_path / "out").exists()
    # mergekit-pytorch loads by tasks of its own.
    more = make_family(tmp_path / "flat", n=2)
    file = more.agents[0] / "model.safetensors"
    files = [folder / "model.safetensors" for folder in (more.base, *more.agents)]
    with pytest.raises(ReadError, match=rf"{file}: '\S+' cannot be read from {file}"):
        merged_flat(flat_config(files, "ram_plus"), tmp_path / "flat out")
    assert not (tmp_path / "flat out").exists()


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
def test_tensors_of_unusual_shape(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not contiguous, 0-dimensional, empty; and, of whatever size, in bounded memory."""
    limit = 1 << 13
    monkeypatch.setattr(_staging, "STAGING", limit)
    allocations = _Allocations()

    def watched(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with allocations:
                return kernel(*args, **kwargs)

        return call

    for name in ("merge", "count", "merge_and_count"):
        monkeypatch.setattr(kernels, name, watched(getattr(kernels, name)))
    base = {
        "large": torch.randn(120, 100, generator=torch.Generator().manual_seed(0)),
        "scalar": torch.tensor(0.5),
        "scalar too": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }
    states = [base, changed(base, 1, 0.5), changed(base, 2, 0.5)]
    states = [{n: t.to(BF16) for n, t in state.items()} for state in states]
    # The base and one agent; pickles keep the order in memory.
    for state in states[:2]:
        state["large"] = state["large"].T.contiguous().T
    files = [tmp_path / f"{i}.bin" for i in range(3)]
    for file, state in zip(files, states, strict=True):
        torch.save(state, file)
    got = merged_flat(flat_config(files, method), tmp_path / "out")
    factors = [1.0, 1.0]
    if method == "ram_plus":
        factors = [1 + 0.1 * min(rho, 0.2) for rho in ratios(states[0], states[1:])]
    assert_same(got, recomputed(states[0], states[1:], lambda _: factors))
    assert 0 < allocations.largest <= limit < base["large"].numel() * 2


def test_agents_in_another_order(tmp_path: Path) -> None:
    """Only sums of three or more depend on it, and by their last bit."""
    family = make_family(tmp_path, dtype=FP32)
    config = config_of(family, "ram_plus", parameters=PLUS)
    one = merged(config, tmp_path / "one")
    config["models"].reverse()
    other = merged(config, tmp_path / "other")
    base, *agents = (load(folder) for folder in (family.base, *family.agents))
    assert_same(other, whole_model(base, agents[::-1]))
    differ = 0
    for name, tensor in base.items():
        number = sum(((agent[name] - tensor).abs() > 1e-5).int() for agent in agents)
        unequal = one[name] != other[name]
        assert not unequal[number < 3].any()
        torch.testing.assert_close(one[name], other[name], rtol=1e-6, atol=1e-9)
        differ += int(unequal.sum())
    # It does happen: the case tests something.
    assert differ


def test_a_cache_folder_of_numba_that_cannot_be_written(tmp_path: Path) -> None:
    """One process of the command, since numba looks at its folder while it is imported."""
    family = make_family(tmp_path, n=2, num_hidden_layers=1)
    config = tmp_path / "config.yml"
    config.write_text(yaml.safe_dump(config_of(family)))
    # Not a read-only folder: root may write to it.
    (tmp_path / "file").write_text("")
    result = command(
        "mergekit-yaml",
        config,
        tmp_path / "out",
        NUMBA_CACHE_DIR=str(tmp_path / "file" / "cache"),
        NUMBA_CACHE_LOCATOR_CLASSES="UserProvidedCacheLocator",
        NUMBA_OPT="0",  # compiles in a fraction of the time
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("cannot be kept on disk") == 1
    assert "NUMBA_CACHE_DIR" in result.stderr
    assert_same(load(tmp_path / "out"), family.expected())
