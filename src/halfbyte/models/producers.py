"""What puts out the channels that linears read: a norm, or some rows of a linear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from halfbyte.models.layout import ModelLayout, ModuleInfo
from halfbyte.models.names import split

_UP = {"down_proj": "up_proj", "w2": "w3"}
_GATE = {"down_proj": "gate_proj", "w2": "w1"}
_PLAIN = {
    "down_proj": "up_proj",
    "fc2": "fc1",
    "fc_out": "fc_in",
    "c_proj": "c_fc",
    "dense_4h_to_h": "dense_h_to_4h",
}

Modules = Mapping[str, ModuleInfo]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class NormProducer:
    """A norm: stored tensors of its weight and bias ``[channels]``, the gain being ``offset + weight``."""

    weight: str
    bias: str | None
    offset: float


@dataclass(frozen=True)
class RowsProducer:
    """Rows of a linear: channel ``h * width + i`` is row ``start + h * stride + i``, for ``h`` below ``heads``.

    module: its name in the layout. bias: stored tensor with an element for each of its rows, or none.
    """

    module: str
    bias: str | None
    start: int
    heads: int
    stride: int
    width: int

    @property
    def channels(self) -> int:
        return self.heads * self.width


@dataclass(frozen=True)
class InnerRows:
    """The rows behind an MLP's inner channels; ``gated``: multiplied with an activation of other rows."""

    rows: RowsProducer
    gated: bool


def value_rows(
    reader: ModuleInfo, modules: Modules, shapes: Shapes, layout: ModelLayout
) -> RowsProducer | None:
    """The rows that put out the values which ``reader``, attention's last linear, reads; none if they do not fit."""
    heads, kv_heads = layout.heads, layout.kv_heads
    parent, _ = split(reader.name)
    if not heads or not kv_heads or heads % kv_heads or reader.in_features % heads:
        return None
    width = reader.in_features // heads

    def rows(leaf: str, start: int, count: int, stride: int, out_features: int) -> RowsProducer | None:
        module = modules.get(f"{parent}.{leaf}")
        if module is None or module.out_features != out_features:
            return None
        return RowsProducer(module.name, _bias(module, shapes), start, count, stride, width)

    before = (heads + kv_heads) * width
    latent = modules.get(f"{parent}.kv_b_proj")
    stride = latent.out_features // heads if latent else 0
    candidates = (
        rows("v_proj", 0, kv_heads, width, kv_heads * width),
        *(rows(leaf, before, kv_heads, width, before + kv_heads * width) for leaf in ("qkv_proj", "c_attn")),
        rows("query_key_value", 2 * width, heads, 3 * width, 3 * heads * width),
        rows("kv_b_proj", stride - width, heads, stride, heads * stride) if stride > width else None,
    )
    return next((found for found in candidates if found), None)


def inner_rows(reader: ModuleInfo, modules: Modules, shapes: Shapes) -> InnerRows | None:
    """The rows that put out the inner channels which ``reader``, an MLP's last linear, reads; none if none fit."""
    parent, leaf = split(reader.name)
    width = reader.in_features

    def rows(module: ModuleInfo | None, start: int, out_features: int) -> RowsProducer | None:
        if module is None or module.out_features != out_features or _has_fused_bias(module, shapes):
            return None
        return RowsProducer(module.name, _bias(module, shapes), start, 1, width, width)

    gate = modules.get(f"{parent}.{_GATE.get(leaf)}")
    fused = modules.get(f"{parent}.gate_up_proj") if leaf == "down_proj" else None
    if fused is not None:
        found = rows(fused, width, 2 * width)
    elif gate is not None:
        found = rows(modules.get(f"{parent}.{_UP[leaf]}"), 0, width)
    else:
        found = rows(modules.get(f"{parent}.{_PLAIN.get(leaf)}"), 0, width)
    return None if found is None else InnerRows(found, gated=gate is not None or fused is not None)


def _bias(module: ModuleInfo, shapes: Shapes) -> str | None:
    name = f"{module.name}.bias"
    return name if name in shapes else None


def _has_fused_bias(module: ModuleInfo, shapes: Shapes) -> bool:
    """Whether experts in one tensor have biases in another, in an order that nothing says."""
    return module.source.expert is not None and f"{module.source.tensor}_bias" in shapes
