"""transformers' model of a checkpoint without its weights, and where its decoder blocks are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from halfbyte.calibration.places import Places
from halfbyte.errors import HalfbyteError
from halfbyte.models.layout import ModelLayout


def build_skeleton(config: Mapping[str, Any], *, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """The model that ``config`` (config.json) describes, in evaluation mode: parameters on the meta device.

    Buffers are on ``device``, with the values that the family gives them.
    Errors: a configuration that transformers has no causal language model for.
    """
    fields = dict(config)
    family = fields.pop("model_type", "")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields), dtype=dtype)
    except Exception as error:  # model code trips over a wrong config in any way
        raise HalfbyteError(
            f"{family or 'config.json'}: transformers cannot build it as a causal language model "
            f"({type(error).__name__}: {error})"
        ) from error
    _fill_buffers(model, device)
    return model.eval()


def entry_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Parameter or persistent buffer -> what it is kept in: ``dtype`` except where the family asks for fp32."""
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in model._get_dtype_plan(dtype)]
    return {
        name: torch.float32 if any(pattern.search(name) for pattern in kept) else entry.dtype
        for name, entry in model.state_dict().items()
    }


def find_blocks(model: PreTrainedModel, layout: ModelLayout, places: Places) -> list[str]:
    """Names of the decoder's blocks: children of the module list that holds the layout's linear layers.

    Errors: no such list, or more than one.
    """
    lists: dict[str, int] = {}
    for module in layout.modules:
        if module.role.quantizable and module.name in places.modules:
            found = _outermost_list(model, places.modules[module.name].tensor)
            lists[found] = lists.get(found, 0) + 1
    if set(lists) == {""} or len(lists) != 1:
        where = ", ".join(f"{count} in {name or 'no list'}" for name, count in lists.items()) or "none"
        raise HalfbyteError(
            f"{type(model).__name__}: no decoder blocks found; its linear layers are: {where}; "
            "accepted: models that keep all of them in one list of blocks"
        )
    (name,) = lists
    return [f"{name}.{index}" for index, _ in enumerate(model.get_submodule(name).children())]


def _outermost_list(model: nn.Module, entry: str) -> str:
    parts = entry.split(".")
    for length in range(1, len(parts)):
        name = ".".join(parts[:length])
        if isinstance(model.get_submodule(name), nn.ModuleList):
            return name
    return ""


def _fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    for module in model.modules():
        # Building on the meta device has marked everything as initialized.
        module._is_hf_initialized = False
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    model.initialize_weights()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
