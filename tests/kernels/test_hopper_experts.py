"""Grouped kernels up to their launch, which is all that shows without a GPU: operands fit, one launch a height."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import quantize
from halfbyte.kernels.hopper import operands, w4a8
from halfbyte.kernels.hopper.grouped import GroupedLinear
from halfbyte.kernels.hopper_experts import EXPERTS, HopperExperts, PreparedExperts, experts_of
from halfbyte.kernels.problem import LinearProblem
from halfbyte.kernels.routes import route
from halfbyte.schemes import PRESETS, Scheme

N, K, COUNT = 80, 320, 3
CPU = torch.device("cpu")
PRESET = {"hopper-w4a16": "w4a16", "hopper-w4a8-int8": "w4a8-int8", "hopper-fp8": "fp8"}


def scheme_of(kernel: HopperExperts) -> Scheme:
    scheme = PRESETS[PRESET.get(kernel.name, "w4a8")]
    fmt = scheme.weights if scheme.weights.scale == "int8" else scheme.weights.with_scale("bf16")
    if fmt.granularity == "group" and kernel.name != "hopper-w4a8-fp8-scales":
        fmt = fmt.with_group_size(64)
    return replace(scheme, weights=fmt)


def stacked(kernel: HopperExperts, k: int) -> PreparedExperts:
    scheme = scheme_of(kernel)
    problem = LinearProblem(scheme, N, k, CPU, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    weights = [quantize(torch.randn(N, k, generator=generator), scheme.weights) for _ in range(COUNT)]
    return kernel.stack([kernel.linear.prepare(q, problem) for q in weights])


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[GroupedLinear]:
    found: list[GroupedLinear] = []
    monkeypatch.setattr(operands.Linear, "launch", lambda self, *given: found.append(self))
    monkeypatch.setattr(w4a8, "tensor_map", lambda *given: None)
    return found


@pytest.mark.parametrize("kernel", EXPERTS, ids=lambda kernel: kernel.name)
def test_one_launch_a_height(
    kernel: HopperExperts, launched: list[GroupedLinear], monkeypatch: pytest.MonkeyPatch
) -> None:
    k = 384 if kernel.name == "hopper-w4a8-fp8-scales" else K
    prepared = stacked(kernel, k)
    op: Any = kernel._op()
    monkeypatch.setattr(kernel, "_op", lambda: op._init_fn)  # the op itself is for GPUs only
    ids = torch.tensor([[0, 2], [2, 1], [2, -1], [1, 0]])
    for heights in ([8], [32, 128]):
        launched.clear()
        routes = route(ids, COUNT, heights)
        rows = kernel.route(torch.randn(4, k, dtype=torch.bfloat16), prepared, routes)
        bias = torch.zeros(COUNT, N, dtype=torch.bfloat16)
        assert kernel.run(rows, prepared, routes, heights, bias).shape == (8, N)
        assert [each.config.tokens for each in launched] == heights[::-1]
        assert all(each.config.grouped and not each.config.stream for each in launched)
        assert all(each.weight.shape[0] == COUNT for each in launched)
    with pytest.raises(HalfbyteError, match=f"bias must be contiguous bfloat16 with {COUNT} x {N} numbers"):
        kernel.run(rows, prepared, routes, heights, bias[0])


@pytest.mark.parametrize("kernel", EXPERTS, ids=lambda kernel: kernel.name)
def test_experts_come_back_and_share_memory(kernel: HopperExperts) -> None:
    prepared = stacked(kernel, 384)
    scheme = scheme_of(kernel)
    generator = torch.Generator().manual_seed(0)
    for expert, stacked_one in enumerate(prepared.experts):
        restored = kernel.linear.restore(stacked_one)
        q = quantize(torch.randn(N, 384, generator=generator), scheme.weights)
        assert torch.equal(restored.codes.view(torch.uint8), q.codes.view(torch.uint8))
        assert torch.equal(restored.scales, q.scales)
        weight = prepared.experts[expert].tensors["weight"]
        assert weight.data_ptr() == prepared.stacked["weight"][expert].data_ptr()


def test_by_name() -> None:
    assert experts_of("hopper-w4a8") is EXPERTS[0]
    assert experts_of("scaled-mm") is None
