"""What a CUDA graph's capture needs of Python: that nothing else happens to the GPU meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Collects garbage first and none within: an old graph or its memory, freed by Python's collector while another
    graph is captured, makes that capture invalid (``cudaErrorStreamCaptureInvalidated``)."""
    collected = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
