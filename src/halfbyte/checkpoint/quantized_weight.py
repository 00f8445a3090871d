"""The stored form of any weight: compressed-tensors where that has a name for it, else halfbyte's own.

Or another project's, where a format asks for it: QServe's, SGLang's w4afp8.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from halfbyte.checkpoint import compressed_tensors, halfbyte_format, qserve, w4afp8
from halfbyte.checkpoint.config_groups import is_two_level
from halfbyte.checkpoint.shard_plan import Entry
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.schemes import FormName, Scheme

_DEFAULT: FormName = "compressed-tensors"


def stored_entries(
    module: str, scheme: Scheme, shape: tuple[int, int], model_dtype: str, form: FormName = _DEFAULT
) -> list[Entry]:
    """What is stored for the weight ``[out, in]`` of ``module``; ``model_dtype``: ``bf16``, ``f16`` or ``f32``.

    Errors: a scheme that has no stored form, or that does not divide ``shape``.
    """
    if form == "qserve":
        return qserve.stored_entries(module, scheme, shape, model_dtype)
    if form == "w4afp8":
        return w4afp8.stored_entries(module, scheme, shape, model_dtype)
    if is_two_level(scheme.weights):
        return halfbyte_format.stored_entries(module, scheme, shape, model_dtype)
    return compressed_tensors.stored_entries(module, scheme, shape, model_dtype)


def encode(
    module: str,
    scheme: Scheme,
    q: QuantizedTensor,
    model_dtype: str,
    form: FormName = _DEFAULT,
    input_scale: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of :func:`stored_entries`. input_scale: fp32 ``[1]`` of static inputs, where one was measured.

    Errors: ``q`` is not of ``scheme`` with scales in ``model_dtype``.
    """
    if form == "qserve":
        return qserve.encode(module, scheme, q, model_dtype)
    if form == "w4afp8":
        return w4afp8.encode(module, scheme, q, model_dtype, input_scale)
    if is_two_level(scheme.weights):
        return halfbyte_format.encode(module, scheme, q, model_dtype)
    return compressed_tensors.encode(module, scheme, q, model_dtype)


def decode(
    module: str, scheme: Scheme, tensors: Mapping[str, torch.Tensor], form: FormName = _DEFAULT
) -> QuantizedTensor:
    """The weight of ``module`` from its stored tensors (full names).

    Errors: missing tensors; a dtype or shape that the scheme does not call for.
    """
    if form == "qserve":
        return qserve.decode(module, scheme, tensors)
    if form == "w4afp8":
        return w4afp8.decode(module, scheme, tensors)
    if is_two_level(scheme.weights):
        return halfbyte_format.decode(module, scheme, tensors)
    return compressed_tensors.decode(module, scheme, tensors)
