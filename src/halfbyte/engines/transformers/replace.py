"""Swapping a model's linear layers and experts for halfbyte's, before their weights are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from halfbyte.checkpoint.dtypes import TORCH_DTYPES
from halfbyte.engines.transformers.codec import INPUT_SCALE, ModuleCodec
from halfbyte.engines.transformers.stored_modules import (
    ExpertAddress,
    StoredModule,
    StoredModules,
    UnsupportedError,
)
from halfbyte.errors import HalfbyteError
from halfbyte.kernels.fused import GATES
from halfbyte.kernels.problem import LinearProblem
from halfbyte.kernels.registry import explain
from halfbyte.layers.expert_gate import ExpertGate
from halfbyte.layers.experts import ExpertNames, QuantExperts
from halfbyte.layers.linear import QuantLinear

_CPU = torch.device("cpu")
_FUSED_WEIGHTS = {"gate_up_proj", "up_proj", "down_proj"}
_FUSED_BIASES = {"gate_up_proj_bias", "up_proj_bias", "down_proj_bias"}


def replace_modules(model: PreTrainedModel, found: StoredModules) -> None:
    """Put a layer of ours, on the meta device, wherever ``found`` has a quantized weight.

    Errors: a missing input scale or expert. UnsupportedError, with the model as it was: modules of a kind that is
    no linear layer; a scheme that no kernel runs; experts of a kind that is not known here.
    """
    layers: dict[str, nn.Module] = {}
    for stored in found.linears:
        module = model.get_submodule(stored.name)
        in_features, out_features = _sizes(module, stored)
        layers[stored.name] = _quant_linear(stored, in_features, out_features, module.bias)
    by_parent: dict[str, dict[ExpertAddress, StoredModule]] = {}
    for address, stored in found.experts.items():
        by_parent.setdefault(address.parent, {})[address] = stored
    for parent, experts in by_parent.items():
        layers[parent] = _quant_experts(model.get_submodule(parent), parent, experts)
    for parent in by_parent:
        # What is left of fused experts only lends its gate: their weights are never loaded.
        model.get_submodule(parent)._parameters.clear()
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    _untie(model)


def repack_modules(model: PreTrainedModel) -> Counter[str]:
    """Repack all layers of ours after loading, for inputs of the model's dtype; how many run on which kernel."""
    kernels: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.__dict__.pop("weight", None)
            module.repack(model.dtype)
            kernels[str(module.kernel)] += 1
    return kernels


def _sizes(module: nn.Module, stored: StoredModule) -> tuple[int, int]:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, Conv1D):
        # It keeps [in, out]; the file has [out, in], as for every linear layer.
        return module.weight.shape[0], module.weight.shape[1]
    raise UnsupportedError(
        f"{stored.stored_name} is stored quantized, but the model has a {type(module).__name__} there; "
        "accepted: Linear, Conv1D and fused experts"
    )


def _quant_linear(
    stored: StoredModule,
    in_features: int,
    out_features: int,
    bias: nn.Parameter | None = None,
) -> QuantLinear:
    assert stored.scheme is not None
    reasons = explain(LinearProblem(stored.scheme, out_features, in_features, _CPU, torch.float32))
    if all(reasons.values()):
        why = "; ".join(f"{kernel}: {reason}" for kernel, reason in reasons.items())
        raise UnsupportedError(f"{stored.stored_name}: no kernel can run it; {why}")
    if stored.scheme.has_static_inputs and INPUT_SCALE not in stored.tensors:
        raise HalfbyteError(
            f"{stored.stored_name}: its inputs have a static scale, but {INPUT_SCALE} is missing"
        )
    tensors = {}
    for local, info in stored.tensors.items():
        if info.dtype not in TORCH_DTYPES:
            raise HalfbyteError(
                f"{info.file}: tensor {info.name} has dtype {info.dtype}, which torch cannot hold"
            )
        tensors[local] = torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device="meta")
    layer = QuantLinear(
        stored.scheme,
        in_features,
        out_features,
        stored=tensors,
        codec=ModuleCodec(stored.stored_name, stored.scheme, stored.form),
        bias=bias,
        name=stored.name,
    )
    if "weight" not in tensors:
        layer.weight = _stand_in()
    return layer


def _stand_in() -> torch.Tensor:
    """For what some families initialize by name (GPT-2: ``c_proj.weight``) after loading, as long as that lasts."""
    weight = torch.empty(0)
    weight._is_hf_initialized = True  # type: ignore[attr-defined]
    return weight


def _quant_experts(
    fused: nn.Module, parent: str, experts: Mapping[ExpertAddress, StoredModule]
) -> QuantExperts:
    """Experts of which transformers would have made the ``fused`` module."""
    parameters = dict(fused.named_parameters())
    projections = {address.projection for address in experts}
    names = ExpertNames.among(sorted(projections))
    down = parameters.get("down_proj")
    if names is None or down is None or set(parameters) - _FUSED_WEIGHTS - _FUSED_BIASES:
        raise UnsupportedError(
            f"{parent}: experts with projections {', '.join(sorted(projections))} in a {type(fused).__name__} with "
            f"{', '.join(parameters)} are not known here"
        )
    count = down.shape[0]
    hidden, inner = reversed(down.shape[1:]) if getattr(fused, "is_transposed", False) else down.shape[1:]
    layers: list[dict[str, nn.Module]] = []
    for index in range(count):
        layers.append({})
        for projection in sorted(projections):
            stored = experts.get(ExpertAddress(parent, index, projection))
            if stored is None:
                raise HalfbyteError(
                    f"{parent}: {projection} of expert {index} of {count} is not in the checkpoint"
                )
            sizes = (inner, hidden) if projection == names.down else (hidden, inner)
            layers[-1][projection] = (
                nn.Linear(*sizes, bias=False, device="meta", dtype=down.dtype)
                if stored.scheme is None
                else _quant_linear(stored, *sizes)
            )
    return QuantExperts(layers, names, expert_gate(fused, names))


def expert_gate(fused: nn.Module, names: ExpertNames) -> ExpertGate:
    """What lies between the projections of transformers' ``fused`` experts. Errors: experts of another kind."""
    parameters = dict(fused.named_parameters())
    return ExpertGate(
        _combination(fused, names),
        interleaved=not getattr(fused, "is_concatenated", True),
        activation=_activation(fused, names),
        up_bias=parameters.get("gate_up_proj_bias", parameters.get("up_proj_bias")),
        down_bias=parameters.get("down_proj_bias"),
    )


def _combination(fused: nn.Module, names: ExpertNames) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation between an expert's projections, which is the model family's own."""
    combination: Any = fused.act_fn if names.gate is None else getattr(fused, "_apply_gate", None)
    if combination is None:
        raise HalfbyteError(
            f"experts of {type(fused).__name__} do not take tokens and their routes, so halfbyte cannot run them; "
            "accepted: a scheme that compressed-tensors stores, which transformers runs itself"
        )
    return combination


def _activation(fused: Any, names: ExpertNames) -> str | None:
    """What the gate's half goes through before it is multiplied by the other one, if that is all, and known here."""
    gating = getattr(type(fused), "_apply_gate", None)
    if names.gate is None or getattr(gating, "__module__", None) != "transformers.integrations.moe":
        return None
    return next((ours for name, ours in GATES.items() if type(ACT2FN[name]) is type(fused.act_fn)), None)


def _untie(model: PreTrainedModel) -> None:
    """A quantized head has a weight of its own, even where config.json says that the embedding is tied to it."""
    tied = model.all_tied_weights_keys
    for target, source in list(tied.items()):
        ends = (model.get_submodule(name.rpartition(".")[0]) for name in (target, source))
        if any(isinstance(module, QuantLinear) for module in ends):
            del tied[target]
