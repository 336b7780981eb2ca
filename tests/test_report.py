"""The overlap report, the record of a merge, and its verification."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from checkpoints import Family, load, make_family
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from rich.console import Console
from safetensors.torch import save_file
from test_end_to_end import command, config_of, merged

from mergekit_ram import advice, figure, record, table
from mergekit_ram.cli import main
from mergekit_ram.errors import RamError
from mergekit_ram.kinds import KINDS, kind_of, layer_labels, layer_of, natural_order
from mergekit_ram.overlap import ModelOverlap, OverlapCounts
from mergekit_ram.report import OverlapReport

EXAMPLES = Path(__file__).parents[1] / "example_configs"


def run(name: str, config: dict[str, Any], folder: Path, *arguments: str | Path) -> tuple[int, str]:
    """Exit status and output of a ``mergekit-ram`` command."""
    file = folder / "config.yml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    result = CliRunner().invoke(main, [name, str(file), "--quiet", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def counted(
    base: Mapping[str, torch.Tensor],
    agents: list[Mapping[str, torch.Tensor]],
    names: list[str],
    epsilon: float = 1e-5,
) -> dict[str, Any]:
    """Count by numpy, element for element, sharing nothing with the package."""
    n = len(agents)
    limit = np.float32(epsilon)
    taus = []
    bits = []
    for agent in agents:
        flat = [agent[name].float().flatten().numpy() for name in names]
        start = [base[name].float().flatten().numpy() for name in names]
        taus.append(np.concatenate(flat) - np.concatenate(start))
        same = [a.view(np.uint32) == b.view(np.uint32) for a, b in zip(flat, start, strict=True)]
        bits.append(~np.concatenate(same))
    active = np.stack([np.abs(tau) > limit for tau in taus])
    number = active.sum(0)
    signs = np.stack([np.sign(tau) for tau in taus]) * active
    conflicts = (signs.max(0) > 0) & (signs.min(0) < 0)
    return {
        "elements": {
            "total": active.shape[1],
            "unchanged": int((number == 0).sum()),
            "unique": int((number == 1).sum()),
            "shared": int((number > 1).sum()),
            "sign_conflicts": int(conflicts.sum()),
        },
        "agents": [
            {
                "changed": int(active[i].sum()),
                "density": int(active[i].sum()) / active.shape[1],
                "unique": int((active[i] & (number == 1)).sum()),
                "shared": int((active[i] & (number > 1)).sum()),
                "overlap": [int((active[i] & (number == k + 1)).sum()) for k in range(n)],
                "below_epsilon": int((bits[i] & ~active[i]).sum()),
            }
            for i in range(n)
        ],
        "pairs": [[int((active[i] & active[j]).sum()) for j in range(n)] for i in range(n)],
    }


def assert_counts(document: Any, wanted: dict[str, Any]) -> None:
    assert document["elements"] == wanted["elements"]
    assert document["pairs"] == wanted["pairs"]
    for got, one in zip(document["agents"], wanted["agents"], strict=True):
        assert {key: got[key] for key in one} == one


@pytest.mark.parametrize(
    ("kind", "method", "dtype", "tied"),
    [
        ("qwen2", "ram_plus", torch.bfloat16, True),
        ("llama", "ram", torch.float32, False),
        ("qwen2", "ramplus_tl", torch.float16, False),
    ],
)
def test_json_equals_an_independent_count(
    tmp_path: Path, kind: str, method: str, dtype: torch.dtype, tied: bool
) -> None:
    """Of the whole, of every kind of weight, of every layer and of every tensor."""
    family = make_family(
        tmp_path / "models", kind, dtype=dtype, n=4, shards=2, tie_word_embeddings=tied
    )
    config = config_of(family, method, parameters={"epsilon": 1e-4, "r": 0.3, "alpha": 5})
    status, output = run("overlap", config, tmp_path, "--json", tmp_path / "counts.json")
    assert status == 0, output
    text = (tmp_path / "counts.json").read_text()
    document = json.loads(text)
    base = load(family.base)
    agents = [load(folder) for folder in family.agents]
    names = list(base)
    assert_counts(document, counted(base, agents, names, 1e-4))
    for name, part in document["tensors"].items():
        assert_counts(part, counted(base, agents, [name], 1e-4))
    assert document["tensors"].keys() == base.keys()
    for kind_, part in document["groups"]["kind"].items():
        of_kind = [n for n in names if kind_of(n) == kind_]
        assert_counts(part, counted(base, agents, of_kind, 1e-4))
    for layer, part in document["groups"]["layer"].items():
        in_layer = [n for n in names if n.startswith(f"{layer}.")]
        assert_counts(part, counted(base, agents, in_layer, 1e-4))
    assert list(document["groups"]["layer"]) == ["model.layers.0", "model.layers.1"]

    assert (document["format"], document["version"]) == ("mergekit-ram overlap", 1)
    assert document["base_model"] == str(family.base)
    assert document["method"] == method
    for agent, folder in zip(document["agents"], family.agents, strict=True):
        assert agent["model"] == str(folder)
        assert agent["rho"] == agent["shared"] / agent["unique"]
        low, high = agent["rescale_factor_range"]
        if method == "ramplus_tl":
            assert low < high
            assert agent["rescale_factor"] is None
        else:
            assert low == high == agent["rescale_factor"] == 1 + 0.3 * min(agent["rho"], 5)
        assert agent["parameters"] == {"epsilon": 1e-4, "weight": 1, "r": 0.3, "alpha": 5}

    # The merge records the same, whichever pass counts.
    merged(config, tmp_path / "out")
    assert (tmp_path / "out" / record.FILE).read_text() == text


def test_the_record_counts_what_the_merge_merges(tmp_path: Path) -> None:
    """An agent left out of some tensors; a stored copy of a tied head; infinite alpha."""
    family = make_family(tmp_path / "models", tie_word_embeddings=True)
    for folder in (family.base, *family.agents):
        state = dict(load(folder))
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(family, "ram", parameters={"alpha": float("inf")})
    config["models"][1]["parameters"] = {"weight": [{"filter": "mlp", "value": 0}, {"value": 1}]}
    documents = []
    for method, r in (("ram", 0.0), ("ram_plus", 0.1)):
        config |= {"merge_method": method, "parameters": {"alpha": float("inf"), "r": r}}
        merged(config, tmp_path / method)
        documents.append(json.loads((tmp_path / method / record.FILE).read_text()))
    ram, ram_plus = documents
    base, agents = load(family.base), [load(folder) for folder in family.agents]
    mlp = [name for name in base if "mlp" in name]
    rest = [name for name in base if "mlp" not in name and name != "lm_head.weight"]
    without = counted(base, [agents[0], agents[2]], mlp)
    for document in documents:
        head = document["tensors"]["lm_head.weight"]
        assert head["copy_of"] is None or document["tensors"][head["copy_of"]]["copy_of"] is None
        copies = [n for n, t in document["tensors"].items() if t["copy_of"]]
        assert len(copies) == 1
        total = counted(base, agents, rest)["elements"]["total"] + without["elements"]["total"]
        assert document["elements"]["total"] == total
        assert (
            document["agents"][1]["changed"] == counted(base, agents, rest)["agents"][1]["changed"]
        )
        first = document["tensors"][mlp[0]]
        assert first["agents"][1]["changed"] == 0
        assert_without = counted(base, [agents[0], agents[2]], [mlp[0]])
        assert first["elements"] == assert_without["elements"]
        assert document["agents"][0]["parameters"]["alpha"] == "inf"
        assert document["agents"][1]["parameters"]["weight"] == [0, 1]
    assert ram["tensors"] == ram_plus["tensors"]
    assert ram["agents"][0]["rescale_factor"] == 1
    assert ram_plus["agents"][0]["rescale_factor"] == 1 + 0.1 * ram_plus["agents"][0]["rho"]


def test_model_card(tmp_path: Path) -> None:
    family = make_family(tmp_path / "models")
    config = config_of(family, "ram_plus")
    config["models"][0]["parameters"] = {"weight": 0.5}
    merged(config, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    head, _, section = card.partition("### Overlap of the agents\n")
    assert head.rstrip().endswith("```")
    document = json.loads((tmp_path / "out" / record.FILE).read_text())
    total = document["elements"]["total"]

    def percent(part: int, whole: int) -> str:
        return f"{100 * part / whole:.1f} %" if 2000 * part >= whole or not part else "<0.1 %"

    for agent in document["agents"]:
        cells = (
            agent["model"],
            percent(agent["changed"], total),
            percent(agent["unique"], agent["changed"]),
            percent(agent["shared"], agent["changed"]),
            percent(agent["below_epsilon"], total),
            f"{agent['rho']:.3f}",
            f"{agent['rescale_factor']:.4f}",
        )
        assert f"| {' | '.join(cells)} |" in section
    assert "`weight` 0.5, 1, 1; `r` 0.1; `alpha` 0.2" in section
    assert "`ram_plus` of mergekit-ram" in section
    assert "arXiv:2601.13572" in section
    # Another method's merge into the same process gets no section of ours.
    merged(config_of(family, "linear", parameters={"weight": 1}), tmp_path / "linear")
    assert "Overlap" not in (tmp_path / "linear" / "README.md").read_text()
    assert not (tmp_path / "linear" / record.FILE).exists()
    merged(config, tmp_path / "no card", write_model_card=False)
    assert (tmp_path / "no card" / record.FILE).exists()


def test_commands_give_the_same_bytes_each_time(tmp_path: Path) -> None:
    """In fresh processes with other hash seeds, card, record and shards; then verified."""
    config = EXAMPLES / "quickstart_plus.yml"
    files = []
    for seed in ("1", "2"):
        out = tmp_path / seed / "merge"
        done = command(
            "mergekit-yaml", config, out, "--quiet", "--out-shard-size", "100K", PYTHONHASHSEED=seed
        )
        assert done.returncode == 0, done.stderr
        files.append({f.name: f.read_bytes() for f in sorted(out.iterdir())})
    assert files[0].keys() == files[1].keys()
    assert [name for name in files[0] if files[0][name] != files[1][name]] == []
    assert {"README.md", record.FILE, "mergekit_config.yml"} <= files[0].keys()

    done = command("mergekit-ram", "verify", config, out, COLUMNS="80")
    assert (done.returncode, done.stdout) == (0, f"{out}: all 30 tensors are equal bit for bit.\n")
    done = command("mergekit-ram", "overlap", config, NO_COLOR="1", COLUMNS="80")
    assert done.returncode == 0, done.stderr
    assert "Measuring overlap" in done.stderr
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    for text in ("14.5    24.2    25.2    50.6     <0.1  3.13   1.020", "Sparse and distinct"):
        assert text in done.stdout


# --- verify -------------------------------------------------------------------------------


def flip(folder: Path, name: str, element: int) -> None:
    """Flip the lowest bit of one element of a merge."""
    state = load(folder)
    integers = state[name].view(torch.int16).flatten()
    integers[element] ^= 1
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def edit_state(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        state = load(folder)
        change(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


UP = "model.layers.1.mlp.up_proj.weight"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "one bit": (lambda folder: flip(folder, UP, 37), f"'{UP}': 1 of 1,536 elements differ, by at"),
    "its place": (lambda folder: flip(folder, UP, 37), "the first at [1, 5] is"),
    "missing": (edit_state(lambda s: s.pop(UP)), f"'{UP}': is missing from the folder"),
    "added": (
        edit_state(lambda s: s.update(more=torch.ones(1))),
        "'more': is not part of the merge",
    ),
    "dtype": (
        edit_state(lambda s: s.update({UP: s[UP].float()})),
        f"'{UP}': is float32 instead of bfloat16",
    ),
    "shape": (
        edit_state(lambda s: s.update({UP: s[UP].T.contiguous()})),
        f"'{UP}': has the shape 32 x 48 instead of 48 x 32",
    ),
    "NaN": (
        edit_state(lambda s: s.update({UP: s[UP].fill_(float("nan"))})),
        "1,536 of 1,536 elements differ, by at most inf",
    ),
}


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
def test_verify(tmp_path: Path, method: str) -> None:
    family = make_family(tmp_path / "models", shards=2)
    config = config_of(family, method, dtype="float32", out_dtype="bfloat16")
    good = tmp_path / "good"
    merged(config, good)
    status, output = run("verify", config, tmp_path, good)
    assert (status, output) == (0, f"{good}: all 27 tensors are equal bit for bit.\n")
    for name, (damage, says) in DAMAGE.items():
        bad = tmp_path / name
        shutil.copytree(good, bad)
        damage(bad)
        status, output = run("verify", config, tmp_path, bad)
        assert status == 1, name
        assert says in output, output
        assert "1 tensor differs, 2" in output
    (good / "model.safetensors").write_bytes(b"")
    with pytest.raises(SystemExit):
        main(["verify", str(tmp_path / "config.yml"), str(good)], standalone_mode=True)


def test_files_for_mergekit_pytorch(tmp_path: Path) -> None:
    """Checked, counted, merged with a record, and verified."""
    family = make_family(tmp_path / "models")
    config = {
        "merge_method": "ram_plus",
        "base_model": str(family.base / "model.safetensors"),
        "models": [{"model": str(a / "model.safetensors")} for a in family.agents],
        "epsilon": 1,
    }
    status, output = run("check", config, tmp_path, tmp_path / "out")
    assert status == 0, output
    assert "'epsilon' has no effect there" in output
    assert "0 errors, 1 warning; 27 tensors planned" in output
    status, _ = run("overlap", config, tmp_path, "--json", tmp_path / "counts.json")
    assert status == 0
    done = command("mergekit-pytorch", tmp_path / "config.yml", tmp_path / "out", "--quiet")
    assert done.returncode == 0, done.stderr
    assert "'epsilon' has no effect there" in done.stderr
    assert (tmp_path / "out" / record.FILE).read_text() == (tmp_path / "counts.json").read_text()
    assert run("verify", config, tmp_path, tmp_path / "out")[0] == 0
    status, output = run("check", config, tmp_path, family.base)
    assert status == 1
    assert "the output folder is the folder of" in output


# --- Warnings and advice ------------------------------------------------------------------


def report_of(*masks: Any, method: str = "ram", names: int = 1) -> OverlapReport:
    """A report of agents that are active where their masks say, in ``names`` equal tensors."""
    active = np.array(masks, bool)
    n, elements = active.shape
    number = active.sum(0)
    agents = tuple(f"org/agent{i}" for i in range(n))
    counts = OverlapCounts(
        agents=agents,
        elements=elements,
        overlap=np.array([[(a & (number == k + 1)).sum() for k in range(n)] for a in active]),
        pairs=active.astype(np.int64) @ active.T.astype(np.int64),
        below_epsilon=np.full(n, 7),
        sign_conflicts=0,
    )
    settings = {"epsilon": 1e-5, "weight": 1.0, "r": 0.0, "alpha": 0.2}
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": counts for i in range(names)}
    return OverlapReport(
        method=method,
        tensor_local=False,
        base_models=("org/base",),
        overlap=ModelOverlap(agents, tensors),
        settings={name: dict.fromkeys(agents, settings) for name in tensors},
    )


RNG = np.random.default_rng(0)


def random_mask(density: float) -> Any:
    return RNG.random(10_000) < density


def test_advice_and_warnings() -> None:
    sparse = random_mask(0.15), random_mask(0.2)
    assert advice.warnings(report_of(*sparse)) == []
    assert advice.advice(report_of(*sparse)).startswith("Sparse and distinct")
    dense = report_of(random_mask(0.99), random_mask(0.95))
    assert advice.advice(dense).startswith("Some agents") or "shared" in advice.advice(dense)
    assert ["dense task vector" in m for m in advice.warnings(dense)] == [True, True]
    everything = report_of(np.ones(9), np.ones(9))
    assert advice.advice(everything).startswith("Nearly all changes are shared")
    nothing = report_of(np.zeros(9), np.ones(9))
    assert (
        "org/agent0 differs from the base model by no more than epsilon (7 elements"
        in advice.warnings(nothing)[0]
    )
    assert advice.advice(nothing).startswith("One agent changed anything")
    assert advice.advice(report_of(np.zeros(9))).startswith("No agent changed")
    mixed = report_of(random_mask(0.5), random_mask(0.5), random_mask(0.03))
    assert advice.advice(mixed).startswith("Some agents") or "Sparse" in advice.advice(mixed)
    twice = report_of(sparse[0], sparse[0])
    assert (
        "org/agent1 and org/agent0 changed exactly the same elements" in advice.warnings(twice)[0]
    )


def test_a_dense_agent_of_few_tensors_is_found() -> None:
    """LoRA: dense where an adapter is, and nothing elsewhere."""
    touched, rest = report_of(np.ones(100), np.zeros(100)), report_of(np.zeros(100), np.zeros(100))
    tensors = {f"a.{i}": rest.total for i in range(9)} | {"b": touched.total}
    one = next(iter(rest.settings.values()))
    report = OverlapReport(
        "ram",
        False,
        ("base",),
        ModelOverlap(rest.overlap.agents, tensors),
        dict.fromkeys(tensors, one),
    )
    assert report.total.density[0] == 0.1
    (dense,) = [m for m in advice.warnings(report) if "agent0" in m]
    assert "100.0 % of the elements of those tensors (1 of 10)" in dense


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
def test_merges_warn_after_counting(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong base, and an agent that is the base in other files: once each, with densities."""
    family = make_family(tmp_path / "models")
    other = make_family(tmp_path / "other")
    state = {n: t + 1 for n, t in load(other.base).items()}
    save_file(state, other.base / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(family.base, tmp_path / "copy")
    config = config_of(family, method)
    config["models"] = [
        {"model": str(p)} for p in (other.base, tmp_path / "copy", family.agents[0])
    ]
    with caplog.at_level(logging.INFO, "mergekit_ram"):
        merged(config, tmp_path / "out")
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    messages = [m for m in messages if "agent" in m or "base model" in m]
    assert len(messages) == 2, messages
    assert f"{tmp_path / 'copy'} does not differ from the base model in any" in messages[0]
    assert f"{other.base} changed 100.0 % of all elements" in messages[1]
    assert "density  unique   shared" in caplog.text


# --- Tables and figures -------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 16])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_tables_fit(n: int, width: int) -> None:
    report = report_of(*(random_mask(0.3) for _ in range(n)), names=12)
    console = Console(width=width, record=True, file=io.StringIO())
    table.show(report, console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    text.encode("ascii")
    for i in range(n):
        assert f"{i + 1}  org/agent{i}" in text


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_figures(tmp_path: Path, suffix: str) -> None:
    for n in (1, 3, 9):
        report = report_of(*(random_mask(0.3) for _ in range(n)), names=5)
        files = [tmp_path / f"{n}{turn}{suffix}" for turn in range(2)]
        for file in files:
            figure.draw(report, file)
        assert files[0].read_bytes() == files[1].read_bytes()
        assert files[0].read_bytes()[:4] in (b"\x89PNG", b"<?xm")
    with pytest.raises(RamError, match=r"must be \.png or \.svg"):
        figure.check(tmp_path / "figure.pdf")


def test_bad_files_are_said_before_the_models_are_read(tmp_path: Path) -> None:
    family = make_family(tmp_path / "models")
    for option, file, says in (
        ("--plot", "x.jpg", "must be .png or .svg"),
        ("--json", "no/folder/x.json", "its folder does not exist"),
        ("--json", ".", "is a folder; a file is wanted"),
        ("--plot", "config.yml.svg/../config.yml", "must be .png or .svg"),
        ("--json", "config.yml", "is the config itself"),
    ):
        status, output = run("overlap", config_of(family), tmp_path, option, tmp_path / file)
        assert (status, says in " ".join(output.split())) == (1, True), output


def test_names_are_printed_as_they_are(tmp_path: Path) -> None:
    """Brackets are no markup, and what a terminal cannot show is no traceback."""
    folder = tmp_path / "[bold]x[/a]\u03c1"
    family = make_family(folder / "models")
    merged(config_of(family), folder / "out")
    for name, arguments in (("check", ()), ("verify", (folder / "out",)), ("overlap", ())):
        status, output = run(name, config_of(family), folder, *arguments)
        assert status == 0, output
        assert "[bold]x[/a]" in output
    file = folder / "config.yml"
    result = CliRunner(charset="ascii").invoke(main, ["overlap", str(file), "--quiet"])
    assert result.exit_code == 0, result.exception
    assert "\\u03c1" in result.output


def test_it_is_said_when_the_plugin_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergekit.merge_methods.get", lambda name: None)
    status, output = run("check", config_of(make_family(tmp_path / "models")), tmp_path)
    assert status == 1
    assert "switched off (MERGEKIT_RAM_DISABLE)" in output


# --- Names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "layer"),
    [
        ("model.embed_tokens.weight", "embedding", None),
        ("model.layers.3.self_attn.q_proj.weight", "attention", "model.layers.3"),
        ("model.layers.3.self_attn.q_norm.weight", "norm", "model.layers.3"),
        ("model.layers.10.mlp.experts.3.down_proj.weight", "MLP", "model.layers.10"),
        ("model.layers.0.mlp.experts.gate_up_proj", "MLP", "model.layers.0"),
        ("model.norm.weight", "norm", None),
        ("lm_head.weight", "head", None),
        ("transformer.wte.weight", "embedding", None),
        ("transformer.h.0.ln_1.weight", "norm", "transformer.h.0"),
        ("transformer.h.0.attn.c_attn.weight", "attention", "transformer.h.0"),
        ("transformer.h.0.mlp.c_fc.weight", "MLP", "transformer.h.0"),
        ("bert.embeddings.LayerNorm.weight", "norm", None),
        ("bert.encoder.layer.0.attention.output.dense.weight", "attention", "bert.encoder.layer.0"),
        ("bert.encoder.layer.0.output.dense.weight", "MLP", "bert.encoder.layer.0"),
        ("cls.predictions.bias", "head", None),
        ("visual.blocks.7.attn.qkv.weight", "attention", "visual.blocks.7"),
        ("visual.merger.mlp.0.weight", "MLP", None),
        ("backbone.layers.0.mixer.A_log", "other", "backbone.layers.0"),
    ],
)
def test_kinds_and_layers(name: str, kind: str, layer: str | None) -> None:
    assert (kind_of(name), layer_of(name)) == (kind, layer)
    assert kind in KINDS


def test_labels_and_order() -> None:
    names = [f"model.layers.{i}" for i in (10, 9, 1)]
    assert sorted(names, key=natural_order) == names[::-1]
    assert layer_labels(names) == {n: n.rpartition(".")[2] for n in names}
    parts = layer_labels(["model.language_model.layers.0", "visual.blocks.0"])
    assert list(parts.values()) == ["language_model 0", "visual 0"]


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=5))
def test_reports_of_anything_can_be_written(masks: list[list[bool]]) -> None:
    report = report_of(*masks)
    document = json.loads(report.to_json())
    assert document["elements"]["total"] == 6
    assert len(document["agents"]) == len(masks)
    assert record.card_section(report).count("org/agent") == len(masks)
    assert advice.advice(report)
    assert isinstance(advice.warnings(report), list)


def test_a_report_is_kept_for_its_own_card_only(tmp_path: Path) -> None:
    """Two configs that are equal are two merges."""
    family: Family = make_family(tmp_path / "models")
    options = MergeOptions(quiet=True, copy_tokenizer=False)
    for i in range(2):
        config = MergeConfiguration.model_validate(config_of(family))
        run_merge(config, str(tmp_path / str(i) / "m"), options)
    cards = [(tmp_path / str(i) / "m" / "README.md").read_text() for i in range(2)]
    assert cards[0] == cards[1]
    assert cards[0].count("### Overlap of the agents") == 1
