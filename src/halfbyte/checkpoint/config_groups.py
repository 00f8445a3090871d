"""Schemes in the words of config groups, which compressed-tensors and halfbyte share. No torch here.

Source: QuantizationArgs and QuantizationScheme of compressed-tensors 0.17, which refuse fields that they do not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from halfbyte.errors import HalfbyteError
from halfbyte.formats.spec import INTEGER_BITS, ActivationFormat, TensorFormat
from halfbyte.schemes import PRESETS, Scheme

FLOAT_SCALES = ("bf16", "f16", "f32")
_TORCH_SCALES = {"e8m0": "torch.uint8", "e4m3": "torch.float8_e4m3fn", "int8": "torch.int8"}
_FLOATS = {8: "e4m3", 4: "e2m1"}
TWO_LEVEL_FORMAT = "two-level-pack-quantized"


def is_two_level(weights: TensorFormat) -> bool:
    """Whether weights have integer group scales under one fp32 scale per output channel."""
    return weights.scale == "int8" and weights.outer == "channel"


def group_format(scheme: Scheme) -> str:
    """The ``format`` of a config group. Errors: a scheme that has no stored form."""
    return TWO_LEVEL_FORMAT if is_two_level(scheme.weights) else storage_format(scheme)


def storage_format(scheme: Scheme) -> str:
    """The name that compressed-tensors has for how weights of ``scheme`` are stored.

    Errors: a scheme that it cannot say.
    """
    weights = scheme.weights
    kind = (weights.element, weights.scale, weights.outer, weights.group_size)
    if kind == ("e2m1", "e4m3", "tensor", 16):
        return "nvfp4-pack-quantized"
    if kind == ("e2m1", "e8m0", None, 32):
        return "mxfp4-pack-quantized"
    if kind == ("e4m3", "e8m0", None, 32):
        return "mxfp8-quantized"
    if weights.outer is None and weights.scale in ("model", *FLOAT_SCALES):
        if weights.is_integer:
            return "int-quantized" if weights.bits == 8 and scheme.activations else "pack-quantized"
        if weights.element == "e4m3":
            return "float-quantized"
    raise HalfbyteError(f"scheme {scheme.name}: compressed-tensors has no name for {weights}")


def weight_args(weights: TensorFormat) -> dict[str, Any]:
    """The ``weights`` of a config group."""
    args: dict[str, Any] = {
        "num_bits": weights.bits,
        "type": "int" if weights.is_integer else "float",
        "symmetric": weights.symmetric,
        "strategy": "tensor_group" if weights.outer == "tensor" else weights.granularity,
    }
    if weights.group_size is not None:
        args["group_size"] = weights.group_size
    if weights.block_shape is not None:
        args["block_structure"] = list(weights.block_shape)
    if weights.scale in _TORCH_SCALES:
        args["scale_dtype"] = _TORCH_SCALES[weights.scale]
    return {**args, "dynamic": False}


def activation_args(activations: ActivationFormat | None) -> dict[str, Any] | None:
    """The ``input_activations`` of a config group."""
    if activations is None:
        return None
    args: dict[str, Any] = {
        "num_bits": activations.bits,
        "type": "int" if activations.element in INTEGER_BITS else "float",
        "symmetric": True,
        "strategy": activations.granularity,
    }
    if activations.group_size is not None:
        args["group_size"] = activations.group_size
    if activations.scale in _TORCH_SCALES:
        args["scale_dtype"] = _TORCH_SCALES[activations.scale]
    return {**args, "dynamic": activations.dynamic}


def read_scheme(
    where: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, form: str | None
) -> Scheme:
    """The scheme of a config group; ``form``: its storage format, if the config says it.

    It has a preset's name when it is that preset, its group size aside (as in recipes), else a name that says it.
    Errors: values that no supported number format has, after ``where``.
    """
    try:
        fmt = _read_weights(weights, form)
        activations = None if inputs is None else _read_activations(inputs)
    except HalfbyteError as error:
        raise HalfbyteError(f"{where}: {error}") from None
    for preset in PRESETS.values():
        group_size = preset.weights.group_size
        resized = (
            replace(fmt, group_size=group_size) if fmt.is_integer and fmt.group_size and group_size else fmt
        )
        if (preset.weights, preset.activations) == (resized, activations):
            return Scheme(preset.name, fmt, activations)
    return Scheme(_described(fmt, activations), fmt, activations)


def _read_weights(args: Mapping[str, Any], form: str | None) -> TensorFormat:
    bits, integer = _bits_and_kind(args)
    group_size = args.get("group_size")
    strategy = _strategy(args)
    symmetric = args.get("symmetric", True) is not False
    if integer:
        element = f"int{bits}"
    elif bits in _FLOATS:
        element = _FLOATS[bits]
    else:
        raise HalfbyteError(f"{bits}-bit float weights are not supported; accepted: 8 and 4 bits")
    scale, outer = "model", None
    if _torch_name(args.get("scale_dtype")) == "int8":
        scale, outer = "int8", "channel"
    elif strategy == "tensor_group":
        scale, outer, strategy = "e4m3", "tensor", "group"
    elif not integer and (_torch_name(args.get("scale_dtype")) == "uint8" or str(form).startswith("mxfp")):
        scale = "e8m0"
    return TensorFormat(
        element,
        strategy,
        group_size if strategy == "group" else None,
        _block_shape(args.get("block_structure")) if strategy == "block" else None,
        symmetric,
        scale,
        outer,
    )


def _read_activations(args: Mapping[str, Any]) -> ActivationFormat:
    bits, integer = _bits_and_kind(args)
    if args.get("symmetric", True) is False:
        raise HalfbyteError("asymmetric input activations are not supported; accepted: symmetric ones")
    strategy = _strategy(args)
    scale = "f32"
    if strategy == "tensor_group":
        scale, strategy = "e4m3", "group"
    elif _torch_name(args.get("scale_dtype")) == "uint8":
        scale = "e8m0"
    group_size = args.get("group_size") if strategy == "group" else None
    element = f"int{bits}" if integer else _FLOATS.get(bits, f"{bits}-bit float")
    return ActivationFormat(element, strategy, group_size, bool(args.get("dynamic")), scale)


def _bits_and_kind(args: Mapping[str, Any]) -> tuple[int, bool]:
    bits, kind = args.get("num_bits", 8), str(args.get("type", "int")).lower()
    if type(bits) is not int or kind not in ("int", "float"):
        raise HalfbyteError(f"num_bits {bits!r} of type {kind!r}; accepted: an integer, of type int or float")
    return bits, kind == "int"


def _strategy(args: Mapping[str, Any]) -> str:
    """What the config says, else what the group size implies, as in compressed-tensors."""
    group_size, strategy = args.get("group_size"), args.get("strategy")
    if group_size is not None and type(group_size) is not int:
        raise HalfbyteError(f"group_size {group_size!r}; accepted: an integer or null")
    if group_size == -1 and strategy in (None, "group"):
        return "channel"
    if strategy is None:
        return "group" if group_size else "tensor"
    return str(strategy).lower()


def _block_shape(block: Any) -> tuple[int, int]:
    """``[rows, columns]``, or the ``"128x128"`` of early files."""
    sizes = block.split("x") if isinstance(block, str) else block
    if isinstance(sizes, list | tuple) and len(sizes) == 2 and all(str(size).isdecimal() for size in sizes):
        rows, columns = map(int, sizes)
        if rows and columns:
            return rows, columns
    raise HalfbyteError(f"block_structure {block!r}; accepted: two positive sizes, as [128, 128]")


def _torch_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _described(fmt: TensorFormat, activations: ActivationFormat | None) -> str:
    tile = fmt.granularity if fmt.group_size is None else f"g{fmt.group_size}"
    weights = f"{fmt.element}-{tile}" + ("" if fmt.symmetric else "-asym")
    if activations is None:
        return weights
    static = "" if activations.dynamic else "-static"
    return f"{weights}+{activations.element}-{activations.granularity}{static}"
