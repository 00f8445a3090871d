"""Tokens to experts' rows and back on the GPU, held to the same said in torch."""

from __future__ import annotations

import pytest
import torch

import halfbyte.kernels.triton.experts  # noqa: F401
from halfbyte.errors import HalfbyteError
from halfbyte.kernels.routes import Routes, route
from tests.kernels.triton.rows import DTYPES, assert_fp8, assert_int8, assert_same, hostile_rows, normal_rows
from tests.kernels.triton.runners import Runner

EXPERTS = 5
DEVICE = torch.device("cuda", 0)


def routed(tokens: int, top_k: int) -> tuple[Routes, torch.Tensor]:
    """Some choices are nobody's; the tokens of the rows that are there."""
    ids = torch.randint(-1, EXPERTS, (tokens, top_k), generator=torch.Generator().manual_seed(tokens))
    routes = route(ids, EXPERTS, [8])
    there = routes.origin[: int(routes.offsets[-1])].long()
    return routes, there // top_k


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_those_of_their_tokens(run: Runner, dtype: torch.dtype) -> None:
    cases = [(hostile_rows(m, k, dtype), top_k) for m, k, top_k in ((11, 200, 2), (4, 64, 3), (0, 64, 2))]
    calls = []
    for x, top_k in cases:
        place = routed(len(x), top_k)[0].place
        calls += [
            ("route_quantize_fp8", (x, place, 64)),
            ("route_quantize_int8", (x, place)),
            ("route_rows", (x, place)),
        ]
    results = iter(run(calls))
    for x, top_k in cases:
        tokens = routed(len(x), top_k)[1]
        rows = len(tokens)
        fp8, int8, (plain,) = next(results), next(results), next(results)
        assert all(len(result) == len(x) * top_k for result in (*fp8, *int8, plain))
        assert_fp8(x[tokens], tuple(_first(result, rows) for result in fp8), 64)
        assert_int8(x[tokens], tuple(result[:rows] for result in int8))
        assert_same(plain[:rows], x[tokens])


def _first(rows: torch.Tensor, count: int) -> torch.Tensor:
    """With the strides that they have."""
    return rows[:count]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [torch.float32, torch.bfloat16])
def test_tokens_are_the_sums_of_their_rows(run: Runner, dtype: torch.dtype, share: torch.dtype) -> None:
    cases = [(11, 200, 2), (5, 64, 3), (3, 4200, 1), (0, 64, 2)]
    calls, wanted = [], []
    for m, k, top_k in cases:
        place = routed(m, top_k)[0].place
        rows, shares = normal_rows(m * top_k, k, dtype), normal_rows(m, top_k, share, seed=1)
        if m:
            rows[int(place.max()) + 1 :] = float("nan")  # rows of nobody
        calls.append(("combine_experts", (rows, place, shares)))
        there = place.ge(0)[..., None]
        values = torch.where(there, rows[place.clamp(min=0).long()].double(), 0)
        wanted.append((values * shares.double()[..., None]).sum(1))
    for (found,), exact in zip(run(calls), wanted, strict=True):
        unit = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        assert found.dtype == dtype
        assert ((found.double() - exact).abs() <= exact.abs() * unit + 2e-6).all()


@pytest.mark.gpu
def test_what_is_not_taken_is_refused() -> None:
    x, place = torch.zeros(2, 64, device=DEVICE), torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    ops = torch.ops.halfbyte
    with pytest.raises(
        HalfbyteError, match=r"route_rows takes contiguous int32 places \[2, top_k\], not int64"
    ):
        ops.route_rows(x, place.long())
    with pytest.raises(HalfbyteError, match=r"route_quantize_int8 takes .* not int32 \[1, 2\]"):
        ops.route_quantize_int8(x, place[:1])
    with pytest.raises(HalfbyteError, match="route_rows takes at most 16384 columns, not 20000"):
        ops.route_rows(torch.zeros(2, 20000, device=DEVICE), place)
    with pytest.raises(HalfbyteError, match="combine_experts takes contiguous rows"):
        ops.combine_experts(x, place, torch.zeros(2, 3, device=DEVICE))
