"""Registers with transformers when, and only when, transformers loads its quantizers.

transformers has no entry points for quantizers: whoever adds one must be imported before a checkpoint is
loaded. Its quantizers take seconds to import, and ``import halfbyte`` must not. So a finder waits for that
one module and registers right after it has run. ``HALFBYTE_TRANSFORMERS=0`` in the environment leaves
transformers as it is.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

logger = logging.getLogger(__name__)

SWITCH = "HALFBYTE_TRANSFORMERS"
_AWAITED = "transformers.quantizers.auto"


def install() -> None:
    """Register now if transformers' quantizers are there, else as soon as they are. Idempotent."""
    if os.environ.get(SWITCH) == "0":
        return
    if _AWAITED in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds the awaited module as Python would, and lets its loader register afterwards."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _AWAITED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        sys.meta_path.remove(self)
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            _register()

        setattr(spec.loader, "exec_module", run_and_register)  # noqa: B010 - mypy forbids the plain assignment
        return spec


def _register() -> None:
    # A transformers that this version does not know must still import; its own quantizers then stay in place.
    try:
        from halfbyte.engines.transformers.registration import register

        register()
    except (ImportError, AttributeError) as error:
        logger.warning("halfbyte cannot run checkpoints in this version of transformers: %s", error)
