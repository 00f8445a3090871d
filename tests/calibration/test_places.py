"""Checkpoints that fill a model in an unusual way, or do not fill it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Chunk, WeightConverter

from halfbyte.calibration import places
from halfbyte.calibration.blocks import BlockModel
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.models.describe import describe
from tests.calibration.running import run
from tests.tiny import tiny_model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
IDS = torch.tensor([[5, 80, 3, 7]])


def opened(path: Path) -> BlockModel:
    checkpoint = Checkpoint.open(path)
    return BlockModel.open(checkpoint, describe(checkpoint.config, checkpoint.shapes))


def change(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@torch.no_grad()
def assert_computes_what_transformers_loads(path: Path) -> None:
    model = opened(path)
    hidden = model.enter(IDS)
    for index in range(len(model.blocks)):
        with model.block(index) as block:
            hidden = run(block, hidden, IDS)
    expected = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    torch.testing.assert_close(model.leave(hidden), expected(IDS).logits, rtol=1e-5, atol=1e-5)


def test_the_head_alone_is_stored_of_a_tied_pair(tmp_path: Path) -> None:
    path = tiny_model("qwen2", tmp_path, torch.float32)
    change(path, lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))
    assert_computes_what_transformers_loads(path)


def test_both_of_a_tied_pair_are_stored_and_differ(tmp_path: Path) -> None:
    path = tiny_model("qwen2", tmp_path, torch.float32)
    change(path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] * 3 + 1}))
    assert_computes_what_transformers_loads(path)


def test_tensors_of_no_part_of_the_model_are_passed_over(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path, torch.float32)
    change(path, lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.ones(128, 256)}))
    assert_computes_what_transformers_loads(path)


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path, torch.float32)
    change(path, lambda tensors: tensors.update({QUERY: tensors[QUERY][:64].clone()}))
    with pytest.raises(HalfbyteError, match=r"q_proj\.weight is stored as \[64, 128\], but .* \[128, 128\]"):
        opened(path)


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    path = tiny_model("mixtral", tmp_path, torch.float32)
    experts = "model.layers.0.block_sparse_moe.experts"
    change(path, lambda tensors: tensors.update({f"{experts}.4.w2.weight": torch.ones(128, 256)}))
    with pytest.raises(HalfbyteError, match=r"experts\.4\.w2\.weight is stored as \[128, 256\], but"):
        opened(path)


def test_codes_without_their_scales_are_refused(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path, torch.float32)
    change(path, lambda tensors: tensors.update({QUERY: tensors[QUERY].to(torch.float8_e4m3fn)}))
    with (
        pytest.raises(HalfbyteError, match=r"q_proj\.weight is stored as torch\.float8_e4m3fn; accepted"),
        opened(path).block(0),
    ):
        pass


def test_a_conversion_that_splits_a_tensor_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splitting = WeightConverter(
        ["self_attn.q_proj.weight"],
        ["self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        operations=[Chunk(dim=0)],
    )
    monkeypatch.setattr(places, "get_model_conversion_mapping", lambda _: [splitting])
    with pytest.raises(HalfbyteError, match=r"q_proj\.weight: transformers makes .* of it by Chunk"):
        opened(tiny_model("llama", tmp_path, torch.float32))
