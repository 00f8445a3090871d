"""A mixture's experts at once on a Hopper GPU, against the same experts one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from halfbyte.layers.expert_gate import ExpertGate
from halfbyte.layers.experts import ExpertNames, QuantExperts
from halfbyte.schemes import PRESETS
from tests.layers.plain_codec import quant_linear

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
HIDDEN, INNER, EXPERTS = 512, 192, 9
GATED = ExpertNames("gate_proj", "up_proj", "down_proj")
PLAIN = ExpertNames(None, "up_proj", "down_proj")
SCHEMES = ("w4a8", "w4a16", "w4a8-int8")


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return nn.functional.silu(gate) * up


def alternating(gate_up: torch.Tensor) -> torch.Tensor:
    """gpt-oss's: a clamped gate, one beside the other."""
    gate, up = gate_up[..., ::2].clamp(max=7), gate_up[..., 1::2].clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


def bias(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, device=GPU, dtype=torch.bfloat16) * 0.1, requires_grad=False)


def make(scheme: str, names: ExpertNames, gate: ExpertGate, group: int = 64) -> QuantExperts:
    generator = torch.Generator().manual_seed(0)
    preset = PRESETS[scheme]
    fmt = preset.weights if preset.weights.scale == "int8" else preset.weights.with_scale("bf16")
    of_group = replace(preset, weights=fmt.with_group_size(group))
    experts = []
    for _ in range(EXPERTS):
        layers = {}
        for name in names.all:
            shape = (HIDDEN, INNER) if name == names.down else (INNER, HIDDEN)
            weight = torch.randn(shape, generator=generator) / shape[1] ** 0.5
            layers[name], _ = quant_linear(of_group, weight, dtype=torch.bfloat16)
        experts.append(layers)
    return QuantExperts(experts, names, gate)


def routed(tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(GPU).manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, device=GPU, generator=generator).bfloat16()
    ids = torch.rand(tokens, EXPERTS, device=GPU, generator=generator).topk(top_k).indices
    return x, ids, torch.rand(tokens, top_k, device=GPU, generator=generator).bfloat16()


def one_by_one(experts: QuantExperts, *arguments: torch.Tensor) -> torch.Tensor:
    experts._grouped = lambda x: None  # type: ignore[method-assign]
    try:
        return experts(*arguments)
    finally:
        del experts._grouped


GATES = {
    "silu": (GATED, ExpertGate(swiglu, activation="silu")),
    "torch": (GATED, ExpertGate(swiglu)),
    "biases": (
        GATED,
        lambda: ExpertGate(
            alternating, interleaved=True, up_bias=bias(EXPERTS, 2 * INNER), down_bias=bias(EXPERTS, HIDDEN)
        ),
    ),
    "no gate": (PLAIN, ExpertGate(nn.functional.gelu)),
}


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", GATES)
def test_equal_to_one_by_one(scheme: str, kind: str) -> None:
    names, gate = GATES[kind]
    experts = make(scheme, names, gate() if callable(gate) else gate)
    for tokens, top_k in ((0, 2), (1, 2), (13, 3), (300, 2)):
        arguments = routed(tokens, top_k)
        found = experts(*arguments)
        assert "halfbyte_grouped" in experts._modules
        wanted = one_by_one(experts, *arguments)
        assert found.dtype == wanted.dtype
        # One by one, each expert's results are rounded, and biases are added to rounded numbers: then the codes of the
        # last projection's inputs are others here and there.
        allowed = 0.03 if kind == "biases" and scheme != "w4a16" else 0.01
        assert (found.double() - wanted.double()).norm() <= allowed * wanted.double().norm()


@torch.no_grad()
def test_the_weights_are_read_back_and_held_once() -> None:
    experts = make("w4a8", GATED, ExpertGate(swiglu, activation="silu"))
    before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    experts(*routed(4, 2))
    after = experts.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(tensor.cpu(), after[name].cpu()) for name, tensor in before.items())
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    del experts.halfbyte_grouped.products  # type: ignore[union-attr]
    assert torch.cuda.memory_allocated() == held  # the layers have views of the same


@torch.no_grad()
def test_strangers_add_nothing_and_runs_are_alike() -> None:
    experts = make("w4a8", GATED, ExpertGate(swiglu, activation="silu"))
    x, ids, shares = routed(40, 3)
    whole = experts(x, ids, shares)
    assert torch.equal(experts(x, ids, shares), whole)
    others = ids.clone()
    others[:, 2] = EXPERTS + 5  # an expert of another machine
    silenced = shares.clone()
    silenced[:, 2] = 0
    torch.testing.assert_close(experts(x, others, shares), experts(x, ids, silenced))
    assert experts(x, torch.full_like(ids, -1), shares).eq(0).all()


@torch.no_grad()
def test_a_nan_token_spoils_no_other() -> None:
    experts = make("w4a8", GATED, ExpertGate(swiglu, activation="silu"))
    x, ids, shares = routed(50, 2)
    clean = experts(x, ids, shares)
    x[7, 3] = float("nan")
    found = experts(x, ids, shares)
    assert found[7].isnan().all()
    others = [token for token in range(50) if token != 7]
    assert torch.equal(found[others], clean[others])


@torch.no_grad()
def test_a_graph_follows_its_inputs() -> None:
    experts = make("w4a8-int8", GATED, ExpertGate(swiglu, activation="silu"))
    x, ids, shares = routed(24, 2)
    experts(x, ids, shares)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts(x, ids, shares)
    others = routed(24, 2)
    for mine, other in zip((x, ids, shares), (others[0].flip(0), others[1].flip(0), others[2]), strict=True):
        mine.copy_(other)
    graph.replay()
    assert torch.equal(captured, experts(x, ids, shares))


@torch.no_grad()
def test_on_the_cpu_and_back() -> None:
    experts = make("w4a8", GATED, ExpertGate(swiglu, activation="silu"))
    arguments = routed(5, 2)
    first = experts(*arguments)
    on_cpu = experts(*(argument.cpu() for argument in arguments))
    torch.testing.assert_close(on_cpu.float(), first.float().cpu(), rtol=0.03, atol=0.03)
    assert torch.equal(experts(*arguments), first)
