from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.api import quantize
from halfbyte.checkpoint.detect import detect
from halfbyte.checkpoint.qserve_import import import_qserve
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.engines.transformers.loading import load
from halfbyte.errors import HalfbyteError
from tests.checkpoint.qserve_files import packed_groups
from tests.tiny import tiny_model

Q = "model.layers.0.self_attn.q_proj"
IDS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("plain"), torch.float16, num_hidden_layers=1)


def written(plain: Path, folder: Path, size: int) -> Path:
    quantize(plain, folder, recipe={"scheme": "w4a8-int8", "group_size": size, "format": "qserve"})
    return folder


def as_omniserve(path: Path, folder: Path, file: str, **changed: torch.Tensor) -> Path:
    """The same weights as its converter leaves them: a pickle, and config.json of the model before."""
    shutil.copytree(path, folder)
    (folder / "model.safetensors").unlink()
    tensors = {**load_file(path / "model.safetensors"), **changed}
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file, {"format": "pt"})
    else:
        torch.save(tensors, folder / file)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    return folder


@pytest.mark.parametrize("file", ["quant_model.pt", "pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("size", [128, -1])
def test_the_same_tensors_beside_a_config_that_tells(
    size: int, file: str, plain: Path, tmp_path: Path
) -> None:
    path = written(plain, tmp_path / "written", size)
    source = as_omniserve(path, tmp_path / "source", file)
    seen: list[str] = []
    found = import_qserve(
        source, tmp_path / "out", allow_pickle=True, on_tensor=lambda _, name: seen.append(name)
    )
    ours, copied = Checkpoint.open(path), Checkpoint.open(tmp_path / "out")
    assert (found.group_size, found.modules, found.eight_bit) == (size, 7, 0)
    assert sorted(seen) == sorted(copied.tensors) == sorted(ours.tensors)
    assert found.nbytes == sum(info.nbytes for info in copied.tensors.values())
    assert all(torch.equal(copied.load(name), ours.load(name)) for name in ours.tensors)
    assert copied.config["quantization_config"] == ours.config["quantization_config"]
    assert copied.config["torch_dtype"] == "float16"
    with torch.inference_mode():
        assert torch.equal(load(tmp_path / "out")[0](IDS).logits, load(path)[0](IDS).logits)


def test_a_source_that_says_nothing_is_recognised_and_says_what_to_do(plain: Path, tmp_path: Path) -> None:
    source = as_omniserve(written(plain, tmp_path / "w", -1), tmp_path / "source", "model.safetensors")
    found = detect(Checkpoint.open(source))
    assert (found.format, found.readable) == ("qoq without config", False)
    assert "s1_scales" in found.why
    with pytest.raises(HalfbyteError, match="halfbyte import-qserve"):
        load(source)


def test_pickles_are_refused_unless_allowed(plain: Path, tmp_path: Path) -> None:
    source = as_omniserve(written(plain, tmp_path / "w", -1), tmp_path / "source", "quant_model.pt")
    with pytest.raises(HalfbyteError, match=r"quant_model\.pt.*--allow-pickle"):
        import_qserve(source, tmp_path / "out")


def test_deepcompressors_zeros_are_counted_and_run_as_int8(plain: Path, tmp_path: Path) -> None:
    # Its shipped recipe subtracts zeros after scaling: any integer, not a multiple of the scale.
    path = written(plain, tmp_path / "w", 128)
    codes = load_file(path / "model.safetensors")
    changed = {
        f"{Q}.s2_scales": torch.full_like(codes[f"{Q}.s2_scales"], 7),
        f"{Q}.s2_zeros": torch.full_like(codes[f"{Q}.s2_zeros"], -51),
    }
    source = as_omniserve(path, tmp_path / "source", "quant_model.pt", **changed)
    found = import_qserve(source, tmp_path / "out", allow_pickle=True)
    assert (found.modules, found.eight_bit) == (7, 1)
    layer = load(tmp_path / "out")[0].get_submodule(Q)
    assert layer.unpack().format.element == "int8"
    assert layer.unpack().codes.unique().tolist() == list(range(-51, 15 * 7 - 50, 7))


def test_a_weight_that_cannot_be_read_stops_the_import(plain: Path, tmp_path: Path) -> None:
    path = written(plain, tmp_path / "w", 128)
    changed = {f"{Q}.s2_zeros": packed_groups(torch.full((128, 1), 100))}
    source = as_omniserve(path, tmp_path / "source", "quant_model.pt", **changed)
    with pytest.raises(HalfbyteError, match=rf"{Q}\.s2_zeros: row 0, group 0: .* is a value of level one"):
        import_qserve(source, tmp_path / "out", allow_pickle=True)
    assert not (tmp_path / "out").exists()


def test_no_weights_of_qserve(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(HalfbyteError, match="found none of these"):
        import_qserve(plain, tmp_path / "out")


def test_the_source_is_not_replaced(plain: Path, tmp_path: Path) -> None:
    path = written(plain, tmp_path / "w", -1)
    with pytest.raises(HalfbyteError):
        import_qserve(path, path, overwrite=True)
    assert Checkpoint.open(path).tensors
