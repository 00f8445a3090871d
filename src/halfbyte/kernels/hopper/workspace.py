"""Memory in which blocks of one kernel leave parts of sums for each other."""

from __future__ import annotations

from functools import cache

import torch

from halfbyte.kernels.hopper.config import MOST_SUMS, MULTIPROCESSORS

FLAG_BYTES = 16384
_SPACE_BYTES = FLAG_BYTES + MULTIPROCESSORS * MOST_SUMS * 4
_SPACES = 4


def space(device: int, stream: int) -> int | None:
    """The address of ``stream``'s space: flags, which are zero between kernels, and behind them the sums.

    Kernels on two streams may run at once, so each stream has its own; none is left for a fifth one, nor can the
    first be made while a CUDA graph is captured.
    """
    if _reserved.cache_info().currsize == 0 and torch.cuda.is_current_stream_capturing():
        return None
    spaces, owners = _reserved(device)
    if stream not in owners and len(owners) == _SPACES:
        return None
    return spaces.data_ptr() + owners.setdefault(stream, len(owners)) * _SPACE_BYTES


def reserve(device: int) -> None:
    """Make the spaces of a device, before the first graph is captured."""
    _reserved(device)


@cache
def _reserved(device: int) -> tuple[torch.Tensor, dict[int, int]]:
    nbytes = _SPACES * _SPACE_BYTES
    return torch.zeros(nbytes, dtype=torch.uint8, device=torch.device("cuda", device)), {}
