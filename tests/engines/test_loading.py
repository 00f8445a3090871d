"""Checkpoints that cannot be loaded say so in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.engines.transformers.loading import load
from halfbyte.errors import HalfbyteError
from halfbyte.layers.linear import QuantLinear
from tests.engines.checkpoints import Checkpoints


def without(path: Path, out: Path, name: str) -> Path:
    shutil.copytree(path, out)
    tensors = load_file(out / "model.safetensors")
    del tensors[name]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("scheme", [None, "w4a8"])
def test_a_plain_or_quantized_checkpoint(scheme: str | None, checkpoints: Checkpoints) -> None:
    path = checkpoints.quantized("llama", scheme) if scheme else checkpoints.plain("llama")
    model, tokenizer = load(path)
    assert not model.training
    assert model.dtype == torch.bfloat16
    assert any(isinstance(module, QuantLinear) for module in model.modules()) == bool(scheme)
    assert tokenizer("ab")["input_ids"]


def test_tied_embeddings_stay_tied(checkpoints: Checkpoints) -> None:
    model, _ = load(checkpoints.quantized("qwen2", "w4a8"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("scheme", "name", "message"),
    [
        (
            None,
            "model.layers.1.mlp.up_proj.weight",
            "lacks 1 tensors of the model",
        ),
        ("w4a8", "model.norm.weight", "lacks 1 tensors of the model, such as model.norm.weight"),
        ("w4a8", "model.layers.1.mlp.up_proj.weight_packed", "model.layers.1.mlp.up_proj"),
        ("w4a8", "model.layers.1.mlp.up_proj.weight_scale", "model.layers.1.mlp.up_proj"),
        ("w4a8", "model.layers.1.mlp.up_proj.weight_shape", "model.layers.1.mlp.up_proj"),
    ],
)
def test_a_missing_tensor_is_named(
    scheme: str | None, name: str, message: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    path = checkpoints.quantized("llama", scheme) if scheme else checkpoints.plain("llama")
    with pytest.raises(HalfbyteError) as caught:
        load(without(path, tmp_path / "out", name))
    assert message in str(caught.value)


def test_a_missing_expert_is_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = checkpoints.quantized("qwen3_moe", "w4a16")
    out = tmp_path / "out"
    shutil.copytree(path, out)
    tensors = load_file(out / "model.safetensors")
    for name in [name for name in tensors if "layers.1.mlp.experts.2.up_proj" in name]:
        del tensors[name]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        HalfbyteError, match=r"layers.1.mlp.experts: up_proj of expert 2 of 4 is not in the checkpoint"
    ):
        load(out)


def test_a_tensor_of_another_shape_is_named(checkpoints: Checkpoints, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(checkpoints.quantized("llama", "w4a8"), out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "intermediate_size": 512}))
    with pytest.raises(
        HalfbyteError, match=r"mlp\.\w+_proj: the stored weight has shape .*, but the model has"
    ):
        load(out)


@pytest.mark.parametrize(
    ("kernel", "scheme", "message"),
    [
        ("marlin", "w4a8", "kernel 'marlin' is not known; known kernels: cpu-int4"),
        ("cpu-int8", "w4a8", "q_proj: no kernel can run it; cpu-int8: inputs must be INT8"),
        ("cpu-int4", None, "kernel 'cpu-int4' has nothing to run, no layer is quantized"),
    ],
)
def test_kernels_that_cannot_be_had(
    kernel: str, scheme: str | None, message: str, checkpoints: Checkpoints
) -> None:
    path = checkpoints.quantized("llama", scheme) if scheme else checkpoints.plain("llama")
    with pytest.raises(HalfbyteError, match=message):
        load(path, kernel=kernel)


def test_no_tokenizer(checkpoints: Checkpoints, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(checkpoints.plain("llama"), out)
    for file in out.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(HalfbyteError, match="no tokenizer that transformers can load"):
        load(out)


@pytest.mark.parametrize("change", [{"model_type": "never_heard_of"}, {"architectures": ["BertModel"]}])
def test_no_causal_language_model(change: dict, checkpoints: Checkpoints, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(checkpoints.plain("llama"), out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(HalfbyteError, match="causal language model"):
        load(out)
