"""Products of several weights, each with tokens of its own: a mixture's experts. One launch for each tile height."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.hopper.blocks import ROWS, BlockFormat
from halfbyte.kernels.hopper.config import Config, Table, TileConfig, ceil_div
from halfbyte.kernels.hopper.driver import Launch
from halfbyte.kernels.hopper.operands import Features, Linear, Problem
from halfbyte.kernels.routes import HEIGHTS, first_runs


@dataclass(frozen=True)
class Runs:
    """The tiles of one height: ``Routes.runs`` of it and its number in ``Routes.tiles``, at most ``most``."""

    runs: torch.Tensor
    tiles: torch.Tensor

    @property
    def most(self) -> int:
        return self.runs.shape[0]


def of_heights(
    runs: torch.Tensor, tiles: torch.Tensor, heights: Sequence[int], rows: int, experts: int
) -> list[tuple[int, Runs]]:
    """What ``expert_routes`` found, by height, the tallest first, which takes longest."""
    begins = first_runs(rows, experts, heights)
    return [
        (heights[i], Runs(runs[begins[i] : begins[i + 1]], tiles[i:])) for i in reversed(range(len(heights)))
    ]


def choose(
    table: Table[Config], height: int, runs: Runs, weight: torch.Tensor, inputs: int, fmt: BlockFormat
) -> Config:
    """The configuration for tiles of a height. What counts as features are those of all tiles together.

    Errors: a height that the kernels are not made for.
    """
    features = runs.most * weight.shape[1] * ROWS
    if height not in HEIGHTS:
        raise HalfbyteError(f"tiles of {height} tokens: accepted heights are {', '.join(map(str, HEIGHTS))}")
    return table.choose(height, features, inputs, fmt)


def feature_shape(weight: torch.Tensor, out: torch.Tensor, runs: Runs | None) -> tuple[int, ...]:
    """Of what has a number for each output feature: with ``runs`` of each expert."""
    return (*(weight.shape[:1] if runs else ()), out.shape[1])


@dataclass(frozen=True)
class GroupedLinear(Linear):
    """``x [R, K]``, packed ``weight [experts, ...]``, ``out [R, N]``, for the rows of ``runs``."""

    runs: Runs

    def _problem(self) -> tuple[Problem, Launch]:
        rows, (_, rows64, blocks_k, _) = self.x.shape[0], self.weight.shape
        config, features, runs = self.config, self.out.shape[1], self.runs
        clusters = runs.most * ceil_div(features, config.rows * config.share)
        if config.split == 1:
            clusters = min(clusters, config.places)
        quantum = config.cut(self.fmt) if config.split > 1 else blocks_k
        numbers = (rows, features, blocks_k, rows64, 0, 0, quantum)
        pointers = (None, None, runs.runs.data_ptr(), runs.tiles.data_ptr())
        shared = config.shared_bytes(self.fmt)
        shape = Launch((clusters * config.cluster, 1, 1), config.threads, shared, config.cluster)
        return Problem(*numbers, *pointers, runs.most), shape


Launches = Iterator[tuple[Linear, tuple[torch.Tensor | None, ...]]]


def launches(
    config: TileConfig,
    fmt: BlockFormat,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    vectors: tuple[torch.Tensor | None, ...],
    runs: Runs | None,
) -> Launches:
    """What to launch for ``x`` times one weight, or with ``runs`` times several, and the parts of ``vectors``, with a
    number for each output feature, that belong to it.
    """
    if runs is not None:
        yield GroupedLinear(config, fmt, x, weight, out, runs), vectors
        return
    for cut, part in Features(weight, out, vectors).launches(config, fmt):
        yield Linear(cut, fmt, x, part.weight, part.out), part.vectors
