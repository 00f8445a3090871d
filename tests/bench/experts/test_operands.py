"""Random experts and who gets which tokens."""

from __future__ import annotations

import pytest
import torch

from halfbyte.bench.experts.contender import Loaded, relative_error
from halfbyte.bench.experts.mixtures import MIXTURES, Mixture, choices
from halfbyte.bench.experts.operands import Routing, Stack, checked_experts
from halfbyte.bench.kernels.accuracy import WrongResultError
from halfbyte.formats.quantize import dequantize
from halfbyte.formats.spec import TensorFormat

CPU = torch.device("cpu")
SMALL = Mixture(experts=12, top_k=3, hidden=256, intermediate=128)


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_a_token_has_different_experts_and_the_same_ones_again(routing: str) -> None:
    drawn = [choices(SMALL, 200, routing, torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*drawn)
    assert drawn[0].dtype == torch.int32
    assert all(len(set(row)) == 3 for row in drawn[0].tolist())
    counts = torch.bincount(drawn[0].flatten(), minlength=12)
    assert counts.sum() == 600
    assert (counts[0] > 3 * counts[11]) == (routing == "zipf")


def test_products_of_real_mixtures() -> None:
    assert MIXTURES["qwen3-30b-a3b"].product("gate-up") == (1536, 2048)
    assert MIXTURES["mixtral-8x7b"].product("down") == (4096, 14336)


def test_rows_follow_their_experts() -> None:
    ids = torch.tensor([[2, 0], [1, 2], [2, 1]], dtype=torch.int32)
    x = torch.arange(3.0)[:, None]
    routing = Routing(ids, x, 4)
    assert routing.offsets == [0, 1, 3, 6, 6]
    assert routing.rows.flatten().tolist() == [0, 1, 2, 0, 1, 2]
    assert routing.touched == 3
    assert checked_experts(routing, most=2) == [0, 2]
    of_choices = Routing(ids, torch.arange(6.0)[:, None], 4)
    assert of_choices.rows.flatten().tolist() == [1, 2, 5, 0, 3, 4]


def test_experts_differ_and_mean_what_they_say() -> None:
    stack = Stack(SMALL, "gate-up", CPU)
    assert stack.shape == (256, 256)
    q = stack.quantized(TensorFormat("int4", "group", 128))
    assert len(q) == 12
    exact = [dequantize(each) for each in q]
    assert torch.equal(exact[8], exact[0] * 2)
    assert not torch.equal(exact[1], exact[0])
    assert [w.shape for w in stack.plain()] == [torch.Size([256, 256])] * 12


def test_errors_are_seen_whatever_the_order() -> None:
    stack = Stack(SMALL, "down", CPU)
    experts = stack.plain()
    (routing,) = stack.routings(20, "uniform", 1)
    result = torch.empty(60, 256)
    for expert in range(12):
        rows = slice(*routing.offsets[expert : expert + 2])
        result[rows] = routing.rows[rows].float() @ experts[expert].float().T

    def loaded(in_order: bool) -> Loaded:
        return Loaded(experts, None, [()], 1, lambda routing: None, lambda *given: result, in_order)

    assert relative_error(result, loaded(True), routing) < 1e-6
    of_choices = torch.empty_like(result)
    of_choices[routing.order] = result
    assert relative_error(of_choices, loaded(False), routing) < 1e-6
    assert relative_error(of_choices, loaded(True), routing) > 0.5
    result[3, 3] = float("nan")
    with pytest.raises(WrongResultError, match="1 of 15360"):
        relative_error(result, loaded(True), routing)
