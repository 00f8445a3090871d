from __future__ import annotations

import json
import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from halfbyte.checkpoint.gguf import import_gguf
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from tests.checkpoint.gguf_files import reference_model, write_gguf

FAMILIES = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 128},  # the one head size that transformers' own loader assumes for it
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_the_model_s_rounded_to_bfloat16(family: str, tmp_path: Path) -> None:
    model = reference_model(family, **FAMILIES[family])
    made = import_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out")

    written = Checkpoint.open(tmp_path / "out")
    expected = dict(model.named_parameters())
    assert set(written.tensors) == set(expected)
    for name, parameter in expected.items():
        assert torch.equal(written.load(name), parameter.detach().to(torch.bfloat16)), name
    assert made.parameters == sum(parameter.numel() for parameter in expected.values())
    assert made.stored_types == {"F32": len(expected)}


@pytest.mark.parametrize("family", FAMILIES)
def test_computes_what_transformers_makes_of_the_file(family: str, tmp_path: Path) -> None:
    model = reference_model(family, **FAMILIES[family])
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()  # so that nothing is left to round
    file = write_gguf(tmp_path / "m.gguf", model)
    import_gguf(file, tmp_path / "out")
    ids = torch.arange(3, 43)[None]

    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
        assert torch.equal(ours(ids).logits, model(ids).logits)


@pytest.mark.parametrize("storage", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_stored_types_are_dequantized(storage: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[storage]
    model = reference_model("llama")
    import_gguf(write_gguf(tmp_path / "m.gguf", model, storage=kind), tmp_path / "out")

    written = Checkpoint.open(tmp_path / "out")
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if values.ndim == 2:  # blocks lie along rows, so the order of rows does not change them
            values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        assert torch.equal(written.load(name), torch.tensor(values).to(torch.bfloat16)), name


def test_config_and_generation_files(tmp_path: Path) -> None:
    model = reference_model("llama", tie_word_embeddings=True, rope_parameters={"rope_theta": 1e5})
    out = tmp_path / "out"
    import_gguf(write_gguf(tmp_path / "m.gguf", model, metadata={"rope.dimension_count": 32}), out)

    config = AutoConfig.from_pretrained(out)
    for field in ("vocab_size", "hidden_size", "head_dim", "num_key_value_heads", "rms_norm_eps"):
        assert getattr(config, field) == getattr(model.config, field), field
    assert config.rope_parameters["rope_theta"] == 1e5
    assert config.tie_word_embeddings
    assert config.dtype == torch.bfloat16
    assert json.loads((out / "generation_config.json").read_text()) == {
        "bos_token_id": 256,
        "eos_token_id": [257, 258],
    }


def test_biases_everywhere_make_attention_bias(tmp_path: Path) -> None:
    model = reference_model("llama", attention_bias=True)
    import_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "out")
    assert AutoConfig.from_pretrained(tmp_path / "out").attention_bias
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(
        ours.model.layers[1].self_attn.k_proj.bias, model.model.layers[1].self_attn.k_proj.bias.bfloat16()
    )


def test_llama3_rope_rule_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    rule = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = reference_model("llama", rope_parameters=rule, max_position_embeddings=131072)
    plain = 5e5 ** (-np.arange(0, 32, 2) / 32)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    file = write_gguf(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": divisors})
    import_gguf(file, tmp_path / "out")

    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == rule
    strange = write_gguf(tmp_path / "s.gguf", model, tensors={"rope_freqs.weight": divisors[::-1].copy()})
    with pytest.raises(HalfbyteError, match="does not follow the Llama 3 rule"):
        import_gguf(strange, tmp_path / "strange")


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_stated_rope_scaling_is_kept(scaling: dict, expected: dict, tmp_path: Path) -> None:
    metadata = {f"rope.scaling.{name}": value for name, value in scaling.items()}
    import_gguf(
        write_gguf(tmp_path / "m.gguf", reference_model("qwen2"), metadata=metadata), tmp_path / "out"
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_theta": 10000.0, **expected}


def _zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("metadata", "tensors", "message"),
    [
        ({}, {"blk.1.ffn_up.weight": None}, r"'blk\.1\.ffn_up\.weight' is missing"),
        ({}, {"token_embd.weight": None}, r"'token_embd\.weight' is missing"),
        (
            {},
            {"blk.0.attn_k.weight": _zeros(32, 128)},
            r"attn_k\.weight' has shape \[32, 128\], expected \[64, 128\]",
        ),
        ({}, {"blk.0.ssm_a": _zeros(4)}, r"'blk\.0\.ssm_a' has no place in architecture 'llama'"),
        (
            {},
            {"output_norm.weight": np.full(128, math.nan, np.float32)},
            r"'output_norm\.weight' holds NaN or Inf",
        ),
        ({"block_count": None}, {}, r"the metadata has no llama\.block_count"),
        (
            {"feed_forward_length": [256, 128]},
            {},
            r"feed_forward_length is \[256, 128\], expected one number",
        ),
        ({"expert_count": 8}, {}, "a mixture of experts"),
        ({"attention.sliding_window": 4096}, {}, "sliding_window"),
        ({"rope.dimension_count": 16}, {}, "rope.dimension_count is 16, expected the head size 32"),
        ({"rope.scaling.type": "longrope"}, {}, "'longrope' is not supported; supported: linear, yarn"),
    ],
)
def test_what_does_not_fit_is_named_and_leaves_nothing(
    metadata: dict, tensors: dict, message: str, tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf", reference_model("llama"), metadata=metadata, tensors=tensors)
    with pytest.raises(HalfbyteError, match=message):
        import_gguf(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
    writer.add_tensor("token_embd.weight", _zeros(4, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(HalfbyteError, match=r"'gemma3' is not supported; supported: llama, qwen2, qwen3"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize("keep", [0, 3, 100, 0.5, 0.99])
def test_a_cut_off_file_is_refused(keep: float, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", reference_model("llama"))
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(HalfbyteError, match=r"m\.gguf: is no complete GGUF file"):
        import_gguf(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(HalfbyteError, match="is no complete GGUF file"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_existing_output_needs_overwrite(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", reference_model("llama"))
    import_gguf(file, tmp_path / "out")
    with pytest.raises(HalfbyteError, match="exists"):
        import_gguf(file, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    import_gguf(file, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
