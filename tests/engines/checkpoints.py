"""Quantized tiny checkpoints, and plain ones that hold what the quantized weights mean."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from halfbyte.api import quantize
from halfbyte.checkpoint.quantization_config import parse_config
from halfbyte.checkpoint.quantized_weight import decode
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.formats.quantize import dequantize
from halfbyte.models.describe import describe
from tests.tiny import tiny_model


class Checkpoints:
    """Made on demand, each once, below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def plain(self, family: str, **overrides: object) -> Path:
        path = self._folder / _label(family, overrides)
        if not path.exists():
            shutil.move(tiny_model(family, self._folder / "new", **overrides), path)
        return path

    def quantized(self, family: str, scheme: str, **overrides: object) -> Path:
        path = self._folder / f"{_label(family, overrides)}-{scheme}"
        if not path.exists():
            quantize(self.plain(family, **overrides), path, scheme)
        return path

    def meant(self, family: str, scheme: str, **overrides: object) -> Path:
        """A plain float32 checkpoint, laid out as the original, of the weights that the quantized one decodes to."""
        path = self._folder / f"{_label(family, overrides)}-{scheme}-meant"
        if not path.exists():
            source = Checkpoint.open(self.plain(family, **overrides))
            stored = Checkpoint.open(self.quantized(family, scheme, **overrides))
            shutil.copytree(source.path, path)
            save_file(_meant(source, stored), path / "model.safetensors", metadata={"format": "pt"})
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
        return path


def _label(family: str, overrides: dict[str, object]) -> str:
    return "-".join([family, *(f"{name}={value}" for name, value in overrides.items())])


def _meant(source: Checkpoint, stored: Checkpoint) -> dict[str, torch.Tensor]:
    declared = parse_config(stored.config["quantization_config"])
    tensors = {name: source.load(name).float() for name in source.tensors}
    for module in describe(source.config, source.shapes).modules:
        scheme = declared.scheme_for(module.name, module.role, stored.tensors)
        if scheme is None:
            continue
        prefix = f"{module.name}."
        parts = {name: stored.load(name) for name in stored.tensors if name.startswith(prefix)}
        place = tensors[module.source.tensor]
        if module.source.expert is not None:
            place = place[module.source.expert]
        if module.source.transposed:
            place = place.T
        if module.source.rows is not None:
            place = place[slice(*module.source.rows)]
        place.copy_(dequantize(decode(module.name, scheme, parts)))
    return tensors
