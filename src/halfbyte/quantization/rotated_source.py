"""A checkpoint of the same model in other coordinates, each tensor rotated when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from halfbyte.checkpoint.headers import TensorInfo
from halfbyte.checkpoint.reader import Checkpoint, write_all
from halfbyte.errors import HalfbyteError, NonFiniteError
from halfbyte.models.config_fields import text_config
from halfbyte.models.describe import describe
from halfbyte.models.producers import NormProducer
from halfbyte.models.residual import Residual, find_residual
from halfbyte.quantization.turns import Rotations, Turn, apply_turn, plan_turns

if TYPE_CHECKING:
    import numpy

_ROWS = 4096
_FLOATS = ("F64", "F32", "BF16", "F16")


@dataclass(frozen=True, kw_only=True)
class RotatedCheckpoint(Checkpoint):
    """``source`` with a rotated residual stream: another checkpoint of a model that puts out the same.

    The stream is rotated by a Hadamard matrix with random signs, gains of its norms are folded into what reads them
    (they become one), and the values of attention's heads are rotated inside v_proj and o_proj. A tied output head
    becomes a tensor of its own, as the final norm's gain is folded into it: ``config`` and ``tensors`` say so. The
    inputs of down_proj keep their channels: they are products of two projections, channel by channel, so no change of
    weights alone rotates them.
    Tensors are computed when read, products in fp64, rounded to the stored dtype once at the end: in bf16 the model
    differs from the source as by one rounding of its weights. The same seed and device give the same bytes.
    ``tensors`` say where the bytes of the source lie, so only methods of this class read them.
    Memory: one tensor and its fp32 copy (of an embedding and of fused experts a part), and the rotation, fp64
    ``[hidden, hidden]``.
    Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024, section 4.
    """

    source: Checkpoint
    turns: Mapping[str, Turn]
    unit_gains: Mapping[str, float]
    """Weight of a norm -> the stored value at which its gain is one."""
    rotations: Rotations

    @staticmethod
    def of(source: Checkpoint, *, seed: int, device: torch.device | str = "cpu") -> RotatedCheckpoint:
        """``source`` rotated by what ``seed`` decides, computed on ``device``; reads no weight yet.

        Errors: a model that cannot be rotated (see :func:`~halfbyte.models.residual.find_residual`); tensors of it
        that hold no floating-point values of 16 bits or more.
        """
        layout = describe(source.config, source.shapes)
        try:
            residual = find_residual(layout, source.shapes, source.config)
        except HalfbyteError as error:
            raise HalfbyteError(f"{source.path}: {error}") from None
        turns = plan_turns(residual, layout.modules)
        norms = [residual.final_norm, *(norm.norm for norm in residual.norms)]
        for name in (*(turn.origin for turn in turns.values()), *(norm.weight for norm in norms)):
            if source.info(name).dtype not in _FLOATS:
                raise HalfbyteError(
                    f"{source.path}: {name} is stored as {source.info(name).dtype}; accepted for a rotation: "
                    f"{', '.join(_FLOATS)}"
                )
        return RotatedCheckpoint(
            source.path,
            _untied(source.config),
            _with_head(source.tensors, residual),
            source.notes,
            source=source,
            turns=turns,
            unit_gains={norm.weight: 1.0 - norm.offset for norm in norms},
            rotations=Rotations.draw(residual, seed, torch.device(device)),
        )

    def load(self, name: str) -> torch.Tensor:
        """One tensor as the rotated model has it, on the CPU. Errors: as the source's; NaN or Inf (it is named)."""
        return (
            self.load_rows(name, 0, self.info(name).shape[0])
            if self._changes(name)
            else self.source.load(name)
        )

    def load_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start:stop`` of the first axis of a tensor. Errors: as :meth:`load`."""
        turn = self.turns.get(name)
        if name in self.unit_gains:
            return torch.full_like(self.source.load_rows(name, start, stop), self.unit_gains[name])
        if turn is None:
            return self.source.load_rows(name, start, stop)
        rows = self.source.load_rows(turn.origin, start, stop)
        count = self.info(name).shape[0]
        if self._step(name) == count:
            whole = rows if stop - start == count else self.source.load(turn.origin)
            return self._turned(name, turn, whole)[start:stop]
        for first, last in self._slabs(name, start, stop):
            rows[first - start : last - start] = self._turned(name, turn, rows[first - start : last - start])
        return rows

    def numpy(self, name: str) -> numpy.ndarray:
        """One tensor as an array, BF16 as float32. Errors: as :meth:`load`."""
        if not self._changes(name):
            return self.source.numpy(name)
        tensor = self.load(name)
        return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()

    def copy_bytes(self, name: str, fileobj: BinaryIO) -> None:
        """Append the bytes of a tensor, as the rotated model has it, to ``fileobj``. Errors: as :meth:`load`."""
        if not self._changes(name):
            self.source.copy_bytes(name, fileobj)
            return
        for start, stop in self._slabs(name, 0, self.info(name).shape[0]):
            rows = self.load_rows(name, start, stop)
            write_all(fileobj, rows.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def _changes(self, name: str) -> bool:
        return name in self.turns or name in self.unit_gains

    def _slabs(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int]]:
        step = self._step(name)
        for first in range(start, stop, step):
            yield first, min(first + step, stop)

    def _step(self, name: str) -> int:
        """How much of the first axis is computed at a time; all of it where its rows depend on each other."""
        shape = self.info(name).shape
        if len(shape) == 3:
            return 1
        by_rows = name in self.turns and self.turns[name].by_rows and len(shape) == 2
        return min(_ROWS, shape[0]) if by_rows else shape[0]

    def _turned(self, name: str, turn: Turn, stored: torch.Tensor) -> torch.Tensor:
        gain = None if turn.gain is None else self._gain(turn.gain)
        matrix = stored[0] if stored.dim() == 3 else stored
        turned = apply_turn(matrix, turn, gain, self.rotations).to(stored.dtype).cpu().reshape(stored.shape)
        if not bool(turned.isfinite().all()):
            info = self.info(name)
            raise NonFiniteError(
                f"{info.file}: {name}: holds NaN or Inf after rotation; accepted: finite values that "
                f"{info.dtype} can hold when rotated"
            )
        return turned

    def _gain(self, norm: NormProducer) -> torch.Tensor:
        return self.source.load(norm.weight).float() + norm.offset


def _with_head(tensors: Mapping[str, TensorInfo], residual: Residual) -> dict[str, TensorInfo]:
    head = replace(tensors[residual.head_origin], name=residual.head)
    return {**tensors, residual.head: head}


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with a head that is not tied, here and in the part about the language model."""
    text = text_config(config)
    inner = {
        key: _untied(value)
        for key, value in config.items()
        if isinstance(value, Mapping) and text_config(value) is text
    }
    return {**config, **inner, "tie_word_embeddings": False}
