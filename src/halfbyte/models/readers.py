"""What a matrix of a block takes as its input, by the last part of its name."""

from __future__ import annotations

from enum import Enum

from halfbyte.models.layout import ModuleInfo, Role
from halfbyte.models.names import split


class Input(Enum):
    """Where a matrix's inputs come from."""

    ATTENTION_NORM = "the norm before attention"
    MLP_NORM = "the norm before the MLP"
    QUERY_NORM = "the norm of compressed queries"
    KEY_VALUE_NORM = "the norm of compressed keys and values"
    VALUES = "attention's sums of values"
    INNER = "the MLP's inner channels"
    UNKNOWN = "not known"


_ATTENTION = (
    *(
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",
        "query_key_value",
        "c_attn",
        "q_a_proj",
        "kv_a_proj_with_mqa",
    ),
    *("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"),
)
_BY_LEAF: dict[str, Input] = {
    **dict.fromkeys(_ATTENTION, Input.ATTENTION_NORM),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"), Input.MLP_NORM),
    **dict.fromkeys(("fc1", "fc_in", "c_fc", "dense_h_to_4h"), Input.MLP_NORM),
    "q_b_proj": Input.QUERY_NORM,
    "kv_b_proj": Input.KEY_VALUE_NORM,
    **dict.fromkeys(("o_proj", "dense", "out_proj"), Input.VALUES),
    **dict.fromkeys(("down_proj", "w2", "fc2", "fc_out", "dense_4h_to_h"), Input.INNER),
}
_ATTENTION_PARTS = frozenset({"attn", "self_attn", "attention"})


def input_of(module: ModuleInfo) -> Input:
    """What ``module``, a matrix inside a block, reads; routers and gates of shared experts read the MLP's norm."""
    if module.role is Role.ROUTER:
        return Input.MLP_NORM
    parent, leaf = split(module.name)
    if leaf == "c_proj":
        return Input.VALUES if parent.rpartition(".")[2] in _ATTENTION_PARTS else Input.INNER
    return _BY_LEAF.get(leaf, Input.UNKNOWN)
