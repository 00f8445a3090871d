"""A Llama-like decoder layer with each of its inputs quantized once, by the norm or gate that makes it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfbyte.engines.transformers.fused_attention import FusedAttention
from halfbyte.engines.transformers.untouched import Untouched
from halfbyte.kernels.fused import GATES, gated, gated_quantize, rms_norm, rms_norm_quantize
from halfbyte.kernels.quantized_inputs import sum_group
from halfbyte.layers.linear import QuantLinear
from halfbyte.layers.merged import MergedLinear, MergedPlain


@dataclass(frozen=True)
class _Original:
    """The layer that is fused, of which the fused one is a child, so that it cannot be a child of that in turn."""

    layer: Any
    arguments: tuple[str, ...]
    modules: Untouched
    attention: FusedAttention


class FusedLayer(nn.Module):
    """The forward of a decoder layer whose attention projections, and whose gate and up projections, were merged."""

    def __init__(
        self, layer: nn.Module, qkv: MergedLinear | MergedPlain, gate_up: MergedLinear | MergedPlain
    ) -> None:
        super().__init__()
        self.qkv = qkv
        self.gate_up = gate_up
        attention: Any = layer.get_submodule("self_attn")
        self._gate = GATES[attention.config.hidden_act]
        arguments = tuple(inspect.signature(type(layer).forward).parameters)[2:]
        self._original = _Original(layer, arguments, Untouched(layer), FusedAttention(attention))

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the forward of the layer's class.

        That does the work where gradients may be wanted, where modules were replaced, patched or hooked, and for
        norms and inputs whose dtypes have come to differ.
        """
        layer = self._original.layer
        if (
            torch.is_grad_enabled()
            or not self._original.modules.holds()
            or any(
                norm.weight.dtype != hidden_states.dtype
                for norm in (layer.input_layernorm, layer.post_attention_layernorm)
            )
        ):
            return type(layer).forward(layer, hidden_states, *args, **kwargs)
        kwargs = {**dict(zip(self._original.arguments, args, strict=False)), **kwargs}
        *lead, width = hidden_states.shape
        rows = hidden_states.reshape(-1, width)
        qkv, residual = _after_norm(layer.input_layernorm, rows, None, self.qkv)
        attended = self._original.attention(qkv.view(*lead, -1), **kwargs)
        gate_up, residual = _after_norm(
            layer.post_attention_layernorm, attended.reshape(-1, width), residual, self.gate_up
        )
        gate, up = gate_up.chunk(2, dim=-1)
        return (residual + self._down(layer.mlp.down_proj, gate, up)).view(hidden_states.shape)

    def _down(self, linear: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if isinstance(linear, QuantLinear) and linear.takes_quantized(gate):
            inputs = gated_quantize(gate, up, self._gate, sum_group(linear.scheme))
            return linear.forward_quantized(inputs, gate.dtype)
        return linear(gated(gate, up, self._gate))


def _after_norm(
    norm: Any, x: torch.Tensor, residual: torch.Tensor | None, linear: MergedLinear | MergedPlain
) -> tuple[torch.Tensor, torch.Tensor]:
    """``linear(norm(x + residual))`` and ``x + residual``."""
    if isinstance(linear, MergedLinear) and linear.takes_quantized(x):
        group = sum_group(linear.scheme)
        inputs, total = rms_norm_quantize(x, residual, norm.weight, norm.variance_epsilon, group)
        return linear.forward_quantized(inputs, x.dtype), total
    normed, total = rms_norm(x, residual, norm.weight, norm.variance_epsilon)
    return linear(normed), total
