"""The scales that a calibrated run moved between tensors, found again from both checkpoints.

No file holds them. A norm says them exactly: they are the ratio of its gains. Rows of a projection are rounded, so
that theirs are estimated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from halfbyte.audit.expected import ChannelScales, ExpectedWeight, Factors
from halfbyte.audit.raw import values
from halfbyte.audit.row_factors import row_factors
from halfbyte.audit.source import SourceWeight
from halfbyte.audit.untouched import other_form
from halfbyte.audit.written import WrittenWeights
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.models.folding import Fold
from halfbyte.models.layout import ModuleInfo
from halfbyte.models.producers import NormProducer, RowsProducer

SMALLEST, LARGEST = 1e-4, 1e4
"""No method of halfbyte's finds scales beyond these."""


class ScalesUnknownError(HalfbyteError):
    """``where``: the norm's weight or the module that does not tell them."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(why)
        self.where = where


class MovedScales:
    """Scales of folds, each found when it is first asked for."""

    def __init__(
        self,
        folds: Sequence[Fold],
        source: Checkpoint,
        originals: Mapping[str, ModuleInfo],
        written: WrittenWeights,
    ) -> None:
        """originals: modules of the source by name, all that ``folds`` name among them."""
        self._folds, self._source, self._originals, self._written = folds, source, originals, written
        self._touching: dict[str, list[int]] = {}
        self._norms: dict[str, int] = {}
        self._biases: dict[str, int] = {}
        for index, fold in enumerate(folds):
            names = dict.fromkeys(fold.consumers)
            if isinstance(fold.producer, NormProducer):
                self._norms[fold.producer.weight] = index
            else:
                names[fold.producer.module] = None
            if fold.producer.bias is not None:
                self._biases[fold.producer.bias] = index
            for name in names:
                self._touching.setdefault(name, []).append(index)
        self._found: dict[int, ChannelScales | ScalesUnknownError] = {}

    def changes_module(self, name: str) -> bool:
        return name in self._touching

    def changes_norm(self, name: str) -> bool:
        return name in self._norms

    def changes_bias(self, name: str) -> bool:
        return name in self._biases

    def weight(self, name: str) -> ExpectedWeight:
        """What the module's weight was before it was rounded. Errors: scales that are unknown."""
        return self._expected(name, len(self._folds))

    def of_norm(self, name: str) -> ChannelScales:
        """What the gains of the norm with this weight were divided by. Errors: they are unknown."""
        return self._scales(self._norms[name])

    def bias(self, name: str) -> Factors:
        """What a bias was multiplied with, as the rows of a weight. Errors: scales that are unknown."""
        index = self._biases[name]
        producer, size = self._folds[index].producer, self._source.info(name).shape[0]
        rows = np.arange(size) if isinstance(producer, NormProducer) else channel_rows(producer)
        return Factors.ones((size, 1)).put_out(self._scales(index), rows)

    def _expected(self, name: str, before: int) -> ExpectedWeight:
        """A weight after the folds that were done earlier than number ``before``."""
        info = self._originals[name]
        factors = Factors.ones(info.shape)
        for index in self._touching.get(name, ()):
            if index < before:
                fold = self._folds[index]
                scales = self._scales(index)
                if name in fold.consumers:
                    factors = factors.read(scales, fold.width, fold.repeats)
                if isinstance(fold.producer, RowsProducer) and fold.producer.module == name:
                    factors = factors.put_out(scales, channel_rows(fold.producer))
        return ExpectedWeight(SourceWeight(self._source, info), factors)

    def _scales(self, index: int) -> ChannelScales:
        if index not in self._found:
            producer = self._folds[index].producer
            try:
                self._found[index] = (
                    self._norm_scales(producer)
                    if isinstance(producer, NormProducer)
                    else self._row_scales(producer, index)
                )
            except ScalesUnknownError as error:
                self._found[index] = error
        found = self._found[index]
        if isinstance(found, ScalesUnknownError):
            raise found
        return found

    def _norm_scales(self, norm: NormProducer) -> ChannelScales:
        if why := other_form(self._written.checkpoint, self._source, norm.weight):
            raise ScalesUnknownError(norm.weight, why)
        before, after = (
            values(checkpoint, norm.weight).astype(np.float32) + np.float32(norm.offset)
            for checkpoint in (self._source, self._written.checkpoint)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            scales = np.where(before == after, np.float32(1), before / after)
        bad = ~(np.isfinite(scales) & (scales > 0))
        if bad.any():
            first = int(bad.argmax())
            why = (
                f"gain {first} is {after[first]:g}, in the source {before[first]:g}; "
                "accepted: that divided by a finite positive scale"
            )
            raise ScalesUnknownError(norm.weight, why)
        return ChannelScales(scales, np.zeros_like(scales))

    def _row_scales(self, rows: RowsProducer, index: int) -> ChannelScales:
        faults = self._written.faults(rows.module)
        if faults:
            raise ScalesUnknownError(rows.module, faults)
        expected = self._expected(rows.module, index)
        parts = [
            row_factors(part, expected.rows(part.start, part.start + len(part.values)))
            for part in self._written.chunks(rows.module)
        ]
        at = channel_rows(rows)
        found, doubt = (np.concatenate(each)[at] for each in zip(*parts, strict=True))
        bad = ~((found >= 1 / LARGEST) & (found <= 1 / SMALLEST))
        if bad.any():
            first = int(bad.argmax())
            why = (
                f"row {at[first]} is {found[first]:.3g} times that of the source; "
                f"accepted: {1 / LARGEST:g} to {1 / SMALLEST:g}, what scales that moved can be"
            )
            raise ScalesUnknownError(rows.module, why)
        return ChannelScales((1 / found).astype(np.float32), doubt.astype(np.float32))


def channel_rows(rows: RowsProducer) -> np.ndarray:
    """The rows of the producing linear, in the order of the channels."""
    heads, within = np.arange(rows.heads), np.arange(rows.width)
    return (rows.start + heads[:, None] * rows.stride + within).reshape(-1)
