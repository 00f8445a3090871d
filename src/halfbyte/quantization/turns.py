"""What a rotation of the residual stream does to each stored tensor, and doing it to one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from halfbyte.algorithms.hadamard import random_hadamard
from halfbyte.algorithms.rotation import fold_gain, rotate_inputs, rotate_outputs
from halfbyte.models.layout import ModuleInfo
from halfbyte.models.producers import NormProducer, RowsProducer
from halfbyte.models.residual import Residual


@dataclass(frozen=True)
class Turn:
    """How one stored tensor, a weight, embedding or bias, changes; in this order:

    origin: stored tensor that it is made of. transposed: weights lie in it as ``[in, out]``.
    gain: norm whose gain its columns are multiplied with. columns: every run of so many columns is rotated.
    values: rows that are rotated head by head. outputs: all rows are rotated, as a part of the residual stream.
    A bias that is added to the stream is a row of it, like those of the embedding; one of values is a column.
    """

    origin: str
    transposed: bool = False
    gain: NormProducer | None = None
    columns: int | None = None
    values: RowsProducer | None = None
    outputs: bool = False

    @property
    def by_rows(self) -> bool:
        """Whether each stored row of a matrix changes without the others."""
        return not (self.transposed or self.outputs or self.values)


@dataclass(frozen=True)
class Rotations:
    """The rotation of the residual stream, fp64 ``[hidden, hidden]``, and those of heads, by size."""

    stream: torch.Tensor
    by_size: Mapping[int, torch.Tensor]

    @property
    def device(self) -> torch.device:
        """Where tensors are rotated."""
        return self.stream.device

    @staticmethod
    def draw(residual: Residual, seed: int, device: torch.device) -> Rotations:
        """Hadamard matrices with random signs, all of ``seed``."""
        stream = random_hadamard(residual.hidden, seed, device=device)
        sizes = {heads.rows.width for heads in residual.heads} - {residual.hidden}
        heads = {size: random_hadamard(size, seed, device=device) for size in sorted(sizes)}
        return Rotations(stream, {residual.hidden: stream, **heads})


def plan_turns(residual: Residual, modules: Iterable[ModuleInfo]) -> dict[str, Turn]:
    """Stored tensor (or the head that a tied model lacks) -> how it changes; norms are not in it.

    modules: the layout's.
    """
    sources = {module.name: module.source for module in modules}
    turns: dict[str, Turn] = {}

    def turn(tensor: str) -> Turn:
        return turns.get(tensor, Turn(tensor))

    def of_module(name: str) -> Turn:
        return replace(turn(sources[name].tensor), transposed=sources[name].transposed)

    def put(changed: Turn) -> None:
        turns[changed.origin] = changed

    put(replace(turn(residual.embedding), columns=residual.hidden))
    for norm in residual.norms:
        for name in norm.readers:
            put(replace(of_module(name), gain=norm.norm, columns=residual.hidden))
    for name in residual.writers:
        put(replace(of_module(name), outputs=True))
    for heads in residual.heads:
        put(replace(of_module(heads.reader), columns=heads.rows.width))
        put(replace(of_module(heads.rows.module), values=heads.rows))
        if heads.rows.bias is not None:
            put(replace(turn(heads.rows.bias), values=heads.rows))
    turns[residual.head] = Turn(residual.head_origin, gain=residual.final_norm, columns=residual.hidden)
    return turns | {name: Turn(name, columns=residual.hidden) for name in residual.biases}


def apply_turn(
    stored: torch.Tensor, turn: Turn, gain: torch.Tensor | None, rotations: Rotations
) -> torch.Tensor:
    """The changed values of ``stored``, fp32, on the device of ``rotations``.

    stored: ``[out, in]`` (``[in, out]`` if transposed), rows of it if the turn goes by rows, or a bias ``[out]``.
    gain: fp32 ``[in]`` of the turn's norm, offset included. Products are in fp64, each rounded to fp32.
    """
    weight = stored.to(rotations.stream.device)
    if weight.dim() == 1:
        weight = weight[:, None] if turn.values else weight[None]
    elif turn.transposed:
        weight = weight.t()
    if gain is not None:
        weight = fold_gain(weight, gain.to(weight.device))
    if turn.columns is not None:
        weight = rotate_inputs(weight, rotations.by_size[turn.columns])
    if turn.values is not None:
        weight = _rotate_heads(weight, turn.values, rotations.by_size[turn.values.width])
    if turn.outputs:
        weight = rotate_outputs(weight, rotations.stream)
    return (weight.t() if turn.transposed else weight).reshape(stored.shape)


def _rotate_heads(weight: torch.Tensor, rows: RowsProducer, rotation: torch.Tensor) -> torch.Tensor:
    heads, within = (torch.arange(count, device=weight.device) for count in (rows.heads, rows.width))
    index = (rows.start + heads[:, None] * rows.stride + within).flatten()
    rotated = weight.float().clone()
    rotated[index] = rotate_outputs(weight[index], rotation)
    return rotated
