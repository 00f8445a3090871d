"""Whole runs whose output is in QServe's form, and the same scheme per channel in compressed-tensors'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import halfbyte
from halfbyte.audit.verify import verify
from halfbyte.checkpoint.detect import detect
from halfbyte.checkpoint.quantized_weight import decode
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantize import dequantize
from halfbyte.formats.quantize import quantize as round_to_nearest
from halfbyte.models.describe import describe
from halfbyte.quantization import job
from halfbyte.quantization.report import REPORT_FILE
from halfbyte.recipe import Recipe
from tests.quantization.calibrated_runs import contents, quantize
from tests.tiny import tiny_model

SIZES = (128, -1)
IDS = torch.arange(3, 60)[None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("source"))


def weights(path: Path) -> dict[str, torch.Tensor]:
    """What the quantized weights of a checkpoint decode to."""
    checkpoint = Checkpoint.open(path)
    stored = detect(checkpoint).stored
    assert stored is not None
    modules = [
        name.removesuffix(f".{stored.scale_leaf}")
        for name in checkpoint.tensors
        if name.endswith(f".{stored.scale_leaf}")
    ]
    found = {}
    for module in modules:
        scheme = stored.scheme_for(module)
        assert scheme is not None
        parts = {name: checkpoint.load(name) for name in checkpoint.tensors if name.startswith(f"{module}.")}
        found[module] = dequantize(decode(module, scheme, parts, stored.form))
    return found


@pytest.mark.parametrize("size", SIZES)
def test_rounded_to_nearest(size: int, source: Path, tmp_path: Path) -> None:
    recipe = Recipe(scheme="w4a8-int8", group_size=size, format="qserve")
    job.run(job.prepare(source, recipe), tmp_path / "out")
    before, found = Checkpoint.open(source), weights(tmp_path / "out")
    assert recipe.default is not None
    scheme = recipe.default.scheme
    assert len(found) == 14
    for module in describe(before.config, before.shapes).modules:
        if module.name in found:
            want = round_to_nearest(before.load_source(module.source), scheme.weights)
            assert torch.equal(found[module.name], dequantize(want)), module.name


@pytest.mark.parametrize("algorithm", ["gptq", "awq", "awq+gptq"])
@pytest.mark.parametrize(("size", "form"), [(128, "qserve"), (-1, "qserve"), (-1, "compressed-tensors")])
def test_calibrated(size: int, algorithm: str, form: str, source: Path, tmp_path: Path) -> None:
    recipe = Recipe(scheme="w4a8-int8", group_size=size, algorithm=algorithm, format=form)
    quantize(source, tmp_path / "out", recipe)
    assert verify(tmp_path / "out", against=source).passed
    report = json.loads((tmp_path / "out" / REPORT_FILE).read_text())
    modules = [module for block in report["blocks"] for module in block["modules"]]
    assert len(modules) == 14
    gains = [module["error"] / module["error_rtn"] for module in modules]
    assert sum(gains) / 14 < 0.97, gains
    model, _ = halfbyte.load(tmp_path / "out", dtype=torch.float32)
    plain, _ = halfbyte.load(source, dtype=torch.float32)
    with torch.inference_mode():
        found, exact = model(IDS).logits, plain(IDS).logits
    # Two blocks of random weights in 4 bits.
    assert (found - exact).norm() < 0.6 * exact.norm()


def test_a_stopped_run_goes_on_to_the_same_bytes(source: Path, tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def stop(state: object) -> None:
        if getattr(state, "block", 0) == 1:
            raise StoppedError

    recipe = Recipe(scheme="w4a8-int8", algorithm="awq+gptq", format="qserve")
    quantize(source, tmp_path / "whole", recipe)
    with pytest.raises(StoppedError):
        quantize(source, tmp_path / "out", recipe, on_progress=stop)
    quantize(source, tmp_path / "out", recipe)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_rotated_model_has_norms_of_one_and_no_warning(source: Path, tmp_path: Path) -> None:
    recipe = Recipe(scheme="w4a8-int8", algorithm="rotation", format="qserve")
    result = job.run(job.prepare(source, recipe), tmp_path / "out")
    assert not any("OmniServe" in note for note in result.notes)
    written = Checkpoint.open(tmp_path / "out")
    norms = [name for name in written.tensors if "layers" in name and "norm" in name]
    assert len(norms) == 4
    assert all((written.load(name) == 1).all() for name in norms)


def test_a_width_that_groups_do_not_divide_is_said_before_work_starts(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path / "narrow", hidden_size=192, num_hidden_layers=1)
    with pytest.raises(
        HalfbyteError, match=r"groups of 64 in 192 inputs; QServe's are of 128.*group_size -1"
    ):
        job.prepare(source, Recipe(scheme="w4a8-int8", format="qserve"))
    job.prepare(source, Recipe(scheme="w4a8-int8", group_size=-1, format="qserve"))


def test_scales_beyond_fp16_name_the_tensor(tmp_path: Path) -> None:
    source = tiny_model("llama", tmp_path / "huge", num_hidden_layers=1)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][5, 7] = 1e7
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    for size, words in ((128, "beyond the largest fp16"), (-1, "65504 is the largest fp16")):
        recipe = Recipe(scheme="w4a8-int8", group_size=size, format="qserve")
        with pytest.raises(HalfbyteError, match=rf"mlp\.up_proj.*{words}"):
            job.run(job.prepare(source, recipe), tmp_path / "out")
