"""Runs ops in Triton's interpreter: python -m tests.kernels.triton.interpreter CALLS RESULTS (by torch.save)."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

import halfbyte.kernels.triton.activations
import halfbyte.kernels.triton.experts
import halfbyte.kernels.triton.feedback
import halfbyte.kernels.triton.linear_inputs
import halfbyte.kernels.triton.norms
import halfbyte.kernels.triton.scaled_product  # noqa: F401
from tests.kernels.triton.exact import fma
from tests.kernels.triton.runners import run

_TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
}
_BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32}


def _convert(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Floats rounded to nearest even, E4M3 with saturation: the GPU's instructions. Triton's own truncates."""
    plain = torch.from_numpy(np.ascontiguousarray(values).copy()).view(_TORCH[source.scalar]).float()
    if target.scalar == tl.float8e4nv:
        plain = plain.clamp(-448, 448)
    size = target.scalar.primitive_bitwidth
    codes = plain.to(_TORCH[target.scalar]).view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[size])
    return codes.numpy().view(_BITS[size]).reshape(values.shape)


def _fma(self: Any, x: Any, y: Any, z: Any) -> Any:
    """Rounded once. Triton's own rounds the product too."""
    return interpreter.TensorHandle(fma(x.data, y.data, z.data), z.dtype.scalar)


def main(asked: str, answered: str) -> None:
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_fma = _fma
    with np.errstate(all="ignore"):
        torch.save([run(name, *arguments) for name, arguments in torch.load(asked)], answered)


if __name__ == "__main__":
    main(*sys.argv[1:])
