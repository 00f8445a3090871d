"""Where the tensors of a checkpoint lie in transformers' model, which renames some and merges experts into one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from halfbyte.errors import HalfbyteError
from halfbyte.models.layout import ModelLayout, WeightSource

_MERGED = [MergeModulelist]
_MERGED_AND_JOINED = [MergeModulelist, Concatenate]


@dataclass(frozen=True)
class Places:
    """Places are sources whose ``tensor`` is a parameter (or persistent buffer) of the model.

    tensors: stored tensor -> its place; those that the model has no place for are not in it.
    modules: name of a layout's module -> place of its ``[out, in]`` weight.
    ties: parameter that the checkpoint leaves out -> the one that it shares its values with.
    """

    tensors: Mapping[str, WeightSource]
    modules: Mapping[str, WeightSource]
    ties: Mapping[str, str]


def view_at(tensor: torch.Tensor, place: WeightSource) -> torch.Tensor:
    """The part of ``tensor``, a parameter of the model, that ``place`` means; shares its memory."""
    view = tensor if place.expert is None else tensor[place.expert]
    if place.transposed:
        view = view.t()
    return view if place.rows is None else view[slice(*place.rows)]


def find_places(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]], layout: ModelLayout) -> Places:
    """Places in ``model`` (on the meta device) for the stored tensors of ``shapes`` and the modules of ``layout``.

    Errors: a parameter that no stored tensor fills; a shape that is not the model's.
    """
    entries = model.state_dict()
    tensors = _Placing(model, entries, shapes).run()
    _require_shapes(entries, shapes, tensors)
    modules = {}
    for module in layout.modules:
        place = tensors.get(module.source.tensor)
        if place is not None:
            whole = place == WeightSource(place.tensor)
            modules[module.name] = replace(module.source, tensor=place.tensor) if whole else place
    return Places(tensors, modules, _ties(model, entries, shapes, tensors))


class _Placing:
    """One pass over the stored tensors in the order in which transformers' loader would merge them."""

    def __init__(
        self,
        model: PreTrainedModel,
        entries: Mapping[str, torch.Tensor],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._entries = entries
        self._shapes = shapes
        self._prefix = model.base_model_prefix
        conversions = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._merged: Counter[tuple[str, str]] = Counter()

    def run(self) -> dict[str, WeightSource]:
        places = {}
        for name in sorted(self._shapes, key=_natural):
            entry, pattern = self._rename(name, self._renamings, self._converters)
            if entry not in self._entries and name in self._entries:
                entry, pattern = self._rename(name, [], [])
            if entry in self._entries:
                places[name] = WeightSource(entry) if pattern is None else self._merge(name, entry, pattern)
        return places

    def _rename(
        self, name: str, renamings: Sequence[WeightRenaming], converters: Sequence[WeightConverter]
    ) -> tuple[str, str | None]:
        return rename_source_key(name, renamings, converters, self._prefix, self._entries)

    def _merge(self, name: str, entry: str, pattern: str) -> WeightSource:
        converter = next(found for found in self._converters if pattern in found.source_patterns)
        operations = [type(operation) for operation in converter.operations]
        if operations not in (_MERGED, _MERGED_AND_JOINED):
            names = ", ".join(operation.__name__ for operation in operations)
            raise HalfbyteError(
                f"{name}: transformers makes {entry} of it by {names}, which calibration cannot follow; "
                "accepted: renamed tensors and experts merged into one"
            )
        expert = self._merged[entry, pattern]
        self._merged[entry, pattern] += 1
        if operations == _MERGED:
            return WeightSource(entry, expert)
        rows = self._shapes[name][0]
        start = converter.source_patterns.index(pattern) * rows
        return WeightSource(entry, expert, (start, start + rows, 1))


def _natural(name: str) -> str:
    """Sorts numbers in a name by value."""
    return re.sub(r"\d+", lambda digits: digits[0].zfill(9), name)


def _require_shapes(
    entries: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    places: Mapping[str, WeightSource],
) -> None:
    for name, place in places.items():
        entry = entries[place.tensor]
        inside = place.expert is None or place.expert < entry.shape[0]
        wanted = tuple(view_at(entry, place).shape) if inside else ()
        if shapes[name] != wanted:
            raise HalfbyteError(
                f"{name} is stored as {list(shapes[name])}, but the model has {list(wanted)} at {place.tensor}"
            )


def _ties(
    model: PreTrainedModel,
    entries: Mapping[str, torch.Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    places: Mapping[str, WeightSource],
) -> dict[str, str]:
    filled: Counter[str] = Counter()
    for name, place in places.items():
        filled[place.tensor] += torch.Size(shapes[name]).numel()
    buffers = {name for name, _ in model.named_buffers()}
    missing = {
        name for name, entry in entries.items() if name not in buffers and filled[name] != entry.numel()
    }
    tied = model.all_tied_weights_keys.items()
    # A checkpoint may store either end of a tie.
    both_ways = [*tied, *((origin, target) for target, origin in tied)]
    ties = {absent: present for absent, present in both_ways if absent in missing and present not in missing}
    if lacking := sorted(missing - ties.keys(), key=_natural):
        raise HalfbyteError(
            f"the checkpoint lacks {len(lacking)} tensors of {type(model).__name__}, such as {lacking[0]}"
        )
    return ties
