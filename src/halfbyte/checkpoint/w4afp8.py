"""Mixtures as SGLang's ``w4afp8`` reads them from files; docs/formats.md gives every byte.

An expert's projection: ``w = code * weight_scale_inv`` in groups of 128, codes two to a byte, and ``input_scale``, by
which inputs are divided before they become E4M3. Any other linear layer: E4M3, ``w = code * weight_scale_inv`` in
blocks of 128 x 128.
Source: SGLang's ``layers/quantization/w4afp8.py``; TensorRT-LLM's ``quantize_mixed_precision_moe.py`` and its packing
of INT4, which made the first of these files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from halfbyte.checkpoint.dtypes import STORED_NAMES
from halfbyte.checkpoint.packed_weight import check_stored
from halfbyte.checkpoint.shard_plan import Entry
from halfbyte.checkpoint.w4afp8_config import GROUP_SIZE, INPUT_SCALE, SCALE_LEAF, is_experts
from halfbyte.errors import HalfbyteError
from halfbyte.formats.packing import pack_signed_nibbles, unpack_signed_nibbles
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.schemes import Scheme

_SCALES = {"BF16": "bf16", "F32": "f32"}
_INPUT_SCALES = ("BF16", "F16", "F32")
_STORED = {name: dtype for dtype, name in _SCALES.items()}


def stored_entries(module: str, scheme: Scheme, shape: tuple[int, int], model_dtype: str) -> list[Entry]:
    """What is stored for the weight ``[out, in]`` of ``module``.

    Scales in the model's dtype are stored as fp32, which holds them: SGLang takes fp32 and multiplies in bf16.
    Errors: a scheme that this form cannot hold; experts' ``in`` that is no multiple of 128.
    """
    weights = scheme.weights
    dtype = _STORED.get(weights.scale, "F32")
    if not is_experts(scheme):
        if weights.element != "e4m3" or weights.granularity != "block":
            raise HalfbyteError(
                f"{module}: {weights.element} in groups of {weights.group_size} is not what w4afp8 holds; accepted: "
                f"experts in int4 in groups of {GROUP_SIZE}, other layers in E4M3 blocks"
            )
        return [
            Entry(f"{module}.weight", "F8_E4M3", shape),
            Entry(f"{module}.{SCALE_LEAF}", dtype, weights.scale_shape(shape)),
        ]
    rows, columns = shape
    return [
        Entry(f"{module}.weight", "I8", (rows, columns // 2)),
        Entry(f"{module}.{SCALE_LEAF}", dtype, weights.scale_shape(shape)),
        Entry(f"{module}.{INPUT_SCALE}", "BF16", (1,)),
    ]


def encode(
    module: str,
    scheme: Scheme,
    q: QuantizedTensor,
    model_dtype: str,
    input_scale: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of :func:`stored_entries`.

    input_scale: of experts, fp32 ``[1]``, a number that bf16 holds; 1 if none is known, as SGLang takes it.
    Errors: ``q`` is not of ``scheme`` with scales in ``model_dtype``.
    """
    if q.format != scheme.weights.with_scale(model_dtype):
        raise HalfbyteError(
            f"{module}: quantized as {q.format}, but its scheme {scheme.name} says {scheme.weights}"
        )
    entries = stored_entries(module, scheme, (q.shape[0], q.shape[1]), model_dtype)
    as_stored = torch.bfloat16 if entries[1].dtype == "BF16" else torch.float32
    tensors = {f"{module}.{SCALE_LEAF}": q.scales.to(as_stored)}
    if not is_experts(scheme):
        return {f"{module}.weight": q.codes, **tensors}
    scale = torch.ones(1) if input_scale is None else input_scale.reshape(1).cpu()
    return {
        f"{module}.weight": pack_signed_nibbles(q.codes),
        **tensors,
        f"{module}.{INPUT_SCALE}": scale.to(torch.bfloat16),
    }


def decode(module: str, scheme: Scheme, tensors: Mapping[str, torch.Tensor]) -> QuantizedTensor:
    """The weight of ``module`` from its stored tensors (full names); scales in fp32 or bf16.

    Errors, each with the tensor: missing ones, another dtype or shape; a scale or input scale that is no positive
    number (weights' scales may be 0, of groups of zeros).
    """
    name, scale_name, input_name = (f"{module}.{leaf}" for leaf in ("weight", SCALE_LEAF, INPUT_SCALE))
    weight, scales = tensors.get(name), tensors.get(scale_name)
    if weight is not None and weight.dim() != 2:
        raise HalfbyteError(f"{name}: is {list(weight.shape)}; accepted: two dimensions")
    found = None if scales is None else STORED_NAMES.get(scales.dtype)
    fmt = replace(scheme.weights, scale=_SCALES.get(str(found), "f32"))
    scheme = replace(scheme, weights=fmt)
    packed = is_experts(scheme)
    rows, columns = (0, 0) if weight is None else (weight.shape[0], weight.shape[1] * (2 if packed else 1))
    if packed and columns % GROUP_SIZE:
        raise HalfbyteError(
            f"{name}: {columns} inputs are no whole groups; accepted: multiples of {GROUP_SIZE}"
        )
    entries = [
        replace(entry, dtype=_dtype_of(entry, tensors))
        for entry in stored_entries(module, scheme, (rows, columns), "f32")
    ]
    check_stored(module, entries, tensors)
    assert weight is not None
    assert scales is not None
    _refuse(scale_name, scales.isfinite() & (scales >= 0), scales, "finite, not negative")
    if not packed:
        return QuantizedTensor(fmt, weight, scales.reshape(fmt.scale_shape((rows, columns))))
    input_scale = tensors[input_name].reshape(1)
    _refuse(input_name, input_scale.isfinite() & (input_scale > 0), input_scale, "a positive finite number")
    codes = unpack_signed_nibbles(weight)
    return QuantizedTensor(fmt, codes, scales.reshape(fmt.scale_shape((rows, columns))))


def _dtype_of(entry: Entry, tensors: Mapping[str, torch.Tensor]) -> str:
    """Input scales of any of three dtypes are read; what else is stored has one."""
    if not entry.name.endswith(f".{INPUT_SCALE}") or entry.name not in tensors:
        return entry.dtype
    found = STORED_NAMES.get(tensors[entry.name].dtype)
    return found if found in _INPUT_SCALES else entry.dtype


def _refuse(name: str, right: torch.Tensor, values: torch.Tensor, accepted: str) -> None:
    if right.all():
        return
    place = [int(index) for index in (~right).nonzero()[0]]
    value = values[tuple(place)].item()
    raise HalfbyteError(f"{name}: holds {value:g} at {place}; accepted: {accepted}")
