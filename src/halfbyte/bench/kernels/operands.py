"""Random operands of one shape, and the quantized forms of its weight, each made once."""

from __future__ import annotations

import torch

from halfbyte.formats.quantize import quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat

Shape = tuple[int, int]
"""out_features, in_features: N and K."""

_WEIGHT_STD = 0.02
_SEED = 0


class Inputs:
    """Gaussian BF16 inputs ``x [most_rows, in_features]`` on a GPU.

    Real numbers matter: on zeros the same kernel draws less power and looks faster. cache: bytes of the GPU's
    second-level cache.
    """

    def __init__(self, in_features: int, most_rows: int, device: torch.device) -> None:
        self.device = device
        self.cache = second_level_cache(device)
        self._generator = torch.Generator(device).manual_seed(_SEED)
        self.x = self.random(most_rows, in_features)

    def random(self, *size: int) -> torch.Tensor:
        """More Gaussian BF16 numbers."""
        return torch.randn(*size, generator=self._generator, device=self.device, dtype=torch.bfloat16)


class Operands(Inputs):
    """Inputs with a Gaussian BF16 weight ``[N, K]``."""

    def __init__(self, shape: Shape, most_rows: int, device: torch.device) -> None:
        super().__init__(shape[1], most_rows, device)
        self.shape = shape
        self.weight = self.random(*shape).mul_(_WEIGHT_STD)
        self._quantized: dict[tuple[TensorFormat, float], QuantizedTensor] = {}

    def quantized(self, fmt: TensorFormat) -> QuantizedTensor:
        """The weight in ``fmt``, rounded to nearest; scales of the model's own dtype are BF16."""
        return self._rounded(fmt, 1.0)

    def seven(self, group_size: int | None) -> QuantizedTensor:
        """The weight in symmetric INT4 without the code -8: what kernels for sign and magnitude want to see.

        group_size: none for one scale per output channel.
        """
        granularity = "group" if group_size else "channel"
        return self._rounded(TensorFormat("int4", granularity, group_size), 7.5 / 7)

    def _rounded(self, fmt: TensorFormat, ratio: float) -> QuantizedTensor:
        key = (fmt.with_scale("bf16"), ratio)
        if key not in self._quantized:
            self._quantized[key] = quantize(self.weight, key[0], ratio=ratio)
        return self._quantized[key]


def second_level_cache(device: torch.device) -> int:
    """Bytes; none on a CPU, where nothing is timed."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0
