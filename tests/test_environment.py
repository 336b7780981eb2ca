"""The plugin among other packages: versions of MergeKit, copies, upgrades, half uninstalled."""

from __future__ import annotations

import ast
import json
import os
import shutil
import site
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Family, StateDict, load, make_family
from forks import Forks
from test_end_to_end import assert_same, config_of, merged

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "mergekit_ram"
OURS = ["mergekit_ram.methods"] * 3
BUILT_IN = ["mergekit.merge_methods.ram", None, "mergekit.merge_methods.ram"]
ENTRY = "[torch.backends]\nmergekit_ram = mergekit_ram._activate:activate\n"


@dataclass
class Seen:
    """What ``environment.look`` saw: its result, and what was printed beside."""

    state: dict[str, Any]
    err: str

    def assert_active(self) -> None:
        assert self.state["methods"] == OURS
        assert self.state["wrapped"] == [1] * 5
        assert "mergekit-ram" not in self.err

    def assert_built_in(self, warning: str | None = None) -> None:
        """MergeKit is as if the plugin were not there, with at most one warning that says why."""
        methods = self.state["methods"]
        assert methods[1] is None
        assert all(m.startswith("mergekit.") for m in (methods[0], methods[2])), methods
        assert self.err.count("mergekit-ram is not active") == (warning is not None), self.err
        assert (warning or "") in self.err


class Environment:
    """Folders of packages: all that is installed but the plugin, and copies of the plugin."""

    def __init__(self, folder: Path, forks: Forks) -> None:
        self.folder = folder
        self.forks = forks
        self.others = folder / "others"
        self.others.mkdir()
        for packages in site.getsitepackages():
            for file in Path(packages).glob("*"):
                link = self.others / file.name
                ours = file.name.lower().startswith(("mergekit_ram", "__editable__"))
                if not ours and file.suffix != ".pth" and not link.exists():
                    link.symlink_to(file)

    def copy(self, name: str, *, entry: str | None = "mergekit_ram") -> Path:
        """A folder with the plugin, installed as the distribution ``entry`` if there is one."""
        folder = self.folder / name
        # With the compiled kernels that lie beside the source.
        shutil.copytree(PACKAGE, folder / "mergekit_ram")
        if entry is not None:
            self.metadata(folder, entry, "0.1.0")
            info = folder / f"{entry}-0.1.0.dist-info"
            (info / "entry_points.txt").write_text(ENTRY)
        return folder

    @staticmethod
    def metadata(folder: Path, name: str, version: str) -> Path:
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)
        return folder

    def look(self, *path: Path, others: bool = True, **what: Any) -> Seen:
        folders = [*map(str, path), *([str(self.others)] if others else [])]
        result = self.forks.run("environment:look", path=folders, **what)
        assert result.returncode == 0, result.stderr
        return Seen(json.loads(result.stdout.splitlines()[-1]), result.stderr)


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    folder = tmp_path_factory.mktemp("streams")
    with Forks(folder, "environment", TORCH_DEVICE_BACKEND_AUTOLOAD="0") as warm:
        yield warm


@pytest.fixture
def environment(tmp_path: Path, forks: Forks) -> Environment:
    return Environment(tmp_path, forks)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def wanted(family: Family, tmp_path_factory: pytest.TempPathFactory) -> StateDict:
    return merged(config_of(family, "ram_plus"), tmp_path_factory.mktemp("wanted") / "out")


@pytest.fixture
def merge(family: Family, tmp_path: Path) -> list[str]:
    """Arguments of a merge with ``ram_plus``."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_of(family, "ram_plus")))
    return [str(config), str(tmp_path / "out")]


def assert_merged_once(merge: list[str], wanted: StateDict) -> dict[str, Any]:
    out = Path(merge[1])
    assert_same(load(out), wanted)
    assert (out / "README.md").read_text().count("### Overlap of the agents") == 1
    record: dict[str, Any] = json.loads((out / "ram_overlap.json").read_text())
    assert record["elements"]["total"] == sum(t.numel() for t in wanted.values())
    return record


def test_torch_without_mergekit(environment: Environment) -> None:
    for link in environment.others.glob("mergekit*"):
        link.unlink()
    seen = environment.look(environment.copy("site"))
    assert seen.state["missing"] == "mergekit"
    assert seen.state["loaded"] == ["mergekit_ram", "mergekit_ram._activate"]
    assert seen.err == ""


@pytest.mark.parametrize("version", ["0.1.4", "0.2.0", "0.1.6", "0.1.5+local"])
def test_versions_of_mergekit(environment: Environment, version: str) -> None:
    other = environment.metadata(environment.folder / "other", "mergekit", version)
    seen = environment.look(other, environment.copy("site"))
    if version.startswith(("0.1.5", "0.1.6")):
        seen.assert_active()
    else:
        seen.assert_built_in(f"it supports MergeKit >=0.1.5,<0.2 and found {version}.")
        assert "Set MERGEKIT_RAM_DISABLE=1 to switch the plugin off" in seen.err


def test_two_copies(environment: Environment, merge: list[str], wanted: StateDict) -> None:
    """The first on the path is used, once, whoever names it, and however often it is imported."""
    source = environment.copy("source", entry=None)
    installed = environment.copy("installed")
    fork = environment.copy("fork", entry="ram_fork")
    again = (
        "import sys, mergekit.merge, mergekit.scripts.merge_raw_pytorch, mergekit_ram\n"
        "mergekit_ram.activate()\n"
        "for name in [n for n in sys.modules if n.startswith('mergekit_ram')]:\n"
        "    del sys.modules[name]\n"
        f"sys.path.insert(0, {str(fork)!r})\n"
        "import mergekit_ram.cli\n"
    )
    seen = environment.look(source, installed, fork, script=again, merge=merge)
    seen.assert_active()
    assert seen.state["file"] == str(fork / "mergekit_ram" / "__init__.py")
    assert_merged_once(merge, wanted)
    seen = environment.look(source, installed, fork)
    seen.assert_active()
    assert seen.state["file"] == str(source / "mergekit_ram" / "__init__.py")


def test_an_upgrade(environment: Environment, merge: list[str], wanted: StateDict) -> None:
    """Byte code and compiled kernels of the version before are not used."""
    folder = environment.copy("site")
    environment.look(folder, merge=merge).assert_active()
    kernels = folder / "mergekit_ram" / "kernels"
    if not (os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("NUMBA_DISABLE_JIT")):
        assert list((kernels / "__pycache__").glob("_numba*.nbc"))
    (kernels / "_numba.py").write_text((kernels / "_numba.py").read_text() + "\n# The next.\n")
    methods = folder / "mergekit_ram" / "methods.py"
    methods.write_text(methods.read_text().replace('"Reinforced Agent Merging Plus"', '"Next"'))
    environment.look(folder, merge=merge).assert_active()
    assert_merged_once(merge, wanted)
    assert "[Next]" in (Path(merge[1]) / "README.md").read_text()


def test_without_metadata(environment: Environment, merge: list[str], wanted: StateDict) -> None:
    """Files alone, as a source tree on the path: torch does not know them, importing them works."""
    folder = environment.copy("source", entry=None)
    environment.look(folder).assert_built_in()
    seen = environment.look(folder, script="import mergekit_ram", merge=merge)
    seen.assert_active()
    assert seen.state["version"] == "unknown"
    assert assert_merged_once(merge, wanted)["plugin"] == "mergekit-ram unknown"


@pytest.mark.parametrize(
    "file", ["_extend.py", "methods.py", "planning.py", "_mergekit/merging.py", "kernels"]
)
def test_files_are_missing(environment: Environment, file: str) -> None:
    folder = environment.copy("site")
    gone = folder / "mergekit_ram" / file
    if gone.is_dir():
        shutil.rmtree(gone)
    else:
        gone.unlink()
    environment.look(folder).assert_built_in("")


@pytest.mark.parametrize(
    ("module", "name"),
    [("merge_methods.registry", "_METHODS"), ("plan", "MergePlanner"), ("merge", "generate_card")],
)
def test_mergekit_has_changed(environment: Environment, module: str, name: str) -> None:
    """What cannot be extended leaves the rest as it was, too."""
    changed = (
        "import importlib.util, mergekit_ram._extend as extend\n"
        "def broken(module, extension, imported=None, real=extend.extend):\n"
        f"    if module.__name__ == 'mergekit.{module}':\n"
        f"        kept = vars(module).pop({name!r})\n"
        "        real(module, extension, imported)\n"
        f"        setattr(module, {name!r}, kept)\n"
        "    else:\n"
        "        real(module, extension, imported)\n"
        "extend.extend = broken\n"
    )
    seen = environment.look(environment.copy("site"), script=changed)
    seen.assert_built_in(f"mergekit.{module} could not be extended")


def test_files_are_gone_and_metadata_is_left(environment: Environment) -> None:
    """An editable installation whose folder was removed: torch itself says what to do."""
    folder = environment.copy("site")
    shutil.rmtree(folder / "mergekit_ram")
    result = environment.forks.run("environment:look", path=[str(folder), str(environment.others)])
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert "Failed to load the backend extension: mergekit_ram" in last
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in last


def test_no_syntax_newer_than_python_3_10() -> None:
    for file in PACKAGE.rglob("*.py"):
        ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 10))
