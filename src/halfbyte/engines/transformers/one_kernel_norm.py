"""transformers' RMSNorms in one kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from halfbyte.kernels.fused import rms_norm


def run_in_one_kernel(norm: nn.Module) -> None:
    """For good, unless somebody has patched its forward already. In its dict it survives copies and files."""
    norm.__dict__.setdefault("forward", partial(_one_kernel_norm, norm))


def is_one_kernel(module: nn.Module) -> bool:
    """Whether its forward is what :func:`run_in_one_kernel` made of it."""
    return getattr(module.__dict__.get("forward"), "func", None) is _one_kernel_norm


def _one_kernel_norm(norm: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():
        return type(norm).forward(norm, hidden_states)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    return rms_norm(rows, None, norm.weight, norm.variance_epsilon)[0].view(hidden_states.shape)
