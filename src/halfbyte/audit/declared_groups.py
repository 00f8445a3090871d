"""What config groups say: the words that compressed-tensors and halfbyte's own form share. No torch.

Read apart from ``checkpoint/`` on purpose: an audit that shared its parser would share its mistakes.
Source: QuantizationConfig, QuantizationScheme and QuantizationArgs of compressed-tensors 0.17.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfbyte.audit.declaration import Declared, Rule, ignore_by_pattern
from halfbyte.errors import HalfbyteError
from halfbyte.formats.spec import INTEGER_BITS, ActivationFormat, TensorFormat

TWO_LEVEL_LAYOUT = "two-level-pack-quantized"
_CT_SCALES = {"torch.uint8": "e8m0", "uint8": "e8m0", "torch.float8_e4m3fn": "e4m3", "float8_e4m3fn": "e4m3"}
_CT_SCALES |= {"torch.int8": "int8"}  # halfbyte's own form, in which groups have integer scales


def weight_format(args: Mapping[str, Any]) -> TensorFormat:
    """The weights of a compressed-tensors config group, from its QuantizationArgs.

    Errors: numbers that no TensorFormat can say.
    """
    bits, kind = int(args.get("num_bits", 8)), args.get("type", "int")
    if kind == "int":
        element = f"int{bits}"
        if element not in INTEGER_BITS:
            raise HalfbyteError(f"num_bits {bits} of type int; accepted: 2..8")
    else:
        element = {8: "e4m3", 4: "e2m1"}.get(bits, f"float{bits}")
    group = args.get("group_size")
    strategy = args.get("strategy") or ("tensor" if group is None else "channel" if group == -1 else "group")
    scale = _CT_SCALES.get(str(args.get("scale_dtype")), "model")
    outer = "channel" if scale == "int8" else None
    if strategy == "tensor_group":
        strategy, scale, outer = "group", "e4m3", "tensor"
    elif element == "e2m1":
        scale = "e8m0"
    return TensorFormat(
        element,
        strategy,
        group_size=group if strategy == "group" else None,
        block_shape=tuple(args["block_structure"]) if strategy == "block" else None,
        symmetric=bool(args.get("symmetric", True)),
        scale=scale,
        outer=outer,
    )


def activation_format(args: Mapping[str, Any]) -> ActivationFormat:
    """The input activations of a compressed-tensors config group, from its QuantizationArgs."""
    bits, kind = int(args.get("num_bits", 8)), args.get("type", "int")
    element = f"int{bits}" if kind == "int" else {8: "e4m3", 4: "e2m1"}.get(bits, f"float{bits}")
    strategy = args.get("strategy") or "tensor"
    scale = _CT_SCALES.get(str(args.get("scale_dtype")), "f32")
    if strategy == "tensor_group":
        strategy, scale = "group", "e4m3"
    return ActivationFormat(
        element,
        strategy,
        group_size=args.get("group_size") if strategy == "group" else None,
        dynamic=bool(args.get("dynamic", False)),
        scale=scale,
    )


def infer_layout(weights: TensorFormat) -> str:
    """The format of a config group that names none, or only ``mixed-precision``."""
    if weights.scale == "int8":
        return TWO_LEVEL_LAYOUT
    if weights.element == "e2m1":
        return "nvfp4-pack-quantized" if weights.outer else "mxfp4-pack-quantized"
    if weights.element == "e4m3":
        return "mxfp8-quantized" if weights.scale == "e8m0" else "float-quantized"
    return "pack-quantized" if weights.bits < 8 else "int-quantized"


def read_config_groups(found: Mapping[str, Any], result: Declared) -> None:
    result.format = found.get("format")
    result.ignored = ignore_by_pattern(found.get("ignore") or [])
    result.kv = kv_in_words(found.get("kv_cache_scheme"))
    result.target = found.get("halfbyte_target")
    for name, group in found.get("config_groups", {}).items():
        if not isinstance(group, Mapping) or not group.get("weights"):
            result.problems.append(f"config group {name!r} says nothing about weights")
            continue
        weights = weight_format(group["weights"])
        acts = group.get("input_activations")
        layout = group.get("format") or found.get("format")
        if layout in (None, "mixed-precision", "dense", "fakequant"):
            layout = infer_layout(weights)
        rule = Rule(layout, weights, activation_format(acts) if acts else None)
        result.rules.append((tuple(group.get("targets") or ()), rule))


def kv_in_words(scheme: Mapping[str, Any] | None) -> str | None:
    if not scheme:
        return None
    kind = "fp" if scheme.get("type") == "float" else "int"
    timing = "dynamic" if scheme.get("dynamic") else "static"
    return f"{kind}{scheme.get('num_bits', 8)} per {scheme.get('strategy') or 'tensor'}, {timing}"
