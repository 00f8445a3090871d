"""What blocks are passed, on models of a few lines that do what some family does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from halfbyte.calibration import arguments
from halfbyte.calibration.arguments import ModelAround
from halfbyte.errors import HalfbyteError

WIDTH, VOCABULARY = 4, 11


class Block(nn.Module):
    """Adds a multiple of what it is passed; returns a tuple where the model expects one."""

    def __init__(self, index: int, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.index = index
        self.wrap = wrap

    def forward(self, hidden_states: torch.Tensor, scale: float, *, shift: torch.Tensor) -> Any:
        return self.wrap(hidden_states * scale + shift * (self.index + 1))


class Model(nn.Module):
    """runs: how often its forward pass began."""

    def __init__(self, blocks: int = 3, tupled: bool = False, shift: str = "length") -> None:
        super().__init__()
        self.tupled = tupled
        self.shift = shift
        self.runs = 0
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            Block(index, (lambda hidden: (hidden, None)) if tupled else (lambda hidden: hidden))
            for index in range(blocks)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert not use_cache
        self.runs += 1
        hidden = self.embedding(input_ids)
        shift = hidden * 0.5 if self.shift == "tokens" else torch.full((1,), float(input_ids.shape[1]))
        for layer in self.layers:
            result = layer(hidden, 0.5, shift=shift)
            hidden = result[0] if self.tupled else result
            if self.shift == "between":
                hidden = hidden + 1
        return SimpleNamespace(logits=self.head(hidden))


def around(model: Model) -> ModelAround:
    return ModelAround(model, list(model.layers))  # type: ignore[arg-type]


def logits_by_blocks(model: Model, ids: torch.Tensor) -> torch.Tensor:
    outside = around(model)
    hidden = outside.enter(ids)
    for block, passed in zip(model.layers, outside.arguments(ids), strict=True):
        hidden = passed.call(block, hidden)
    return outside.leave(hidden)


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor([tokens])


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("tupled", [False, True])
@pytest.mark.parametrize("shift", ["length", "tokens"])
@torch.no_grad()
def test_blocks_get_what_the_model_passes(blocks: int, tupled: bool, shift: str) -> None:
    model = Model(blocks, tupled, shift)
    expected = model(ids(3, 1, 0), use_cache=False).logits
    torch.testing.assert_close(logits_by_blocks(model, ids(3, 1, 0)), expected, rtol=0, atol=0)


@torch.no_grad()
def test_a_length_is_tried_once() -> None:
    model = Model()
    outside = around(model)
    outside.enter(ids(1, 2))
    outside.enter(ids(1, 2, 3))
    runs = model.runs
    for tokens in (ids(4, 5), ids(0, 1, 2), ids(9, 9)):
        assert outside.known(tokens)
        assert float(outside.arguments(tokens)[0].named["shift"]) == tokens.shape[1]
    assert model.runs == runs
    assert not outside.known(ids(1))


@torch.no_grad()
def test_arguments_that_follow_tokens_are_never_kept() -> None:
    outside = around(Model(shift="tokens"))
    first = outside.arguments(ids(1, 2))[0].named["shift"]
    assert not outside.known(ids(1, 2))
    assert not torch.equal(outside.arguments(ids(3, 2))[0].named["shift"], first)


@torch.no_grad()
def test_few_large_arguments_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_CACHED_BYTES", 8)  # two shifts of four bytes each
    outside = around(Model())
    for tokens in (ids(1), ids(1, 1), ids(1, 1, 1)):
        outside.enter(tokens)
    assert [outside.known(ids(*[1] * length)) for length in (1, 2, 3)] == [False, True, True]
    outside.arguments(ids(1, 1))
    outside.enter(ids(1))
    assert [outside.known(ids(*[1] * length)) for length in (1, 2, 3)] == [True, True, False]


@torch.no_grad()
def test_blocks_that_do_not_follow_each_other_are_refused() -> None:
    with pytest.raises(HalfbyteError, match="Model: block 1 does not get what the block before it returned"):
        around(Model(shift="between")).enter(ids(1, 2))


@torch.no_grad()
def test_a_model_that_leaves_a_block_out_is_refused() -> None:
    model = Model(3)
    with pytest.raises(HalfbyteError, match="does not call all of its blocks"):
        ModelAround(model, [*model.layers, Block(3, lambda hidden: hidden)]).enter(ids(1, 2))  # type: ignore[arg-type]


@torch.no_grad()
def test_the_model_s_own_blocks_are_back_afterwards() -> None:
    model = Model()
    expected = model(ids(3, 1), use_cache=False).logits
    around(model).enter(ids(3, 1))
    assert torch.equal(model(ids(3, 1), use_cache=False).logits, expected)
