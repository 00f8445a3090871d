"""Module names, taken apart: layer numbers, wrappers and the last part that says what a projection does."""

from __future__ import annotations

import re

WEIGHT = ".weight"
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")
_WRAPPER = ".linear"


def template(name: str) -> str:
    """The name with every layer and expert number replaced by ``*``: what repeats through the model."""
    return _NUMBER.sub(".*", name)


def layer_index(name: str) -> int | None:
    """The first number in a name: the block's index, for weights inside a block."""
    found = _NUMBER.search(name)
    return int(found[1]) if found else None


def unwrapped(name: str) -> str:
    """The name without a trailing ``.linear``, which some families put around a projection."""
    return name.removesuffix(_WRAPPER)


def split(name: str) -> tuple[str, str]:
    """Parent and last part of a module name without wrappers: ``a.q_proj.linear`` -> ``a``, ``q_proj``."""
    parent, _, leaf = unwrapped(name).rpartition(".")
    return parent, leaf
