"""Files of OmniServe or DeepCompressor in, the same tensors as a checkpoint that says what it is, out.

Those tools leave a pickle of tensors and a config.json without a word about quantization. Tensors are copied byte for
byte, one in memory at a time; every quantized weight is decoded once, so that what cannot be read is said here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from halfbyte.checkpoint import qserve
from halfbyte.checkpoint.output_directory import refuse_to_replace_source
from halfbyte.checkpoint.qserve_config import GROUP_SIZE, SCALE_LEAF, output_config, scheme_of
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.checkpoint.shard_plan import Entry
from halfbyte.checkpoint.writer import CheckpointWriter
from halfbyte.errors import HalfbyteError
from halfbyte.recipe import PER_ROW


@dataclass(frozen=True)
class QServeImport:
    """What was written. group_size: 128, or -1 for a scale per row. modules: how many weights are quantized.
    eight_bit: those of them whose zeros are no multiples of their scales, so that halfbyte holds them as INT8."""

    output: Path
    group_size: int
    modules: int
    eight_bit: int
    nbytes: int
    notes: list[str]


def import_qserve(
    source: Path | str,
    output: Path | str,
    *,
    overwrite: bool = False,
    allow_pickle: bool = False,
    on_tensor: Callable[[int, str], None] | None = None,
) -> QServeImport:
    """Copy the weights and side files in directory ``source`` to ``output``, with a ``quantization_config``.

    on_tensor: called with the bytes of each tensor and its name. allow_pickle: read ``quant_model.pt`` or
    ``pytorch_model*.bin``, through torch's restricted unpickler.
    Errors: no weights in QServe's form, or both per channel and in groups; a weight that cannot be read
    (:func:`halfbyte.checkpoint.qserve.decode`); ``output`` exists without ``overwrite``.
    """
    checkpoint = Checkpoint.open(source, allow_pickle=allow_pickle)
    files = {info.file for info in checkpoint.tensors.values()}
    for path in {checkpoint.path, *files}:
        refuse_to_replace_source(Path(output), path)
    group_size = group_size_of(checkpoint)
    scheme = scheme_of(group_size)
    entries = [Entry(name, info.dtype, info.shape) for name, info in checkpoint.tensors.items()]
    states = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    modules, eight_bit = 0, 0
    with CheckpointWriter(
        Path(output), entries, overwrite=overwrite, fingerprint=f"qserve {states}"
    ) as writer:
        missing = {entry.name for entry in writer.missing()}
        for name, info in checkpoint.tensors.items():
            module, _, leaf = name.rpartition(".")
            if leaf == "qweight":
                parts = {part: checkpoint.load(part) for part in _parts(module) if part in checkpoint.tensors}
                modules += 1
                eight_bit += qserve.decode(module, scheme, parts).format.element == "int8"
            if name in missing:
                writer.write(name, partial(checkpoint.copy_bytes, name))
            if on_tensor:
                on_tensor(info.nbytes, name)
        writer.finish(output_config(checkpoint.config, {"all": scheme}), checkpoint.path)
        nbytes = sum(entry.nbytes for entry in entries)
        return QServeImport(Path(output), group_size, modules, eight_bit, nbytes, writer.notes)


def group_size_of(checkpoint: Checkpoint) -> int:
    """128, or -1 for a scale per row, told from tensors. Errors: neither, or both."""
    leaves = {name.rpartition(".")[2] for name in checkpoint.tensors}
    grouped, per_row = "s2_scales" in leaves, "s1_szeros" in leaves
    if SCALE_LEAF not in leaves or grouped == per_row:
        found = (
            ", ".join(sorted(leaves & {"qweight", SCALE_LEAF, "s2_scales", "s1_szeros"})) or "none of these"
        )
        raise HalfbyteError(
            f"{checkpoint.path}: weights of QServe have qweight and {SCALE_LEAF}, and all of them s1_szeros or all of "
            f"them s2_scales; found {found}"
        )
    return GROUP_SIZE if grouped else PER_ROW


def _parts(module: str) -> list[str]:
    return [f"{module}.{leaf}" for leaf in ("qweight", SCALE_LEAF, "s1_szeros", "s2_scales", "s2_zeros")]
