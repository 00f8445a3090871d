"""Routing as torch says it: what any reader of the tiles relies on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.kernels.routes import HEIGHTS, LONGEST_RUN, Routes, cut_rows, first_runs, route, tile_heights


def choices(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """ids, with numbers that are no experts, and how many experts there are."""
    experts, top_k = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    tokens = draw(st.integers(0, 40))
    numbers = st.integers(-2, experts + 1)
    ids = draw(st.lists(st.lists(numbers, min_size=top_k, max_size=top_k), min_size=tokens, max_size=tokens))
    return torch.tensor(ids, dtype=torch.int64).view(tokens, top_k), experts


heights = st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3, unique=True).map(sorted)


@given(st.composite(choices)(), heights)
def test_each_choice_that_counts_has_one_row_and_one_tile(
    case: tuple[torch.Tensor, int], heights: list[int]
) -> None:
    ids, experts = case
    routes = route(ids, experts, heights)
    top_k = ids.shape[1]
    rows = []
    for expert in range(experts):
        first, end = routes.offsets[expert : expert + 2].tolist()
        origins = routes.origin[first:end].tolist()
        assert origins == sorted(origins)
        assert all(ids.flatten()[origin] == expert for origin in origins)
        assert len({origin // top_k for origin in origins}) == len(origins)  # a token once
        assert {origin // top_k for origin in origins} == {t for t in range(len(ids)) if expert in ids[t]}
        rows += [(row, expert) for row in range(first, end)]
    routed = int(routes.offsets[-1])
    assert routes.origin[routed:].eq(-1).all()
    for choice, row in enumerate(routes.place.flatten().tolist()):
        assert (row == -1) == (choice not in routes.origin[:routed].tolist())
        assert row == -1 or routes.origin[row] == choice
    assert sorted(row for row, _ in tiled(routes, ids.numel(), experts, heights)) == [row for row, _ in rows]
    assert sorted(tiled(routes, ids.numel(), experts, heights)) == rows


def tiled(routes: Routes, rows: int, experts: int, heights: list[int]) -> list[tuple[int, int]]:
    """The rows that kernels go through, with the expert whose weight they are multiplied by."""
    found = []
    begins = first_runs(rows, experts, heights)
    for h, height in enumerate(heights):
        count = int(routes.tiles[h])
        assert count <= begins[h + 1] - begins[h]
        for tile in range(count):
            expert, first, of_run, first_tile = routes.runs[begins[h] + tile].tolist()
            assert 0 <= tile - first_tile < -(-of_run // height) <= LONGEST_RUN
            begin = first + (tile - first_tile) * height
            found += [(row, expert) for row in range(begin, min(begin + height, first + of_run))]
    return found


def test_an_experts_rows_are_cut_into_full_tiles_and_the_lowest_that_holds_the_rest() -> None:
    assert cut_rows(0, [8, 32]) == [0, 0]
    assert cut_rows(7, [8, 32]) == [7, 0]
    assert cut_rows(9, [8, 32]) == [0, 9]
    assert cut_rows(64, [8, 32]) == [0, 64]
    assert cut_rows(69, [8, 32]) == [5, 64]
    assert cut_rows(90, [8, 32]) == [0, 90]
    assert cut_rows(17, [8]) == [17]


def test_a_long_run_is_cut() -> None:
    """So many tiles of one expert go through its weight together, and no more."""
    rows = 2 * LONGEST_RUN + 3
    routes = route(torch.full((rows, 1), 1), 2, [1])
    assert routes.tiles.tolist() == [rows]
    firsts = [(run[1], run[2], run[3]) for run in routes.runs[:rows].tolist()]
    assert firsts == (
        [(0, LONGEST_RUN, 0)] * LONGEST_RUN
        + [(LONGEST_RUN, LONGEST_RUN, LONGEST_RUN)] * LONGEST_RUN
        + [(2 * LONGEST_RUN, 3, 2 * LONGEST_RUN)] * 3
    )


@pytest.mark.parametrize("experts", [1, 8, 128, 512])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_heights_are_some_that_kernels_have(experts: int, top_k: int) -> None:
    for tokens in (0, 1, 3, 16, 100, 1000, 30000):
        found = tile_heights(tokens, top_k, experts)
        assert found == sorted(found)
        assert set(found) <= set(HEIGHTS)
    assert tile_heights(1, top_k, max(experts, top_k)) == [8]
