"""Runs linear layers in Triton's interpreter: python -m tests.kernels.triton.linear_interpreter CASES RESULTS."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from halfbyte.kernels.triton import linear_w4a8, linear_w4a16, linear_w8
from halfbyte.kernels.triton.linear_plan import Gpu
from tests.kernels.triton.interpreter import _convert, _fma

# So few multiprocessors that even small problems are split along K, but not all of them.
_GPU = Gpu(capability=90, multiprocessors=2)

_patch_tensor = interpreter._patch_lang_tensor


def _numbers(handle: Any) -> np.ndarray:
    """A tile's values, of which the interpreter keeps the bits where numpy has no such dtype."""
    kind = handle.dtype.scalar
    if kind in (tl.bfloat16, tl.float8e4nv):
        return _convert(handle.data, kind, tl.float32, None).view(np.float32)
    return handle.data


def _dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """Triton's own multiplies the bits of BF16."""
    kind = d.data.dtype
    return TensorHandle(_numbers(a).astype(kind) @ _numbers(b).astype(kind) + d.data, d.dtype.scalar)


def _subtract(self: Any, a: Any, b: Any) -> Any:
    """Triton's own subtracts the bits of BF16."""
    if a.dtype.scalar != tl.bfloat16:
        return self.binary_op(a, b, np.subtract)
    return TensorHandle(_convert(_numbers(a) - _numbers(b), tl.float32, tl.bfloat16, None), tl.bfloat16)


def _patch_index(tensor: Any, scope: Any) -> None:
    """Triton's own relies on conversions that numpy has given up."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def main(asked: str, answered: str) -> None:
    interpreter._convert_float = _convert
    interpreter._patch_lang_tensor = _patch_index
    InterpreterBuilder.create_fma = _fma
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.create_fsub = _subtract
    for module in (linear_w4a16, linear_w4a8, linear_w8):
        module.gpu_of = lambda device: _GPU
    with np.errstate(all="ignore"):
        cases = torch.load(asked, weights_only=False)
        torch.save([case.run(torch.device("cpu")) for case in cases], answered)


if __name__ == "__main__":
    main(*sys.argv[1:])
