"""The decoder of a quantized weight's form."""

from __future__ import annotations

from halfbyte.audit.decode import WeightDecoder
from halfbyte.audit.decode_qserve import QServeDecoder
from halfbyte.audit.modules import StoredModule
from halfbyte.audit.stored import QSERVE_LAYOUT
from halfbyte.checkpoint.reader import Checkpoint

Decoder = WeightDecoder | QServeDecoder


def decoder_of(checkpoint: Checkpoint, module: StoredModule) -> Decoder:
    """For a weight that :func:`halfbyte.audit.decode.undecodable` has nothing to say about."""
    kind = QServeDecoder if module.stored.layout == QSERVE_LAYOUT else WeightDecoder
    return kind(checkpoint, module)
