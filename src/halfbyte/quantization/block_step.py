"""Quantizing one decoder block that is in memory, from what its layers have seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from halfbyte.algorithms.output_error import relative_error, row_energies
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
from halfbyte.quantization.input_scales import input_scales
from halfbyte.quantization.plan import Quantize
from halfbyte.quantization.report import BlockReport, ModuleReport, fold_report
from halfbyte.quantization.rounding_step import round_stack
from halfbyte.quantization.scaling_step import BlockTensors, scale_inputs
from halfbyte.quantization.stacks import Stack, stack_up

FEWEST_TOKENS = 64
"""Fewer tokens than this say nothing about an expert: it is rounded to nearest, and named."""


@dataclass(frozen=True)
class QuantizedBlock:
    """quantized: by module. changed: other stored tensors that scales were folded into, as they are to be stored.
    input_scales: of modules with static inputs (see :func:`input_scales`)."""

    quantized: Mapping[str, QuantizedTensor]
    changed: Mapping[str, torch.Tensor]
    input_scales: Mapping[str, torch.Tensor]
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

    observation: is emptied, since its moments are given up one after the other.
    methods, targets, modules: of the whole model, by name. folds: those of this block. load: stored tensors by name.
    dtype: the model's (bf16, f16 or f32), which scales are stored in. on_module: called with each module and its
    output error.
    Errors: weights that are not finite, or scales that are not; the tensor is named.
    """
    formats = {step.module.name: step.scheme.weights.with_scale(dtype) for step in steps}
    shapes = {step.module.name: step.module.shape for step in steps}
    statistics = {name: group.statistics for group in observation.groups for name in group.names}
    observation.groups.clear()
    tokens = {name: seen.tokens for name, seen in statistics.items()}
    chosen = {name: _usable(methods[name], statistics.get(name)) for name in formats}
    usable = {name: method for name, (method, _) in chosen.items()}
    tensors = BlockTensors(block.weight, modules, formats, load)
    errors_rtn: dict[str, float] = {}
    for stack in stack_up(formats, shapes, usable, targets, statistics):
        errors_rtn |= _errors_of_rtn(stack, tensors, statistics)
    applied, spreads = scale_inputs(folds, tensors, formats, usable, statistics, targets)
    for name, tensor in tensors.stored.items():
        block.put_parameter(name, tensor)
    static_scales = input_scales(steps, statistics)

    elsewhere = _largest_elsewhere(steps, formats, tensors)
    schemes = {step.module.name: step.scheme.name for step in steps}
    quantized: dict[str, QuantizedTensor] = {}
    reports: dict[str, ModuleReport] = {}
    for stack in stack_up(formats, shapes, usable, targets, statistics):
        for part in _quantized(stack, tensors, statistics, elsewhere.get(stack.members[0][0], 0.0)):
            name = part.name
            block.put(name, part.decoded)
            quantized[name] = part.quantized
            reports[name] = ModuleReport(
                module=name,
                scheme=schemes[name],
                method=str(stack.method),
                shape=shapes[name],
                group_size=stack.fmt.group_size,
                tokens=tokens.get(name, 0),
                error_rtn=errors_rtn.get(name),
                error=part.error,
                scale_min=part.scales[0],
                scale_max=part.scales[1],
                narrowed=part.narrowed,
                scaling=spreads.get(name),
                damping=part.damping,
                fallback=part.fallback or chosen[name][1],
            )
            on_module(name, part.error)
            # Moments and copies that nobody asks for any more make room for the next stack.
            statistics.pop(name, None)
            tensors.scaled.pop(name, None)
            del part
    return QuantizedBlock(
        quantized,
        tensors.stored,
        static_scales,
        BlockReport(
            block.name,
            tuple(reports[name] for name in formats),
            observation.routed_tokens,
            tuple(map(fold_report, applied)),
        ),
    )


def _errors_of_rtn(
    stack: Stack, tensors: BlockTensors, statistics: Mapping[str, InputStatistics]
) -> dict[str, float]:
    """Relative output error of each module rounded to nearest; nothing where inputs are not known."""
    moment = stack.moment(statistics)
    if moment is None:
        return {}
    weight = stack.weight(tensors.weight)
    outputs = _energies(stack, weight, moment)
    errors = _energies(stack, weight.sub_(stack.target.nearest(weight, stack.fmt)), moment)
    return {name: relative_error(errors[name], outputs[name]) for name in stack.names}


@dataclass(frozen=True)
class _Part:
    """One module of a quantized stack. error: relative, of its output, if its inputs are known."""

    name: str
    quantized: QuantizedTensor
    decoded: torch.Tensor
    error: float | None
    scales: tuple[float, float]
    narrowed: float | None
    damping: float | None
    fallback: str | None


def _quantized(
    stack: Stack, tensors: BlockTensors, statistics: Mapping[str, InputStatistics], elsewhere: float
) -> list[_Part]:
    moment = stack.moment(statistics)
    weight = stack.weight(tensors.weight)
    result = round_stack(weight, stack.fmt, stack.method, moment, stack.target, elsewhere=elsewhere)
    scales = _scale_ranges(stack, result.quantized)
    decoded = stack.target.decode(result.quantized)
    errors: dict[str, float] = {}
    if moment is not None:
        # Of the weight as it is now: scales that were folded into its rows have changed its output.
        outputs = _energies(stack, weight, moment)
        lost = _energies(stack, weight.sub_(decoded), moment)
        errors = {name: relative_error(lost[name], outputs[name]) for name in stack.names}
    return [
        _Part(
            name,
            stack.part(result.quantized, member, rows),
            decoded[member, rows],
            errors.get(name),
            scales[name],
            result.narrowed[member],
            result.damping[member],
            result.fallback[member],
        )
        for name, member, rows in stack.parts()
    ]


def _usable(method: Method, seen: InputStatistics | None) -> tuple[Method, str | None]:
    """The method, or round to nearest and why, where too little was seen for it."""
    if not method.needs_data or (seen is not None and seen.tokens >= FEWEST_TOKENS):
        return method, None
    tokens = 0 if seen is None else seen.tokens
    return method.without_data, f"saw {tokens} tokens, fewer than {FEWEST_TOKENS}"


def _largest_elsewhere(
    steps: Sequence[Quantize], formats: Mapping[str, TensorFormat], tensors: BlockTensors
) -> dict[str, float]:
    """Largest magnitude of the weights that share a module's outer scale per tensor, for modules that have one.

    Known before any of them is quantized, since weights that are put into the block are no longer the given ones.
    """
    groups: dict[str, list[str]] = {}
    for name, group in ((step.module.name, step.module.fused_group) for step in steps):
        if formats[name].outer == "tensor":
            groups.setdefault(group or name, []).append(name)
    largest = {
        group: max(float(tensors.weight(name).abs().max()) for name in names)
        for group, names in groups.items()
    }
    return {name: largest[group] for group, names in groups.items() for name in names}


def _energies(stack: Stack, rows: torch.Tensor, moment: torch.Tensor) -> dict[str, float]:
    """What the rows of each module of a stack put out, squared (see :func:`row_energies`)."""
    energies = row_energies(rows, moment)
    sums = torch.stack([energies[member, part].sum() for _, member, part in stack.parts()])
    return dict(zip(stack.names, sums.tolist(), strict=True))


def _scale_ranges(stack: Stack, q: QuantizedTensor) -> dict[str, tuple[float, float]]:
    """The smallest and the largest scale of each module. Errors: one that is zero, not finite, or was too large."""
    scales = scale_values(q.scales) if q.outer_scales is None else scale_values(q.scales) * q.outer_scales
    lows, highs = scales.amin(-1), scales.amax(-1)
    every = slice(None)
    places = [(member, rows if stack.by_rows else every) for _, member, rows in stack.parts()]
    ends = torch.stack([torch.stack([lows[place].amin(), highs[place].amax()]) for place in places])
    ranges = dict(zip(stack.names, ((low, high) for low, high in ends.tolist()), strict=True))
    largest = LARGEST_SCALE.get(q.format.scale) if q.outer_scales is None else None
    for name, (low, high) in ranges.items():
        if not (low > 0 and math.isfinite(high)):
            raise HalfbyteError(f"{name}: a scale is zero or not finite; accepted: finite positive scales")
        if largest is not None and high >= largest:
            raise HalfbyteError(
                f"{name}: a scale is {high:g}, the largest that {q.format.scale} holds: "
                "its weights do not fit; accepted: weights within the range of the scales' dtype"
            )
    return ranges
