from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.bench.pooled_weights import fill_with_random_weights
from halfbyte.bench.synthetic import TensorSpec, write_sparse_checkpoint

TENSORS: dict[str, TensorSpec] = {
    "embed.weight": ("BF16", (7, 10)),
    "0.q_norm.weight": ("BF16", (10,)),
    "0.up.weight": ("BF16", (13, 10)),
    "1.input_layernorm.weight": ("BF16", (10,)),
    "1.up.weight": ("BF16", (13, 10)),
}


def filled(path: Path, **options: int) -> dict[str, torch.Tensor]:
    write_sparse_checkpoint(path, {"model_type": "llama"}, TENSORS, shards=2)
    fill_with_random_weights(path, **options)
    files = sorted(path.glob("*.safetensors"))
    assert len(files) == 2
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_weights_are_a_pool_over_and_over_and_norms_are_one(tmp_path: Path) -> None:
    found = filled(tmp_path, pool_elements=31)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        name: shape for name, (_, shape) in TENSORS.items()
    }
    weights = torch.cat([found[name].flatten() for name in TENSORS if "norm" not in name])
    pool = weights[:31]
    assert torch.equal(weights, pool.repeat(11)[: len(weights)])
    assert len(pool.unique()) > 25
    for name in ("0.q_norm.weight", "1.input_layernorm.weight"):
        assert torch.equal(found[name], torch.ones(10, dtype=torch.bfloat16))


def test_a_small_checkpoint_repeats_nothing(tmp_path: Path) -> None:
    found = filled(tmp_path)
    assert not torch.equal(found["0.up.weight"], found["1.up.weight"])
    values = torch.cat([found[name].flatten() for name in TENSORS if "norm" not in name]).float()
    assert float(values.std()) == pytest.approx(0.02, rel=0.2)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first, second, other = (filled(tmp_path / str(n), seed=seed) for n, seed in enumerate((0, 0, 1)))
    assert all(torch.equal(first[name], second[name]) for name in TENSORS)
    assert not torch.equal(first["0.up.weight"], other["0.up.weight"])
