"""What we write, loaded by transformers through the compressed-tensors library, without halfbyte in the process."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.checkpoint.quantization_config import quantization_config
from halfbyte.checkpoint.quantized_weight import encode, stored_entries
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.checkpoint.shard_plan import Entry
from halfbyte.checkpoint.writer import CheckpointWriter
from halfbyte.formats.quantize import dequantize, quantize
from halfbyte.models.layout import ModelLayout, ModuleInfo, Role, WeightSource
from halfbyte.schemes import PRESETS, Scheme
from tests.checkpoint import oracle

# Prints nothing; saves the logits of the model in argv[1] to argv[2].
PROGRAM = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
with torch.no_grad():
    logits = model(torch.arange(12)[None]).logits
torch.save(logits, sys.argv[2])
assert "halfbyte" not in sys.modules
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers, hidden size 64, so that group sizes differ between its linears."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).bfloat16().save_pretrained(path)
    return path


def grouped(preset: str, group_size: int) -> Scheme:
    return replace(PRESETS[preset], weights=PRESETS[preset].weights.with_group_size(group_size))


# What down_proj and o_proj get; everything else gets w4a16 in groups of 64.
EXCEPTIONS = {
    "uniform": {},
    "mixed": {"down_proj": PRESETS["w8a16"], "o_proj": grouped("w4a16", 32)},
    "asymmetric": {"down_proj": grouped("w4a16-asym", 128), "o_proj": grouped("w4a16-asym", 32)},
}
# 0.20.1 does not load the asymmetric checkpoints that it writes itself.
LOADS_ASYMMETRIC = oracle.VERSION.startswith("0.17.")


def write(model: Path, out: Path, exceptions: dict[str, Scheme]) -> dict[str, torch.Tensor]:
    """Quantize every projection; the weights that this should amount to."""
    checkpoint = Checkpoint.open(model)
    names = [name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith("_proj.weight")]
    schemes = {name: exceptions.get(name.rpartition(".")[2], grouped("w4a16", 64)) for name in names}
    modules = [
        ModuleInfo(name, Role.LINEAR, *checkpoint.shapes[f"{name}.weight"], WeightSource(f"{name}.weight"))
        for name in names
    ]
    stored: dict[str, torch.Tensor] = {}
    entries: list[Entry] = []
    expected: dict[str, torch.Tensor] = {}
    for name, info in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        if module not in schemes:
            entries.append(Entry(name, info.dtype, info.shape))
            stored[name] = expected[name] = checkpoint.load(name)
            continue
        scheme = schemes[module]
        q = quantize(checkpoint.load(name), scheme.weights.with_scale("bf16"))
        entries += stored_entries(module, scheme, (info.shape[0], info.shape[1]), "bf16")
        stored |= encode(module, scheme, q, "bf16")
        expected[name] = dequantize(q, torch.bfloat16)
    config = checkpoint.config | {
        "quantization_config": quantization_config(schemes, ModelLayout("llama", modules, True, True))
    }
    with CheckpointWriter(out, entries, fingerprint="") as writer:
        for entry in writer.missing():
            writer.write(entry.name, stored[entry.name])
        writer.finish(config, model)
    return expected


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_same_logits_as_the_dequantized_model(model: Path, tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    if kind == "asymmetric" and not LOADS_ASYMMETRIC:
        pytest.skip(f"compressed-tensors {oracle.VERSION} does not load asymmetric weights")
    expected = write(model, tmp_path / "out", EXCEPTIONS[kind])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "out"), str(tmp_path / "logits")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    reference.load_state_dict(expected, strict=False)
    with torch.no_grad():
        logits = reference(torch.arange(12)[None]).logits
    assert torch.equal(torch.load(tmp_path / "logits"), logits)
    assert load_file(model / "model.safetensors").keys() == expected.keys()
