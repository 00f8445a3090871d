"""The ranges that scales have to cover, and the check that they are finite, in one pass over the weight."""

from __future__ import annotations

import torch

from halfbyte.errors import HalfbyteError, NonFiniteError
from halfbyte.formats.parallel import for_each
from halfbyte.formats.tiles import Tiling

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
FLOAT_DTYPES = (*_BITS, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


def as_float(weight: torch.Tensor) -> torch.Tensor:
    """The weight in a dtype that the passes below read: bf16, f16 and f32 as they are, others in fp32.

    Errors: a dtype that holds no floating-point numbers.
    """
    if weight.dtype not in FLOAT_DTYPES:
        accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
        raise HalfbyteError(f"a weight of dtype {weight.dtype} cannot be quantized; accepted: {accepted}")
    return weight if weight.dtype in _BITS else weight.float()


def absolute_maxima(weight: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """Largest magnitude of each tile, fp32 ``[down, 1, across, 1]``.

    Errors: NaN or Inf, with the place and value of the first one.
    """
    tiles = tiling.tiles(weight)
    # Without their signs, floats order as their bits do, NaN above Inf above all numbers: integer maxima are
    # several times faster than float ones on a CPU and settle the question of finiteness too.
    integer = _BITS[weight.dtype]
    largest = torch.zeros(tiling.down, 1, tiling.across, 1, dtype=integer, device=weight.device)

    def measure(chunks: list[tuple[slice, slice]]) -> None:
        for down, rows in chunks:
            magnitudes = tiles[down, rows].view(integer) & torch.iinfo(integer).max
            part = magnitudes.amax(3, keepdim=True).amax(1, keepdim=True)
            largest[down] = torch.maximum(largest[down], part)

    for_each(measure, tiling.bands(weight.device), weight.device)
    maxima = largest.view(weight.dtype).float()
    if not bool(maxima.isfinite().all()):
        raise _non_finite(weight)
    return maxima


def signed_ranges(weight: torch.Tensor, tiling: Tiling) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of each tile, zero included, fp32 ``[down, 1, across, 1]`` each.

    Errors: NaN or Inf, with the place and value of the first one.
    """
    tiles = tiling.tiles(weight)
    low = torch.zeros(tiling.down, 1, tiling.across, 1, device=weight.device)
    high = torch.zeros_like(low)

    def measure(chunks: list[tuple[slice, slice]]) -> None:
        for down, rows in chunks:
            part = tiles[down, rows].float()
            low[down] = torch.minimum(low[down], part.amin(3, keepdim=True).amin(1, keepdim=True))
            high[down] = torch.maximum(high[down], part.amax(3, keepdim=True).amax(1, keepdim=True))

    for_each(measure, tiling.bands(weight.device), weight.device)
    if not bool((low.isfinite() & high.isfinite()).all()):
        raise _non_finite(weight)
    return low, high


def _non_finite(weight: torch.Tensor) -> NonFiniteError:
    place = tuple((~weight.isfinite()).nonzero()[0].tolist())
    return NonFiniteError(
        f"weight {list(weight.shape)} holds {weight[place].item()} at {list(place)}; accepted: finite numbers only"
    )
