"""Memory in which blocks of one kernel leave parts of sums for each other."""

from __future__ import annotations

import torch

from halfbyte.kernels.hopper.config import MOST_SUMS, MULTIPROCESSORS
from halfbyte.kernels.hopper.driver import captured_by

FLAG_BYTES = 16384
_SPACE_BYTES = FLAG_BYTES + MULTIPROCESSORS * MOST_SUMS * 4
_SPACES = 8


class Spaces:
    """A device's spaces, each for one stream or one CUDA graph, which may run beside the others.

    A space is flags, which are zero between kernels, and behind them the sums.
    """

    def __init__(self, device: int) -> None:
        self._memory = torch.zeros(
            _SPACES * _SPACE_BYTES, dtype=torch.uint8, device=torch.device("cuda", device)
        )
        torch.cuda.current_stream(device).synchronize()  # another stream may use them next
        self._owners: dict[tuple[str, int], int] = {}

    def of(self, owner: tuple[str, int]) -> int | None:
        """The address of an owner's space; none where all have other owners."""
        if owner not in self._owners and len(self._owners) == _SPACES:
            return None
        return self._memory.data_ptr() + self._owners.setdefault(owner, len(self._owners)) * _SPACE_BYTES


_made: dict[int, Spaces] = {}


def space(device: int, stream: int) -> int | None:
    """The address of the space for a kernel on ``stream``, which may be capturing a graph.

    None: no space is left, or none was made before the first graph.
    """
    graph = captured_by(stream)
    if device not in _made:
        if graph is not None:
            return None
        reserve(device)
    return _made[device].of(("stream", stream) if graph is None else ("graph", graph))


def reserve(device: int) -> None:
    """Make the spaces of a device, before the first graph is captured."""
    if device not in _made:
        _made[device] = Spaces(device)
