"""Putting halfbyte's quantizer into transformers' tables, and taking it out again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer

from halfbyte.engines.transformers.config import (
    COMPRESSED_TENSORS,
    HALFBYTE,
    QSERVE,
    W4AFP8,
    StoredCompressedTensorsConfig,
    StoredConfig,
)

_CONFIGS = {
    COMPRESSED_TENSORS: StoredCompressedTensorsConfig,
    **dict.fromkeys((HALFBYTE, QSERVE, W4AFP8), StoredConfig),
}


def make_quantizer(config: Any, **kwargs: Any) -> HfQuantizer:
    """What transformers calls in place of a quantizer class.

    transformers loads its quantizers halfway through loading itself, so ours is imported only when it is
    used.
    """
    from halfbyte.engines.transformers.quantizer import choose_quantizer

    return choose_quantizer(config, **kwargs)


_replaced: dict[str, tuple[Any, Any]] = {}


def register() -> None:
    """Make ``from_pretrained`` run the checkpoints that halfbyte reads on halfbyte's layers. Idempotent.

    transformers' own ``register_quantizer`` refuses names that are taken, so the tables are written directly.
    """
    if _replaced:
        return
    quantizers, configs = auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    for method, config in _CONFIGS.items():
        _replaced[method] = quantizers.get(method), configs.get(method)
        quantizers[method], configs[method] = make_quantizer, config


def unregister() -> None:
    """Leave such checkpoints to transformers again, as before :func:`register`. Idempotent."""
    for method, entries in _replaced.items():
        for table, entry in zip(
            (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING), entries, strict=True
        ):
            if entry is None:
                table.pop(method, None)
            else:
                table[method] = entry
    _replaced.clear()


@contextmanager
def registered() -> Iterator[None]:
    """Registered inside, whatever it was before, and as before afterwards."""
    was = bool(_replaced)
    register()
    try:
        yield
    finally:
        if not was:
            unregister()
