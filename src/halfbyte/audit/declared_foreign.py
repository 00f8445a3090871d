"""What the quantization configs of other tools say, in halfbyte's terms. No torch.

Sources: the loaders of vLLM 0.33 for each method, and the configs that AutoAWQ, GPTQModel and ModelOpt write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from halfbyte.audit.declaration import LINEAR_CLASSES, Declared, Rule, ignore_by_part, ignore_by_pattern
from halfbyte.audit.declared_groups import kv_in_words
from halfbyte.audit.stored import QSERVE_LAYOUT, W4AFP8_LAYOUT
from halfbyte.formats.spec import ActivationFormat, TensorFormat

Reader = Callable[[Mapping[str, Any], Declared], None]
"""Fills a declaration from the content of a quantization config."""


def _group_format(element: str, group: int, symmetric: bool, scale: str) -> TensorFormat:
    if group <= 0:
        return TensorFormat(element, "channel", symmetric=symmetric, scale=scale)
    return TensorFormat(element, "group", group, symmetric=symmetric, scale=scale)


def _awq(found: Mapping[str, Any], result: Declared) -> None:
    bits = found.get("bits", found.get("w_bit", 4))
    group = found.get("group_size", found.get("q_group_size", 128))
    result.format = found.get("version", "gemm")
    rule = Rule("awq", _group_format(f"int{bits}", group, not found.get("zero_point", True), "f16"))
    result.rules.append((LINEAR_CLASSES, rule))
    result.ignored = ignore_by_part(found.get("modules_to_not_convert") or ())


def _gptq(found: Mapping[str, Any], result: Declared) -> None:
    result.format = found.get("checkpoint_format", "gptq")
    group, symmetric = found.get("group_size", 128), bool(found.get("sym", True))
    rule = Rule("gptq", _group_format(f"int{found['bits']}", group, symmetric, "f16"))
    result.rules.append((LINEAR_CLASSES, rule))
    dynamic = found.get("dynamic") or {}
    result.ignored = ignore_by_pattern(["re:" + key[2:] for key in dynamic if key.startswith("-:")])
    for key, overrides in dynamic.items():
        if not key.startswith("-:"):
            own = {**found, **overrides}
            weights = _group_format(
                f"int{own['bits']}", own.get("group_size", group), own.get("sym", symmetric), "f16"
            )
            result.rules.append((["re:" + key.removeprefix("+:")], Rule("gptq", weights)))


def _fp8(found: Mapping[str, Any], result: Declared) -> None:
    block = found.get("weight_block_size")
    static = found.get("activation_scheme") == "static"
    if block:
        weights = TensorFormat("e4m3", "block", block_shape=(block[0], block[1]), scale="f32")
        rule = Rule("fp8-block", weights, ActivationFormat("e4m3", "group", block[1]))
    else:
        weights = TensorFormat("e4m3", "tensor", scale="f32")
        rule = Rule("fp8", weights, ActivationFormat("e4m3", "tensor", dynamic=not static))
    result.format = "block" if block else "tensor"
    result.rules.append((LINEAR_CLASSES, rule))
    result.ignored = ignore_by_part(found.get("modules_to_not_convert") or found.get("ignored_layers") or ())


_MODELOPT: dict[str, Rule] = {
    "FP8": Rule(
        "modelopt-fp8",
        TensorFormat("e4m3", "tensor", scale="f32"),
        ActivationFormat("e4m3", "tensor", dynamic=False),
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": Rule(
        "modelopt-fp8", TensorFormat("e4m3", "channel", scale="f32"), ActivationFormat("e4m3", "token")
    ),
    "FP8_PB_WO": Rule("modelopt-fp8", TensorFormat("e4m3", "block", block_shape=(128, 128), scale="f32")),
    "NVFP4": Rule(
        "modelopt-nvfp4",
        TensorFormat("e2m1", "group", 16, scale="e4m3", outer="tensor"),
        ActivationFormat("e2m1", "group", 16, dynamic=False, scale="e4m3"),
    ),
    "W4A16_NVFP4": Rule("modelopt-nvfp4", TensorFormat("e2m1", "group", 16, scale="e4m3", outer="tensor")),
    "MXFP8": Rule(
        "mxfp8-quantized",
        TensorFormat("e4m3", "group", 32, scale="e8m0"),
        ActivationFormat("e4m3", "group", 32, scale="e8m0"),
    ),
    "W4A16_AWQ": Rule("modelopt-int4", TensorFormat("int4", "group", 128)),
    "W4A8_AWQ": Rule(
        "modelopt-int4", TensorFormat("int4", "group", 128), ActivationFormat("e4m3", "tensor", dynamic=False)
    ),
}


def _modelopt(found: Mapping[str, Any], result: Declared) -> None:
    algorithm = str(found.get("quant_algo") or found.get("quantization", {}).get("quant_algo") or "")
    result.format = algorithm or None
    excluded = list(found.get("exclude_modules") or found.get("ignore") or ())
    result.ignored = ignore_by_pattern(excluded)
    kv = found.get("kv_cache_quant_algo") or found.get("kv_cache_scheme")
    result.kv = kv_in_words(kv) if isinstance(kv, Mapping) else (str(kv).lower() if kv else None)
    if rule := _MODELOPT.get(algorithm.upper()):
        result.rules.append((LINEAR_CLASSES, rule))
    for name, own in (found.get("quantized_layers") or {}).items():
        if rule := _MODELOPT.get(str(own.get("quant_algo")).upper()):
            result.rules.append(([name], rule))
    if not result.rules:
        result.problems.append(
            f"ModelOpt quant_algo {algorithm!r} is not known; accepted: {', '.join(_MODELOPT)}"
        )


def _mxfp4(found: Mapping[str, Any], result: Declared) -> None:
    result.format = "blocks and scales"
    # gpt-oss stores its experts so, whatever linear layers the ignore list leaves; tensors tell which.
    result.ignored = ignore_by_part(found.get("modules_to_not_convert") or ())


def _qoq(found: Mapping[str, Any], result: Declared) -> None:
    result.format = "qserve"
    bits, group = found.get("wbits", 4), found.get("group_size", -1)
    if group == -1:
        weights = TensorFormat(f"int{bits}", "channel", symmetric=False, scale="f16")
    else:
        weights = TensorFormat(f"int{bits}", "group", group, symmetric=False, scale="int8", outer="channel")
    result.rules.append((LINEAR_CLASSES, Rule(QSERVE_LAYOUT, weights, ActivationFormat("int8", "token"))))
    # Which layers are quantized is not said: all in the blocks are, and the head is not.
    result.ignored = ignore_by_part(("lm_head",))


def _w4afp8(found: Mapping[str, Any], result: Declared) -> None:
    result.format = "w4afp8"
    experts = Rule(
        W4AFP8_LAYOUT,
        TensorFormat("int4", "group", 128, scale="f32"),
        ActivationFormat("e4m3", "tensor", dynamic=False),
    )
    blocks = TensorFormat("e4m3", "block", block_shape=(128, 128), scale="f32")
    dense = Rule("fp8-block", blocks, ActivationFormat("e4m3", "group", 128))
    result.rules += [((r"re:(.*\.)?experts\.\d+\.[^.]+$",), experts), (LINEAR_CLASSES, dense)]
    ignored = found.get("ignored_layers") or found.get("modules_to_not_convert") or ()
    result.ignored = ignore_by_part(("lm_head", *ignored))


def _names_only(layout: str) -> Reader:
    """A format that is described from its tensors; its config only says which one it is."""

    def read(found: Mapping[str, Any], result: Declared) -> None:
        result.format = str(found.get("version") or found.get("format") or layout)

    return read


FOREIGN: dict[str, Reader] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _mxfp4,
    "w4afp8": _w4afp8,
    "bitsandbytes": _names_only("bitsandbytes"),
    "exl3": _names_only("exl3"),
    "qoq": _qoq,
    "torchao": _names_only("torchao"),
    "quark": _names_only("quark"),
    "auto-round": _names_only("auto-round"),
}
