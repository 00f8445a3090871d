"""A Llama-like decoder layer with each of its inputs quantized once, by the norm or gate that makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfbyte.engines.transformers.fused_attention import FusedAttention
from halfbyte.kernels.fused import GATES, gated, gated_quantize, rms_norm, rms_norm_quantize
from halfbyte.kernels.quantized_inputs import sum_group
from halfbyte.layers.linear import QuantLinear
from halfbyte.layers.merged import MergedLinear, MergedPlain


@dataclass(frozen=True)
class _Original:
    """The layer that is fused, of which the fused one is a child, so that it cannot be a child of that in turn."""

    layer: Any
    forward: Callable[..., Any]
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
        self._original = _Original(layer, layer.forward, FusedAttention(attention))

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the layer's own forward, to which it leaves the work where gradients may be wanted."""
        if torch.is_grad_enabled():
            return self._original.forward(hidden_states, *args, **kwargs)
        layer = self._original.layer
        *lead, width = hidden_states.shape
        rows = hidden_states.reshape(-1, width)
        qkv, residual = _after_norm(layer.input_layernorm, rows, None, self.qkv)
        attended = self._original.attention(qkv.view(*lead, -1), *args, **kwargs)
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
