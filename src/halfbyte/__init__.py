"""halfbyte: quantized checkpoints of causal language models, made, checked and run at half a byte per weight.

``import halfbyte`` is light: torch and transformers load when something needs them. It also arranges that
transformers, once imported, runs quantized checkpoints on halfbyte's layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from halfbyte.engines.transformers.autoregister import install as _install
from halfbyte.errors import HalfbyteError
from halfbyte.version import VERSION

if TYPE_CHECKING:
    from halfbyte.api import evaluate, inspect, load, quantize, verify
    from halfbyte.recipe import Recipe

__version__ = VERSION
__all__ = ["HalfbyteError", "Recipe", "evaluate", "inspect", "load", "quantize", "verify"]

_install()


def __getattr__(name: str) -> Any:
    if name == "Recipe":
        from halfbyte.recipe import Recipe

        return Recipe
    if name in __all__:
        from halfbyte import api

        return getattr(api, name)
    raise AttributeError(f"module 'halfbyte' has no attribute {name!r}")
