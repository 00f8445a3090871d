"""Several linear layers on the same inputs as one: one activation to quantize, one matrix product to wait for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.kernels.problem import LinearProblem
from halfbyte.kernels.registry import forced_kernel, kernel_named
from halfbyte.layers.linear import QuantLinear
from halfbyte.layers.merged_rows import MergedRows


class MergedLinear(QuantLinear):
    """``[y_0 | y_1 | ...]`` of quantized layers that keep their names, and lend their weights to this one.

    The layers go on running by themselves, on their rows, and ``state_dict`` still has what they were loaded from;
    this one has no part in it.
    """

    def __init__(self, parts: Sequence[QuantLinear], name: str) -> None:
        """parts: repacked for the same device and dtype; :func:`cannot_merge` has nothing against them."""
        problem = parts[0].problem
        super().__init__(
            problem.scheme,
            problem.in_features,
            sum(part.out_features for part in parts),
            stored={},
            codec=_Concatenation(parts),
            name=name,
        )
        self._biases = MergedRows(parts, "bias")
        with forced_kernel(parts[0].kernel):
            self.repack(problem.dtype)
        start = 0
        for part in parts:
            part.lend(self, slice(start, start + part.out_features))
            start += part.out_features

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        """``[out]`` of all parts, as theirs are now; no parameter and no buffer of this layer's own."""
        return self._biases.merged()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Nothing: the parts save themselves."""

    def _load_from_state_dict(self, *args: Any) -> None:
        """Nothing: the parts load themselves."""


class MergedPlain(nn.Module):
    """The same for layers that are not quantized: their weights and biases become views of this one's.

    Wherever those go afterwards, moved, copied or replaced, this one follows when it runs.
    """

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        """parts: :func:`cannot_merge` has nothing against them."""
        super().__init__()
        self.in_features = parts[0].in_features
        self.out_features = sum(part.out_features for part in parts)
        self._weights, self._biases = MergedRows(parts, "weight"), MergedRows(parts, "bias")

    @property
    def weight(self) -> torch.Tensor:
        """``[out, in]``"""
        weight = self._weights.merged()
        assert weight is not None
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """``[out]``"""
        return self._biases.merged()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]`` of all parts, one after the other."""
        return nn.functional.linear(x, self.weight, self.bias)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> MergedPlain:
        """What moves are the parts; memory that they have left is given up."""
        self._weights.release()
        self._biases.release()
        return super()._apply(fn, recurse)


def cannot_merge(parts: Sequence[nn.Module]) -> str:
    """Why layers cannot run as one (empty if they can): kinds or formats that differ, scales that they would share."""
    for name in ("weight", "bias"):
        kinds = {(t.dtype, t.device) for part in parts if (t := getattr(part, name, None)) is not None}
        if len(kinds) > 1:
            return "their weights or biases differ in dtype or device"
    if all(type(part) is nn.Linear for part in parts):
        return ""
    quantized = [part for part in parts if type(part) is QuantLinear]
    if len(quantized) < len(parts):
        return "some of them are quantized and some are not"
    first = quantized[0].problem
    if any(
        (part.problem.scheme, part.problem.in_features) != (first.scheme, first.in_features)
        for part in quantized
    ):
        return "their schemes or inputs differ"
    if any(part.static_input_scale is not None for part in quantized):
        return "their inputs have scales of their own"
    weights = first.scheme.weights
    height = weights.block_shape[0] if weights.block_shape else 1
    if weights.granularity == "tensor" or weights.outer == "tensor":
        return "each has one scale for its whole weight"
    if any(part.out_features % height for part in quantized):
        return "their blocks would overlap"
    problem = LinearProblem(
        first.scheme,
        sum(part.out_features for part in quantized),
        first.in_features,
        first.device,
        first.dtype,
    )
    return kernel_named(str(quantized[0].kernel)).can_implement(problem)[1]


class _Concatenation:
    """Weights one below the other, from layers that hold them."""

    def __init__(self, parts: Sequence[QuantLinear]) -> None:
        self._parts = parts

    def decode(self, stored: Mapping[str, torch.Tensor]) -> QuantizedTensor:
        weights = [part.unpack() for part in self._parts]
        return QuantizedTensor(
            weights[0].format,
            torch.cat([q.codes for q in weights]),
            torch.cat([q.scales for q in weights]),
            _joined([q.zero_points for q in weights]),
            _joined([q.outer_scales for q in weights]),
        )

    def encode(self, q: QuantizedTensor) -> Mapping[str, torch.Tensor]:
        return {}

    def input_scale(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        return None


def _joined(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    found = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(found) if found else None
