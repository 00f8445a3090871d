from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from halfbyte.bench.remembered_logits import RememberedLogits

VOCABULARY = 5
BYTES_PER_TOKEN = 4 * VOCABULARY


class Counting(nn.Module):
    """Logits that are its tokens, and how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.config = SimpleNamespace(max_position_embeddings=7)
        self.asked: list[list[int]] = []
        self.options: dict[str, Any] = {}

    def forward(self, ids: torch.Tensor, **options: Any) -> Any:
        self.asked.append(ids[0].tolist())
        self.options = options
        return SimpleNamespace(logits=ids[..., None].float().expand(-1, -1, VOCABULARY) * self.weight)


class Loads:
    def __init__(self) -> None:
        self.models: list[Counting] = []

    def __call__(self) -> Counting:
        self.models.append(Counting())
        return self.models[-1]


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor([tokens])


def test_each_sequence_is_asked_for_once() -> None:
    loads = Loads()
    remembered = RememberedLogits(loads, limit=1000)
    first, again, other = (
        remembered(tokens, use_cache=False) for tokens in (ids(1, 2), ids(1, 2), ids(2, 1))
    )
    assert first[0, :, 0].tolist() == again[0, :, 0].tolist() == [1, 2]
    assert other[0, :, 0].tolist() == [2, 1]
    (model,) = loads.models
    assert model.asked == [[1, 2], [2, 1]]
    assert model.options == {"use_cache": False}
    assert remembered.config.max_position_embeddings == 7


def test_no_more_is_kept_than_the_limit() -> None:
    loads = Loads()
    remembered = RememberedLogits(loads, limit=3 * BYTES_PER_TOKEN)
    for tokens in (ids(1, 2), ids(3, 4), ids(5), ids(1, 2), ids(3, 4), ids(5)):
        assert remembered(tokens)[0, :, 0].tolist() == tokens[0].tolist()
    assert loads.models[0].asked == [[1, 2], [3, 4], [5], [3, 4]]


def test_a_released_model_comes_back_only_for_what_was_not_kept() -> None:
    loads = Loads()
    remembered = RememberedLogits(loads, limit=1000)
    remembered(ids(1, 2))
    remembered.release()
    remembered(ids(1, 2))
    assert len(loads.models) == 1
    assert remembered(ids(4))[0, 0].tolist() == [4.0] * VOCABULARY
    assert len(loads.models) == 2
