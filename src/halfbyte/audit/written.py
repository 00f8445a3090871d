"""Weights of the checkpoint under audit as numbers, quantized or not, rows at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from halfbyte.audit.codes import lookup
from halfbyte.audit.decode import undecodable
from halfbyte.audit.decoders import decoder_of
from halfbyte.audit.modules import StoredModule
from halfbyte.audit.scales import scale_faults
from halfbyte.audit.source import ROUNDING_UNIT, SourceWeight
from halfbyte.audit.structure import structure_findings
from halfbyte.audit.untouched import other_form
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.models.layout import ModuleInfo

_ROWS = 512


@dataclass(frozen=True)
class WrittenRows:
    """Rows from ``start`` on: ``values``, float32 ``[rows, in]``.

    inner: which of them did not saturate; none for all. unit: by which share of it a value that is not quantized was
    rounded, 0 for codes.
    """

    start: int
    values: np.ndarray
    inner: np.ndarray | None
    unit: float


class WrittenWeights:
    """The weights of ``checkpoint`` that the modules of its source became."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        modules: Iterable[StoredModule],
        source: Checkpoint,
        originals: Mapping[str, ModuleInfo],
    ) -> None:
        self.checkpoint = checkpoint
        self._quantized = {module.name: module for module in modules if module.stored.quantized}
        self._source, self._originals = source, originals

    def faults(self, name: str) -> str | None:
        """Why a weight cannot be read, or none."""
        module = self._quantized.get(name)
        if module is None:
            return other_form(self.checkpoint, self._source, self._originals[name].source.tensor)
        errors = [fault for fault in structure_findings(self.checkpoint, module) if fault.level == "error"]
        if errors:
            return errors[0].message
        if why := undecodable(module):
            return why
        decoder = decoder_of(self.checkpoint, module)
        if decoder.shape != self._originals[name].shape:
            return f"is {list(decoder.shape)}, in the source {list(self._originals[name].shape)}"
        return next((fault for scale in decoder.scales.values() for fault in scale_faults(scale)), None)

    def chunks(self, name: str) -> Iterator[WrittenRows]:
        """All rows of a weight without faults, in order."""
        module = self._quantized.get(name)
        if module is None:
            info = self._originals[name]
            weight = SourceWeight(self.checkpoint, info)
            unit = ROUNDING_UNIT[self.checkpoint.info(info.source.tensor).dtype]
            for start in range(0, info.out_features, _ROWS):
                rows = weight.rows(start, min(start + _ROWS, info.out_features))
                yield WrittenRows(start, rows, None, unit)
            return
        for tiles in decoder_of(self.checkpoint, module).chunks():
            found = tiles.scaled(tiles.by_tile(tiles.table.value_of(tiles.codes)))
            inner = np.isfinite(tiles.table.low) & np.isfinite(tiles.table.high)
            yield WrittenRows(
                tiles.start, found.reshape(len(tiles.codes), -1), lookup(inner, tiles.codes), 0.0
            )
