"""Partners that engines run as one matrix product and that a recipe would tear apart."""

from __future__ import annotations

from collections.abc import Iterable

from halfbyte.assignment import Assignment
from halfbyte.models.layout import ModelLayout, ModuleInfo, Role
from halfbyte.models.names import split
from halfbyte.preflight.finding import Findings
from halfbyte.schemes import Scheme


def check_fused(findings: Findings, layout: ModelLayout, assignment: Assignment) -> None:
    """Errors where the shards of q/k/v or gate/up differ; warnings where the experts of a layer do."""
    groups: dict[str, list[ModuleInfo]] = {}
    experts: dict[str, set[Scheme | None]] = {}
    for module in layout.modules:
        if module.fused_group:
            groups.setdefault(module.fused_group, []).append(module)
        if module.role is Role.EXPERT:
            layer = module.name.partition(".experts.")[0]
            experts.setdefault(f"{layer}.experts", set()).add(assignment.schemes[module.name])
    for key, modules in groups.items():
        if len({assignment.schemes[module.name] for module in modules}) > 1:
            findings.add_module(
                "error",
                key,
                f"{_shards(modules, assignment)}; engines run them as one matrix product, "
                "so they need one scheme or none",
            )
    for layer, schemes in experts.items():
        if len(schemes) > 1:
            findings.add_module(
                "warning",
                layer,
                f"experts of one layer differ ({', '.join(sorted(map(said, schemes)))}); vLLM runs a layer's "
                "experts as one kernel and needs one scheme for all their projections",
            )


def _shards(modules: Iterable[ModuleInfo], assignment: Assignment) -> str:
    return ", ".join(f"{split(m.name)[1]} {said(assignment.schemes[m.name])}" for m in modules)


def said(scheme: Scheme | None) -> str:
    """A scheme in a few words."""
    if scheme is None:
        return "not quantized"
    weights = scheme.weights
    grouped = f" group {weights.group_size}" if weights.group_size else ""
    return f"{scheme.name}{grouped}"
