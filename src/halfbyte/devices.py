"""Devices: their names as people give them, and how precisely they multiply."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from halfbyte.errors import HalfbyteError


def device_named(name: torch.device | str) -> torch.device:
    """``cpu``, ``cuda`` (the current GPU), ``cuda:N``, or ``auto``: a GPU if there is one.

    Errors: another name; a GPU that is not there.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise HalfbyteError(f"device {str(name)!r} is not known; accepted: auto, cpu, cuda, cuda:N")
    if device.type == "cpu":
        return torch.device("cpu")
    if not gpus:
        raise HalfbyteError(
            f"device {str(name)!r}: torch {torch.__version__} finds no CUDA GPU; accepted: cpu, auto"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= gpus:
        raise HalfbyteError(
            f"device {str(name)!r} is not there; accepted: {', '.join(f'cuda:{i}' for i in range(gpus))}"
        )
    return torch.device("cuda", index)


def hardware(device: torch.device | str) -> str:
    """Name of what computes: a GPU's (``NVIDIA H100 80GB HBM3``), or ``cpu``. Another one adds up in another order."""
    place = torch.device(device)
    return torch.cuda.get_device_name(place) if place.type == "cuda" else place.type


@contextmanager
def tf32_products() -> Iterator[None]:
    """Within it GPUs multiply fp32 matrices with inputs rounded to TF32 (11 bits), an eighth of the time.

    16-bit floats lose nothing by that; sums are fp32 in any case.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
