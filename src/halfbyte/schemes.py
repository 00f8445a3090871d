"""What a scheme is, and the table of presets. A scheme says what the numbers are; it names no layer and no kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from halfbyte.errors import HalfbyteError
from halfbyte.formats.spec import ActivationFormat, TensorFormat

TargetName = Literal["halfbyte", "vllm"]
FormName = Literal["compressed-tensors", "qserve", "w4afp8"]


@dataclass(frozen=True)
class Scheme:
    """Number formats of a linear layer's weight and, if they are quantized too, of its inputs.

    target: whose kernel multiplies. halfbyte's take scales as they are stored; vLLM's for W4A8 rounds them, and codes
    times scales, to E4M3 (:mod:`halfbyte.formats.vllm_scales`).
    """

    name: str
    weights: TensorFormat
    activations: ActivationFormat | None = None
    target: TargetName = "halfbyte"

    @property
    def label(self) -> str:
        """The field's shorthand WxAy."""
        return f"W{self.weights.bits}A{self.activations.bits if self.activations else 16}"

    @property
    def has_static_inputs(self) -> bool:
        """Whether the checkpoint holds the scale of the inputs."""
        return self.activations is not None and not self.activations.dynamic

    def aimed_at(self, target: TargetName) -> Scheme:
        """The same for another target's kernel, if it is one of INT4 weights and E4M3 inputs; else as it is."""
        is_w4a8 = self.weights.element == "int4" and self.activations and self.activations.element == "e4m3"
        return replace(self, target=target) if is_w4a8 else self

    def stored_as(self, form: FormName) -> Scheme:
        """The same in the numbers that files of ``form`` hold: all of QServe's floating-point scales are fp16, and
        experts in SGLang's w4afp8 have inputs with a static scale.

        Errors: a scheme that ``form`` cannot hold.
        """
        if form == "qserve":
            return _in_qserve(self)
        return _in_w4afp8(self) if form == "w4afp8" else self


def _in_qserve(scheme: Scheme) -> Scheme:
    weights = scheme.weights
    if scheme.activations != _INT8_TOKEN or (weights.element, weights.symmetric) != ("int4", False):
        raise HalfbyteError(
            f"scheme {scheme.name} cannot be stored as qserve; accepted: w4a8-int8, with group_size 128 or -1"
        )
    if weights.scale == "int8":
        return replace(scheme, weights=replace(weights, outer_dtype="f16"))
    if weights.granularity != "channel":
        raise HalfbyteError(
            f"scheme {scheme.name}: qserve's groups have integer scales under one of the channel; accepted: w4a8-int8"
        )
    return replace(scheme, weights=replace(weights, scale="f16"))


def _in_w4afp8(scheme: Scheme) -> Scheme:
    experts, dense = PRESETS["w4a8"], PRESETS["fp8_per_block"]
    if (scheme.weights, scheme.activations) == (dense.weights, dense.activations):
        return scheme
    if scheme.target != "halfbyte":
        raise HalfbyteError(
            f"target {scheme.target} is of another kernel than w4afp8's, whose scales are exact; accepted: halfbyte"
        )
    if (scheme.weights, scheme.activations) == (experts.weights, experts.activations):
        return replace(scheme, activations=replace(_FP8_TOKEN, granularity="tensor", dynamic=False))
    size = "" if scheme.weights.group_size in (None, 128) else f" in groups of {scheme.weights.group_size}"
    zeros = "" if scheme.weights.symmetric else " with zero points"
    raise HalfbyteError(
        f"scheme {scheme.name}{size}{zeros} cannot be stored as w4afp8; accepted: w4a8 with group_size 128 and no zero "
        "points for experts, fp8_per_block for other layers"
    )


_FP8_TOKEN = ActivationFormat("e4m3", "token")
_INT8_TOKEN = ActivationFormat("int8", "token")

PRESETS: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("w4a8", TensorFormat("int4", "group", 128), _FP8_TOKEN),
        Scheme(
            "w4a8-int8",
            TensorFormat("int4", "group", 128, symmetric=False, scale="int8", outer="channel"),
            _INT8_TOKEN,
        ),
        Scheme("w4a16", TensorFormat("int4", "group", 128)),
        Scheme("w4a16-asym", TensorFormat("int4", "group", 128, symmetric=False)),
        Scheme("w8a16", TensorFormat("int8", "channel")),
        Scheme("w8a8-int8", TensorFormat("int8", "channel"), _INT8_TOKEN),
        Scheme("fp8", TensorFormat("e4m3", "channel"), _FP8_TOKEN),
        Scheme("fp8_per_tensor", TensorFormat("e4m3", "tensor"), ActivationFormat("e4m3", "tensor")),
        Scheme(
            "fp8_per_block",
            TensorFormat("e4m3", "block", block_shape=(128, 128)),
            ActivationFormat("e4m3", "group", 128),
        ),
        Scheme(
            "mxfp8",
            TensorFormat("e4m3", "group", 32, scale="e8m0"),
            ActivationFormat("e4m3", "group", 32, scale="e8m0"),
        ),
        Scheme("mxfp4", TensorFormat("e2m1", "group", 32, scale="e8m0")),
        Scheme("nvfp4", TensorFormat("e2m1", "group", 16, scale="e4m3", outer="tensor")),
    )
}

ALIASES = {
    "w4afp8": "w4a8",
    "fp8_per_channel": "fp8",
    "int8": "w8a8-int8",
    "nvfp4a16": "nvfp4",
    "mxfp4a16": "mxfp4",
}


def resolve(name: str) -> Scheme:
    """The preset called ``name`` (any case, aliases included).

    Errors: an unknown name; the message lists those known.
    """
    key = name.lower()
    key = ALIASES.get(key, key)
    if key not in PRESETS:
        raise HalfbyteError(f"scheme {name!r} is not known; known schemes: {', '.join(PRESETS)}")
    return PRESETS[key]
