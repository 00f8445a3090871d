"""Scales of inputs that are quantized with a number from the checkpoint, from the largest input that was seen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from halfbyte.calibration.statistics import InputStatistics
from halfbyte.formats.spec import FLOAT_MAX
from halfbyte.quantization.plan import Quantize

_EXPERT = re.compile(r"(?P<experts>.*)\.\d+\.(?P<projection>[^.]+)")
_LAST = frozenset({"down_proj", "w2"})


def input_scales(
    steps: Iterable[Quantize], statistics: Mapping[str, InputStatistics]
) -> dict[str, torch.Tensor]:
    """fp32 ``[1]``, a bf16 number, for each module of ``steps`` with static inputs, where any of its group were seen.

    One for what a mixture's experts read, and one for what their last projections read: engines keep no more of them
    than these, the largest of all experts. Largest magnitude / largest element, rounded up.
    """
    groups: dict[tuple[str, bool], list[Quantize]] = {}
    for step in steps:
        if step.scheme.has_static_inputs:
            match = _EXPERT.fullmatch(step.module.name)
            key = (match["experts"], match["projection"] in _LAST) if match else (step.module.name, False)
            groups.setdefault(key, []).append(step)
    found: dict[str, torch.Tensor] = {}
    for members in groups.values():
        names = [step.module.name for step in members]
        seen = [statistics[name].absmax.max() for name in names if name in statistics]
        largest = torch.stack(seen).max().cpu() if seen else torch.zeros(())
        if largest > 0:
            activations = members[0].scheme.activations
            assert activations is not None
            found |= dict.fromkeys(names, _up_to_bf16(largest.reshape(1) / FLOAT_MAX[activations.element]))
    return found


def _up_to_bf16(scale: torch.Tensor) -> torch.Tensor:
    nearest = scale.bfloat16()
    above = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    return torch.where(nearest.float() < scale, above, nearest).float()
