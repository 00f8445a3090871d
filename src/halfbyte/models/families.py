"""What names and shapes cannot say about a model family, and which families have been checked against it.

Everything else follows from the tensors themselves (see ``roles``, ``experts`` and ``fusion``), so a family
that is missing here works too; it is only reported as not known.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Facts that decide where shapes leave a choice.

    tied: ``tie_word_embeddings`` when config.json does not say (the family's own default).
    interleaved_experts: fused gate and up rows alternate (gate, up, gate, ...) instead of lying in halves.
    transposed_experts: fused experts are ``[experts, in, out]`` where all sizes are equal.
    """

    tied: bool = False
    interleaved_experts: bool = False
    transposed_experts: bool = False


_PLAIN = (
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "exaone4",
    "glm4",
    "glm4_moe",
    "gpt_neox",
    "gptj",
    "granite",
    "granitemoe",
    "hunyuan_v1_moe",
    "jamba",
    "llama",
    "minimax_m2",
    "mistral",
    "mixtral",
    "nemotron",
    "olmo2",
    "olmoe",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "seed_oss",
    "stablelm",
)
_TIED = (
    "bloom",
    "cohere",
    "cohere2",
    "ernie4_5_moe",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "gpt2",
    "gpt_bigcode",
    "lfm2",
    "mpt",
    "opt",
    "smollm3",
    "starcoder2",
)
_IN_OUT_EXPERTS = ("llama4", "llama4_text", "qwen3_vl_moe")

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_PLAIN, Family()),
    **dict.fromkeys(_TIED, Family(tied=True)),
    **dict.fromkeys(_IN_OUT_EXPERTS, Family(transposed_experts=True)),
    "gpt_oss": Family(interleaved_experts=True, transposed_experts=True),
}
