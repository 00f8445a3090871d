"""How the blocks of a family are wired: which norm's output a linear reads. Names and shapes cannot say that.

A family that is missing here has no folds; a wrong guess would change what the model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from halfbyte.models.config_fields import read_config, text_config


@dataclass(frozen=True)
class Wiring:
    """What the two halves of a block read.

    attention_norm, mlp_norm: the block's norm whose output each reads; none where that is the residual stream.
    norm_offset: what those norms add to the stored weight before they multiply with it (Gemma: 1).
    linear_values: attention's output scales as its values do.
    linear_up: a gated MLP's inner channels scale as its up projection's do.
    homogeneous: a plain MLP's activation passes positive factors on (ReLU).
    """

    attention_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    norm_offset: float = 0.0
    linear_values: bool = True
    linear_up: bool = True
    homogeneous: bool = False


_PRE_NORM = Wiring()
_OFFSET = Wiring(norm_offset=1.0)
_SANDWICH = Wiring(mlp_norm="pre_feedforward_layernorm", norm_offset=1.0)
_PARALLEL = Wiring(mlp_norm="input_layernorm")
_POST_NORM = Wiring(attention_norm=None, mlp_norm=None)

_FAMILIES: dict[str, Wiring] = {
    **dict.fromkeys(
        (
            "deepseek_v2",
            "deepseek_v3",
            "dots1",
            "ernie4_5_moe",
            "glm4",
            "glm4_moe",
            "gpt_neox",
            "granite",
            "granitemoe",
            "hunyuan_v1_moe",
            "llama",
            "llama4",
            "llama4_text",
            "minimax_m2",
            "mistral",
            "mixtral",
            "olmoe",
            "phi3",
            "phimoe",
            "qwen2",
            "qwen2_moe",
            "qwen3",
            "qwen3_moe",
            "seed_oss",
            "smollm3",
            "stablelm",
            "starcoder2",
        ),
        _PRE_NORM,
    ),
    **dict.fromkeys(("gemma", "nemotron", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _OFFSET),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), _SANDWICH),
    **dict.fromkeys(("cohere", "cohere2", "phi"), _PARALLEL),
    **dict.fromkeys(("exaone4", "olmo2"), _POST_NORM),
    "gptj": Wiring("ln_1", "ln_1"),
    "gpt2": Wiring("ln_1", "ln_2"),
    # Its experts clamp up and add one to it.
    "gpt_oss": replace(_PRE_NORM, linear_up=False),
    "opt": Wiring("self_attn_layer_norm", "final_layer_norm"),
}
_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation")


def wiring_of(config: Mapping[str, Any]) -> Wiring | None:
    """The wiring of the language model that config.json describes; none if its family is not known."""
    fields = read_config(config)
    known = _FAMILIES.get(fields.family) or _FAMILIES.get(fields.text_family)
    if known is None:
        return None
    text = text_config(config)
    if text.get("do_layer_norm_before") is False:
        known = replace(known, attention_norm=None, mlp_norm=None)
    if fields.text_family == "stablelm" and text.get("use_parallel_residual"):
        known = replace(known, mlp_norm=known.attention_norm)
    if text.get("clip_qkv") is not None:
        known = replace(known, linear_values=False)
    return replace(known, homogeneous=any(text.get(name) == "relu" for name in _ACTIVATIONS))
