"""``halfbyte::expert_routes``: which rows experts get and the tiles that they make, on Hopper in one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch

from halfbyte.kernels.hopper.compiler import Source
from halfbyte.kernels.hopper.config import up
from halfbyte.kernels.hopper.driver import Launch, function, pointer
from halfbyte.kernels.hopper.operands import require
from halfbyte.kernels.routes import LONGEST_RUN, MOST_EXPERTS, Routes, first_runs

# A thread keeps so many ids at most; beyond that there are more threads, then more blocks.
_MOST_STEPS = 4
_BLOCKS = (1, 2, 4, 8)
_IDS = {torch.int32: "int", torch.int64: "long long"}


def expert_routes(ids: torch.Tensor, experts: int, heights: Sequence[int]) -> Routes:
    """:func:`halfbyte.kernels.routes.route` on a Hopper GPU: no synchronisation, the same result every time.

    ids: int32 or int64 ``[M, top_k]``, contiguous. experts: up to 512. Errors: other ids, more experts.
    """
    return Routes(*_expert_routes(ids, experts, list(heights)))


@torch.library.custom_op("halfbyte::expert_routes", mutates_args=(), device_types="cuda")
def _expert_routes(
    ids: torch.Tensor, experts: int, heights: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    require(
        "expert_routes",
        (ids.dtype in _IDS and ids.dim() == 2, "ids must be int32 or int64 of tokens x choices", ids),
        (ids.is_contiguous(), "ids must be contiguous", ids),
        (0 < experts <= MOST_EXPERTS, f"at most {MOST_EXPERTS} experts are taken, not {experts}: ids", ids),
    )
    routes = _room(ids, experts, heights)
    if not ids.numel():
        routes.offsets.zero_()
        routes.tiles.zero_()
        return routes
    cut = routes_cut(ids.numel(), experts)
    with torch.cuda.device_of(ids):
        function(routes_source(ids.dtype, ids.shape[1], experts, len(heights), cut), ids.device.index)(
            cut.launch(experts, len(heights)),
            [pointer(ids), *map(pointer, routes), _sizes(ids, experts, heights)],
        )
    return routes


@_expert_routes.register_fake
def _(ids, experts, heights):  # type: ignore[no-untyped-def]
    return tuple(_room(ids, experts, heights))


@dataclass(frozen=True)
class RoutesCut:
    """How ids are divided: ``steps`` for each of ``threads`` of each of ``blocks``."""

    threads: int
    steps: int
    blocks: int

    def launch(self, experts: int, heights: int) -> Launch:
        most, warps = _most_experts(experts), self.threads // 32
        # struct Shared
        shared = 4 * ((1 + heights) * most // 32 + most + 1 + heights * most + most + warps * most)
        return Launch((self.blocks, 1, 1), self.threads, up(shared, 16), self.blocks)


def routes_cut(ids: int, experts: int) -> RoutesCut:
    """As few threads as have not too many ids each; with the most threads, as many ids as it takes."""
    fewest = max(256, _most_experts(experts))
    for blocks, threads in product(_BLOCKS, (fewest, 1024)):
        steps = -(-ids // (blocks * threads))
        if steps <= _MOST_STEPS:
            return RoutesCut(threads, 1 << (steps - 1).bit_length(), blocks)
    return RoutesCut(1024, 1 << (-(-ids // (_BLOCKS[-1] * 1024)) - 1).bit_length(), _BLOCKS[-1])


@cache
def routes_source(ids: torch.dtype, top_k: int, experts: int, heights: int, cut: RoutesCut) -> Source:
    """The kernel for one kind of routing."""
    defines: dict[str, str | int] = {
        "Id": _IDS[ids],
        "TOP_K": top_k,
        "MOST_EXPERTS": _most_experts(experts),
        "HEIGHTS": heights,
        "LONGEST": LONGEST_RUN,
        "THREADS": cut.threads,
        "STEPS": cut.steps,
        "CLUSTER": cut.blocks,
    }
    return Source.of("routes.cu", "routes", defines)


def _room(ids: torch.Tensor, experts: int, heights: Sequence[int]) -> Routes:
    def integers(*shape: int) -> torch.Tensor:
        return ids.new_empty(shape, dtype=torch.int32)

    runs = first_runs(ids.numel(), experts, heights)[-1]
    return Routes(
        integers(*ids.shape),
        integers(ids.numel()),
        integers(experts + 1),
        integers(runs, 4),
        integers(len(heights)),
    )


def _most_experts(experts: int) -> int:
    return up(experts, 64)


def _sizes(ids: torch.Tensor, experts: int, heights: Sequence[int]) -> ctypes.Array:
    """``struct Sizes``: tokens, experts, the heights, where their runs begin."""
    begins = first_runs(ids.numel(), experts, heights)[:-1]
    numbers = [ids.shape[0], experts, *heights, *begins]
    return (ctypes.c_int * len(numbers))(*numbers)
