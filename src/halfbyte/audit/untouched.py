"""Tensors that quantization leaves alone: each must equal its source byte for byte."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from halfbyte.audit.raw import raw_bytes
from halfbyte.audit.verification import Finding
from halfbyte.checkpoint.headers import TensorInfo
from halfbyte.checkpoint.reader import Checkpoint

_CHUNK_BYTES = 16 << 20


def compare_bytes(checkpoint: Checkpoint, source: Checkpoint, name: str) -> Finding | None:
    """An error that names the first difference of tensor ``name`` in both checkpoints; none if they are equal."""
    if text := other_form(checkpoint, source, name):
        return Finding("error", "untouched", name, text)
    for at, rows in _pieces(checkpoint.info(name)):
        mine, theirs = raw_bytes(checkpoint, name, rows), raw_bytes(source, name, rows)
        if not np.array_equal(mine, theirs):
            different = np.flatnonzero(mine != theirs)
            first = int(different[0])
            text = (
                f"byte {at + first} is {mine[first]:#04x}, in the source {theirs[first]:#04x}; "
                "a tensor that is not quantized must equal its source"
            )
            return Finding("error", "untouched", name, text)
    return None


def other_form(checkpoint: Checkpoint, source: Checkpoint, name: str) -> str | None:
    """How tensor ``name`` of the source differs in dtype or shape, or that it is missing; none if it does not."""
    if name not in checkpoint.tensors:
        return f"{name} is missing; the source holds it"
    here, there = checkpoint.info(name), source.info(name)
    if (here.dtype, here.shape) == (there.dtype, there.shape):
        return None
    return f"is {here.dtype} {list(here.shape)}; in the source {there.dtype} {list(there.shape)}"


def not_finite(checkpoint: Checkpoint, info: TensorInfo) -> Finding | None:
    """A warning about NaN or Inf in a plain float tensor."""
    from halfbyte.audit.elements import as_array

    if info.dtype not in ("BF16", "F16", "F32"):
        return None
    for _, rows in _pieces(info):
        found = as_array(raw_bytes(checkpoint, info.name, rows), info.dtype)
        if not np.isfinite(found).all():
            count = int(np.count_nonzero(~np.isfinite(found)))
            return Finding("warning", "finite", info.name, f"holds {count} NaN or Inf")
    return None


def _pieces(info: TensorInfo) -> Iterator[tuple[int, tuple[int, int] | None]]:
    """Parts of a tensor of about 16 MB: the byte where each starts, and its rows (none: all of it)."""
    if not info.shape or not info.nbytes:
        yield 0, None
        return
    row = info.nbytes // info.shape[0]
    step = max(1, _CHUNK_BYTES // max(1, row))
    for start in range(0, info.shape[0], step):
        yield start * row, (start, min(info.shape[0], start + step))
