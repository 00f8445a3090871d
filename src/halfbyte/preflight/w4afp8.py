"""What SGLang's reader of ``w4afp8`` asks beyond its form: every expert in INT4, whatever else is linear in FP8."""

from __future__ import annotations

from halfbyte.assignment import Assignment
from halfbyte.models.layout import ModelLayout, Role
from halfbyte.preflight.finding import Findings
from halfbyte.recipe import Recipe

_ELEMENTS = {Role.EXPERT: "int4", Role.LINEAR: "e4m3"}
_ACCEPTED = {Role.EXPERT: "experts in w4a8", Role.LINEAR: "fp8_per_block for layers that are no experts"}


def check_w4afp8(findings: Findings, layout: ModelLayout, recipe: Recipe, assignment: Assignment) -> None:
    """Errors for what its config cannot say, which names no modules; a warning about input scales that are a guess."""
    if recipe.format != "w4afp8":
        return
    if not any(module.role is Role.EXPERT for module in layout.modules):
        findings.add(
            "error", "format: w4afp8", "is of mixtures, and this model has no experts; accepted: a mixture"
        )
        return
    if not any(method.needs_data for method in assignment.methods.values()):
        findings.add(
            "warning",
            "format: w4afp8",
            "input_scale of all experts is 1 without data, so that inputs beyond 448 saturate; --data measures it",
        )
    for module in layout.modules:
        scheme = assignment.schemes[module.name]
        wanted = _ELEMENTS.get(module.role)
        if wanted is None:
            if scheme is not None:
                findings.add_module(
                    "error", module.name, "is a linear layer of no block; SGLang reads it in 16 bits"
                )
        elif scheme is None:
            findings.add_module(
                "error",
                module.name,
                f"is left alone, but config.json cannot say so; accepted: {_ACCEPTED[module.role]}",
            )
        elif scheme.weights.element != wanted:
            findings.add_module(
                "error", module.name, f"would be {scheme.weights.element}; accepted: {_ACCEPTED[module.role]}"
            )
