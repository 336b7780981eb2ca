"""Checks of a merge before work: its config, its models' headers, its plan, its output folder.

No weight is read. What would give a wrong result is an error, what probably was not meant is a
warning; each says what to do. Errors of one stage come together.
"""

from mergekit_ram.preflight.models import check_models
from mergekit_ram.preflight.output import check_output
from mergekit_ram.preflight.plan import check_plan, plan_by_headers
from mergekit_ram.preflight.request import check_modules, check_request
from mergekit_ram.preflight.tensors import PlannedTensors

__all__ = [
    "PlannedTensors",
    "check_models",
    "check_modules",
    "check_output",
    "check_plan",
    "check_request",
    "plan_by_headers",
]
