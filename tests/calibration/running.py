"""One sample through one block."""

from __future__ import annotations

import torch

from halfbyte.calibration.loaded_block import LoadedBlock, Sample


def run(block: LoadedBlock, hidden: torch.Tensor, ids: torch.Tensor, name: str = "a sample") -> torch.Tensor:
    """The block's output ``[1, T, hidden]``."""
    (output,) = block.run([Sample(hidden, ids, name)])
    return output
