"""Telling what the tensors of one module are, from their names, dtypes and shapes. No torch, no values.

Sources: compressed-tensors 0.17, DeepSeek-V3's block FP8, docs/formats.md; foreign forms: ``recognise_foreign``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from halfbyte.audit.declaration import Rule
from halfbyte.audit.declared_groups import TWO_LEVEL_LAYOUT
from halfbyte.audit.recognise_foreign import (
    byte_weight,
    foreign_int8,
    gpt_oss_blocks,
    qweight,
    torchao,
    trellis,
)
from halfbyte.audit.stored import (
    SCALE_DTYPES,
    SCALE_LEAVES,
    Part,
    Parts,
    StoredWeight,
    grouped_format,
    missing,
)
from halfbyte.errors import HalfbyteError
from halfbyte.formats.spec import TensorFormat

_FLOATS = {"BF16": "bf16", "F16": "f16", "F32": "f32", "F64": "f64"}
_FP8 = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}
_DEFAULT_BLOCK = (128, 128)


def recognise(parts: Parts, rule: Rule | None) -> StoredWeight | None:
    """The weight that ``parts`` hold; none when no tensor among them holds codes or values.

    rule: what the config declares, for what shapes cannot tell (the bits of packed words).
    """
    leaf = next((leaf for leaf in _DESCRIBERS if leaf in parts), None)
    if leaf is None:
        return None
    try:
        return _with_one_group(_DESCRIBERS[leaf](parts, rule), rule)
    except (HalfbyteError, ValueError, IndexError, ZeroDivisionError) as error:
        # Shapes that no layout has: unpacking or dividing them fails.
        fault = f"{leaf} {parts[leaf].dtype} {list(parts[leaf].shape)} fits no known form ({error})"
        return StoredWeight("unknown", parts[leaf].shape, parts[leaf].dtype, leaf, faults=(fault,))


def _with_one_group(stored: StoredWeight, rule: Rule | None) -> StoredWeight:
    """A group as wide as the weight looks like a channel; then the config decides what it is called."""
    form, declared = stored.format, rule.weights if rule else None
    if form and declared and form.granularity == "channel" and declared.group_size == stored.shape[-1]:
        grouped = replace(form, granularity="group", group_size=declared.group_size)
        return replace(stored, format=grouped)
    return stored


def _integer_bits(rule: Rule | None, default: int) -> int:
    return rule.weights.bits if rule and rule.weights and rule.weights.is_integer else default


def _packed(parts: Parts, rule: Rule | None) -> StoredWeight:
    packed, scale = parts["weight_packed"], parts.get("weight_scale")
    faults = missing(parts, "weight_scale")
    if packed.dtype == "U8":
        return _fp4_packed(packed, scale, parts, faults)
    faults += missing(parts, "weight_shape")
    if packed.dtype != "I32":
        faults.append(f"weight_packed has dtype {packed.dtype}; accepted: I32 (integers), U8 (4-bit floats)")
    bits = _integer_bits(rule, 4)
    per_word = 32 // bits
    shape = (*packed.shape[:-1], packed.shape[-1] * per_word)
    group = rule.weights.group_size if rule and rule.weights else None
    if scale and group and len(scale.shape) == 2 and 0 <= shape[-1] - scale.shape[-1] * group < per_word:
        shape = (*shape[:-1], scale.shape[-1] * group)  # the last word of a row is padded
    if scale and scale.dtype == "I8":
        return _two_level(shape, scale, parts, faults)
    form = grouped_format(f"int{bits}", shape, scale, "weight_zero_point" not in parts, faults)
    return StoredWeight("pack-quantized", shape, f"int{bits}", "weight_packed", form, tuple(faults))


def _two_level(shape: tuple[int, ...], scale: Part, parts: Parts, faults: list[str]) -> StoredWeight:
    faults += missing(parts, "weight_zero_point", "weight_channel_scale")
    if scale.shape[:-1] != shape[:-1] or not scale.shape[-1] or shape[-1] % scale.shape[-1]:
        raise HalfbyteError(f"weight_scale is {list(scale.shape)}")
    group = shape[-1] // scale.shape[-1]
    form = TensorFormat("int4", "group", group, symmetric=False, scale="int8", outer="channel")
    return StoredWeight(TWO_LEVEL_LAYOUT, shape, "int4", "weight_packed", form, tuple(faults))


def _fp4_packed(packed: Part, scale: Part | None, parts: Parts, faults: list[str]) -> StoredWeight:
    shape = (*packed.shape[:-1], packed.shape[-1] * 2)
    form = grouped_format("e2m1", shape, scale, True, faults)
    layout = "mxfp4-pack-quantized"
    if form and form.scale == "e4m3":
        layout = "nvfp4-pack-quantized"
        faults += missing(parts, "weight_global_scale")
        form = TensorFormat("e2m1", "group", form.group_size or shape[-1], scale="e4m3", outer="tensor")
    return StoredWeight(layout, shape, "e2m1", "weight_packed", form, tuple(faults))


def _weight(parts: Parts, rule: Rule | None) -> StoredWeight:
    weight = parts["weight"]
    if weight.dtype in _FP8:
        return _fp8(parts, rule)
    if weight.dtype == "I8":
        return foreign_int8(parts) or _int8(parts, rule)
    if weight.dtype == "U8":
        return byte_weight(parts)
    faults = tuple(f"{leaf} beside a plain {weight.dtype} weight" for leaf in parts if leaf in SCALE_LEAVES)
    element = _FLOATS.get(weight.dtype, weight.dtype.lower())
    return StoredWeight("plain", weight.shape, element, "weight", None, faults)


def _int8(parts: Parts, rule: Rule | None) -> StoredWeight:
    shape, faults = parts["weight"].shape, missing(parts, "weight_scale")
    element = f"int{_integer_bits(rule, 8)}"
    symmetric = "weight_zero_point" not in parts
    form = grouped_format(element, shape, parts.get("weight_scale"), symmetric, faults)
    return StoredWeight("int-quantized", shape, element, "weight", form, tuple(faults))


def _fp8(parts: Parts, rule: Rule | None) -> StoredWeight:
    weight = parts["weight"]
    element = _FP8[weight.dtype]
    leaf = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    scale, faults = parts.get(leaf), missing(parts, leaf)
    if scale and (block := _block_shape(weight, scale, rule, leaf)):
        dtype = SCALE_DTYPES.get(scale.dtype, "f32")
        form = TensorFormat(element, "block", block_shape=block, scale=dtype)
        layout = "fp8-block" if leaf == "weight_scale_inv" else "float-quantized"
        return StoredWeight(layout, weight.shape, element, "weight", form, tuple(faults))
    form_or_none = grouped_format(element, weight.shape, scale, True, faults)
    layout = "float-quantized"
    if form_or_none and form_or_none.scale == "e8m0":
        layout = "mxfp8-quantized"
    elif rule and rule.layout in ("fp8", "modelopt-fp8", "naive-quantized"):
        layout = rule.layout
    return StoredWeight(layout, weight.shape, element, "weight", form_or_none, tuple(faults))


def _block_shape(weight: Part, scale: Part, rule: Rule | None, leaf: str) -> tuple[int, int] | None:
    """The block that fits an FP8 weight's scales, if the config, their name or nothing else explains them."""
    if len(scale.shape) != len(weight.shape) or len(weight.shape) < 2:
        return None
    declared = rule.weights.block_shape if rule and rule.weights else None
    block = declared or _DEFAULT_BLOCK
    tiles = tuple(-(-size // side) for size, side in zip(weight.shape[-2:], block, strict=True))
    if scale.shape != (*weight.shape[:-2], *tiles):
        return None
    told = declared is not None or leaf == "weight_scale_inv"
    return block if told or (scale.shape[-2] < weight.shape[-2] and scale.shape[-1] > 1) else None


_DESCRIBERS: dict[str, Callable[[Parts, Rule | None], StoredWeight]] = {
    "weight_packed": _packed,
    "qweight": qweight,
    "_blocks": gpt_oss_blocks,
    "trellis": trellis,
    "_weight_qdata": torchao,
    "weight": _weight,
}
