from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from tests.checkpoint.files import tensors, write_checkpoint


def opened(path: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Checkpoint:
    weights = {name: tensor.to(dtype) for name, tensor in tensors(a=(2, 2)).items()}
    return Checkpoint.open(write_checkpoint(path, {"model.safetensors": weights}, config=config))


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForConditionalGeneration"]
)
def test_causal_language_models(tmp_path: Path, architecture: str) -> None:
    assert opened(tmp_path, {"architectures": [architecture]}).config == {"architectures": [architecture]}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"architectures": None},
        {"architectures": ["ChatGLMModel"], "auto_map": {"AutoModelForCausalLM": "m.C"}},
    ],
)
def test_configs_that_leave_it_open(tmp_path: Path, config: dict[str, Any]) -> None:
    assert opened(tmp_path, config).config == config


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["BertForSequenceClassification"]},
        {"architectures": ["LlamaModel"]},
        {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
    ],
)
def test_other_models_are_refused_by_name(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(HalfbyteError, match=f"describes {config['architectures'][0]}, which is no causal"):
        opened(tmp_path, config)


def test_architectures_of_the_wrong_type(tmp_path: Path) -> None:
    with pytest.raises(HalfbyteError, match="architectures must be a list of names, found 'x'"):
        opened(tmp_path, {"architectures": "x"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable as JSON"),
        ("[]", "expected a JSON object, found list"),
        ('{"a":1,"a":2}', "'a' occurs twice"),
    ],
)
def test_configs_that_are_no_json_object(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(HalfbyteError, match=rf"config\.json: {message}"):
        Checkpoint.open(tmp_path)


def test_directories_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(HalfbyteError, match=r"no config\.json"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HalfbyteError, match=r"no weights; expected model\.safetensors"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("with_config", [True, False])
def test_gguf_directories_are_sent_to_the_importer(tmp_path: Path, with_config: bool) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    if with_config:
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises(HalfbyteError, match="halfbyte import-gguf"):
        Checkpoint.open(tmp_path)


def test_names_of_the_hub_are_not_resolved() -> None:
    with pytest.raises(
        HalfbyteError, match="meta-llama/Llama-3-8B: no such directory; only local directories"
    ):
        Checkpoint.open("meta-llama/Llama-3-8B")


@pytest.mark.parametrize(
    ("config", "stored", "expected"),
    [
        ({"torch_dtype": "float16"}, torch.bfloat16, "f16"),
        ({"dtype": "bfloat16"}, torch.float32, "bf16"),
        ({"dtype": "torch.float32"}, torch.bfloat16, "f32"),
        ({"text_config": {"dtype": "float16"}}, torch.float32, "f16"),
        ({"torch_dtype": "auto"}, torch.float16, "f16"),
        ({}, torch.float32, "f32"),
        ({}, torch.int8, "bf16"),
    ],
)
def test_the_dtype_of_the_model(
    tmp_path: Path, config: dict[str, Any], stored: torch.dtype, expected: str
) -> None:
    assert opened(tmp_path, config, stored).model_dtype == expected
