"""Why experts cannot run at once: what shows without a GPU."""

from __future__ import annotations

import torch

from halfbyte.formats.spec import TensorFormat
from halfbyte.layers.grouped_experts import cannot_group
from halfbyte.layers.linear import QuantLinear
from halfbyte.schemes import PRESETS, Scheme
from tests.layers.plain_codec import quant_linear

INT8 = Scheme("w8a16", TensorFormat("int8", "channel", scale="f32"))


def layer(scheme: Scheme = INT8, n: int = 64, k: int = 128) -> QuantLinear:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))
    return quant_linear(scheme, weight, dtype=torch.float32)[0]


def test_kernels_that_take_one_weight() -> None:
    experts = [[layer(), layer()], [layer(), layer()]]
    reason = cannot_group(experts, [layer(), layer()])
    assert reason == f"{experts[0][0].kernel} takes one weight"


def test_one_expert_with_another_scheme() -> None:
    int4 = Scheme("w4a16", PRESETS["w4a16"].weights.with_scale("f32"))
    other = layer(int4)
    assert "their schemes or inputs differ" in cannot_group([[layer(), other]], [layer()])
    assert cannot_group([[layer()], [other]], [layer(), layer()]) == "their schemes or shapes differ"
    assert cannot_group([[layer()], [layer(n=32)]], [layer(), layer()]) == "their schemes or shapes differ"


def test_more_than_a_kernel_finds_tiles_for() -> None:
    one = layer()
    assert cannot_group([[one]] * 513, [one] * 513) == "there are 513; at most 512 run at once"
