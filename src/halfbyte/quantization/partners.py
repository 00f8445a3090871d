"""Weights that engines run as one GEMM have one scale per tensor, so it has to cover all of them."""

from __future__ import annotations

from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.models.layout import ModelLayout, ModuleInfo


class PartnersAbsmax:
    """Largest magnitude among a module and its fused partners (q/k/v, gate/up).

    vLLM keeps one of the partners' global scales and drops the others (vllm#54974): they must be equal on disk.
    """

    def __init__(self, checkpoint: Checkpoint, layout: ModelLayout) -> None:
        self._checkpoint = checkpoint
        self._partners: dict[str, list[ModuleInfo]] = {}
        for module in layout.modules:
            if module.fused_group is not None:
                self._partners.setdefault(module.fused_group, []).append(module)
        self._known: dict[str, float] = {}

    def __call__(self, module: ModuleInfo) -> float:
        """Reads every partner once. NaN and Inf show as themselves."""
        group = module.fused_group
        assert group is not None
        if group not in self._known:
            weights = (self._checkpoint.load_source(partner.source) for partner in self._partners[group])
            self._known[group] = max(float(weight.abs().max()) for weight in weights)
        return self._known[group]
