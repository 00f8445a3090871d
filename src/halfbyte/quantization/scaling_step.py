"""Scales that move between the tensors of a block before anything is rounded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from halfbyte.algorithms.awq import awq_scales
from halfbyte.algorithms.fold import fold_scales_, folded_statistics
from halfbyte.algorithms.shared_columns import SharedColumns
from halfbyte.algorithms.smoothquant import smoothquant_scales
from halfbyte.algorithms.targets import Target
from halfbyte.calibration.statistics import InputStatistics
from halfbyte.errors import NonFiniteError
from halfbyte.formats.spec import TensorFormat
from halfbyte.method import Method
from halfbyte.models.folding import Fold
from halfbyte.models.layout import ModuleInfo, WeightSource
from halfbyte.models.producers import NormProducer


@dataclass
class BlockTensors:
    """The weights of a block while scales are folded into them.

    read: a copy of a module's weight ``[out, in]`` by its name. modules: of the model. quantized: names of those that
    will be quantized. load: stored tensors by name. scaled: fp32 weights of quantized modules that scales were folded
    into. stored: other tensors of the block that they were folded into, as they are to be stored.
    """

    read: Callable[[str], torch.Tensor]
    modules: Mapping[str, ModuleInfo]
    quantized: Collection[str]
    load: Callable[[str], torch.Tensor]
    scaled: dict[str, torch.Tensor] = field(default_factory=dict)
    stored: dict[str, torch.Tensor] = field(default_factory=dict)

    def weight(self, name: str) -> torch.Tensor:
        """fp32 ``[out, in]`` of a module that will be quantized, as it is now."""
        return self.scaled[name] if name in self.scaled else self.read(name).float()

    def fold(self, fold: Fold, scales: torch.Tensor) -> torch.Tensor:
        """Applies ``fold``; the scales that took effect (see :func:`fold_scales_`)."""
        tensors: dict[str, torch.Tensor] = {}
        sources: dict[str, WeightSource] = {}
        for name in (*fold.consumers, *self._producer_modules(fold)):
            if name in self.quantized:
                sources[name] = WeightSource(name)
                tensors[name] = self.scaled[name] = self.weight(name)
            else:
                sources[name] = self.modules[name].source
                tensors[sources[name].tensor] = self._stored(sources[name].tensor)
        for name in self._producer_tensors(fold):
            tensors[name] = self._stored(name)
        return fold_scales_(tensors, sources, fold, scales)

    def _stored(self, name: str) -> torch.Tensor:
        if name not in self.stored:
            self.stored[name] = self.load(name)
        return self.stored[name]

    @staticmethod
    def _producer_modules(fold: Fold) -> tuple[str, ...]:
        return () if isinstance(fold.producer, NormProducer) else (fold.producer.module,)

    @staticmethod
    def _producer_tensors(fold: Fold) -> list[str]:
        producer = fold.producer
        names = [producer.weight, producer.bias] if isinstance(producer, NormProducer) else [producer.bias]
        return [name for name in names if name is not None]


def scale_inputs(
    folds: Sequence[Fold],
    tensors: BlockTensors,
    formats: Mapping[str, TensorFormat],
    methods: Mapping[str, Method],
    statistics: dict[str, InputStatistics],
    targets: Mapping[str, Target],
) -> tuple[list[Fold], dict[str, float]]:
    """Finds and folds the scales that the methods ask for; ``statistics`` (by module) become those after it.

    Returns: the folds that were applied, in that order; module -> largest over smallest scale of its inputs, for those
        whose inputs were scaled.
    """
    applied: list[Fold] = []
    spreads: dict[str, float] = {}
    for fold in folds:
        meant = [
            name
            for name in fold.consumers
            if name in methods and methods[name].scaling and name in statistics
        ]
        if not meant:
            continue
        shared = SharedColumns(fold.width, fold.repeats)
        # All that reads one producer has the same inputs, so the first module's statistics are everyone's.
        seen = statistics[meant[0]]
        weights = [tensors.weight(name) for name in meant]
        if methods[meant[0]].scaling == "awq":
            round_trips = [partial(targets[name].nearest, fmt=formats[name]) for name in meant]
            try:
                found = awq_scales(weights, [formats[name] for name in meant], seen, shared, round_trips)
            except NonFiniteError as error:
                raise NonFiniteError(f"{', '.join(meant)}: {error}") from None
            if found.exponent is None:
                continue
            scales = found.scales
        else:
            scales = smoothquant_scales(weights, seen, shared=shared)
        del weights  # the fold makes copies of its own
        # A norm is folded into where it was loaded, on the CPU.
        scales = tensors.fold(fold, scales).to(seen.moment.device)
        applied.append(fold)
        columns = shared.to_columns(scales)
        after = folded_statistics(seen, columns)
        for name in fold.consumers:
            if name in statistics:
                statistics[name] = after
        spreads |= dict.fromkeys(meant, float(columns.max() / columns.min()))
    return applied, spreads
