"""Bytes of stored tensors as numpy arrays, whole or some rows of them."""

from __future__ import annotations

import numpy as np

from halfbyte.audit.elements import as_array
from halfbyte.checkpoint.reader import Checkpoint


def raw_bytes(checkpoint: Checkpoint, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
    """The bytes (flat uint8) of a tensor, or of rows ``start:stop`` of its first axis."""
    import torch

    tensor = checkpoint.load(name) if rows is None else checkpoint.load_rows(name, *rows)
    return tensor.reshape(-1).view(torch.uint8).numpy()


def values(checkpoint: Checkpoint, name: str, rows: tuple[int, int] | None = None) -> np.ndarray:
    """Values of a tensor in its shape, or of some rows: see :func:`halfbyte.audit.elements.as_array`."""
    info = checkpoint.info(name)
    shape = info.shape if rows is None else (rows[1] - rows[0], *info.shape[1:])
    return as_array(raw_bytes(checkpoint, name, rows), info.dtype).reshape(shape)
