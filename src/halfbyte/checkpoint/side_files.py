"""What lies beside a model's weights and belongs to the model."""

from __future__ import annotations

import shutil
from pathlib import Path

from halfbyte.checkpoint.durable import write_synced
from halfbyte.checkpoint.manifest import MANIFEST, NOTES_SUFFIX
from halfbyte.checkpoint.model_config import CONFIG_FILE

_WEIGHT_SUFFIXES = {
    *(
        ".safetensors",
        ".bin",
        ".pt",
        ".pth",
        ".ckpt",
        ".gguf",
        ".h5",
        ".msgpack",
        ".onnx",
        ".onnx_data",
        ".npz",
    ),
    *(".index.json", ".tflite", ".mlmodel", ".nemo", f".safetensors{NOTES_SUFFIX}"),
}
# They describe the source's own weights, not ours.
_ABOUT_THE_SOURCE = {
    CONFIG_FILE,
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "params.json",
}
_COPIED_FOLDERS = ("additional_chat_templates",)


def copy_side_files(source: Path, target: Path) -> None:
    """Copy what belongs to the model but is neither weights nor about the source's quantization.

    Tokenizer, chat templates, generation config, code and licence come along; READMEs and hidden files
    do not.
    """
    for file in sorted(source.iterdir()):
        if file.is_file() and is_side_file(file.name):
            write_synced(target / file.name, file.read_bytes())
        elif file.is_dir() and file.name in _COPIED_FOLDERS:
            shutil.copytree(file, target / file.name, dirs_exist_ok=True)


def is_side_file(name: str) -> bool:
    """Whether a file of a checkpoint directory is worth copying beside new weights."""
    if (
        name.startswith(".")
        or name.lower().startswith("readme")
        or name in _ABOUT_THE_SOURCE
        or name == MANIFEST
    ):
        return False
    return not any(name.endswith(suffix) for suffix in _WEIGHT_SUFFIXES)
