"""What a two-dimensional weight does, judged by its name, its shape and where it lies."""

from __future__ import annotations

import re

from halfbyte.models.config_fields import ConfigFields
from halfbyte.models.layout import Role
from halfbyte.models.names import split

_HEADS = frozenset({"lm_head", "embed_out", "output", "head", "unembed", "output_layer"})
_EMBEDDINGS = re.compile(r"(?:^|_)(?:embed(?:_|dings?$|s?$)|embedding)|^(?:wte|wpe)$")
_NORMS = re.compile(r"(?:^|_)(?:layer_?)?norm(?:_|\d*$)|^ln_")
_ROUTER_PARTS = re.compile(r"router")
_GATES = frozenset({"gate", "wg", "classifier"})
_SHARED_GATES = re.compile(r"^shared_experts?_gate$")
_MULTI_TOKEN = re.compile(r"^(?:mtp|nextn|multi_token)|^eh_proj$|^shared_head$")
_OTHER_MODALITIES = re.compile(
    r"^(?:visual|vision|image|pixel|audio|speech|video|vit$|mm_|multi_modal|multimodal|embed_vision|embed_audio"
    r"|siglip|vqmodel|aligner|connector|talker|code2wav)"
)
# Below this a weight holds next to nothing and no kernel can tile it.
_SMALLEST_SIDE = 16


def role_of(pattern: str, shape: tuple[int, int], fields: ConfigFields) -> Role:
    """Role of the module ``pattern`` (its name with ``*`` for numbers) with a weight of ``shape``.

    Weights of other modalities, of multi-token prediction heads and outside the blocks are OTHER.
    """
    parts = pattern.split(".")
    _, leaf = split(pattern)
    if any(_OTHER_MODALITIES.match(part) or _MULTI_TOKEN.match(part) for part in parts):
        return Role.OTHER
    if _NORMS.search(leaf):
        return Role.NORM
    inside_block = "*" in parts
    if not inside_block and leaf in _HEADS:
        return Role.LM_HEAD
    if _EMBEDDINGS.search(leaf) or (not inside_block and shape[0] == fields.vocab):
        return Role.EMBEDDING
    if not inside_block:
        return Role.OTHER
    if _is_router(parts, leaf, shape, fields):
        return Role.ROUTER
    if ".experts.*." in pattern:
        return Role.EXPERT
    return Role.LINEAR if min(shape) >= _SMALLEST_SIDE else Role.OTHER


def _is_router(parts: list[str], leaf: str, shape: tuple[int, int], fields: ConfigFields) -> bool:
    """A linear called ``gate`` routes if it has an output per expert; one of a dense model is a linear."""
    if any(_ROUTER_PARTS.search(part) for part in parts) or _SHARED_GATES.match(leaf):
        return True
    return leaf in _GATES and fields.experts is not None and shape[0] in (1, fields.experts)
