"""Quantizing one decoder block that is in memory, from what its layers have seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from halfbyte.algorithms.output_error import output_error
from halfbyte.algorithms.targets import Target
from halfbyte.calibration.loaded_block import LoadedBlock
from halfbyte.calibration.observers import Observation
from halfbyte.calibration.statistics import InputStatistics
from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.scales import LARGEST_SCALE, scale_values
from halfbyte.formats.spec import TensorFormat
from halfbyte.method import Method
from halfbyte.models.folding import Fold
from halfbyte.models.layout import ModuleInfo
from halfbyte.quantization.plan import Quantize
from halfbyte.quantization.report import BlockReport, ModuleReport, fold_report
from halfbyte.quantization.rounding_step import Rounded, round_weights
from halfbyte.quantization.scaling_step import BlockTensors, scale_inputs

FEWEST_TOKENS = 64
"""Fewer tokens than this say nothing about an expert: it is rounded to nearest, and named."""


@dataclass(frozen=True)
class QuantizedBlock:
    """quantized: by module. changed: other stored tensors that scales were folded into, as they are to be stored."""

    quantized: Mapping[str, QuantizedTensor]
    changed: Mapping[str, torch.Tensor]
    report: BlockReport


def quantize_block(
    block: LoadedBlock,
    steps: Sequence[Quantize],
    observation: Observation,
    *,
    methods: Mapping[str, Method],
    targets: Mapping[str, Target],
    folds: Sequence[Fold],
    modules: Mapping[str, ModuleInfo],
    load: Callable[[str], torch.Tensor],
    dtype: str,
    on_module: Callable[[str, float | None], None],
) -> QuantizedBlock:
    """Quantizes the weights of ``steps``, all in ``block``, which then holds what they decode to.

    methods, targets, modules: of the whole model, by name. folds: those of this block. load: stored tensors by name.
    dtype: the model's (bf16, f16 or f32), which scales are stored in. on_module: called with each module and its
    output error.
    Errors: weights that are not finite, or scales that are not; the tensor is named.
    """
    formats = {step.module.name: step.scheme.weights.with_scale(dtype) for step in steps}
    statistics = {name: group.statistics for group in observation.groups for name in group.names}
    chosen = {name: _usable(methods[name], statistics.get(name)) for name in formats}
    weights = {name: block.weight(name).float() for name in formats}
    before = {
        name: output_error(weights[name], targets[name].nearest(weights[name], fmt), statistics[name].moment)
        for name, fmt in formats.items()
        if name in statistics
    }
    tensors = BlockTensors(modules, weights, load)
    usable = {name: method for name, (method, _) in chosen.items()}
    applied, spreads = scale_inputs(folds, tensors, formats, usable, statistics, targets)
    for name, tensor in tensors.stored.items():
        block.put_parameter(name, tensor)

    partners = _partners(steps)
    rounded: dict[str, Rounded] = {}
    for names in _same_input(formats, chosen, targets, statistics):
        elsewhere = [max(float(weights[other].abs().max()) for other in partners[name]) for name in names]
        seen = statistics.get(names[0])
        some = round_weights(
            [weights[name] for name in names],
            formats[names[0]],
            chosen[names[0]][0],
            None if seen is None else seen.moment,
            elsewhere,
            targets[names[0]],
        )
        rounded |= dict(zip(names, some, strict=True))

    reports = []
    for step in steps:
        name = step.module.name
        result, (method, why) = rounded[name], chosen[name]
        _require_sound(name, result.quantized)
        decoded = targets[name].decode(result.quantized)
        seen = statistics.get(name)
        error = None if seen is None else output_error(weights[name], decoded, seen.moment)
        block.put(name, decoded)
        scales = _scales(result.quantized)
        reports.append(
            ModuleReport(
                module=name,
                scheme=step.scheme.name,
                method=str(method),
                shape=step.module.shape,
                group_size=formats[name].group_size,
                tokens=0 if seen is None else seen.tokens,
                error_rtn=before.get(name),
                error=error,
                scale_min=float(scales.min()),
                scale_max=float(scales.max()),
                narrowed=result.narrowed,
                scaling=spreads.get(name),
                damping=result.damping,
                fallback=result.fallback or why,
            )
        )
        on_module(name, error)
    return QuantizedBlock(
        {name: result.quantized for name, result in rounded.items()},
        tensors.stored,
        BlockReport(block.name, tuple(reports), observation.routed_tokens, tuple(map(fold_report, applied))),
    )


def _usable(method: Method, seen: InputStatistics | None) -> tuple[Method, str | None]:
    """The method, or round to nearest and why, where too little was seen for it."""
    if not method.needs_data or (seen is not None and seen.tokens >= FEWEST_TOKENS):
        return method, None
    tokens = 0 if seen is None else seen.tokens
    return replace(Method(), clip="none"), f"saw {tokens} tokens, fewer than {FEWEST_TOKENS}"


def _partners(steps: Sequence[Quantize]) -> dict[str, list[str]]:
    """The modules that share an outer scale per tensor with each module, itself included."""
    groups: dict[str, list[str]] = {}
    for step in steps:
        groups.setdefault(step.module.fused_group or step.module.name, []).append(step.module.name)
    return {name: names for names in groups.values() for name in names}


def _same_input(
    formats: Mapping[str, TensorFormat],
    chosen: Mapping[str, tuple[Method, str | None]],
    targets: Mapping[str, Target],
    statistics: Mapping[str, InputStatistics],
) -> list[list[str]]:
    """Names in lists of those that can be rounded together: same statistics, format, method and target."""
    together: dict[tuple[object, ...], list[str]] = {}
    for name, fmt in formats.items():
        seen = statistics.get(name)
        key = (name if seen is None else id(seen), fmt, chosen[name][0], targets[name])
        together.setdefault(key, []).append(name)
    return list(together.values())


def _scales(q: QuantizedTensor) -> torch.Tensor:
    scales = scale_values(q.scales)
    return scales if q.outer_scales is None else scales * q.outer_scales


def _require_sound(name: str, q: QuantizedTensor) -> None:
    scales = _scales(q)
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise HalfbyteError(f"{name}: a scale is zero or not finite; accepted: finite positive scales")
    largest = LARGEST_SCALE.get(q.format.scale)
    if q.outer_scales is None and largest is not None and bool((scales >= largest).any()):
        raise HalfbyteError(
            f"{name}: a scale is {float(scales.max()):g}, the largest that {q.format.scale} holds: "
            "its weights do not fit; accepted: weights within the range of the scales' dtype"
        )
