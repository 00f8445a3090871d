"""Whether a layer's modules are run by the forwards of their classes alone, so that another may do their work."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module

from halfbyte.engines.transformers.one_kernel_norm import is_one_kernel

# transformers' own hooks that note attention weights: they look at what the attention returns, and fused layers
# have it return that.
_OWN_HOOKS = "transformers.utils.output_capturing"


class Untouched:
    """The modules inside of a layer, as they were, for comparison."""

    def __init__(self, layer: nn.Module) -> None:
        self._children = [
            (parent, name, child)
            for parent in layer.modules()
            for name, child in parent._modules.items()
            if child is not None
        ]

    def holds(self) -> bool:
        """Whether nobody has replaced, patched or hooked any of them."""
        return not torch_module._has_any_global_hook() and all(
            parent._modules.get(name) is child and not _is_touched(child)
            for parent, name, child in self._children
        )


def _is_touched(module: nn.Module) -> bool:
    """Whether calling it does something before, after or instead of the forward of its class."""
    if "forward" in module.__dict__ and not is_one_kernel(module):
        return True
    if not module._forward_hooks and not module._forward_pre_hooks:
        return False
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(getattr(hook, "__module__", None) != _OWN_HOOKS for hook in hooks)
