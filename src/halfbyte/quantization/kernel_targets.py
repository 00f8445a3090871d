"""Which module is rounded to which kernel's numbers."""

from __future__ import annotations

from halfbyte.algorithms.targets import ExactScales, Target, VllmScales
from halfbyte.errors import HalfbyteError
from halfbyte.formats.vllm_scales import VLLM_W4A8
from halfbyte.quantization.plan import QuantizationPlan, Quantize


def kernel_targets(plan: QuantizationPlan) -> dict[str, Target]:
    """For each module that ``plan`` quantizes: that of its scheme.

    Errors: a W4A8 weight that vLLM's kernel cannot take; target ``vllm`` where nothing is W4A8.
    """
    targets: dict[str, Target] = {}
    for step in plan.steps:
        if isinstance(step, Quantize):
            vllm = step.scheme.target == "vllm"
            if vllm:
                _require_vllm_format(step, plan.checkpoint.model_dtype)
            targets[step.module.name] = VllmScales() if vllm else ExactScales()
    if plan.recipe.target == "vllm" and not any(
        isinstance(target, VllmScales) for target in targets.values()
    ):
        raise HalfbyteError(
            "target vllm is for w4a8, which no module gets; accepted: target halfbyte, or w4a8"
        )
    return targets


def _require_vllm_format(step: Quantize, dtype: str) -> None:
    found = step.scheme.weights.with_scale(dtype)
    if found != VLLM_W4A8:
        raise HalfbyteError(
            f"{step.module.name}: target vllm takes symmetric int4 in groups of 128 with bf16 scales, not "
            f"{'symmetric' if found.symmetric else 'asymmetric'} int4 in groups of {found.group_size} with "
            f"{found.scale} scales; accepted: such modules in ignore, or another scheme for them"
        )
