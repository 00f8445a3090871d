"""On which device a model is to run. Said before it is loaded, so that its layers are packed there and only there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_target: ContextVar[torch.device | None] = ContextVar("device to load to", default=None)


@contextmanager
def placed_on(device: torch.device) -> Iterator[None]:
    """Within this context quantized layers are packed on ``device`` once they are loaded."""
    token = _target.set(device)
    try:
        yield
    finally:
        _target.reset(token)


def target_device() -> torch.device | None:
    """The device of :func:`placed_on`; none outside of it, where models stay where they are loaded to."""
    return _target.get()
