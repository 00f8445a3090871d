"""Random experts of one product, and rows for them as a routing orders them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from halfbyte.bench.experts.mixtures import Mixture, choices
from halfbyte.formats.quantize import quantize
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat

_WEIGHT_STD = 0.02
_SEED = 0
# So many experts have codes of their own; the others repeat them, with scales of their own.
_DISTINCT = 8


class Stack:
    """Gaussian experts ``[N, K]``, quantized in as many formats as are asked for."""

    def __init__(self, mixture: Mixture, gemm: str, device: torch.device) -> None:
        self.mixture, self.gemm, self.device = mixture, gemm, device
        self.shape = mixture.product(gemm)
        self._generator = torch.Generator(device).manual_seed(_SEED)
        count = min(_DISTINCT, mixture.experts)
        self._weights = [self.normal(*self.shape).mul_(_WEIGHT_STD) for _ in range(count)]
        # Powers of two: they change no digit of a scale.
        self._factors = [2.0 ** (index // _DISTINCT % 3) for index in range(mixture.experts)]

    def normal(self, *size: int) -> torch.Tensor:
        """BF16."""
        return torch.randn(*size, generator=self._generator, device=self.device, dtype=torch.bfloat16)

    def quantized(self, fmt: TensorFormat, ratio: float = 1.0) -> list[QuantizedTensor]:
        """Each expert, rounded to nearest; scales of the model's own dtype are BF16."""
        settled = fmt if fmt.scale in ("int8", "f32") else fmt.with_scale("bf16")
        distinct = [quantize(weight, settled, ratio=ratio) for weight in self._weights]
        return [_scaled(distinct[i % _DISTINCT], factor) for i, factor in enumerate(self._factors)]

    def plain(self) -> list[torch.Tensor]:
        """Each expert in BF16."""
        return [self._weights[i % _DISTINCT] * factor for i, factor in enumerate(self._factors)]

    def routings(self, tokens: int, routing: str, count: int) -> list[Routing]:
        """``count`` different ones with inputs of their own."""
        generator = torch.Generator(self.device).manual_seed(tokens)
        drawn = [choices(self.mixture, tokens, routing, generator) for _ in range(count)]
        inputs = tokens if self.gemm == "gate-up" else tokens * self.mixture.top_k
        x = self.normal(inputs, self.shape[1])
        return [Routing(ids, x, self.mixture.experts) for ids in drawn]


@dataclass(frozen=True)
class Routing:
    """ids: int32 ``[T, top_k]``. x: ``[T, K]``, one row a token, or ``[T * top_k, K]``, one a choice."""

    ids: torch.Tensor
    x: torch.Tensor
    experts: int

    @cached_property
    def order(self) -> torch.Tensor:
        """The choices, those of expert 0 first, each expert's in the order of tokens."""
        return self.ids.flatten().argsort(stable=True)

    @cached_property
    def rows(self) -> torch.Tensor:
        """The inputs of the choices in that order."""
        choices_a_row = self.ids.numel() // len(self.x)
        return self.x[self.order // choices_a_row]

    @cached_property
    def counts(self) -> torch.Tensor:
        """int64 ``[experts]``: rows of each."""
        return torch.bincount(self.ids.flatten(), minlength=self.experts)

    @cached_property
    def offsets(self) -> list[int]:
        """Where each expert's rows begin, and where the last one's end."""
        return [0, *self.counts.cumsum(0).tolist()]

    @property
    def touched(self) -> int:
        """Experts that have rows."""
        return int(self.counts.count_nonzero())


def checked_experts(routing: Routing, most: int = 4) -> Sequence[int]:
    """Experts whose rows are compared: the first that have some, and the last one."""
    with_rows = routing.counts.nonzero().flatten().tolist()
    return list(dict.fromkeys([*with_rows[: most - 1], with_rows[-1]]))


def _scaled(q: QuantizedTensor, factor: float) -> QuantizedTensor:
    if q.outer_scales is not None:
        return replace(q, outer_scales=q.outer_scales * factor)
    return replace(q, scales=q.scales * factor)
