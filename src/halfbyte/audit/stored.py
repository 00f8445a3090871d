"""What a set of tensors of one module is: the vocabulary, and what scales tell by their shape. No torch, no values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
    "dequant_scale", "_weight_scale", "_scales", "suh", "svh", "weight.absmax", "weight_channel_scale",
)  # fmt: skip
COMPANION_LEAVES = (
    "weight_shape", "weight_zero_point", "weight_g_idx", "qzeros", "g_idx", "s1_szeros", "s2_zeros", "pre_quant_scale",
    "input_scale", "input_global_scale", "input_zero_point", "mcg", "mul1", "_weight_zero_point",
    "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", "weight.quant_state.bitsandbytes__nf4",
    "weight.quant_state.bitsandbytes__fp4", "SCB",
)  # fmt: skip
KV_LEAVES = (
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_scale",
    "output_scale",
    "prob_scale",
    "k_zero_point",
    "v_zero_point",
)
MODULE_LEAVES = frozenset((*CODE_LEAVES, *SCALE_LEAVES, *COMPANION_LEAVES))

QSERVE_LAYOUT = "qserve"
W4AFP8_LAYOUT = "w4afp8"
SCALE_DTYPES = {
    "BF16": "bf16",
    "F16": "f16",
    "F32": "f32",
    "F8_E8M0": "e8m0",
    "U8": "e8m0",
    "F8_E4M3": "e4m3",
}


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


def missing(parts: Parts, *leaves: str) -> list[str]:
    """A line for each of ``leaves`` that is not there."""
    return [f"{leaf} is missing" for leaf in leaves if leaf not in parts]


def grouped_format(
    element: str, shape: tuple[int, ...], scale: Part | None, symmetric: bool, faults: list[str]
) -> TensorFormat | None:
    """Granularity of scales laid out ``[..., out, groups]``, from their shape; misfits are added to ``faults``."""
    if scale is None:
        return None
    dtype = SCALE_DTYPES.get(scale.dtype)
    if dtype is None:
        faults.append(f"scale dtype {scale.dtype} is not known; accepted: {', '.join(SCALE_DTYPES)}")
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
