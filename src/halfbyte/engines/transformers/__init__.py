"""Quantized checkpoints in transformers: ``from_pretrained`` builds halfbyte's layers on stored weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfbyte.engines.transformers.loading import load
    from halfbyte.engines.transformers.registration import register, unregister

__all__ = ["load", "register", "unregister"]


def __getattr__(name: str) -> Any:
    # ``import halfbyte`` passes through here, and must not load torch.
    if name == "load":
        from halfbyte.engines.transformers.loading import load

        return load
    if name in ("register", "unregister"):
        from halfbyte.engines.transformers import registration

        return getattr(registration, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
