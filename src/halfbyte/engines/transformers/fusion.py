"""Which decoder layers of a loaded model can run fused, and making them do so."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from halfbyte.engines.transformers.fused_layer import FusedLayer
from halfbyte.engines.transformers.llama_like import GATE_UP, QKV, is_llama_like, norms_of, unlike_llama
from halfbyte.engines.transformers.one_kernel_norm import run_in_one_kernel
from halfbyte.engines.transformers.untouched import Untouched
from halfbyte.kernels.fused import DTYPES
from halfbyte.layers.experts import QuantExperts
from halfbyte.layers.linear import QuantLinear
from halfbyte.layers.merged import MergedLinear, MergedPlain, cannot_merge

logger = logging.getLogger(__name__)

FUSED = "halfbyte_fused"


# Layers outlive the mode in which somebody first runs them.
@torch.inference_mode(False)
@torch.no_grad()
def fuse(model: PreTrainedModel) -> int:
    """Run every decoder layer that is known and whose linear layers are alike as a :class:`FusedLayer`, for good.

    What the model computes stays the same up to the order of sums; ``state_dict`` stays the same altogether. Linear
    layers move to the model's device first, where it is found out what kernel they run on. A layer with modules that
    somebody has replaced, patched or hooked stays as it is, and one to which that happens later runs unfused.
    Idempotent. Returns: the number of fused layers.
    """
    layers = [module for module in model.modules() if is_llama_like(module, "DecoderLayer")]
    for layer in layers:
        if FUSED not in layer._modules and (reason := _fuse_layer(layer, model)):
            logger.info("A %s stays as it is: %s", type(layer).__name__, reason)
    if model.dtype in DTYPES:
        for norm in norms_of(model):
            if norm.weight.dtype == model.dtype:
                run_in_one_kernel(norm)
    return sum(FUSED in layer._modules for layer in layers)


def fuse_on_gpu(model: PreTrainedModel) -> None:
    """Have the model fused when it is first called on a CUDA device."""
    model.register_forward_pre_hook(_fuse_if_on_gpu)


def _fuse_if_on_gpu(model: Any, inputs: object) -> None:
    if model.device.type != "cuda":
        return
    hooks = model._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if hook is _fuse_if_on_gpu]:
        del hooks[key]
    fuse(model)


def running_linears(model: PreTrainedModel) -> list[Any]:
    """The linear layers that a call of the model runs: merged ones, and none of those that they stand for.

    Those of experts are not among them.
    """
    of_experts = {
        module
        for experts in model.modules()
        if isinstance(experts, QuantExperts)
        for module in experts.modules()
    }
    merged = {
        parent.get_submodule(name)
        for layer in model.modules()
        if FUSED in layer._modules
        for parent, names in _groups(layer)
        for name in names
    }
    kinds = (QuantLinear, MergedPlain, nn.Linear)
    left_out = merged | of_experts
    return [module for module in model.modules() if isinstance(module, kinds) and module not in left_out]


def _groups(layer: nn.Module) -> list[tuple[Any, tuple[str, ...]]]:
    """The parents and names of linear layers that are to run as one."""
    return [(layer.get_submodule("self_attn"), QKV), (layer.get_submodule("mlp"), GATE_UP)]


def _fuse_layer(layer: nn.Module, model: PreTrainedModel) -> str:
    """Why it cannot be done; empty once it is."""
    if reason := unlike_llama(layer):
        return reason
    if model.dtype not in DTYPES:
        return f"the kernels do not take {model.dtype}"
    if any(norm.weight.dtype != model.dtype for norm in norms_of(layer)):
        return "its norms have another dtype than the model"
    if "forward" in layer.__dict__ or not Untouched(layer).holds():
        return "somebody has patched or hooked it, or modules in it"
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
