"""Experts in a list of modules: all of them see all counted tokens, the mixture's output stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from halfbyte.calibration.listed_experts import listed_experts, row_keys
from halfbyte.calibration.observers import Observer
from halfbyte.models.layout import WeightSource

HIDDEN, INNER, EXPERTS, TOKENS = 6, 5, 3, 12
PARTS = {"gate_proj": HIDDEN, "up_proj": HIDDEN, "down_proj": INNER}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER)
        self.up_proj = nn.Linear(HIDDEN, INNER)
        self.down_proj = nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Mixture(nn.Module):
    """Each token goes to one expert; the last expert gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, HIDDEN)
        result = torch.zeros_like(rows)
        for index in range(EXPERTS - 1):
            chosen = torch.where((rows[:, 0] > 0).long() == index)[0]
            result[chosen] = self.experts[index](rows[chosen])
        return result.reshape(hidden_states.shape)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mixture()


@pytest.mark.parametrize("masked", [False, True])
@torch.no_grad()
def test_every_expert_sees_every_counted_token(masked: bool) -> None:
    torch.manual_seed(0)
    model, counts = Block(), torch.arange(TOKENS) % 4 != 1
    samples = [torch.randn(1, TOKENS, HIDDEN) for _ in range(2)]
    in_features = {f"moe.experts.{i}.{part}": size for i in range(EXPERTS) for part, size in PARTS.items()}
    places = {name: WeightSource(f"{name.replace('moe', 'mlp')}.weight") for name in in_features}
    expected = [model.mlp(sample) for sample in samples]

    with Observer(in_features, {}, [], listed_experts(model, in_features, places)) as observer:
        for sample, output in zip(samples, expected, strict=True):
            observer.expect(counts if masked else None)
            assert torch.equal(model.mlp(sample), output)
    found = observer.observation()

    rows = torch.cat([sample[0, counts] if masked else sample[0] for sample in samples])
    statistics = {name: group.statistics for group in found.groups for name in group.names}
    for name in in_features:
        expert = model.mlp.experts[int(name.split(".")[2])]
        inputs = silu(expert.gate_proj(rows)) * expert.up_proj(rows) if "down" in name else rows
        assert statistics[name].tokens == len(rows)
        torch.testing.assert_close(statistics[name].moment, inputs.T @ inputs / len(rows))
    outer = {name for name in in_features if "down" not in name}
    assert outer in [set(group.names) for group in found.groups]
    positive = int((rows[:, 0] > 0).sum())
    assert found.routed_tokens == {"moe.experts": [len(rows) - positive, positive, 0]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_row_keys_tell_rows_apart_and_not_their_layout(dtype: torch.dtype) -> None:
    rows = torch.randn(500, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    keys = row_keys(rows)
    assert len(keys.unique()) == len(rows)
    assert torch.equal(row_keys(rows.T.contiguous().T)[100:], keys[100:])
    assert torch.equal(row_keys(rows[7:8]), keys[7:8])
    swapped = rows[:, [1, 0, *range(2, 33)]]
    assert not torch.isin(row_keys(swapped), keys).any()
