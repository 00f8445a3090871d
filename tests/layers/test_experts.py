from __future__ import annotations

import pytest
import torch
from torch import nn

from halfbyte.formats.quantize import dequantize
from halfbyte.formats.spec import TensorFormat
from halfbyte.layers.expert_gate import ExpertGate
from halfbyte.layers.experts import ExpertNames, QuantExperts
from halfbyte.schemes import Scheme
from tests.layers.plain_codec import quant_linear

SCHEME = Scheme("w8a16", TensorFormat("int8", "channel", scale="f32"))
HIDDEN, INNER, EXPERTS = 32, 48, 4


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return nn.functional.silu(gate) * up


def make(names: ExpertNames, gate: ExpertGate) -> tuple[QuantExperts, list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(0)
    layers, weights = [], []
    for _ in range(EXPERTS):
        layer, weight = {}, {}
        for name in names.all:
            shape = (HIDDEN, INNER) if name == names.down else (INNER, HIDDEN)
            layer[name], q = quant_linear(
                SCHEME, torch.randn(shape, generator=generator), dtype=torch.float32
            )
            weight[name] = dequantize(q)
        layers.append(layer)
        weights.append(weight)
    return QuantExperts(layers, names, gate), weights


def route(tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    index = torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)])
    return (
        torch.randn(tokens, HIDDEN, generator=generator),
        index,
        torch.rand(tokens, top_k, generator=generator),
    )


@pytest.mark.parametrize(
    "names", [ExpertNames("gate_proj", "up_proj", "down_proj"), ExpertNames("w1", "w3", "w2")]
)
def test_token_by_token(names: ExpertNames) -> None:
    experts, weights = make(names, ExpertGate(swiglu))
    x, index, share = route(9, 2)
    want = torch.zeros_like(x)
    for token in range(9):
        for slot in range(2):
            w = weights[int(index[token, slot])]
            inner = nn.functional.silu(x[token] @ w[names.gate].T) * (x[token] @ w[names.up].T)
            want[token] += share[token, slot] * (inner @ w[names.down].T)
    torch.testing.assert_close(experts(x, index, share), want, rtol=1e-4, atol=1e-3)


def test_interleaved_gate_and_biases_as_gpt_oss_has_them() -> None:
    names = ExpertNames("gate_proj", "up_proj", "down_proj")
    up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER))
    down_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def combine(gate_up: torch.Tensor) -> torch.Tensor:
        return gate_up[..., ::2].sigmoid() * (gate_up[..., 1::2] + 1)

    experts, weights = make(names, ExpertGate(combine, True, up_bias, down_bias))
    x, index, share = route(5, 1)
    rows = []
    for token in range(5):
        expert = int(index[token, 0])
        w = weights[expert]
        gate = x[token] @ w["gate_proj"].T + up_bias[expert, ::2]
        up = x[token] @ w["up_proj"].T + up_bias[expert, 1::2]
        rows.append(share[token, 0] * ((gate.sigmoid() * (up + 1)) @ w["down_proj"].T + down_bias[expert]))
    torch.testing.assert_close(experts(x, index, share), torch.stack(rows), rtol=1e-4, atol=1e-3)
    assert {"gate_up_proj_bias", "down_proj_bias", "3.down_proj.weight_scale"} <= set(experts.state_dict())


def test_experts_without_a_gate() -> None:
    names = ExpertNames(None, "up_proj", "down_proj")
    experts, weights = make(names, ExpertGate(torch.relu))
    x, index, share = route(3, 1)
    want = torch.stack(
        [
            share[t, 0]
            * (
                torch.relu(x[t] @ weights[int(index[t, 0])]["up_proj"].T)
                @ weights[int(index[t, 0])]["down_proj"].T
            )
            for t in range(3)
        ]
    )
    torch.testing.assert_close(experts(x, index, share), want, rtol=1e-4, atol=1e-3)


def test_experts_without_tokens_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ExpertNames("gate_proj", "up_proj", "down_proj")
    experts, _ = make(names, ExpertGate(swiglu))
    asked: list[int] = []
    run = experts._expert
    monkeypatch.setattr(experts, "_expert", lambda index, x: asked.append(index) or run(index, x))
    x, _, share = route(4, 1)
    experts(x, torch.full((4, 1), 2), share)
    assert asked == [2]
    assert experts(x[:0], torch.zeros(0, 1, dtype=torch.int64), share[:0]).shape == (0, HIDDEN)


def test_experts_of_other_machines_are_left_out() -> None:
    experts, _ = make(ExpertNames("gate_proj", "up_proj", "down_proj"), ExpertGate(swiglu))
    x, _, share = route(2, 1)
    assert experts(x, torch.full((2, 1), EXPERTS), share).abs().max() == 0


def test_a_bad_token_stays_alone() -> None:
    experts, _ = make(ExpertNames("gate_proj", "up_proj", "down_proj"), ExpertGate(swiglu))
    x, index, share = route(6, 2)
    clean = experts(x, index, share)
    x[2, 3] = float("nan")
    y = experts(x, index, share)
    others = [0, 1, 3, 4, 5]
    assert torch.equal(y[others], clean[others])
    assert y[2].isnan().all()


def test_conventions_are_recognized_by_their_whole_set() -> None:
    assert ExpertNames.among(["w2", "w1", "w3"]) == ExpertNames("w1", "w3", "w2")
    assert ExpertNames.among(["gate_proj", "up_proj"]) is None


def test_strangers_and_repetitions_add_nothing() -> None:
    experts, _ = make(ExpertNames("gate_proj", "up_proj", "down_proj"), ExpertGate(swiglu))
    x, index, share = route(5, 2)
    alone = share.clone()
    alone[:, 1] = 0
    for other in (torch.full_like(index[:, 1], -1), torch.full_like(index[:, 1], EXPERTS + 3), index[:, 0]):
        found = experts(x, torch.stack([index[:, 0], other], 1), share)
        torch.testing.assert_close(found, experts(x, index, alone), rtol=1e-4, atol=1e-3)


def test_experts_at_once_have_the_biases_that_were_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader replaces parameters; those that the experts were made with have no data."""
    found: list[ExpertGate] = []

    class Caught(nn.Module):
        def __init__(self, firsts: object, lasts: object, gate: ExpertGate) -> None:
            super().__init__()
            found.append(gate)

    monkeypatch.setattr("halfbyte.layers.experts.cannot_group", lambda *layers: "")
    monkeypatch.setattr("halfbyte.layers.experts.GroupedExperts", Caught)
    on_meta = [nn.Parameter(torch.empty(EXPERTS, n, device="meta")) for n in (2 * INNER, HIDDEN)]
    experts, _ = make(ExpertNames("gate_proj", "up_proj", "down_proj"), ExpertGate(swiglu, False, *on_meta))
    experts.gate_up_proj_bias = nn.Parameter(torch.ones(EXPERTS, 2 * INNER))
    experts.down_proj_bias = nn.Parameter(torch.ones(EXPERTS, HIDDEN))
    assert experts._group(torch.zeros(1, HIDDEN)) == ""
    assert found[0].up_bias is experts.gate_up_proj_bias
    assert found[0].down_bias is experts.down_proj_bias
