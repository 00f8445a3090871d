"""GGUF in, BF16 Hugging Face checkpoint out, one tensor in memory at a time.

Quantized weights are dequantized to float32 and rounded to bfloat16 (nearest, ties to even): the result is
what the GGUF computes with up to that rounding, not the model that the GGUF was once made from.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from halfbyte.checkpoint.gguf_config import generation_config, model_config
from halfbyte.checkpoint.gguf_file import GgufFile
from halfbyte.checkpoint.gguf_layout import Placement, family_of, place_tensors
from halfbyte.checkpoint.gguf_tokenizer import save_tokenizer
from halfbyte.checkpoint.output_directory import refuse_to_replace_source
from halfbyte.checkpoint.reader import write_all
from halfbyte.checkpoint.shard_plan import Entry
from halfbyte.checkpoint.writer import CheckpointWriter, write_json
from halfbyte.errors import NonFiniteError

_CHUNK_VALUES = 4_000_000
"""Values dequantized at once: 16 MB as float32."""


@dataclass(frozen=True)
class GgufImport:
    """What was made of a GGUF file. ``stored_types`` counts its tensors by storage type (``Q4_1``)."""

    source: Path
    output: Path
    architecture: str
    parameters: int
    nbytes: int
    stored_types: dict[str, int]
    notes: list[str]


def import_gguf(
    source: Path | str,
    output: Path | str,
    *,
    overwrite: bool = False,
    on_tensor: Callable[[str, int, int], None] | None = None,
) -> GgufImport:
    """Convert ``source`` to a BF16 checkpoint directory with tokenizer, generation config and chat template.

    ``on_tensor(name, values, total)`` is called after each tensor with its number of values and the total.

    Errors: no complete GGUF; an architecture, variant or storage type that is not supported; a tensor that is
    missing, misshapen or not finite; ``output`` exists without ``overwrite``. Then ``output`` is left as it was.
    """
    refuse_to_replace_source(Path(output), Path(source))
    gguf = GgufFile(Path(source))
    family = family_of(gguf)
    config = model_config(gguf, family)
    placements = {placement.name: placement for placement in place_tensors(gguf, family, config)}
    types = Counter(gguf.tensors[placement.stored].tensor_type.name for placement in placements.values())
    for first in {gguf.tensors[p.stored].tensor_type: p for p in placements.values()}.values():
        gguf.rows(first.stored, slice(0, 1))  # refuses a storage type before work starts

    entries = [Entry(placement.name, "BF16", placement.shape) for placement in placements.values()]
    values = {entry.name: entry.nbytes // 2 for entry in entries}
    total = sum(values.values())
    status = gguf.path.stat()
    fingerprint = f"gguf {gguf.path.name} {status.st_size} {status.st_mtime_ns}"
    with (
        CheckpointWriter(Path(output), entries, overwrite=overwrite, fingerprint=fingerprint) as writer,
        tempfile.TemporaryDirectory() as side_files,
    ):
        save_tokenizer(gguf, Path(side_files), config["max_position_embeddings"])
        write_json(Path(side_files) / "generation_config.json", generation_config(gguf))
        for entry in writer.missing():
            writer.write(entry.name, partial(_copy, gguf, placements[entry.name]))
            if on_tensor:
                on_tensor(entry.name, values[entry.name], total)
        writer.finish(config, copy_from=Path(side_files))
        return GgufImport(
            gguf.path, Path(output), gguf.architecture, total, 2 * total, dict(types), writer.notes
        )


def _copy(gguf: GgufFile, placement: Placement, file: BinaryIO) -> None:
    """Write one tensor's bytes, a chunk of rows at a time."""
    import torch

    order = placement.row_order()
    rows = placement.shape[0]
    step = max(1, _CHUNK_VALUES * rows // int(np.prod(placement.shape)))
    for start in range(0, rows, step):
        chosen = slice(start, start + step) if order is None else order[start : start + step]
        # A copy: what the file stores as float32 comes as a read-only view of it.
        chunk = torch.from_numpy(np.array(gguf.rows(placement.stored, chosen), dtype=np.float32))
        if not chunk.isfinite().all():
            raise NonFiniteError(f"{gguf.path}: tensor {placement.stored!r} holds NaN or Inf")
        write_all(file, chunk.to(torch.bfloat16).reshape(-1).view(torch.uint8).numpy().data)
