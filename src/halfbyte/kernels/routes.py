"""Which rows a mixture's experts get, and the tiles that these make: what the grouped kernels run over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

LONGEST_RUN = 8
"""Tiles of one expert that are computed together, so that its weight is read once for them."""

MOST_EXPERTS = 512
HEIGHTS = (8, 16, 24, 32, 48, 64, 96, 128)
"""Of tiles, in tokens: for each the grouped kernels have configurations."""

# Measured on an H200: tiles for half as many rows again as an expert has on average are cheaper than two tiles for
# many experts. More rows than the tallest tile holds make several, and what is left goes into one of a lower height
# while an expert's rows are few enough for that to save more than reading its weight once again costs.
_SPARE = 1.5
_REST = 32
_MOST_WITH_REST = 512


def tile_heights(tokens: int, top_k: int, experts: int) -> list[int]:
    """The heights for so many tokens, whoever they are for: no choice waits for the routing."""
    rows = tokens * top_k / experts
    fitting = [height for height in HEIGHTS if height >= rows * _SPARE]
    if fitting:
        return fitting[:1]
    return [_REST, HEIGHTS[-1]] if rows <= _MOST_WITH_REST else [HEIGHTS[-1]]


class Routes(NamedTuple):
    """Rows of experts' inputs: those of expert 0 first, each expert's in the order of tokens.

    place: int32 ``[M, top_k]``, the row of each token's choice, or -1 where it is nobody's. origin: int32
    ``[M * top_k]``, which choice a row is of (``token * top_k + slot``), or -1 for rows that are not there. offsets:
    int32 ``[experts + 1]``, where each expert's rows begin.

    runs: int32 ``[tiles, 4]``, for each tile of ``heights[0]`` rows, then for those of ``heights[1]`` ... which run it
    is in: expert, first row, rows, first tile of the run. :func:`first_runs` says where those of a height begin. tiles:
    int32 ``[heights]``, how many of each height there are.
    """

    place: torch.Tensor
    origin: torch.Tensor
    offsets: torch.Tensor
    runs: torch.Tensor
    tiles: torch.Tensor


def first_runs(rows: int, experts: int, heights: Sequence[int]) -> list[int]:
    """Where the tiles of each height begin in ``Routes.runs``, and how long it is: there is room for any routing of
    ``rows`` rows.
    """
    some = min(rows, experts)  # with a tile that is not full
    most = [some] * (len(heights) - 1) + [rows // heights[-1] + some]
    return [sum(most[:height]) for height in range(len(heights) + 1)]


def cut_rows(rows: int, heights: Sequence[int]) -> list[int]:
    """How many of an expert's rows are in tiles of each height: as many tiles of the tallest, the last one, as are
    full, and what is left in one tile of the lowest that holds it.
    """
    left = rows % heights[-1]
    cut = [0] * (len(heights) - 1) + [rows - left]
    if left:
        cut[next(i for i, height in enumerate(heights) if height >= left)] += left
    return cut


def route(ids: torch.Tensor, experts: int, heights: Sequence[int]) -> Routes:
    """What :func:`halfbyte.kernels.hopper.routes.expert_routes` computes, in torch.

    ids: integers ``[M, top_k]``. What is no number from 0 to ``experts`` - 1 is nobody's, and so is a number that the
    token has had before. heights: of tiles, ascending.
    """
    top_k = ids.shape[1]
    choices: list[list[int]] = [[] for _ in range(experts)]
    for token, chosen in enumerate(ids.tolist()):
        for slot, expert in enumerate(chosen):
            if 0 <= expert < experts and expert not in chosen[:slot]:
                choices[expert].append(token * top_k + slot)
    place = torch.full((ids.numel(),), -1, dtype=torch.int32)
    origin = place.clone()
    routed = torch.tensor([choice for of_expert in choices for choice in of_expert], dtype=torch.int64)
    place[routed] = torch.arange(len(routed), dtype=torch.int32)
    origin[: len(routed)] = routed.int()
    offsets = torch.tensor([0, *map(len, choices)]).cumsum(0).int()
    begins = first_runs(ids.numel(), experts, heights)
    runs = torch.zeros(begins[-1], 4, dtype=torch.int32)
    tiles = [0] * len(heights)
    for expert, first_row in enumerate(offsets[:-1].tolist()):
        row = first_row
        cut = cut_rows(len(choices[expert]), heights)
        for h in reversed(range(len(heights))):
            run_rows = LONGEST_RUN * heights[h]
            for first in range(0, cut[h], run_rows):
                rows = min(run_rows, cut[h] - first)
                count = -(-rows // heights[h])
                at = begins[h] + tiles[h]
                runs[at : at + count] = torch.tensor([expert, row + first, rows, tiles[h]])
                tiles[h] += count
            row += cut[h]
    moved = (place.view(ids.shape), origin, offsets, runs, torch.tensor(tiles).int())
    return Routes(*(tensor.to(ids.device) for tensor in moved))
