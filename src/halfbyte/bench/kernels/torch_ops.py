"""torch's own matrix products in BF16 and FP8: what every quantized kernel has to be worth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halfbyte.bench.kernels.contender import Contender, Task, clones, linear
from halfbyte.bench.kernels.operands import Operands
from halfbyte.formats.activations import quantize_activations
from halfbyte.formats.spec import ActivationFormat, TensorFormat

_TOKEN, _TENSOR = ActivationFormat("e4m3", "token"), ActivationFormat("e4m3", "tensor")


def contenders() -> list[Contender]:
    """BF16, FP8 with a scale per channel and token, and FP8 with a scale per tensor (fast accumulation)."""
    return [
        Contender("torch-bf16", "bf16_linear", "bf16", None, "bf16", _bf16),
        Contender("torch-fp8-rowwise", "fp8_linear", "fp8", None, "quantized", _fp8_rowwise),
        Contender("torch-fp8-tensor", "fp8_linear", "fp8_per_tensor", None, "quantized", _fp8_tensor),
    ]


def _bf16(operands: Operands) -> Callable[[int], Task]:
    def call(copy: Any, x: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, copy[0].T, out=room)

    return linear(
        operands,
        weight=operands.weight,
        activations=None,
        copies=clones((operands.weight,), operands.cache),
        call=call,
        feed=lambda x: x,
        quantized=False,
    )


def _fp8_rowwise(operands: Operands) -> Callable[[int], Task]:
    return _scaled_mm(operands, "channel", _TOKEN)


def _fp8_tensor(operands: Operands) -> Callable[[int], Task]:
    return _scaled_mm(operands, "tensor", _TENSOR)


def _scaled_mm(operands: Operands, granularity: str, activations: ActivationFormat) -> Callable[[int], Task]:
    weight = operands.quantized(TensorFormat("e4m3", granularity, scale="f32"))
    # [1, out] or one number, as torch wants them.
    weight_scale = weight.scales.T if granularity == "channel" else weight.scales.reshape(())

    def feed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scale = quantize_activations(x, activations)
        return codes, scale if granularity == "channel" else scale.reshape(())

    def call(copy: Any, fed: Any, room: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(
            fed[0],
            copy[0].T,
            scale_a=fed[1],
            scale_b=weight_scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    return linear(
        operands,
        weight=weight,
        activations=activations,
        copies=clones((weight.codes,), operands.cache),
        call=call,
        feed=feed,
        quantized=True,
    )
