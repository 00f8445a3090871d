from __future__ import annotations

import pytest
import torch

from halfbyte.bench.qwen3_moe_shape import Qwen3MoeShape
from halfbyte.engines.transformers.fusion import running_linears
from halfbyte.engines.transformers.latency import RandomModel
from halfbyte.engines.transformers.random_mixture import random_mixture
from halfbyte.layers.experts import QuantExperts
from halfbyte.layers.linear import QuantLinear
from halfbyte.schemes import resolve

SHAPE = Qwen3MoeShape(
    layers=2,
    hidden=128,
    expert_size=128,
    experts=4,
    experts_per_token=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    vocab=300,
)
CPU = torch.device("cpu")


@pytest.mark.parametrize("scheme", [None, "w4a8", "w4a8-int8"])
def test_a_mixture_that_runs(scheme: str | None) -> None:
    model = random_mixture(SHAPE, None if scheme is None else resolve(scheme), 32, CPU)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    mixtures = [module for module in model.modules() if isinstance(module, QuantExperts)]
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    assert len(mixtures) == (0 if scheme is None else 2)
    assert len(layers) == (0 if scheme is None else 2 * (4 + 3 * 4))
    # What runs by itself: attention's projections and the head, not an expert's.
    assert len(running_linears(model)) == 2 * 4 + 1
    ids = torch.arange(12)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    assert logits.isfinite().all()
    again = random_mixture(SHAPE, None if scheme is None else resolve(scheme), 32, CPU)
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, logits)


@pytest.mark.parametrize("scheme", [None, "w4a8"])
def test_a_step_and_its_products(scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = RandomModel(SHAPE, None if scheme is None else resolve(scheme), 32)
    assert model.kernels == ("torch" if scheme is None else "cpu-int4")
    run = model.run(3, 8, 4)
    run.read()
    run.step()
    run.linears()
