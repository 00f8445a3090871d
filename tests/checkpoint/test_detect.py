from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from halfbyte.checkpoint.detect import Detection, detect
from halfbyte.checkpoint.quantization_config import quantization_config
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.models.layout import ModelLayout
from halfbyte.schemes import PRESETS
from tests.checkpoint.files import CONFIG, tensors, write_checkpoint


def detected(path: Path, config: dict[str, Any] | None = None, tensor: str = "a.weight") -> Detection:
    saved = {"model.safetensors": tensors(**{tensor: (2, 2)})}
    return detect(Checkpoint.open(write_checkpoint(path, saved, config={**CONFIG, **(config or {})})))


def test_unquantized(tmp_path: Path) -> None:
    found = detected(tmp_path)
    assert (found.format, found.readable, found.stored) == ("unquantized", True, None)


@pytest.mark.parametrize(("scheme", "method"), [("w4a8", "compressed-tensors"), ("w4a8-int8", "halfbyte")])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_formats_that_are_read(tmp_path: Path, scheme: str, method: str, key: str) -> None:
    config = quantization_config({"a": PRESETS[scheme]}, ModelLayout("llama", [], True, True))
    found = detected(tmp_path, {key: config})
    assert (found.format, found.readable) == (method, True)
    assert found.stored is not None
    assert found.stored.scheme_for("a") == PRESETS[scheme]


@pytest.mark.parametrize(
    "method", ["awq", "gptq", "fp8", "modelopt", "mxfp4", "bitsandbytes", "quark", "torchao"]
)
def test_foreign_formats_have_a_name(tmp_path: Path, method: str) -> None:
    found = detected(tmp_path, {"quantization_config": {"quant_method": method}})
    assert (found.format, found.readable, found.stored) == (method, False, None)
    assert "not readable yet" in found.why


@pytest.mark.parametrize(
    ("file", "method"),
    [("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("hf_quant_config.json", "modelopt")],
)
def test_formats_told_by_a_file(tmp_path: Path, file: str, method: str) -> None:
    (tmp_path / file).write_text(json.dumps({}))
    found = detected(tmp_path)
    assert (found.format, found.readable) == (method, False)
    assert file in found.why


@pytest.mark.parametrize(
    ("tensor", "method"),
    [
        ("q_proj.weight_packed", "compressed-tensors"),
        ("q_proj.qweight", "gptq or awq"),
        ("q_proj.g_idx", "gptq"),
        ("q_proj.weight_scale_inv", "fp8"),
    ],
)
def test_quantized_tensors_without_a_config(tmp_path: Path, tensor: str, method: str) -> None:
    found = detected(tmp_path, tensor=tensor)
    assert (found.format, found.readable) == (f"{method} without config", False)
    assert tensor in found.why


def test_a_config_that_cannot_be_understood(tmp_path: Path) -> None:
    with pytest.raises(HalfbyteError, match=r"config\.json: quantization_config: config_groups must map"):
        detected(tmp_path, {"quantization_config": {"quant_method": "compressed-tensors"}})
