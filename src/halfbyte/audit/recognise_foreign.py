"""Recognising weights that other tools store in forms of their own. No torch, no values.

Sources: AutoAWQ, GPTQModel 7.7, ModelOpt 0.47, gpt-oss, QServe, torchao, ExLlamaV3, bitsandbytes, SGLang.
"""

from __future__ import annotations

from halfbyte.audit.declaration import Rule
from halfbyte.audit.stored import (
    QSERVE_LAYOUT,
    SCALE_DTYPES,
    W4AFP8_LAYOUT,
    Part,
    Parts,
    StoredWeight,
    grouped_format,
    missing,
)
from halfbyte.formats.spec import TensorFormat

_W4AFP8_GROUP = 128


def foreign_int8(parts: Parts) -> StoredWeight | None:
    """An int8 ``weight`` with the companions of QServe, bitsandbytes or SGLang; none with others."""
    weight = parts["weight"]
    if "dequant_scale" in parts:
        scale = SCALE_DTYPES.get(parts["dequant_scale"].dtype, "f16")
        form = TensorFormat("int8", "channel", scale=scale)
        return StoredWeight("qserve-w8a8", weight.shape, "int8", "weight", form)
    if "SCB" in parts:
        form = TensorFormat("int8", "channel", scale="f32")
        return StoredWeight("bitsandbytes", weight.shape, "int8", "weight", form)
    if "weight_scale_inv" in parts:  # two codes a byte, as SGLang's w4afp8 experts have them
        faults = missing(parts, "input_scale")
        shape = (*weight.shape[:-1], weight.shape[-1] * 2)
        packed = grouped_format("int4", shape, parts["weight_scale_inv"], True, faults)
        if packed and packed.granularity == "channel" and shape[-1] == _W4AFP8_GROUP:
            packed = TensorFormat("int4", "group", _W4AFP8_GROUP, scale=packed.scale)
        if packed and packed.group_size != _W4AFP8_GROUP:
            found = list(parts["weight_scale_inv"].shape)
            faults.append(
                f"weight_scale_inv {found} is not of groups of {_W4AFP8_GROUP}, which SGLang takes it for"
            )
        return StoredWeight(W4AFP8_LAYOUT, shape, "int4", "weight", packed, tuple(faults))
    return None


def byte_weight(parts: Parts) -> StoredWeight:
    """A ``weight`` of bytes: bitsandbytes' 4-bit forms, ModelOpt's NVFP4 or INT4."""
    weight = parts["weight"]
    if any(leaf.startswith("weight.") for leaf in parts):
        return StoredWeight("bitsandbytes", weight.shape, "4-bit", "weight")
    scale, faults = parts.get("weight_scale"), missing(parts, "weight_scale")
    if scale and scale.dtype == "F8_E4M3":
        shape = (*weight.shape[:-1], weight.shape[-1] * 2)
        faults += missing(parts, "weight_scale_2")
        form = TensorFormat("e2m1", "group", shape[-1] // scale.shape[-1], scale="e4m3", outer="tensor")
        return StoredWeight("modelopt-nvfp4", shape, "e2m1", "weight", form, tuple(faults))
    shape = (*weight.shape[:-2], weight.shape[-2] * 2, weight.shape[-1])  # a byte holds two rows
    int4 = grouped_format("int4", shape, scale, True, faults)
    return StoredWeight("modelopt-int4", shape, "int4", "weight", int4, tuple(faults))


def qweight(parts: Parts, rule: Rule | None) -> StoredWeight:
    """AWQ, GPTQ or QServe, told apart by dtype and by the width of the scales."""
    weight = parts["qweight"]
    if weight.dtype == "I8":
        return _qserve(parts)
    faults = missing(parts, "scales")
    bits = rule.weights.bits if rule and rule.weights and rule.weights.is_integer else 4
    per_word, scales = 32 // bits, parts.get("scales")
    awq = bool(rule and rule.layout == "awq")
    if scales:  # AWQ packs along out, so its scales are wider than its codes
        awq = scales.shape[-1] == weight.shape[-1] * per_word
    rows, columns = weight.shape[-1], weight.shape[-2] * 32 // bits
    if awq:
        rows, columns = weight.shape[-1] * per_word, weight.shape[-2]
    flipped = Part(scales.dtype, scales.shape[::-1]) if scales else None
    asymmetric = bool(rule and rule.weights and not rule.weights.symmetric) or (awq and "qzeros" in parts)
    form = grouped_format(f"int{bits}", (rows, columns), flipped, not asymmetric, faults)
    if not (rule and rule.weights and rule.weights.symmetric):
        faults += missing(parts, "qzeros")
    layout = "awq" if awq else "gptq"
    return StoredWeight(layout, (rows, columns), f"int{bits}", "qweight", form, tuple(faults))


def _qserve(parts: Parts) -> StoredWeight:
    rows, half = parts["qweight"].shape
    columns = half * 2
    wanted = {"s1_scales": Part("F16", (rows,))}
    if {"s2_scales", "s2_zeros"} & parts.keys():
        groups = next(parts[leaf].shape[0] for leaf in ("s2_scales", "s2_zeros") if leaf in parts)
        form = TensorFormat(
            "int4", "group", columns // groups, symmetric=False, scale="int8", outer="channel"
        )
        wanted |= dict.fromkeys(("s2_scales", "s2_zeros"), Part("I8", (groups, rows)))
    else:
        form = TensorFormat("int4", "channel", symmetric=False, scale="f16")
        wanted["s1_szeros"] = Part("F16", (rows,))
    faults = missing(parts, *wanted)
    faults += [
        f"{leaf} is {parts[leaf].dtype} {list(parts[leaf].shape)}; accepted: {part.dtype} {list(part.shape)}"
        for leaf, part in wanted.items()
        if leaf in parts and parts[leaf] != part
    ]
    if rows % 32 or columns % 32:
        faults.append(f"qweight of {rows} x {columns} codes is no whole number of tiles of 32 x 32")
    return StoredWeight(QSERVE_LAYOUT, (rows, columns), "int4", "qweight", form, tuple(faults))


def gpt_oss_blocks(parts: Parts, rule: Rule | None) -> StoredWeight:
    """gpt-oss: ``*_blocks`` ``[experts, out, groups, 16]`` beside ``*_scales``."""
    *lead, groups, half = parts["_blocks"].shape
    form = TensorFormat("e2m1", "group", half * 2, scale="e8m0")
    faults = missing(parts, "_scales")
    return StoredWeight("mxfp4-blocks", (*lead, groups * half * 2), "e2m1", "_blocks", form, tuple(faults))


def trellis(parts: Parts, rule: Rule | None) -> StoredWeight:
    """EXL3: 16x16 tiles of 16 words of 16 bits per bit."""
    inputs, outputs, words = parts["trellis"].shape
    shape, element = (outputs * 16, inputs * 16), f"trellis {words // 16}-bit"
    return StoredWeight("exl3", shape, element, "trellis", None, tuple(missing(parts, "suh", "svh")))


def torchao(parts: Parts, rule: Rule | None) -> StoredWeight:
    """torchao's flattened tensor subclasses."""
    data = parts["_weight_qdata"]
    words = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2", "I8": "int8", "U8": "4-bit"}
    faults = missing(parts, "_weight_scale")
    element = words.get(data.dtype, data.dtype)
    return StoredWeight("torchao", data.shape, element, "_weight_qdata", None, tuple(faults))
