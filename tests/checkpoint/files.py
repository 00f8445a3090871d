"""Small checkpoint directories for tests, written by safetensors' own library or byte by byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}


def write_raw(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with the given header (JSON value or raw bytes) and data, right or wrong."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return file


def write_checkpoint(
    path: Path,
    shards: Mapping[str, Mapping[str, torch.Tensor]],
    index: Mapping[str, str] | None = None,
    config: Mapping[str, Any] = CONFIG,
) -> Path:
    """A checkpoint directory of the given files; ``index`` maps tensors to files."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    for file, tensors in shards.items():
        save_file(dict(tensors), path / file)
    if index is not None:
        (path / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": dict(index)})
        )
    return path


def tensors(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Random BF16 tensors of the given shapes."""
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
