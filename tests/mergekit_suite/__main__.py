"""Runs MergeKit's own released tests with the plugin active.

    make test-mergekit

The tests are LGPL and not part of this project: pip fetches them with MergeKit's source
distribution, for the version that is installed. ``common.py``, beside this file, stands in for
the module of helpers that the distribution lacks.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

BUILD = Path("build/mergekit_suite")

# The distribution's own settings; ours would make its warnings errors.
SETTINGS = "[pytest]\naddopts = -q -p no:cacheprovider\n"

# Fails the run if the plugin is not what is tested.
CONFTEST = """
def pytest_sessionstart():
    from mergekit import merge_methods
    for name in ("ram", "ram_plus", "ramplus_tl"):
        assert type(merge_methods.get(name)).__module__ == "mergekit_ram.methods", name
"""


def main() -> int:
    """Fetch the tests, run them, and return pytest's exit status."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    release = f"mergekit=={version('mergekit')}"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--no-build-isolation", "-d", BUILD, release], check=True)
    (archive,) = BUILD.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        wanted = [m for m in packed.getmembers() if m.name.split("/")[1:2] == ["tests"]]
        packed.extractall(BUILD, members=wanted, filter="data")
    (tests,) = BUILD.glob("mergekit-*/tests")
    shutil.copy(Path(__file__).with_name("common.py"), tests / "common.py")
    (tests.parent / "pytest.ini").write_text(SETTINGS)
    (tests.parent / "conftest.py").write_text(CONFTEST)
    return subprocess.run(
        [sys.executable, "-m", "pytest"], cwd=tests.parent, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
