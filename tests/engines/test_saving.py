"""``save_pretrained`` gives the checkpoint back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.engines.transformers.loading import load
from halfbyte.errors import HalfbyteError
from halfbyte.layers.linear import QuantLinear
from tests.engines.checkpoints import Checkpoints

IDS = torch.arange(40)[None]
# One of each way in which transformers' names, or the tensors behind them, differ from the files'.
FAMILIES = ("llama", "qwen2", "gpt2", "mixtral", "qwen3_moe", "gpt_oss", "llama4_text", "deepseek_v3")
SCHEMES = (
    "w4a8-int8",
    "w4a16-asym",
    "w8a16",
    "w8a8-int8",
    "fp8_per_tensor",
    "fp8_per_block",
    "mxfp8",
    "mxfp4",
    "nvfp4",
)
PLAIN = ("bias", "e_score_correction_bias", "gate_up_proj_bias", "down_proj_bias", "sinks")
CASES = [*((family, "w4a8") for family in FAMILIES), *(("llama", scheme) for scheme in SCHEMES)]


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_the_same_bytes_under_the_same_names(
    family: str, scheme: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path = checkpoints.quantized(family, scheme)
    model, _ = load(path)
    with torch.inference_mode():
        before = model(IDS).logits
    model.save_pretrained(tmp_path)
    source, saved = Checkpoint.open(path), Checkpoint.open(tmp_path)
    assert set(saved.tensors) == set(source.tensors)
    for name, info in source.tensors.items():
        stored, written = source.load(name), saved.load(name)
        if name.rpartition(".")[2] in PLAIN:  # some of these transformers keeps in float32
            assert torch.equal(written.to(stored.dtype), stored), name
        else:
            assert (written.dtype, written.shape) == (stored.dtype, info.shape), name
            assert torch.equal(written.view(torch.uint8), stored.view(torch.uint8)), name
    assert saved.config["quantization_config"] == source.config["quantization_config"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        assert torch.equal(again(IDS).logits, before)


def test_in_shards_and_another_dtype(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = checkpoints.quantized("mixtral", "w4a8")
    model, _ = load(path, dtype=torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    source, saved = Checkpoint.open(path), Checkpoint.open(tmp_path)
    assert set(saved.tensors) == set(source.tensors)
    for name in source.tensors:
        stored, written = source.load(name), saved.load(name)
        packed = name.endswith(("weight_packed", "weight_scale", "weight_shape"))
        assert written.dtype == (stored.dtype if packed else torch.float32), name
        assert torch.equal(written, stored.to(written.dtype)), name


def test_weights_stored_in_a_form_that_is_not_written_say_so(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    # LLM Compressor's W4A8 by default: one int8 per INT4 code. It is read, but has no writer here.
    from safetensors.torch import load_file, save_file

    from halfbyte.formats.packing import unpack_int32

    path = checkpoints.quantized("llama", "w4a8")
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_packed")]:
        module = name.removesuffix("_packed")
        shape = tensors.pop(f"{module}_shape")
        tensors[module] = unpack_int32(tensors.pop(name), 4, int(shape[1]))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for file in path.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text().replace("pack-quantized", "int-quantized"))
    model, _ = load(tmp_path)
    packed, _ = load(path)
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, packed(IDS).logits)
    with pytest.raises(
        HalfbyteError,
        match=r"cannot be saved, it was stored as .*, not with weight_packed",
    ):
        model.save_pretrained(tmp_path / "out")


def test_saving_does_not_change_the_model(checkpoints: Checkpoints, tmp_path: Path) -> None:
    model, _ = load(checkpoints.quantized("llama", "w4a8"))
    kernels = [m.kernel for m in model.modules() if isinstance(m, QuantLinear)]
    with torch.inference_mode():
        before = model(IDS).logits
        model.save_pretrained(tmp_path)
        assert torch.equal(model(IDS).logits, before)
    assert [m.kernel for m in model.modules() if isinstance(m, QuantLinear)] == kernels
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
