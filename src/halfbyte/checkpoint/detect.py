"""Which quantization format a checkpoint is in, told from its config.json and tensor names. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from halfbyte.checkpoint import qserve_config, w4afp8_config
from halfbyte.checkpoint.model_config import CONFIG_FILE
from halfbyte.checkpoint.quantization_config import (
    COMPRESSED_TENSORS,
    QUANT_METHOD,
    find_config,
    parse_config,
)
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.checkpoint.stored_quantization import StoredQuantization
from halfbyte.errors import HalfbyteError

UNQUANTIZED = "unquantized"
READABLE = (
    *(UNQUANTIZED, COMPRESSED_TENSORS, QUANT_METHOD),
    *(qserve_config.QUANT_METHOD, w4afp8_config.QUANT_METHOD),
)
# Files in which tools describe their quantization when config.json does not.
_SIDE_CONFIGS = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
# Endings of tensor names that only one kind of tool writes.
_TELLING_ENDINGS = {
    ".weight_packed": COMPRESSED_TENSORS,
    ".g_idx": "gptq",
    ".qweight": "gptq or awq",
    ".weight_scale_inv": "fp8",
    ".weight_scale_2": "modelopt",
    "_blocks": "mxfp4",
    ".trellis": "exl3",
    ".quant_state.bitsandbytes__nf4": "bitsandbytes",
    "._weight_qdata": "torchao",
}


@dataclass(frozen=True)
class Detection:
    """The format's name, what told it in one line, and the quantization if halfbyte can read it."""

    format: str
    why: str
    stored: StoredQuantization | None = None

    @property
    def readable(self) -> bool:
        """Whether weights in this format can be decoded."""
        return self.format in READABLE


def detect(checkpoint: Checkpoint) -> Detection:
    """The quantization format of a checkpoint.

    Errors: a compressed-tensors or halfbyte config that cannot be understood.
    """
    config_file = checkpoint.path / CONFIG_FILE
    quantization = find_config(checkpoint.config)
    if quantization is not None:
        method = str(
            quantization.get("quant_method", COMPRESSED_TENSORS if "config_groups" in quantization else "?")
        )
        why = f"quant_method of {CONFIG_FILE} is {method!r}"
        if method not in READABLE:
            return Detection(method, f"{why}; not readable yet")
        try:
            return Detection(method, why, parse_config(quantization))
        except HalfbyteError as error:
            raise HalfbyteError(f"{config_file}: {error}") from None
    if (name := _packed_expert(checkpoint)) is not None:
        why = (
            f"{name} is INT8 beside {w4afp8_config.SCALE_LEAF}, but {CONFIG_FILE} has no quantization_config"
        )
        entry = f'"quantization_config": {{"quant_method": "{w4afp8_config.QUANT_METHOD}"}}'
        return Detection(w4afp8_config.UNDECLARED, f"{why}; {entry} in {CONFIG_FILE} makes it readable")
    for file, method in _SIDE_CONFIGS.items():
        if (checkpoint.path / file).exists():
            return Detection(method, f"{file} lies beside the weights; not readable yet")
    if any(name.endswith(f".{qserve_config.SCALE_LEAF}") for name in checkpoint.tensors):
        why = f"tensors end in {qserve_config.SCALE_LEAF}, but {CONFIG_FILE} has no quantization_config"
        fix = f"`halfbyte import-qserve {checkpoint.path} -o DIRECTORY` adds it"
        return Detection(qserve_config.UNDECLARED, f"{why}; {fix}")
    if told := _telling_tensor(checkpoint.tensors):
        name, method = told
        why = f"tensor {name} is of a quantized model, but {CONFIG_FILE} has no quantization_config"
        return Detection(f"{method} without config", f"{why}; not readable")
    return Detection(UNQUANTIZED, f"{CONFIG_FILE} has no quantization_config")


def _packed_expert(checkpoint: Checkpoint) -> str | None:
    """A weight that only w4afp8 stores so; its first files came with a config.json that does not say it."""
    for name, info in checkpoint.tensors.items():
        if info.dtype == "I8" and name.endswith(".weight"):
            module = name.removesuffix(".weight")
            if f"{module}.{w4afp8_config.SCALE_LEAF}" in checkpoint.tensors:
                return name
    return None


def _telling_tensor(names: Iterable[str]) -> tuple[str, str] | None:
    endings = tuple(_TELLING_ENDINGS)
    for name in names:
        if name.endswith(endings):
            return name, next(method for ending, method in _TELLING_ENDINGS.items() if name.endswith(ending))
    return None
