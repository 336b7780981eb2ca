"""Merges that are killed, interrupted, out of space, robbed of their inputs, or not the first."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from checkpoints import Family, StateDict, load, make_family
from forks import Forks
from mergekit.config import MergeConfiguration
from mergekit.io import LazyTensorLoader
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors.torch import save_file
from test_end_to_end import assert_same, config_of, merged

from mergekit_ram.errors import ConfigError

METHODS = ("ram", "ram_plus")
# The models have 56 KB: so many bytes per shard make several.
SHARDS = 20_000


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with Forks(tmp_path_factory.mktemp("streams"), "faulty") as warm:
        yield warm


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"), shards=3)


@pytest.fixture(scope="module")
def wanted(family: Family, tmp_path_factory: pytest.TempPathFactory) -> dict[str, StateDict]:
    """Each method's merge, without anything happening to it."""
    out = tmp_path_factory.mktemp("wanted")
    return {method: merged(config_of(family, method), out / method) for method in METHODS}


def contents(family: Family) -> dict[Path, tuple[int, str]]:
    return {
        file: (file.stat().st_mtime_ns, hashlib.sha256(file.read_bytes()).hexdigest())
        for file in family.folder.rglob("*")
        if file.is_file()
    }


@pytest.fixture(autouse=True)
def inputs_stay_as_they_are(family: Family) -> Iterator[None]:
    before = contents(family)
    yield
    assert contents(family) == before


def merge(
    forks: Forks, config: dict[str, Any], out: Path, *options: str, **what: str
) -> subprocess.CompletedProcess[str]:
    """Run mergekit-yaml, with something happening to it unless nothing is said."""
    file = out.parent / "config.yml"
    file.write_text(yaml.safe_dump(config))
    arguments = [str(file), str(out), "--quiet", "--no-copy-tokenizer", *options]
    return forks.run("faulty:run", command="mergekit-yaml", arguments=arguments, **what)


def assert_unfinished(out: Path) -> None:
    """Nothing in the folder looks like a model to a loader."""
    left = {file.name for file in out.iterdir()} if out.exists() else set()
    assert all(name.startswith("model-") and "-of-" not in name for name in left), left


@pytest.mark.parametrize(
    ("method", "point"),
    [
        ("ram_plus", "in the first pass"),
        ("ram_plus", "between the passes"),
        ("ram_plus", "in the second pass"),
        ("ram", "in the second pass"),
    ],
)
def test_killed(
    forks: Forks, family: Family, wanted: dict, tmp_path: Path, method: str, point: str
) -> None:
    config, out, options = config_of(family, method), tmp_path / "out", f"--out-shard-size={SHARDS}"
    killed = merge(forks, config, out, options, point=point, event="kill")
    assert killed.returncode == -signal.SIGKILL
    assert_unfinished(out)
    # The folder is there only once something is written to it.
    assert out.exists() == (point == "in the second pass")
    again = merge(forks, config, out, options)
    assert again.returncode == 0, again.stderr
    assert_same(load(out), wanted[method])


@pytest.mark.parametrize(
    ("method", "point"),
    [
        ("ram_plus", "in a kernel of the first pass"),
        ("ram_plus", "in a kernel of the second pass"),
        ("ram", "in a kernel of the second pass"),
    ],
)
def test_interrupted(
    forks: Forks, family: Family, wanted: dict, tmp_path: Path, method: str, point: str
) -> None:
    """Ctrl-C while several threads compute ends the command at once, in a word."""
    config, out = config_of(family, method), tmp_path / "out"
    begin = time.monotonic()
    result = merge(forks, config, out, point=point, event="interrupt")
    assert time.monotonic() - begin < 60
    assert result.returncode == 1
    assert result.stderr.split() == ["Aborted!"]
    assert_unfinished(out)
    again = merge(forks, config, out)
    assert again.returncode == 0, again.stderr
    assert_same(load(out), wanted[method])


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "none", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `mount` to make a small disk with")
    if mounted.returncode:
        pytest.skip(f"no small disk can be made here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("method", METHODS)
def test_the_disk_fills_up(
    forks: Forks, family: Family, wanted: dict, tmp_path: Path, method: str
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        config, out, filler = config_of(family, method), disk / "out", disk / "filler"
        what = {"point": "in the second pass", "event": "fill", "file": str(filler)}
        result = merge(forks, config, out, f"--out-shard-size={SHARDS}", **what)
        assert result.returncode == 1
        assert "No space left on device" in result.stderr.splitlines()[-1]
        assert_unfinished(out)
        # A full disk is also an error before work, as is one that the merge does not fit on.
        result = merge(forks, config, out)
        assert result.returncode == 1
        assert "Free some space, or choose a folder on another disk" in result.stderr
        filler.unlink()
        again = merge(forks, config, out, f"--out-shard-size={SHARDS}")
        assert again.returncode == 0, again.stderr
        assert_same(load(out), wanted[method])


def test_files_cannot_grow(forks: Forks, family: Family, wanted: dict, tmp_path: Path) -> None:
    """A quota, in effect; and shards that no later merge writes over are pointed out."""
    config, out = config_of(family), tmp_path / "out"
    what = {"point": "in the second pass", "event": "limit"}
    result = merge(forks, config, out, f"--out-shard-size={SHARDS}", **what)
    assert result.returncode == 1
    assert "File too large" in result.stderr.splitlines()[-1]
    assert_unfinished(out)
    left = out / "model-2.safetensors"
    left.write_bytes(b"begun")
    again = merge(forks, config, out)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("model-2.safetensors") == 1
    assert "an interrupted merge may have left" in again.stderr
    assert left.read_bytes() == b"begun"
    left.unlink()
    assert_same(load(out), wanted["ram"])


@pytest.mark.parametrize("event", ["remove", "replace"])
@pytest.mark.parametrize(
    ("method", "point"),
    [
        ("ram_plus", "in the first pass"),
        ("ram_plus", "between the passes"),
        ("ram", "in the second pass"),
    ],
)
def test_a_shard_is_lost(forks: Forks, tmp_path: Path, method: str, point: str, event: str) -> None:
    """It is gone, or cut short, by the time that MergeKit opens it again."""
    mine = make_family(tmp_path / "models", shards=3)
    shard, out = mine.agents[1] / "model-00003-of-00003.safetensors", tmp_path / "out"
    what = {"point": point, "event": event, "file": str(shard)}
    result = merge(forks, config_of(mine, method), out, **what)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: {mine.agents[1]}: '")
    assert f"cannot be read from {shard}, which was removed or changed" in line
    assert_unfinished(out)


def test_a_file_that_is_open_is_lost(forks: Forks, tmp_path: Path) -> None:
    """A model of one file stays open, so that a file put in its place is not even seen."""
    mine = make_family(tmp_path / "models")
    wanted = merged(config_of(mine, "ram_plus"), tmp_path / "wanted")
    file, out = mine.agents[1] / "model.safetensors", tmp_path / "out"
    what = {"point": "between the passes", "file": str(file)}
    result = merge(forks, config_of(mine, "ram_plus"), out, event="replace", **what)
    assert result.returncode == 0, result.stderr
    assert_same(load(out), wanted)

    # One that is cut short itself takes the process with it, as any mapped file would.
    save_file(mine.states[mine.agents[1]], file, metadata={"format": "pt"})
    result = merge(forks, config_of(mine, "ram_plus"), tmp_path / "cut", event="truncate", **what)
    assert result.returncode not in (0, None)
    assert_unfinished(tmp_path / "cut")


@pytest.fixture
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LazyTensorLoader, key: str, *args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"{key} was read before the output folder was looked at")

    monkeypatch.setattr(LazyTensorLoader, "get_tensor", refuse)


@pytest.mark.usefixtures("no_weight_is_read")
def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    mine = make_family(tmp_path / "models")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"file is a file, not a folder\. Choose another"):
        merged(config_of(mine, "ram_plus"), tmp_path / "file" / "in" / "it")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.usefixtures("no_weight_is_read")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    mine = make_family(tmp_path / "models")
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    unlock = ["true"]
    if os.access(locked, os.W_OK):  # root
        unlock = ["chattr", "-i", str(locked)]
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["chattr", "+i", str(locked)], capture_output=True, check=False)
    try:
        if os.access(locked, os.W_OK):
            pytest.skip("root may write anywhere, and this disk knows no immutable folders")
        for out in (locked, locked / "new"):
            with pytest.raises(ConfigError, match=r"locked cannot be written to\. Choose another"):
                merged(config_of(mine, "ram_plus"), out)
    finally:
        subprocess.run(unlock, check=True)
        locked.chmod(0o755)


def by_transformers(folder: Path) -> StateDict:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return dict(model.state_dict())


def by_mergekit(folder: Path) -> StateDict:
    loader = LazyTensorLoader.from_disk(str(folder), lazy_unpickle=False)
    return {name: loader.get_tensor(name) for name in loader.index.tensor_paths}


SINGLE: dict[str, Any] = {}
MANY: dict[str, Any] = {"out_shard_size": 10_000}
FEW: dict[str, Any] = {"out_shard_size": 30_000}
PICKLED: dict[str, Any] = {"safe_serialization": False}
NO_CARD: dict[str, Any] = {"write_model_card": False}


@pytest.mark.parametrize(
    ("before", "old", "new"),
    [
        ("ram", SINGLE, SINGLE),
        ("ram", SINGLE, MANY),
        ("ram", MANY, SINGLE),
        ("ram", MANY, FEW),
        ("ram", PICKLED, SINGLE),
        ("ram", SINGLE, PICKLED),
        ("ram", MANY | PICKLED, MANY),
        ("ram", MANY, FEW | PICKLED),
        ("ram", SINGLE | NO_CARD, MANY),
        ("linear", SINGLE, MANY),
        ("linear", MANY, SINGLE),
        ("linear", MANY | NO_CARD, SINGLE),
    ],
)
def test_a_folder_with_an_older_merge(
    family: Family, wanted: dict, tmp_path: Path, before: str, old: dict, new: dict
) -> None:
    """Whatever loads the folder, and however it looks for weights, gets the new merge."""
    out = tmp_path / "out"
    weights: dict[str, Any] = {"weight": 0.5}
    merged(config_of(family, before, parameters=weights), out, **old)
    kept = {"notes.txt": "mine", "model.gguf": "quantised", "adapter_model.safetensors": "other"}
    for name, text in kept.items():
        (out / name).write_text(text)
    run_merge(
        MergeConfiguration.model_validate(config_of(family)),
        str(out),
        MergeOptions(quiet=True, copy_tokenizer=False, **new),
    )
    assert {name: (out / name).read_text() for name in kept} == kept
    (out / "adapter_model.safetensors").unlink()
    assert_same(load(out), wanted["ram"])
    assert_same(by_mergekit(out), wanted["ram"])
    assert_same(by_transformers(out), wanted["ram"])
    record = json.loads((out / "ram_overlap.json").read_text())
    assert record["agents"][0]["parameters"]["weight"] == 1


def test_a_rerun_leaves_the_same_files(
    family: Family, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mergekit_ram")
    out = tmp_path / "out"
    first = merged(config_of(family), out, **MANY)
    names = sorted(file.name for file in out.iterdir())
    assert_same(merged(config_of(family), out, **MANY), first)
    assert sorted(file.name for file in out.iterdir()) == names
    assert "Removed" not in caplog.text
    merged(config_of(family), out)
    assert f"Removed from {out}, of a former merge: model-00001-of-" in caplog.text


def test_a_folder_with_a_model_that_is_no_merge(family: Family, tmp_path: Path) -> None:
    """MergeKit would write beside its weights; those it writes over are its user's affair."""
    for shards, options in ((3, SINGLE), (1, MANY), (1, PICKLED)):
        folder = tmp_path / f"{shards} {options}"
        other = make_family(folder, n=1, shards=shards)
        before = contents(other)
        with pytest.raises(ConfigError, match=r"holds weights of a model that is no merge \(model"):
            merged(config_of(family, "ram_plus"), other.base, **options)
        assert contents(other) == before
    other = make_family(tmp_path / "single", n=1)
    assert_same(merged(config_of(family), other.base), family.expected())
