"""What the kernels for one token on a fixed cache take."""

from __future__ import annotations

import torch
import triton

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.cached_attention import HEAD_SIZES
from halfbyte.kernels.triton.rows import described

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_cache(op: str, heads: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Errors: keys and values that are no cache, or not one for ``heads`` ``[B, ...]``; what no kernel runs on."""
    if heads.device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise HalfbyteError(f"{op} runs on a CUDA device, not on {heads.device.type}")
    if keys.dim() != 4 or keys.shape != values.shape or not (keys.is_contiguous() and values.is_contiguous()):
        raise HalfbyteError(
            f"{op} takes contiguous keys and values of one shape [B, heads, slots, size], not "
            f"{described(keys)} and {described(values)}"
        )
    kind = heads.dtype, heads.device
    if (
        heads.dtype not in _DTYPES
        or (keys.dtype, keys.device) != kind
        or (values.dtype, values.device) != kind
    ):
        raise HalfbyteError(
            f"{op} takes bfloat16, float16 or float32, the cache alike, not {described(heads)} with {described(keys)}"
        )
    if keys.shape[-1] not in HEAD_SIZES:
        raise HalfbyteError(f"{op} takes heads of {sorted(HEAD_SIZES)} values, not of {keys.shape[-1]}")
    if heads.shape[0] != keys.shape[0]:
        raise HalfbyteError(f"{op} takes a cache of {heads.shape[0]} sequences here, not of {keys.shape[0]}")
