"""What config.json says of weights in QServe's form, ``quant_method: qoq``. No torch here.

Source: SGLang's reader (pull request 6521). OmniServe's files have no such entry; the tensors tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfbyte.checkpoint.stored_quantization import StoredGroup, StoredQuantization
from halfbyte.errors import HalfbyteError
from halfbyte.recipe import PER_ROW, changed
from halfbyte.schemes import Scheme, resolve

QUANT_METHOD = "qoq"
FORM = "qserve"
GROUP_SIZE = 128
BITS = 4
UNDECLARED = f"{QUANT_METHOD} without config"
"""The format of such weights beside a config.json that says nothing of them."""
SCALE_LEAF = "s1_scales"
"""What every quantized weight has, and none in another form."""


def output_config(config: Mapping[str, Any], schemes: Mapping[str, Scheme | None]) -> dict[str, Any]:
    """config.json of a checkpoint with modules quantized as ``schemes`` say (none: left alone), from its source's.

    The dtype is fp16, which QServe's kernels compute in; readers cast what is stored in another one.
    Errors: nothing is quantized, or not all by one scheme: the entry names no modules.
    """
    found = {scheme for scheme in schemes.values() if scheme is not None}
    if len(found) != 1:
        raise HalfbyteError(f"format qserve says one scheme for all modules, not {len(found)}; accepted: one")
    (scheme,) = found
    entry = {"quant_method": QUANT_METHOD, "wbits": BITS, "group_size": scheme.weights.group_size or PER_ROW}
    # transformers calls it "dtype", and SGLang's versions that read this form, "torch_dtype".
    dtypes = dict.fromkeys({"dtype", "torch_dtype"} & config.keys() | {"torch_dtype"}, "float16")
    return {**config, **dict(sorted(dtypes.items())), "quantization_config": entry}


def parse_config(quantization: Mapping[str, Any]) -> StoredQuantization:
    """What such an entry says: one scheme for whatever is stored quantized.

    Errors: other widths than 4 bits; a group size that is neither 128 nor -1.
    """
    bits, size = quantization.get("wbits", BITS), quantization.get("group_size", PER_ROW)
    if bits != BITS:
        raise HalfbyteError(f"quantization_config: wbits {bits!r}; accepted with quant_method qoq: {BITS}")
    if type(size) is not int or size not in (PER_ROW, GROUP_SIZE):
        raise HalfbyteError(
            f"quantization_config: group_size {size!r}; accepted with quant_method qoq: {GROUP_SIZE}, or {PER_ROW} "
            "for one scale per row"
        )
    return StoredQuantization(QUANT_METHOD, (StoredGroup(("Linear",), scheme_of(size), FORM),))


def scheme_of(group_size: int) -> Scheme:
    """The scheme of weights in groups of 128, or (-1) with a scale per row."""
    return changed(resolve("w4a8-int8"), group_size, None).stored_as("qserve")
