"""Changing a checkpoint on disk the way that faults do, and making small ones to change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from halfbyte.quantization import job
from halfbyte.recipe import Recipe
from tests.quantization import calibrated_runs

Q_PROJ = "model.layers.0.self_attn.q_proj"


def quantized(source: Path, out: Path, scheme: str = "w4a8", **options: Any) -> Path:
    """The checkpoint ``source`` quantized by the real job."""
    job.run(job.prepare(source, Recipe(scheme=scheme)), out, **options)
    return out


def calibrated(source: Path, out: Path, algorithm: str, scheme: str = "w4a8", **options: Any) -> Path:
    """The checkpoint ``source`` quantized by the real calibrated run; options are the recipe's."""
    calibrated_runs.quantize(source, out, Recipe(scheme=scheme, algorithm=algorithm, **options))
    return out


def copied(path: Path, to: Path) -> Path:
    """A copy of a checkpoint, to be damaged."""
    shutil.copytree(path, to)
    return to


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def change(path: Path, edit: Callable[[dict[str, torch.Tensor]], None], shard: int = 0) -> None:
    """Rewrites one shard with its tensors edited in place."""
    file = shards(path)[shard]
    tensors = load_file(file)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})


def change_tensor(path: Path, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Rewrites the shard that holds ``name`` with what ``edit`` makes of this tensor."""
    (number,) = (index for index, file in enumerate(shards(path)) if name in load_file(file))
    change(path, lambda tensors: tensors.update({name: edit(tensors[name])}), number)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15, int64 ``[rows, words, 8]``, of int32 words ``[rows, words]``."""
    return ((packed.long() & 0xFFFFFFFF)[..., None] >> torch.arange(0, 32, 4)) & 15


def from_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`nibbles`."""
    return (codes << torch.arange(0, 32, 4)).sum(-1).to(torch.uint32).view(torch.int32)


def reindex(path: Path) -> None:
    """Writes the index anew, for tensors that came or went."""
    found = {name: file.name for file in shards(path) for name in load_file(file)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": found}))


def drop(path: Path, prefix: str) -> None:
    """Rewrites the first shard without the tensors whose names start with ``prefix``; there must be some."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        gone = [name for name in tensors if name.startswith(prefix)]
        assert gone
        for name in gone:
            del tensors[name]

    change(path, edit)


def change_config(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Rewrites config.json after an edit in place."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    edit(config)
    file.write_text(json.dumps(config))


def names(path: Path) -> set[str]:
    """All tensors of a checkpoint."""
    found: set[str] = set()
    for file in shards(path):
        with safe_open(file, "pt") as opened:
            found |= set(opened.keys())
    return found
