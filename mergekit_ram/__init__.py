"""Reinforced Agent Merging (arXiv 2601.13572) for MergeKit: exact, out of core, whole-model RAM+.

Importing the package registers ``ram``, ``ram_plus`` and ``ramplus_tl`` with MergeKit, now or when
MergeKit is imported. With the package installed, ``import torch`` does the same.
"""

from mergekit_ram._activate import activate

__all__ = ["__version__", "activate"]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("mergekit-ram")
        except PackageNotFoundError:  # a source tree or an archive on the path
            return "unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


activate()
