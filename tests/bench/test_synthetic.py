from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from halfbyte.bench.synthetic import (
    LlamaShape,
    deepseek_v3,
    llama_of_bytes,
    plan_shards,
    tensor_bytes,
    write_dense_checkpoint,
    write_sparse_checkpoint,
)

SMALL = LlamaShape(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, vocab=100)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.data())
def test_no_shard_is_empty_and_order_is_kept(sizes: list[int], data: st.DataObject) -> None:
    tensors = {f"t{number}": ("U8", (size,)) for number, size in enumerate(sizes)}
    shards = data.draw(st.integers(1, len(sizes)))
    parts = plan_shards(tensors, shards)
    assert len(parts) == shards
    assert all(parts)
    assert [name for part in parts for name in part] == list(tensors)


def test_more_shards_than_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="2 shards"):
        plan_shards({"t": ("U8", (1,))}, 2)


def test_a_sparse_checkpoint_is_a_true_one_full_of_zeros(tmp_path: Path) -> None:
    tensors = {
        "a.weight": ("BF16", (3, 5)),
        "b.weight": ("F8_E4M3", (7,)),
        "c": ("F32", ()),
        "d": ("I64", (2,)),
    }
    write_sparse_checkpoint(tmp_path, {"model_type": "llama"}, tensors, shards=2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, "pt") as opened:
            assert tuple(opened.get_tensor(name).shape) == tensors[name][1]
            assert not opened.get_tensor(name).float().any()


def test_holes_take_no_space(tmp_path: Path) -> None:
    write_sparse_checkpoint(tmp_path, {}, {"big.weight": ("BF16", (1 << 20, 1 << 12))})
    stat = (tmp_path / "model.safetensors").stat()
    assert stat.st_size > 8 << 30
    assert stat.st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("fp8", [True, False])
def test_deepseek_v3_has_its_size(fp8: bool) -> None:
    config, tensors = deepseek_v3(fp8)
    layers = config["num_hidden_layers"]
    parameters = sum(
        math.prod(shape)
        for name, (_, shape) in tensors.items()
        if not name.endswith("_scale_inv") and not name.startswith(f"model.layers.{layers}.")
    )
    assert round(parameters / 1e9) == 671
    assert ("quantization_config" in config) == fp8
    assert fp8 == any(name.endswith("weight_scale_inv") for name in tensors)


def test_a_dense_checkpoint_loads_and_is_random(tmp_path: Path) -> None:
    written = write_dense_checkpoint(tmp_path, SMALL, shard_bytes=50_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert written == SMALL.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    weight = tensors["model.layers.1.mlp.up_proj.weight"].float()
    assert 0.018 < weight.std() < 0.022
    assert abs(weight.mean()) < 0.001
    assert torch.equal(tensors["model.norm.weight"], torch.ones(64, dtype=torch.bfloat16))
    assert not torch.equal(
        tensors["model.layers.0.mlp.up_proj.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    )
    expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)).state_dict()
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_dense_checkpoint(tmp_path / name, SMALL, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("gigabytes", [1, 8, 30])
def test_the_size_asked_for_is_met_to_half_a_layer(gigabytes: int) -> None:
    shape = llama_of_bytes(gigabytes << 30)
    layer = tensor_bytes(("BF16", (4096 * 2 + 2048 + 3 * 14336, 4096)))
    assert abs(shape.nbytes - (gigabytes << 30)) < layer / 2 + 1e6
