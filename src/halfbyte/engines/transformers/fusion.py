"""Which decoder layers of a loaded model can run fused, and making them do so."""

from __future__ import annotations

import logging
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from halfbyte.engines.transformers.fused_attention import QKV
from halfbyte.engines.transformers.fused_layer import FusedLayer
from halfbyte.kernels.fused import GATES, rms_norm
from halfbyte.layers.linear import QuantLinear
from halfbyte.layers.merged import MergedLinear, MergedPlain, cannot_merge

logger = logging.getLogger(__name__)

FUSED = "halfbyte_fused"
GATE_UP = ("gate_proj", "up_proj")
_FAMILIES = ("Llama", "Ministral", "Mistral", "Qwen2", "Qwen3", "SeedOss", "SmolLM3")
# Decoder layers that norm, attend, add, norm, run a gated MLP and add, and norms that scale by their weight. Others
# with the same parts may combine them in another way, so that parts alone do not tell.
LLAMA_LIKE = frozenset(f"{family}DecoderLayer" for family in _FAMILIES)
_NORMS = frozenset(f"{family}RMSNorm" for family in _FAMILIES)


def fuse(model: PreTrainedModel) -> int:
    """Run every decoder layer that is known and whose linear layers are alike as a :class:`FusedLayer`, for good.

    What the model computes stays the same up to the order of sums; ``state_dict`` stays the same altogether. Linear
    layers move to the model's device first, where it is found out what kernel they run on. Idempotent.
    Returns: the number of fused layers.
    """
    layers = [module for module in model.modules() if type(module).__name__ in LLAMA_LIKE]
    for layer in layers:
        if FUSED not in layer._modules and (reason := _fuse_layer(layer, model)):
            logger.info("A %s stays as it is: %s", type(layer).__name__, reason)
    for norm in model.modules():
        if type(norm).__name__ in _NORMS:
            norm.__dict__["forward"] = MethodType(_one_kernel_norm, norm)
    return sum(FUSED in layer._modules for layer in layers)


def _one_kernel_norm(norm: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():
        return type(norm).forward(norm, hidden_states)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    return rms_norm(rows, None, norm.weight, norm.variance_epsilon)[0].view(hidden_states.shape)


def running_linears(model: PreTrainedModel) -> list[Any]:
    """The linear layers that a call of the model runs: merged ones, and none of those that they stand for."""
    merged = {
        parent.get_submodule(name)
        for layer in model.modules()
        if FUSED in layer._modules
        for parent, names in _groups(layer)
        for name in names
    }
    kinds = (QuantLinear, MergedPlain, nn.Linear)
    return [module for module in model.modules() if isinstance(module, kinds) and module not in merged]


def _groups(layer: nn.Module) -> list[tuple[Any, tuple[str, ...]]]:
    """The parents and names of linear layers that are to run as one."""
    return [(layer.get_submodule("self_attn"), QKV), (layer.get_submodule("mlp"), GATE_UP)]


def _fuse_layer(layer: nn.Module, model: PreTrainedModel) -> str:
    """Why it cannot be done; empty once it is."""
    attention: Any = layer.get_submodule("self_attn")
    gate = attention.config.hidden_act
    if gate not in GATES:
        return f"its gate is {gate}"
    if any(norm.weight.dtype != model.dtype for norm in layer.modules() if type(norm).__name__ in _NORMS):
        return "its norms have another dtype than the model"
    merged = []
    for parent, names in _groups(layer):
        parts = [parent.get_submodule(name) for name in names]
        for part in parts:
            if isinstance(part, QuantLinear):
                part.place(model.device, model.dtype)
        if reason := cannot_merge(parts):
            return f"{', '.join(names)}: {reason}"
        merged.append(parts)
    fused = FusedLayer(layer, *map(_merge, merged))
    layer.add_module(FUSED, fused)
    layer.__dict__["forward"] = fused.forward
    return ""


def _merge(parts: list[Any]) -> MergedLinear | MergedPlain:
    if isinstance(parts[0], QuantLinear):
        return MergedLinear(parts, f"{parts[0].name} and its partners")
    return MergedPlain(parts)
