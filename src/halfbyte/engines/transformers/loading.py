"""Loading any checkpoint for inference, quantized or not, with halfbyte's errors instead of transformers' warnings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from halfbyte.checkpoint import qserve_config, w4afp8_config
from halfbyte.checkpoint.detect import detect
from halfbyte.checkpoint.quantization_config import find_config
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.devices import device_named
from halfbyte.engines.transformers.fusion import fuse_on_gpu
from halfbyte.engines.transformers.placement import placed_on
from halfbyte.engines.transformers.registration import registered
from halfbyte.errors import HalfbyteError
from halfbyte.kernels.registry import forced_kernel
from halfbyte.layers.linear import QuantLinear

_UNDECLARED = (qserve_config.UNDECLARED, w4afp8_config.UNDECLARED)


def load(
    path: Path | str,
    *,
    dtype: torch.dtype | None = None,
    kernel: str | None = None,
    device: torch.device | str = "cpu",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model (in evaluation mode) and tokenizer of the checkpoint directory ``path``.

    Its decoder layers are fused when it is first called on a CUDA device.
    device: of the model, as :func:`device_named` takes it; quantized layers are packed there.
    dtype: of everything that is not quantized, and so of the activations; the checkpoint's own unless given.
    kernel: the one that every quantized layer must run on; chosen layer by layer unless given.
    Errors: no readable checkpoint; one that is no causal language model, has no tokenizer, or does not fill
    the model; a kernel that is unknown, cannot run a layer, or has none to run; a device that is not there or
    has no room for the model.
    """
    place = device_named(device)
    checkpoint = Checkpoint.open(path)
    if find_config(checkpoint.config) is None and (found := detect(checkpoint)).format in _UNDECLARED:
        raise HalfbyteError(f"{checkpoint.path}: {found.why}")
    tokenizer = _tokenizer(checkpoint.path)
    with forced_kernel(kernel), registered(), placed_on(place):
        try:
            model = _model(checkpoint.path, dtype).to(place)
        except torch.OutOfMemoryError as error:
            raise HalfbyteError(f"{checkpoint.path} does not fit on {place}: {error}") from None
    if kernel is not None and not any(isinstance(module, QuantLinear) for module in model.modules()):
        raise HalfbyteError(f"{checkpoint.path}: kernel {kernel!r} has nothing to run, no layer is quantized")
    fuse_on_gpu(model)
    return model, tokenizer


def _model(path: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype or "auto", local_files_only=True, output_loading_info=True
        )
    except (HalfbyteError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # model code trips over a wrong config in any way
        raise HalfbyteError(
            f"{path}: transformers cannot load it as a causal language model ({type(error).__name__}: {error})"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise HalfbyteError(
            f"{path}: the checkpoint lacks {len(missing)} tensors of the model, such as {missing[0]}"
        )
    if mismatched := sorted(report["mismatched_keys"], key=str):
        name, stored, wanted = mismatched[0]
        raise HalfbyteError(
            f"{path}: {name} is stored as {list(stored)}, but the model has {list(wanted)} there"
        )
    return model.eval()


def _tokenizer(path: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise HalfbyteError(f"{path}: no tokenizer that transformers can load ({error})") from None
    return tokenizer
