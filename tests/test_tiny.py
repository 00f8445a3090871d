"""The tiny checkpoints: seeded, loadable, and able to speak."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.tiny import FAMILIES, VOCAB_SIZE, tiny_model, tiny_tokenizer


def test_same_seed_same_bytes_and_the_global_generator_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = load_file(tiny_model("llama", tmp_path / "a") / "model.safetensors")
    assert torch.equal(torch.random.get_rng_state(), before)
    second = load_file(tiny_model("llama", tmp_path / "b") / "model.safetensors")
    other = load_file(tiny_model("llama", tmp_path / "c", seed=1) / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first[name], second[name])
    assert not torch.equal(first[name], other[name])
    assert first[name].dtype is torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_generates_with_its_tokenizer(family: str, tmp_path: Path) -> None:
    path = tiny_model(family, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    assert len(tokenizer) == VOCAB_SIZE
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    inputs = tokenizer("One, two", return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    assert out.shape[1] == inputs.input_ids.shape[1] + 2


def test_every_byte_survives() -> None:
    tokenizer = tiny_tokenizer()
    text = "naïve 量化 \t\n 'quoted' \U0001f600"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
