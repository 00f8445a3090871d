"""Which projections engines run as one matrix product, and how tensor parallelism cuts a projection.

The fused sets are those of vLLM's ``packed_modules_mapping``: ``qkv_proj``, ``gate_up_proj`` and, for
multi-head latent attention, ``fused_qkv_a_proj``.
"""

from __future__ import annotations

from typing import Literal

from halfbyte.models.names import split

_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("w1", "w3"), "w13"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
}
_SPLIT_IN = frozenset(
    {"o_proj", "out_proj", "down_proj", "c_proj", "fc2", "fc_out", "dense", "dense_4h_to_h", "w2", "wo"}
)
_REPLICATED = frozenset({"q_a_proj", "kv_a_proj_with_mqa"})


def fused_group(name: str) -> str | None:
    """Key shared by the modules that run as one with ``name``, or none."""
    parent, leaf = split(name)
    fused = _FUSED.get(leaf)
    return f"{parent}.{fused}" if fused else None


def tensor_parallel_axis(name: str) -> Literal["in", "out"] | None:
    """The side of a module's weight that tensor parallelism divides; none if each rank keeps all of it."""
    _, leaf = split(name)
    if leaf in _REPLICATED:
        return None
    return "in" if leaf in _SPLIT_IN else "out"


def is_key_or_value(name: str) -> bool:
    """Whether the module's outputs are key/value heads, of which a rank holds at least one whole."""
    return split(name)[1] in ("k_proj", "v_proj")
