"""What readers of QServe's files (OmniServe at 02b2925, SGLang's pull request 6521) ask beyond their form."""

from __future__ import annotations

from halfbyte.assignment import Assignment
from halfbyte.models.layout import ModelLayout, Role
from halfbyte.preflight.finding import Findings
from halfbyte.recipe import Recipe


def check_qserve(findings: Findings, layout: ModelLayout, recipe: Recipe, assignment: Assignment) -> None:
    """Errors for what their one scheme without exceptions cannot say; a warning about OmniServe's norms."""
    if recipe.format != "qserve":
        return
    schemes = {scheme for scheme in assignment.schemes.values() if scheme is not None}
    if len(schemes) > 1:
        sizes = sorted({str(scheme.weights.group_size or "rows") for scheme in schemes})
        findings.add(
            "error",
            "format: qserve",
            f"says one scheme for all modules, the recipe has several (groups of {', '.join(sizes)}); accepted: one",
        )
    for module in layout.modules:
        quantized = assignment.schemes[module.name] is not None
        if module.role is Role.EXPERT:
            findings.add_module(
                "error", module.name, "readers of QServe's files have no experts; accepted: dense models"
            )
        elif quantized and module.role is not Role.LINEAR:
            findings.add_module(
                "error", module.name, "is a linear layer of no block; QServe's files leave it alone"
            )
        elif not quantized and module.role is Role.LINEAR:
            findings.add_module(
                "error",
                module.name,
                "is left alone; readers of QServe's files take every linear layer of a block as quantized",
            )
    if not recipe.rotates:
        findings.add(
            "warning",
            "format: qserve",
            "OmniServe takes the norms of blocks to be 1, which rotation makes them; SGLang reads them as they are",
        )
