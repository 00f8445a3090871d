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


_PLAIN = Family()
_TIED = Family(tied=True)
_IN_OUT_EXPERTS = Family(transposed_experts=True)

FAMILIES: dict[str, Family] = {
    "bloom": _TIED,
    "deepseek_v2": _PLAIN,
    "deepseek_v3": _PLAIN,
    "gemma": _TIED,
    "gemma2": _TIED,
    "gemma3": _TIED,
    "gemma3_text": _TIED,
    "glm4_moe": _PLAIN,
    "gpt2": _TIED,
    "gpt_neox": _PLAIN,
    "gpt_oss": Family(interleaved_experts=True, transposed_experts=True),
    "granitemoe": _PLAIN,
    "llama": _PLAIN,
    "llama4": _IN_OUT_EXPERTS,
    "llama4_text": _IN_OUT_EXPERTS,
    "mistral": _PLAIN,
    "mixtral": _PLAIN,
    "olmoe": _PLAIN,
    "opt": _TIED,
    "phi3": _PLAIN,
    "qwen2": _PLAIN,
    "qwen2_moe": _PLAIN,
    "qwen3": _PLAIN,
    "qwen3_moe": _PLAIN,
    "qwen3_next": _PLAIN,
    "qwen3_vl_moe": _IN_OUT_EXPERTS,
    "smollm3": _TIED,
}
