"""What the activation hook calls: hands the methods and checks to MergeKit's modules."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from mergekit_ram._mergekit import replace_methods, wrap_flat_planner, wrap_planner
from mergekit_ram.errors import forget_warnings
from mergekit_ram.methods import METHODS, RamMethod
from mergekit_ram.parameters import check_config


def install_methods(registry: ModuleType) -> None:
    """Register the methods in ``mergekit.merge_methods.registry``."""
    replace_methods(registry, METHODS)


def install_planner(planning: ModuleType) -> None:
    """Check configs before ``mergekit.plan`` plans them."""
    wrap_planner(planning, _before_planning)


def install_flat_planner(script: ModuleType) -> None:
    """Check configs before ``mergekit.scripts.merge_raw_pytorch`` plans them."""
    wrap_flat_planner(script, _before_planning)


def _before_planning(config: Any, method: Any) -> None:
    if isinstance(method, RamMethod):
        forget_warnings()
        check_config(method.spec.name, config)
