"""How MergeKit finds the plugin: each case in a fresh process, with whatever imported first."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from mergekit_ram import _activate, _extend

ROOT = Path(__file__).parent.parent

STATE = """
import sys, warnings
from mergekit import merge_methods
import mergekit.plan, mergekit.scripts.merge_raw_pytorch as raw
from mergekit import merge
names = ("ram", "ram_plus", "ramplus_tl")
methods = {m.spec.name: m for m in merge_methods.registered_methods()}
ours = [n in methods and type(methods[n]).__module__ == "mergekit_ram.methods" for n in names]
planners = [hasattr(mergekit.plan.MergePlanner._plan, "__wrapped__"),
            hasattr(raw.plan_flat_merge, "__wrapped__"),
            hasattr(merge.generate_card, "__wrapped__")]
clean = all(type(sys.modules[n]).__name__ == "module" for n in
            ("mergekit.plan", "mergekit.merge", "mergekit.scripts.merge_raw_pytorch"))
print(ours, planners, clean, merge_methods.get("linear").spec.name)
"""
ACTIVE = "[True, True, True] [True, True, True] True linear"
BUILT_IN = "[False, False, False] [False, False, False] True linear"

FIRST = (
    "mergekit.merge_methods",
    "mergekit.plan",
    "mergekit.card",
    "mergekit.merge",
    "mergekit.scripts.merge_raw_pytorch",
    "torch, mergekit.merge_methods.registry",
    # Ours, where it is what imports MergeKit.
    "mergekit_ram.parameters",
)


def cases(tmp: Path) -> dict[str, tuple[str, dict[str, str]]]:
    """Script and environment of each case."""
    broken = tmp / "broken" / "mergekit_ram"
    broken.mkdir(parents=True)
    for name in ("__init__.py", "_activate.py", "_extend.py"):
        (broken / name).write_text((ROOT / "mergekit_ram" / name).read_text())
    (broken / "methods.py").write_text("raise OSError('disk on fire')\n")
    newer = tmp / "newer" / "mergekit-0.2.0.dist-info"
    newer.mkdir(parents=True)
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: mergekit\nVersion: 0.2.0\n")
    archive = tmp / "package.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for file in (ROOT / "mergekit_ram").rglob("*.py"):
            packed.write(file, file.relative_to(ROOT))
    result = {f"import {first}": (f"import {first}\n{STATE}", {}) for first in FIRST}
    result |= {
        "switched off": (f"import mergekit_ram\n{STATE}", {"MERGEKIT_RAM_DISABLE": "1"}),
        "no autoload, imported last": (
            f"{STATE}\nimport mergekit_ram, importlib; importlib.reload(mergekit_ram)\n{STATE}",
            {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        ),
        "broken": (STATE, {"PYTHONPATH": str(tmp / "broken")}),
        "warnings are errors": (
            f"import warnings; warnings.simplefilter('error', RuntimeWarning)\n{STATE}",
            {"PYTHONPATH": str(tmp / "newer")},
        ),
        "from a zip": (STATE, {"PYTHONPATH": str(archive), "MERGEKIT_RAM_DISABLE": "0"}),
        "torch alone": (
            "import sys, torch\n"
            "print(sorted(m for m in sys.modules if m.startswith(('mergekit_ram', 'mergekit.'))),"
            " torch.ones(2).sum().item())",
            {},
        ),
    }
    return result


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, subprocess.CompletedProcess]:
    """Results of all cases, two processes at a time."""

    def run(case: tuple[str, dict[str, str]]) -> subprocess.CompletedProcess[str]:
        script, environment = case
        return subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **environment},
            cwd=ROOT / "tests",
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    table = cases(tmp_path_factory.mktemp("activation"))
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(table, pool.map(run, table.values()), strict=True))


def check(result: subprocess.CompletedProcess[str], wanted: str) -> None:
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == wanted


@pytest.mark.parametrize("first", FIRST)
def test_whatever_is_imported_first(outcome: dict, first: str) -> None:
    result = outcome[f"import {first}"]
    check(result, ACTIVE)
    assert "mergekit-ram" not in result.stderr


def test_a_package_in_a_zip(outcome: dict) -> None:
    check(outcome["from a zip"], ACTIVE)


def test_importing_the_package_registers_too(outcome: dict) -> None:
    check(outcome["no autoload, imported last"], f"{BUILT_IN}\n{ACTIVE}")


def test_switched_off_the_built_ins_are_back_without_a_word(outcome: dict) -> None:
    check(outcome["switched off"], BUILT_IN)
    assert "mergekit-ram" not in outcome["switched off"].stderr


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("broken", "disk on fire"),
        ("warnings are errors", "supports MergeKit >=0.1.5,<0.2 and found 0.2.0"),
    ],
)
def test_a_failure_is_one_warning(outcome: dict, case: str, reason: str) -> None:
    check(outcome[case], BUILT_IN)
    assert outcome[case].stderr.count("mergekit-ram is not active") == 1
    assert reason in outcome[case].stderr
    assert "MERGEKIT_RAM_DISABLE=1" in outcome[case].stderr


def test_torch_alone_loads_one_module_of_ours(outcome: dict) -> None:
    check(outcome["torch alone"], "['mergekit_ram', 'mergekit_ram._activate'] 2.0")


def test_the_hook_uses_the_standard_library_only() -> None:
    for name in ("__init__.py", "_activate.py", "_extend.py"):
        source = (ROOT / "mergekit_ram" / name).read_text()
        imports = re.findall(r"^\s*(?:from|import) ([\w.]+)", source, re.MULTILINE)
        foreign = [m for m in imports if m.split(".")[0] not in sys.stdlib_module_names]
        # Ours are the hook itself, and what it loads once MergeKit is there.
        assert set(foreign) <= {"mergekit_ram._activate", "mergekit_ram"}


def test_the_supported_versions_are_those_of_the_package() -> None:
    distribution = metadata.distribution("mergekit-ram")
    oldest, before = (".".join(map(str, v)) for v in (_extend.OLDEST, _extend.BEFORE))
    assert f"mergekit<{before},>={oldest}" in (distribution.requires or [])
    (hook,) = distribution.entry_points.select(group="torch.backends")
    assert hook.load() is _activate.activate


def test_the_wheel(tmp_path: Path) -> None:
    """A regular installation has all modules, and its hook is found."""
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    # A copy: building leaves files in the source tree, which the next wheel would contain.
    source_tree = tmp_path / "source"
    source_tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source_tree)
    shutil.copytree(ROOT / "mergekit_ram", source_tree / "mergekit_ram")
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source_tree]
    subprocess.run([*pip, *build], check=True, capture_output=True, timeout=300)
    site = tmp_path / "site"
    (wheel,) = tmp_path.glob("*.whl")
    install = ["install", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run([*pip, *install], check=True, capture_output=True, timeout=300)
    installed = {p.relative_to(site).as_posix() for p in site.rglob("*.py")}
    source = {p.relative_to(ROOT).as_posix() for p in (ROOT / "mergekit_ram").rglob("*.py")}
    assert installed == source
    script = f"import mergekit.plan, mergekit_ram\nprint(mergekit_ram.__file__)\n{STATE}"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    check(result, f"{site / 'mergekit_ram' / '__init__.py'}\n{ACTIVE}")
