from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from halfbyte.bench.synthetic import (
    LlamaShape,
    deepseek_v3,
    plan_shards,
    tensor_bytes,
    write_dense_checkpoint,
    write_sparse_checkpoint,
)
from halfbyte.checkpoint.reader import Checkpoint

_TINY = LlamaShape(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, vocab=100)


def test_dense_checkpoint_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert write_dense_checkpoint(tmp_path / name, _TINY, shard_bytes=50_000) == _TINY.nbytes
    shards = sorted(file.name for file in (tmp_path / "one").glob("*.safetensors"))
    assert len(shards) > 1
    assert all((tmp_path / "one" / f).read_bytes() == (tmp_path / "two" / f).read_bytes() for f in shards)
    tensors = {k: v for shard in shards for k, v in load_file(tmp_path / "one" / shard).items()}
    assert {k: tuple(v.shape) for k, v in tensors.items()} == {
        k: shape for k, (_, shape) in _TINY.tensors().items()
    }
    assert torch.equal(tensors["model.norm.weight"], torch.ones(64, dtype=torch.bfloat16))
    spread = torch.cat([t.float().flatten() for n, t in tensors.items() if n.endswith("proj.weight")])
    assert abs(spread.std().item() - 0.02) < 5e-4
    assert abs(spread.mean().item()) < 5e-4


def test_sparse_checkpoint_has_true_headers_and_takes_no_room(tmp_path: Path) -> None:
    config, tensors = deepseek_v3()
    assert 670e9 < sum(tensor_bytes(s) for n, s in tensors.items() if s[0] == "F8_E4M3") < 690e9
    small = dict(list(tensors.items())[:200])
    write_sparse_checkpoint(tmp_path / "model", config, small, shards=3)
    checkpoint = Checkpoint.open(tmp_path / "model")
    assert checkpoint.shapes == {name: shape for name, (_, shape) in small.items()}
    on_disk = sum(file.stat().st_blocks * 512 for file in (tmp_path / "model").iterdir())
    assert on_disk < 10_000_000 < sum(map(tensor_bytes, small.values()))


def test_no_shard_is_empty() -> None:
    tensors = {f"t{i}": ("BF16", (1 << (30 - 2 * i) if i else 1 << 30,)) for i in range(10)}
    parts = plan_shards(tensors, 7)
    assert len(parts) == 7
    assert all(parts)
    assert {name for part in parts for name in part} == set(tensors)
