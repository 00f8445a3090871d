"""Checkpoints in QServe's form run as what their weights mean."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import halfbyte
from halfbyte.checkpoint.qserve import decode
from halfbyte.checkpoint.qserve_config import scheme_of
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.engines.transformers.loading import load
from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import dequantize
from halfbyte.kernels.reference import reference_linear
from halfbyte.layers.linear import QuantLinear
from tests.audit.tamper import change_tensor, drop
from tests.tiny import tiny_model

IDS = torch.arange(3, 60).reshape(3, 19)
SIZES = (128, -1)
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module", params=SIZES)
def written(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "out"
    halfbyte.quantize(
        source, folder, recipe={"scheme": "w4a8-int8", "group_size": request.param, "format": "qserve"}
    )
    return folder


def meant(source: Path, written: Path, folder: Path) -> Path:
    """A plain float32 checkpoint of the weights that the written one decodes to."""
    stored = Checkpoint.open(written)
    scheme = scheme_of(stored.config["quantization_config"]["group_size"])
    tensors = {
        name: tensor.load(name).float() for tensor in [Checkpoint.open(source)] for name in tensor.tensors
    }
    for name in stored.tensors:
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            parts = {part: stored.load(part) for part in stored.tensors if part.startswith(f"{module}.")}
            tensors[f"{module}.weight"] = dequantize(decode(module, scheme, parts))
    shutil.copytree(source, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    return folder


def test_logits_are_those_of_the_dequantized_weights(source: Path, written: Path, tmp_path: Path) -> None:
    # Inputs of layers are quantized too: with exact ones, nothing is left but the weights.
    model, _ = load(written, dtype=torch.float32)
    plain, _ = load(meant(source, written, tmp_path / "meant"))
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    assert len(layers) == 14
    for layer in layers:
        x = torch.randn(5, layer.in_features)
        weight = plain.get_submodule(layer.name).weight
        assert torch.equal(dequantize(layer.unpack()), weight), layer.name
        want = reference_linear(x, layer.unpack(), layer.scheme.activations)
        torch.testing.assert_close(layer(x).double(), want, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        found, exact = model(IDS).logits, plain(IDS).logits
    # INT8 inputs are 1/254 of their largest off.
    assert (found - exact).norm() <= 0.03 * exact.norm()


def test_saving_gives_the_same_bytes(written: Path, tmp_path: Path) -> None:
    model, _ = load(written)
    assert model.dtype == torch.float16
    model.save_pretrained(tmp_path)
    ours, saved = Checkpoint.open(written), Checkpoint.open(tmp_path)
    assert set(saved.tensors) == set(ours.tensors)
    packed = [name for name in ours.tensors if name.rpartition(".")[2].startswith(("qweight", "s1_", "s2_"))]
    assert len(packed) in (14 * 3, 14 * 4)
    for name in packed:
        assert torch.equal(ours.load(name), saved.load(name)), name
    assert saved.config["quantization_config"] == ours.config["quantization_config"]


def test_it_is_scored_and_generates(source: Path, written: Path) -> None:
    found = halfbyte.evaluate(written, source, context=64, windows=2)
    assert found.baseline is not None
    assert 0 < found.baseline.kl_mean < 0.5
    model, tokenizer = load(written)
    inputs = tokenizer("abc", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=4, do_sample=False).shape[1] > inputs["input_ids"].shape[1]


def test_a_missing_or_misfit_tensor_is_named(written: Path, tmp_path: Path) -> None:
    missing = shutil.copytree(written, tmp_path / "missing")
    drop(missing, f"{Q}.s1_scales")
    with pytest.raises(HalfbyteError, match=f"{Q}: s1_scales is missing"):
        load(missing)
    misfit = shutil.copytree(written, tmp_path / "misfit")
    change_tensor(misfit, f"{Q}.s1_scales", torch.Tensor.float)
    with pytest.raises(HalfbyteError, match=rf"{Q}\.s1_scales: is F32"):
        load(misfit)
