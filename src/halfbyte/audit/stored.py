"""What tensors of one module are, told from their names, dtypes and shapes. No torch, no values.

A checkpoint's names are gathered into modules (``...q_proj`` with ``weight_packed``, ``weight_scale``, ...), and each
set of tensors is recognised as one layout: ours or a foreign one. Sources: the projects' own loaders
(compressed-tensors 0.17, AutoAWQ, GPTQModel, ModelOpt, DeepSeek-V3, QServe, torchao, ExLlamaV3, bitsandbytes).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from halfbyte.audit.declared import Rule
from halfbyte.errors import HalfbyteError
from halfbyte.formats.spec import TensorFormat


class Part(NamedTuple):
    """One tensor of a module: its dtype in safetensors spelling and its shape."""

    dtype: str
    shape: tuple[int, ...]


Parts = Mapping[str, Part]
"""Last name component (``weight_packed``) -> tensor."""

CODE_LEAVES = ("weight", "weight_packed", "qweight", "trellis", "_weight_qdata", "_blocks")
SCALE_LEAVES = (
    "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale", "scales", "s1_scales", "s2_scales",
    "dequant_scale", "_weight_scale", "_scales", "suh", "svh", "weight.absmax", "channel_scale", "group_scale",
)  # fmt: skip
COMPANION_LEAVES = (
    "weight_shape", "weight_zero_point", "weight_g_idx", "qzeros", "g_idx", "s1_szeros", "s2_zeros", "pre_quant_scale",
    "input_scale", "input_global_scale", "input_zero_point", "mcg", "mul1", "_weight_zero_point", "group_zero",
    "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", "weight.quant_state.bitsandbytes__nf4",
    "weight.quant_state.bitsandbytes__fp4", "SCB", "weight_format",
)  # fmt: skip
KV_LEAVES = ("k_scale", "v_scale", "q_scale", "kv_scale", "output_scale", "prob_scale", "k_zero_point", "v_zero_point")
MODULE_LEAVES = frozenset((*CODE_LEAVES, *SCALE_LEAVES, *COMPANION_LEAVES))

_FLOATS = {"BF16": "bf16", "F16": "f16", "F32": "f32", "F64": "f64"}
_SCALE_DTYPES = {"BF16": "bf16", "F16": "f16", "F32": "f32", "F8_E8M0": "e8m0", "U8": "e8m0", "F8_E4M3": "e4m3"}
_FP8 = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}


@dataclass(frozen=True)
class StoredWeight:
    """One weight as it lies on disk.

    layout: ``plain``, or the name of a quantized form. shape: logical ``[..., out, in]``.
    format: what its numbers are; none for a plain weight and for forms that a TensorFormat cannot say.
    element: of the codes, in words. codes: the leaf that holds them. faults: partners that are missing or misfit.
    """

    layout: str
    shape: tuple[int, ...]
    element: str
    codes: str
    format: TensorFormat | None = None
    faults: tuple[str, ...] = ()

    @property
    def quantized(self) -> bool:
        return self.layout != "plain"


def split_name(name: str) -> tuple[str, str]:
    """Module and leaf of a tensor name; the leaf is empty for a tensor that stands alone."""
    module, _, leaf = name.rpartition(".")
    if leaf in MODULE_LEAVES:
        return module, leaf
    if leaf.endswith("_blocks"):
        return name.removesuffix("_blocks"), "_blocks"
    if leaf.endswith("_scales") and leaf != "_scales":
        return name.removesuffix("_scales"), "_scales"
    if (at := name.find(".weight.")) > 0 and name[at + 1 :] in MODULE_LEAVES:
        return name[:at], name[at + 1 :]
    return name, ""


def recognise(parts: Parts, rule: Rule | None) -> StoredWeight | None:
    """The weight that ``parts`` hold; none when no tensor among them holds codes or values.

    rule: what the config declares, for what shapes cannot tell (the bits of packed words).
    """
    try:
        for leaf, describe in _DESCRIBERS.items():
            if leaf in parts:
                return describe(parts, rule)
    except HalfbyteError as error:
        leaf = next(leaf for leaf in CODE_LEAVES if leaf in parts)
        return StoredWeight("unknown", parts[leaf].shape, parts[leaf].dtype, leaf, faults=(str(error),))
    return None


def missing(parts: Parts, *leaves: str) -> list[str]:
    """A line for each of ``leaves`` that is not there."""
    return [f"{leaf} is missing" for leaf in leaves if leaf not in parts]


def _grouped(
    element: str, shape: tuple[int, ...], scale: Part | None, symmetric: bool, faults: list[str]
) -> TensorFormat | None:
    """Granularity of scales laid out ``[..., out, groups]``, from their shape; misfits are added to ``faults``."""
    if scale is None:
        return None
    dtype = _SCALE_DTYPES.get(scale.dtype)
    if dtype is None:
        faults.append(f"scale dtype {scale.dtype} is not known; accepted: {', '.join(_SCALE_DTYPES)}")
        return None
    rows, columns = shape[-2:]
    dims = tuple(scale.shape)
    if not dims or set(dims) == {1}:
        kind = "tensor" if rows > 1 or not dims or len(dims) == 1 else "channel"
        return TensorFormat(element, kind, symmetric=symmetric, scale=dtype)
    if dims in ((*shape[:-1], 1), shape[:-1]):
        return TensorFormat(element, "channel", symmetric=symmetric, scale=dtype)
    if dims[:-1] == shape[:-1] and dims[-1] and columns % dims[-1] == 0:
        return TensorFormat(element, "group", columns // dims[-1], symmetric=symmetric, scale=dtype)
    faults.append(f"scale shape {list(dims)} does not fit a weight {list(shape)}")
    return None


def _pack_quantized(parts: Parts, rule: Rule | None) -> StoredWeight:
    packed, scale = parts["weight_packed"], parts.get("weight_scale")
    faults = missing(parts, "weight_scale")
    if packed.dtype == "U8":
        return _fp4_packed(packed, scale, parts, faults)
    faults += missing(parts, "weight_shape")
    if packed.dtype != "I32":
        faults.append(f"weight_packed has dtype {packed.dtype}; accepted: I32 (integers), U8 (4-bit floats)")
    bits = rule.weights.bits if rule and rule.weights and rule.weights.is_integer else 4
    shape = (*packed.shape[:-1], packed.shape[-1] * (32 // bits))
    group = rule.weights.group_size if rule and rule.weights else None
    if scale and group and len(scale.shape) == 2 and 0 <= shape[-1] - scale.shape[-1] * group < 32 // bits:
        shape = (*shape[:-1], scale.shape[-1] * group)
    symmetric = "weight_zero_point" not in parts
    form = _grouped(f"int{bits}", shape, scale, symmetric, faults)
    return StoredWeight("pack-quantized", shape, f"int{bits}", "weight_packed", form, tuple(faults))


def _fp4_packed(packed: Part, scale: Part | None, parts: Parts, faults: list[str]) -> StoredWeight:
    shape = (*packed.shape[:-1], packed.shape[-1] * 2)
    form = _grouped("e2m1", shape, scale, True, faults)
    layout = "mxfp4-pack-quantized"
    if form and form.scale == "e4m3":
        layout = "nvfp4-pack-quantized"
        faults += missing(parts, "weight_global_scale")
        form = TensorFormat("e2m1", "group", form.group_size or shape[-1], scale="e4m3", outer="tensor")
    return StoredWeight(layout, shape, "e2m1", "weight_packed", form, tuple(faults))


def _weight(parts: Parts, rule: Rule | None) -> StoredWeight | None:
    weight = parts["weight"]
    if weight.dtype in _FP8:
        return _fp8(parts, rule)
    if weight.dtype == "I8":
        return _int8(parts, rule)
    if weight.dtype == "U8":
        return _bytes(parts)
    faults = [f"{leaf} beside a plain {weight.dtype} weight" for leaf in parts if leaf in SCALE_LEAVES]
    return StoredWeight("plain", weight.shape, _FLOATS.get(weight.dtype, weight.dtype), "weight", None, tuple(faults))


def _fp8(parts: Parts, rule: Rule | None) -> StoredWeight:
    weight = parts["weight"]
    element = _FP8[weight.dtype]
    leaf = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    scale, faults = parts.get(leaf), missing(parts, leaf)
    if scale and len(scale.shape) == len(weight.shape) >= 2:
        block = rule.weights.block_shape if rule and rule.weights and rule.weights.block_shape else (128, 128)
        tiles = tuple(-(-size // side) for size, side in zip(weight.shape[-2:], block, strict=True))
        by_block = bool(rule and rule.weights and rule.weights.block_shape) or leaf == "weight_scale_inv"
        fits = scale.shape == (*weight.shape[:-2], *tiles)
        if fits and (by_block or (scale.shape[-2] < weight.shape[-2] and scale.shape[-1] > 1)):
            form = TensorFormat(element, "block", block_shape=block, scale=_SCALE_DTYPES.get(scale.dtype, "f32"))
            layout = "fp8-block" if leaf == "weight_scale_inv" else "float-quantized"
            return StoredWeight(layout, weight.shape, element, "weight", form, tuple(faults))
    form = _grouped(element, weight.shape, scale, True, faults)
    layout = "float-quantized"
    if form and form.scale == "e8m0":
        layout = "mxfp8-quantized"
    elif rule and rule.layout in ("fp8", "modelopt-fp8", "naive-quantized"):
        layout = rule.layout
    return StoredWeight(layout, weight.shape, element, "weight", form, tuple(faults))


def _int8(parts: Parts, rule: Rule | None) -> StoredWeight:
    weight = parts["weight"]
    if "dequant_scale" in parts:
        form = TensorFormat("int8", "channel", scale=_SCALE_DTYPES.get(parts["dequant_scale"].dtype, "f16"))
        return StoredWeight("qserve-w8a8", weight.shape, "int8", "weight", form)
    if "SCB" in parts:
        return StoredWeight("bitsandbytes", weight.shape, "int8", "weight", TensorFormat("int8", "channel", scale="f32"))
    if "weight_scale_inv" in parts:  # two codes a byte, as SGLang's w4afp8 experts have them
        faults: list[str] = []
        shape = (*weight.shape[:-1], weight.shape[-1] * 2)
        form_or_none = _grouped("int4", shape, parts["weight_scale_inv"], True, faults)
        return StoredWeight("w4afp8", shape, "int4", "weight", form_or_none, tuple(faults))
    faults = missing(parts, "weight_scale")
    bits = rule.weights.bits if rule and rule.weights and rule.weights.is_integer else 8
    symmetric = "weight_zero_point" not in parts
    form_or_none = _grouped(f"int{bits}", weight.shape, parts.get("weight_scale"), symmetric, faults)
    return StoredWeight("int-quantized", weight.shape, f"int{bits}", "weight", form_or_none, tuple(faults))


def _bytes(parts: Parts) -> StoredWeight:
    weight = parts["weight"]
    if any(leaf.startswith("weight.") for leaf in parts):
        return StoredWeight("bitsandbytes", weight.shape, "4-bit", "weight")
    scale, faults = parts.get("weight_scale"), missing(parts, "weight_scale")
    if scale and scale.dtype == "F8_E4M3":
        shape = (*weight.shape[:-1], weight.shape[-1] * 2)
        faults += missing(parts, "weight_scale_2")
        form = TensorFormat("e2m1", "group", shape[-1] // scale.shape[-1], scale="e4m3", outer="tensor")
        return StoredWeight("modelopt-nvfp4", shape, "e2m1", "weight", form, tuple(faults))
    shape = (*weight.shape[:-2], weight.shape[-2] * 2, weight.shape[-1])
    form_or_none = _grouped("int4", shape, scale, True, faults)
    return StoredWeight("modelopt-int4", shape, "int4", "weight", form_or_none, tuple(faults))


def _qweight(parts: Parts, rule: Rule | None) -> StoredWeight:
    weight = parts["qweight"]
    if weight.dtype == "I8":
        return _qserve(parts)
    faults = missing(parts, "scales")
    bits = rule.weights.bits if rule and rule.weights and rule.weights.is_integer else 4
    per_word = 32 // bits
    scales = parts.get("scales")
    awq = bool(rule and rule.layout == "awq")
    if scales:  # AWQ packs along out, so its scales are wider than its codes
        awq = scales.shape[-1] == weight.shape[-1] * per_word
    shape = (
        (weight.shape[-1] * per_word, weight.shape[-2]) if awq else (weight.shape[-1], weight.shape[-2] * 32 // bits)
    )
    flipped = Part(scales.dtype, scales.shape[::-1]) if scales else None
    asymmetric = bool(rule and rule.weights and not rule.weights.symmetric) or (awq and "qzeros" in parts)
    form = _grouped(f"int{bits}", shape, flipped, not asymmetric, faults)
    if not (rule and rule.weights and rule.weights.symmetric):
        faults += missing(parts, "qzeros")
    return StoredWeight("awq" if awq else "gptq", shape, f"int{bits}", "qweight", form, tuple(faults))


def _qserve(parts: Parts) -> StoredWeight:
    rows, half = parts["qweight"].shape
    faults = missing(parts, "s1_scales")
    if "s2_scales" in parts:
        faults += missing(parts, "s2_zeros")
        group = half * 2 // parts["s2_scales"].shape[0]
        form = TensorFormat("int4", "group", group, symmetric=False, scale="int8", outer="channel")
    else:
        faults += missing(parts, "s1_szeros")
        form = TensorFormat("int4", "channel", symmetric=False, scale="f16")
    return StoredWeight("qserve", (rows, half * 2), "int4", "qweight", form, tuple(faults))


def _gpt_oss(parts: Parts, rule: Rule | None) -> StoredWeight:
    *lead, groups, half = parts["_blocks"].shape
    form = TensorFormat("e2m1", "group", half * 2, scale="e8m0")
    faults = missing(parts, "_scales")
    return StoredWeight("mxfp4-blocks", (*lead, groups * half * 2), "e2m1", "_blocks", form, tuple(faults))


def _trellis(parts: Parts, rule: Rule | None) -> StoredWeight:
    inputs, outputs, words = parts["trellis"].shape  # 16x16 tiles of 16 * bits 16-bit words
    faults = missing(parts, "suh", "svh")
    return StoredWeight("exl3", (outputs * 16, inputs * 16), f"trellis {words // 16}-bit", "trellis", None, tuple(faults))


def _torchao(parts: Parts, rule: Rule | None) -> StoredWeight:
    data = parts["_weight_qdata"]
    element = _FP8.get(data.dtype, {"I8": "int8", "U8": "4-bit"}.get(data.dtype, data.dtype))
    return StoredWeight("torchao", data.shape, element, "_weight_qdata", None, tuple(missing(parts, "_weight_scale")))


_DESCRIBERS: dict[str, Callable[[Parts, Rule | None], StoredWeight | None]] = {
    "weight_packed": _pack_quantized,
    "qweight": _qweight,
    "_blocks": _gpt_oss,
    "trellis": _trellis,
    "_weight_qdata": _torchao,
    "weight": _weight,
}
