"""config.json of a checkpoint: read, and refused when it is not that of a causal language model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.discover import listed, read_bytes
from halfbyte.checkpoint.headers import TensorInfo, parse_json
from halfbyte.errors import HalfbyteError

CONFIG_FILE = "config.json"
_CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_TORCH_NAMES = {"bfloat16": "bf16", "float16": "f16", "half": "f16", "float32": "f32", "float": "f32"}
_STORED_NAMES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


def read_config(path: Path) -> dict[str, Any]:
    """config.json of the checkpoint directory ``path``.

    Errors: ``path`` is no local directory, there is no config.json or no JSON object in it, or the model that
    it describes is no causal language model. A config that names no architecture passes.
    """
    if not path.is_dir():
        raise HalfbyteError(
            f"{path}: no such directory; only local directories are read (download hub models first)"
        )
    file = path / CONFIG_FILE
    if not file.exists():
        if any(path.glob("*.gguf")):
            raise HalfbyteError(
                f"{path}: holds GGUF files; convert one with `halfbyte import-gguf FILE -o DIRECTORY`"
            )
        raise HalfbyteError(f"{path}: no {CONFIG_FILE}, so this is not a Hugging Face checkpoint")
    config = parse_json(read_bytes(file), file)
    _require_causal_lm(file, config)
    return config


def model_dtype(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """``bf16``, ``f16`` or ``f32``: what config.json says, else what most stored bytes are, else ``bf16``."""
    for section in (config, config.get("text_config")):
        if isinstance(section, Mapping):
            said = str(section.get("dtype") or section.get("torch_dtype")).removeprefix("torch.")
            if said in _TORCH_NAMES:
                return _TORCH_NAMES[said]
    stored = dict.fromkeys(_STORED_NAMES, 0)
    for info in tensors.values():
        if info.dtype in stored:
            stored[info.dtype] += info.nbytes
    return _STORED_NAMES[max(stored, key=stored.__getitem__)]


def _require_causal_lm(file: Path, config: Mapping[str, Any]) -> None:
    architectures = config.get("architectures")
    if not architectures:
        return
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise HalfbyteError(f"{file}: architectures must be a list of names, found {architectures!r}")
    auto_map = config.get("auto_map")
    causal = any(name.endswith(_CAUSAL_SUFFIXES) for name in architectures) or (
        isinstance(auto_map, Mapping) and "AutoModelForCausalLM" in auto_map
    )
    if not causal or config.get("is_encoder_decoder"):
        raise HalfbyteError(
            f"{file}: describes {listed(architectures)}, which is no causal language model; accepted: "
            f"architectures that end in {', '.join(_CAUSAL_SUFFIXES)} and have no encoder"
        )
