"""What config.json says of mixtures in SGLang's form, ``quant_method: w4afp8``. No torch here.

Experts are INT4 in groups of 128 with one static E4M3 scale for their inputs, all other linear layers E4M3 in blocks of
128 x 128. Source: SGLang's ``layers/quantization/w4afp8.py``, which reads the method's name alone, and its
``models/deepseek_v2.py`` for the names of input scales; vLLM's pull request 49979 for ``ignored_layers``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from halfbyte.checkpoint.stored_quantization import StoredGroup, StoredQuantization
from halfbyte.errors import HalfbyteError
from halfbyte.schemes import FormName, Scheme, resolve

QUANT_METHOD = "w4afp8"
FORM: FormName = "w4afp8"
GROUP_SIZE = 128
BLOCK = (128, 128)
UNDECLARED = f"{QUANT_METHOD} without config"
"""The format of such weights beside a config.json that says nothing of them."""
INPUT_SCALE = "input_scale"
SCALE_LEAF = "weight_scale_inv"
"""What every quantized weight has. It multiplies, whatever its name says."""
EXPERTS = r"re:(.*\.)?experts\.\d+\.[^.]+$"
"""The modules that are INT4."""
_SAID = {
    "group_size": (GROUP_SIZE,),
    "weight_block_size": (list(BLOCK),),
    "activation_scheme": ("dynamic",),
    "linear_activation_scheme": ("dynamic",),
    "moe_activation_scheme": ("static",),
    "moe_weight_format": ("int4",),
    "linear_weight_format": ("fp8",),
}
"""What an entry may say beside the method's name: it fixes all of these."""
_SHARD_INPUT_SCALE = re.compile(r"(?P<expert>.*\bexperts\.\d+\.)(?P<shard>w[123])\.input_scale")
_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def output_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a checkpoint in this form, from its source's."""
    entry = {
        "quant_method": QUANT_METHOD,
        "activation_scheme": "dynamic",
        "moe_activation_scheme": "static",
        "group_size": GROUP_SIZE,
        "weight_block_size": list(BLOCK),
    }
    return {**config, "quantization_config": entry}


def parse_config(quantization: Mapping[str, Any]) -> StoredQuantization:
    """What such an entry says: one scheme for experts and one for what else is stored quantized.

    Errors: numbers that this form does not have, such as another group size or dynamic input scales of experts.
    """
    for key, accepted in _SAID.items():
        found = quantization.get(key)
        # The types count: True is 1 in Python, and no group size.
        if found is not None and repr(found) not in map(repr, accepted):
            raise HalfbyteError(
                f"quantization_config: {key} {found!r}; accepted with quant_method {QUANT_METHOD}: {accepted[0]!r}"
            )
    groups = (
        StoredGroup((EXPERTS,), experts_scheme(), FORM),
        StoredGroup(("Linear",), dense_scheme(), FORM),
    )
    return StoredQuantization(QUANT_METHOD, groups)


def experts_scheme() -> Scheme:
    """INT4 in groups of 128, inputs E4M3 with a static scale."""
    return resolve("w4a8").stored_as(FORM)


def dense_scheme() -> Scheme:
    """E4M3 in blocks of 128 x 128, inputs E4M3 in groups of 128."""
    return resolve("fp8_per_block").stored_as(FORM)


def is_experts(scheme: Scheme) -> bool:
    """Whether a scheme of this form is the experts'."""
    return replace(scheme, weights=replace(scheme.weights, scale="model")) == experts_scheme()


def moved_input_scales(names: Collection[str]) -> dict[str, str]:
    """Input scales that lie apart from the weights that they belong to: their name, and the one beside the weight.

    Checkpoints of DeepSeek's models call the weights ``gate_proj``, ``up_proj`` and ``down_proj``, but name the input
    scales, which ModelOpt has measured, after ``w1``, ``w3`` and ``w2``.
    """
    found = {}
    for name in names:
        match = _SHARD_INPUT_SCALE.fullmatch(name)
        if match is None or f"{match['expert']}{match['shard']}.weight" in names:
            continue
        module = match["expert"] + _PROJECTIONS[match["shard"]]
        if f"{module}.weight" in names and f"{module}.{INPUT_SCALE}" not in names:
            found[name] = f"{module}.{INPUT_SCALE}"
    return found
