from __future__ import annotations

import math
from pathlib import Path

from transformers import AutoModelForCausalLM

from halfbyte.bench.pooled_weights import fill_with_random_weights
from halfbyte.bench.qwen3_moe_shape import Qwen3MoeShape
from halfbyte.bench.synthetic import write_sparse_checkpoint

SMALL = Qwen3MoeShape(
    layers=2,
    hidden=64,
    experts=4,
    experts_per_token=2,
    expert_size=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab=50,
)


def test_the_defaults_have_the_published_size() -> None:
    shape = Qwen3MoeShape(layers=48)
    assert sum(math.prod(shape) for _, shape in shape.tensors().values()) == 30_532_122_624
    assert shape.nbytes == 2 * 30_532_122_624


def test_transformers_finds_all_of_its_tensors_and_no_more(tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path, SMALL.config(), SMALL.tensors())
    fill_with_random_weights(tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert sum(parameter.numel() for parameter in model.parameters()) == SMALL.nbytes // 2
