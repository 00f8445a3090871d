from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfbyte.engines.transformers.latency import RandomModel
from halfbyte.engines.transformers.random_llama import LlamaShape, drawn_format, random_llama, random_weight
from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import dequantize
from halfbyte.layers.linear import QuantLinear
from halfbyte.schemes import resolve

SHAPE = LlamaShape(layers=2, hidden=128, intermediate=320, heads=4, kv_heads=2, vocabulary=300)
CPU = torch.device("cpu")


@pytest.mark.parametrize("scheme", ["w4a8", "w4a16-asym", "fp8", "w8a8-int8", "w4a8-int8"])
def test_weights_are_of_normal_size_and_use_all_codes(scheme: str) -> None:
    fmt = drawn_format(resolve(scheme).weights)
    q = random_weight(fmt, 96, 256, torch.Generator().manual_seed(0))
    assert q.codes.shape == (96, 256)
    assert q.scales.shape == fmt.scale_shape((96, 256))
    assert (q.zero_points is None) == fmt.symmetric
    # Zero points, drawn alike, add as much again.
    assert 0.015 < dequantize(q).std() < 0.035
    if fmt.bits == 4:
        assert q.codes.unique().tolist() == list(range(-8, 8))


@pytest.mark.parametrize("scheme", [None, "w4a8", "fp8", "w4a8-int8"])
def test_a_model_that_runs(scheme: str | None) -> None:
    model = random_llama(SHAPE, None if scheme is None else resolve(scheme), 32, CPU)
    assert model.dtype == torch.bfloat16
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    assert len(layers) == (0 if scheme is None else 14)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        # What the rotary embedding holds is not left from the meta device: order matters.
        turned = model(input_ids=ids.flip(1)).logits
    assert logits.isfinite().all()
    assert not torch.equal(logits[0, -1], turned[0, 0])
    again = random_llama(SHAPE, None if scheme is None else resolve(scheme), 32, CPU)
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, logits)


def test_groups_fit_the_shape() -> None:
    model = random_llama(SHAPE, resolve("w4a8"), 32, CPU)
    down = model.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(down, QuantLinear)
    assert down.scheme.weights.group_size == 64  # of 320 inputs
    with pytest.raises(
        HalfbyteError, match=r"^scheme w4a8: no group size divides 300 inputs of model\.layers\.0\.mlp"
    ):
        random_llama(replace(SHAPE, intermediate=300), resolve("w4a8"), 32, CPU)


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4"])
def test_other_formats_are_refused(scheme: str) -> None:
    with pytest.raises(HalfbyteError, match="cannot be drawn at random; accepted: int4, int8 and e4m3"):
        random_llama(SHAPE, resolve(scheme), 32, CPU)


def test_the_linear_layers_alone_are_all_of_a_step_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = RandomModel(SHAPE, resolve("w4a8"), 32)
    assert model.kernels == "cpu-int4"
    run = model.run(3, 8, 4)
    seen: list[tuple[str, tuple[int, ...]]] = []
    for module in model._model.modules():
        module.register_forward_hook(lambda m, x, y: seen.append((type(m).__name__, tuple(y.shape))))
    run.linears()
    layer = [
        ("QuantLinear", (3, 128)),
        ("QuantLinear", (3, 128)),
        ("MergedLinear", (3, 256)),
        ("MergedLinear", (3, 640)),
    ]
    assert sorted(seen) == sorted([*layer, *layer, ("Linear", (3, 300))])
