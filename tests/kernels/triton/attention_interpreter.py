"""Runs attention ops in Triton's interpreter: python -m tests.kernels.triton.attention_interpreter CALLS RESULTS."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

import halfbyte.kernels.triton.decode_attention
import halfbyte.kernels.triton.rotary  # noqa: F401
from tests.kernels.triton.interpreter import _convert
from tests.kernels.triton.runners import run

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_with_index(tensor: Any, scope: Any) -> None:
    """A bound of a loop is an array with one value, which numpy no longer takes for a number."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def main(asked: str, answered: str) -> None:
    """Results: an op's outputs, then its arguments as it left them."""
    interpreter._convert_float = _convert
    interpreter._patch_lang_tensor = _patch_tensor_with_index
    with np.errstate(all="ignore"):
        torch.save([(*run(name, *given), *given) for name, given in torch.load(asked)], answered)


if __name__ == "__main__":
    main(*sys.argv[1:])
