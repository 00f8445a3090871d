"""What can be known to go wrong before any work starts, from headers and the recipe alone."""

from __future__ import annotations

from halfbyte.assignment import Assignment
from halfbyte.errors import HalfbyteError
from halfbyte.models.layout import ModelLayout
from halfbyte.preflight.finding import Finding, Findings
from halfbyte.preflight.fused import check_fused
from halfbyte.preflight.model import check_model
from halfbyte.preflight.qserve import check_qserve
from halfbyte.preflight.rules import check_rules
from halfbyte.preflight.shards import check_tensor_parallel
from halfbyte.preflight.vllm import check_vllm
from halfbyte.preflight.w4afp8 import check_w4afp8
from halfbyte.recipe import Recipe

__all__ = ["Finding", "preflight"]


def preflight(layout: ModelLayout, recipe: Recipe, assignment: Assignment, tp: int = 1) -> list[Finding]:
    """All findings, errors first. ``tp`` is the number of ranks that will share each layer when it is served.

    Smaller group sizes are in ``assignment.notes`` and not repeated here.

    Errors: ``tp`` below 1.
    """
    if tp < 1:
        raise HalfbyteError(f"--tp {tp}; accepted: 1 or more")
    findings = Findings()
    check_rules(findings, layout, recipe, assignment)
    check_fused(findings, layout, assignment)
    check_tensor_parallel(findings, layout, assignment, tp)
    check_model(findings, layout, assignment)
    check_vllm(findings, layout, assignment, tp)
    check_qserve(findings, layout, recipe, assignment)
    check_w4afp8(findings, layout, recipe, assignment)
    return findings.collected()
