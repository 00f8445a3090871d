"""Experts that are modules of their own in a list, and how to tell which tokens reach them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from halfbyte.models.layout import WeightSource

_IN_LIST = re.compile(r"(?P<list>.*\.experts)\.(?P<index>\d+)\.")
_ANY = (-(1 << 62), 1 << 62)


@dataclass
class ListedExperts:
    """The experts of one ``mixture``.

    parent: what the checkpoint calls their list. linears: modules by expert and name of the layer.
    """

    parent: str
    mixture: nn.Module
    experts: nn.Module
    linears: dict[int, dict[str, nn.Module]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The layers' names."""
        return [name for linears in self.linears.values() for name in linears]


def listed_experts(
    model: nn.Module, names: Iterable[str], places: Mapping[str, WeightSource]
) -> list[ListedExperts]:
    """The lists of experts that hold the linear layers ``names``; others among these are left out."""
    found: dict[str, ListedExperts] = {}
    for name in names:
        entry, stored = _IN_LIST.match(places[name].tensor), _IN_LIST.match(name)
        if entry is None or stored is None:
            continue
        path, index = entry["list"], int(entry["index"])
        if path not in found:
            mixture = model.get_submodule(path.rpartition(".")[0])
            found[path] = ListedExperts(stored["list"], mixture, model.get_submodule(path))
        owner = model.get_submodule(places[name].tensor.rpartition(".")[0])
        found[path].linears.setdefault(index, {})[name] = owner
    return list(found.values())


def row_keys(rows: torch.Tensor) -> torch.Tensor:
    """A number ``[tokens]`` for each row ``[tokens, features]``, equal for rows of the same bits."""
    bits = rows.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()])
    # Sums of integers wrap around, but do not depend on how they are added up.
    factors = torch.randint(_ANY[0], _ANY[1], rows.shape[-1:], generator=torch.Generator().manual_seed(0))
    return (bits.long() * factors.to(rows.device)).sum(-1)
