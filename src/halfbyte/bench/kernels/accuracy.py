"""How far a GPU result is from float64 arithmetic on the same quantized operands."""

from __future__ import annotations

import random

import torch

from halfbyte.formats.activations import dequantize_activations, quantize_activations
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import ActivationFormat
from halfbyte.kernels.reference import exact_weight

# A multiple of the rows that share a block's scale, so that each part of a weight can be read alone.
_STRIP = 128
_STRIPS_AT_ONCE = 32
_SAMPLED_STRIPS = 4
_WHOLE_PRODUCTS = 1 << 37
_POISONED_BLOCKS = 4
# Repeated, NaN in every float dtype.
NAN_BYTE = 0xFF


class WrongResultError(Exception):
    """A result of the wrong shape, or one that holds NaN, Inf or memory that nobody wrote."""


def checked_strips(out_features: int, in_features: int, rows: int) -> list[slice]:
    """Output columns to compare, in strips of 128: all of them, or 512 where all would take float64 too long.

    The 512 are the first strip, the last one and two chosen at random; above 2^37 products they suffice.
    """
    starts = list(range(0, out_features, _STRIP))
    if rows * out_features * in_features > _WHOLE_PRODUCTS and len(starts) > _SAMPLED_STRIPS:
        chosen = random.Random(out_features + in_features).sample(starts[1:-1], _SAMPLED_STRIPS - 2)
        starts = sorted([starts[0], *chosen, starts[-1]])
        return [slice(start, min(start + _STRIP, out_features)) for start in starts]
    step = _STRIP * _STRIPS_AT_ONCE
    return [slice(start, min(start + step, out_features)) for start in range(0, out_features, step)]


def relative_error(
    result: torch.Tensor,
    x: torch.Tensor,
    weight: QuantizedTensor | torch.Tensor,
    activations: ActivationFormat | None,
) -> float:
    """``||result - exact|| / ||exact||`` over :func:`checked_strips`.

    result ``[M, out]``; x ``[M, in]``, which ``activations`` quantizes (exact: its codes times its scales);
    weight ``[out, in]``, quantized (exact: its codes times its scales) or plain.
    Errors: WrongResultError, for any element of ``result``.
    """
    out_features, in_features = weight.shape
    require_finite(result, (x.shape[0], out_features))
    inputs = exact_inputs(x, activations)
    off, size = inputs.new_zeros(()), inputs.new_zeros(())
    for strip in checked_strips(out_features, in_features, x.shape[0]):
        exact = inputs @ exact_rows(weight, strip).T
        off += (result[:, strip].double() - exact).square_().sum()
        size += exact.square_().sum()
    return float((off / size).sqrt())


def require_finite(result: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Errors: WrongResultError, a result of another shape or with NaN or Inf in it."""
    if tuple(result.shape) != shape:
        raise WrongResultError(f"result has shape {list(result.shape)}, not {list(shape)}")
    wrong = int((~torch.isfinite(result)).sum())
    if wrong:
        raise WrongResultError(f"{wrong} of {result.numel()} results are NaN, Inf or were never written")


def exact_inputs(x: torch.Tensor, activations: ActivationFormat | None) -> torch.Tensor:
    """``x [M, in]`` as the scheme quantizes it, float64."""
    if activations is None:
        return x.double()
    codes, scales = quantize_activations(x, activations)
    return dequantize_activations(codes, scales.double(), activations.group_size)


def exact_rows(weight: QuantizedTensor | torch.Tensor, rows: slice) -> torch.Tensor:
    """``weight[rows]`` without any rounding, float64. Blocks of a weight with block scales must be whole."""
    if isinstance(weight, torch.Tensor):
        return weight[rows].double()
    tall = weight.format.block_shape[0] if weight.format.block_shape else 1
    scale_rows = slice(rows.start // tall, -(-rows.stop // tall))

    def cut(scales: torch.Tensor | None) -> torch.Tensor | None:
        return scales if scales is None or scales.shape[0] == 1 else scales[scale_rows]

    scales = cut(weight.scales)
    assert scales is not None
    return exact_weight(
        QuantizedTensor(
            weight.format, weight.codes[rows], scales, cut(weight.zero_points), cut(weight.outer_scales)
        )
    )


def poison(nbytes: int, device: torch.device) -> None:
    """Leaves NaN in the memory that the allocator hands out next for so many bytes.

    A kernel that allocates its own result and does not write all of it then shows NaN.
    """
    for block in [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(_POISONED_BLOCKS)]:
        block.fill_(NAN_BYTE)
