from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from halfbyte.algorithms.fold import weight_view
from halfbyte.algorithms.hadamard import random_hadamard
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError, NonFiniteError
from halfbyte.models.describe import describe
from halfbyte.quantization import job
from halfbyte.quantization.plan import make_plan
from halfbyte.quantization.rotated_source import RotatedCheckpoint
from halfbyte.recipe import Recipe
from tests import tiny

SEED = 3
DENSE = ("llama", "qwen2", "qwen3", "mistral", "phi3")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "llama4_text", "deepseek_v3")
_LLAMA = tiny.FAMILIES["llama"]
_LATENT = {name: value for name, value in tiny.FAMILIES["deepseek_v3"].items() if name != "q_lora_rank"}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma": {**_LLAMA, "tie_word_embeddings": True},
    "granite": {
        **_LLAMA,
        **{"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
        **{"attention_bias": True, "mlp_bias": True},
    },
    "smollm3": {**_LLAMA, "hidden_size": 96, "tie_word_embeddings": True},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    "qwen3_next": {
        **tiny.FAMILIES["qwen3_moe"],
        **{"shared_expert_intermediate_size": 128, "layer_types": ["linear_attention", "full_attention"]},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2},
        **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    },
}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Checkpoint]:
    """Writes a tiny model whose norms have gains and whose biases are not zero."""
    for family, fields in OTHERS.items():
        monkeypatch.setitem(tiny.FAMILIES, family, fields)

    def written(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Checkpoint:
        path = tiny.tiny_model(family, tmp_path, dtype, **overrides)
        file = path / "model.safetensors"
        generator = torch.Generator().manual_seed(1)
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if tensor.dim() == 1 or name.endswith("bias"):
                tensor += 0.3 * torch.randn(tensor.shape, generator=generator).to(dtype)
        save_file(tensors, file, metadata={"format": "pt"})
        return Checkpoint.open(path)

    return written


def stored(checkpoint: Checkpoint, folder: Path) -> Path:
    """``checkpoint`` written to ``folder`` from what its ``load`` gives."""
    folder.mkdir()
    tensors = {name: checkpoint.load(name) for name in checkpoint.tensors}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(checkpoint.config))
    return folder


def loaded(path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def tokens() -> torch.Tensor:
    return torch.randint(tiny.VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def run(path: Path) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits, and every router's scores."""
    model, scores = loaded(path), []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.shape == (tiny.EXPERTS, tiny.HIDDEN):
            module.register_forward_hook(
                lambda _module, _inputs, output: scores.append(
                    output[0] if isinstance(output, tuple) else output
                )
            )
    return model(tokens()).logits, scores


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).norm() / right.norm())


def test_every_tiny_family_is_tested_or_refused() -> None:
    refused = {"gemma2", "gemma3_text", "gpt2", "opt", "gpt_neox"}
    assert set(DENSE) | set(MIXTURES) | refused == set(tiny.FAMILIES)


@pytest.mark.parametrize("family", [*DENSE, *MIXTURES, *OTHERS])
def test_a_rotated_model_puts_out_the_same(
    family: str, write: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    source = write(family)
    rotated = stored(RotatedCheckpoint.of(source, seed=SEED), tmp_path / "rotated")
    (logits, scores), (expected, expected_scores) = run(rotated), run(source.path)
    assert difference(logits, expected) < 1e-4
    assert len(scores) == len(expected_scores) >= (family in MIXTURES)
    chosen = source.config.get("num_experts_per_tok", 0)
    for got, wanted in zip(scores, expected_scores, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
        assert torch.equal(got.topk(chosen).indices, wanted.topk(chosen).indices)


@pytest.mark.parametrize("family", [*DENSE, *MIXTURES])
def test_a_rotated_bf16_model_differs_by_rounding(
    family: str, write: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    source = write(family, torch.bfloat16)
    rotated = RotatedCheckpoint.of(source, seed=SEED)
    assert {info.dtype for info in rotated.tensors.values()} == {
        info.dtype for info in source.tensors.values()
    }
    assert difference(run(stored(rotated, tmp_path / "rotated"))[0], run(source.path)[0]) < 0.05


def test_weights_are_the_products_rounded_once(write: Callable[..., Checkpoint]) -> None:
    source = write("llama", torch.bfloat16)
    rotated = RotatedCheckpoint.of(source, seed=SEED)
    stream, head = random_hadamard(tiny.HIDDEN, SEED), random_hadamard(32, SEED)
    layer = "model.layers.1"

    def exact(name: str) -> torch.Tensor:
        return source.load(f"{name}.weight").double()

    expected = {
        "model.embed_tokens": exact("model.embed_tokens") @ stream,
        "lm_head": exact("lm_head") * exact("model.norm") @ stream,
        f"{layer}.mlp.up_proj": exact(f"{layer}.mlp.up_proj")
        * exact(f"{layer}.post_attention_layernorm")
        @ stream,
        f"{layer}.mlp.down_proj": stream.t() @ exact(f"{layer}.mlp.down_proj"),
        f"{layer}.self_attn.o_proj": stream.t()
        @ exact(f"{layer}.self_attn.o_proj")
        @ torch.block_diag(*[head] * 4),
        f"{layer}.self_attn.v_proj": torch.block_diag(*[head.t()] * 2)
        @ (exact(f"{layer}.self_attn.v_proj") * exact(f"{layer}.input_layernorm") @ stream),
    }
    for name, wanted in expected.items():
        got = rotated.load(f"{name}.weight")
        assert got.dtype is torch.bfloat16
        # Half a unit in the last of bf16's 8 bits, and what fp32 steps on the way may move.
        torch.testing.assert_close(got.double(), wanted, rtol=2**-8 * 1.001, atol=1e-6)


@pytest.mark.parametrize(("family", "gain"), [("llama", 1.0), ("gemma", 0.0)])
def test_norms_have_no_gain_of_their_own(family: str, gain: float, write: Callable[..., Checkpoint]) -> None:
    rotated = RotatedCheckpoint.of(write(family, torch.bfloat16), seed=SEED)
    norms = [name for name in rotated.tensors if "norm" in name]
    assert len(norms) == 5
    for name in norms:
        assert torch.equal(rotated.load(name), torch.full((tiny.HIDDEN,), gain, dtype=torch.bfloat16))


def test_inner_norms_keep_their_gains(write: Callable[..., Checkpoint]) -> None:
    source = write("deepseek_v3")
    rotated = RotatedCheckpoint.of(source, seed=SEED)
    for name in (name for name in source.tensors if "a_layernorm" in name):
        assert torch.equal(rotated.load(name), source.load(name))


def test_a_channel_that_stands_out_no_longer_does(write: Callable[..., Checkpoint], tmp_path: Path) -> None:
    source = write("llama")
    file = source.path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][:, 7] *= 100
    save_file(tensors, file, metadata={"format": "pt"})
    rotated = stored(RotatedCheckpoint.of(Checkpoint.open(source.path), seed=SEED), tmp_path / "rotated")

    @torch.no_grad()
    def peak(path: Path) -> torch.Tensor:
        """Largest over mean magnitude of a token's channels, before each block."""
        states = loaded(path)(tokens(), output_hidden_states=True).hidden_states[:-1]
        return torch.stack([(x.abs().amax(-1) / x.abs().mean(-1)).mean() for x in states])

    assert bool((peak(source.path) > 20).all())
    assert bool((peak(rotated) < 6).all())


@pytest.mark.parametrize("nested", [False, True])
def test_a_tied_head_becomes_its_own(nested: bool, write: Callable[..., Checkpoint]) -> None:
    source = write("qwen2")
    if nested:
        config = {"model_type": "newcomer", "text_config": source.config, "vision_config": {"depth": 0}}
        source = Checkpoint(source.path, config, source.tensors)
    before = json.dumps(source.config)
    rotated = RotatedCheckpoint.of(source, seed=SEED)
    assert "lm_head.weight" not in source.tensors
    assert rotated.config["tie_word_embeddings"] is False
    assert not nested or rotated.config["text_config"]["tie_word_embeddings"] is False
    assert not nested or rotated.config["vision_config"] == {"depth": 0}
    assert json.dumps(source.config) == before
    assert not describe(rotated.config, rotated.shapes).tied
    embedding, head = (rotated.info(name) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    assert (head.name, head.dtype, head.shape) == ("lm_head.weight", embedding.dtype, embedding.shape)
    gain = source.load("model.norm.weight").double()
    expected = source.load(embedding.name).double() * gain @ random_hadamard(tiny.HIDDEN, SEED)
    torch.testing.assert_close(rotated.load("lm_head.weight"), expected.float())


def test_the_seed_alone_decides_the_bytes(write: Callable[..., Checkpoint]) -> None:
    source = write("llama", torch.bfloat16)

    def content(seed: int) -> list[bytes]:
        rotated, files = RotatedCheckpoint.of(source, seed=seed), []
        for name in rotated.tensors:
            files.append(io.BytesIO())
            rotated.copy_bytes(name, files[-1])
        return [file.getvalue() for file in files]

    assert content(0) == content(0)
    assert content(0) != content(1)


@pytest.mark.parametrize("family", ["qwen2", "phi3", "gpt_oss", "mixtral", "deepseek_v3"])
def test_every_way_of_reading_gives_the_same(
    family: str, write: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    rotated = RotatedCheckpoint.of(write(family, torch.bfloat16), seed=SEED)
    whole = {name: rotated.load(name) for name in rotated.tensors}
    monkeypatch.setattr("halfbyte.quantization.rotated_source._ROWS", 100)
    for name, tensor in whole.items():
        info, file = rotated.info(name), io.BytesIO()
        rotated.copy_bytes(name, file)
        assert (tuple(tensor.shape), len(file.getvalue())) == (info.shape, info.nbytes)
        assert file.getvalue() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert torch.equal(torch.from_numpy(rotated.numpy(name).copy()), tensor.float())
        rows = info.shape[0]
        parts = [rotated.load_rows(name, start, min(start + 37, rows)) for start in range(0, rows, 37)]
        torch.testing.assert_close(torch.cat(parts), tensor, rtol=2**-7, atol=0)
    for module in describe(rotated.config, rotated.shapes).modules:
        view = weight_view(whole, module.source)
        torch.testing.assert_close(rotated.load_source(module.source), view, rtol=2**-7, atol=0)


def test_an_embedding_is_never_whole_in_memory(
    write: Callable[..., Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write("qwen2")
    rotated = RotatedCheckpoint.of(source, seed=SEED)
    sizes = []

    def watched(checkpoint: Checkpoint, name: str, start: int, stop: int) -> torch.Tensor:
        sizes.append(stop - start)
        return load_rows(checkpoint, name, start, stop)

    load_rows = Checkpoint.load_rows
    monkeypatch.setattr(Checkpoint, "load_rows", watched)
    monkeypatch.setattr("halfbyte.quantization.rotated_source._ROWS", 100)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rotated.copy_bytes(name, io.BytesIO())
    assert sizes == [100, 100, 64] * 2


def test_pickles_can_be_rotated(write: Callable[..., Checkpoint]) -> None:
    source = write("llama")
    file = source.path / "model.safetensors"
    expected = RotatedCheckpoint.of(source, seed=SEED)
    wanted = {name: expected.load(name) for name in expected.tensors}
    torch.save(load_file(file), source.path / "pytorch_model.bin")
    file.unlink()
    rotated = RotatedCheckpoint.of(Checkpoint.open(source.path, allow_pickle=True), seed=SEED)
    assert all(torch.equal(rotated.load(name), tensor) for name, tensor in wanted.items())


def test_a_rotated_model_is_quantized_like_any_other(
    write: Callable[..., Checkpoint], tmp_path: Path
) -> None:
    source = write("qwen2", torch.bfloat16)
    rotated = RotatedCheckpoint.of(source, seed=SEED)
    out = tmp_path / "out"
    job.run(make_plan(rotated, describe(rotated.config, rotated.shapes), Recipe()), out)
    plain = stored(rotated, tmp_path / "plain")
    job.run(job.prepare(plain, Recipe()), tmp_path / "expected")
    written, expected = Checkpoint.open(out), Checkpoint.open(tmp_path / "expected")
    assert set(written.tensors) == set(expected.tensors)
    assert "lm_head.weight" in written.tensors
    for name in written.tensors:
        assert torch.equal(written.load(name), expected.load(name)), name


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt2", "opt", "gpt_neox"])
def test_other_families_are_refused_in_one_line(family: str, write: Callable[..., Checkpoint]) -> None:
    source = write(family)
    with pytest.raises(HalfbyteError, match=f"{family} cannot be rotated") as refused:
        RotatedCheckpoint.of(source, seed=SEED)
    assert str(refused.value).startswith(f"{source.path}: ")
    assert "\n" not in str(refused.value)


def test_weights_that_are_no_floats_are_refused(write: Callable[..., Checkpoint]) -> None:
    file = write("llama").path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.k_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, file)
    with pytest.raises(HalfbyteError, match=f"{name} is stored as F8_E4M3; accepted"):
        RotatedCheckpoint.of(Checkpoint.open(file.parent), seed=SEED)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_name_their_tensor(value: float, write: Callable[..., Checkpoint]) -> None:
    file = write("llama").path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, file)
    rotated = RotatedCheckpoint.of(Checkpoint.open(file.parent), seed=SEED)
    with pytest.raises(NonFiniteError, match=f"{name}: holds NaN or Inf"):
        rotated.load(name)


def test_an_unknown_tensor_is_named(write: Callable[..., Checkpoint]) -> None:
    rotated = RotatedCheckpoint.of(write("llama"), seed=SEED)
    with pytest.raises(HalfbyteError, match="no tensor 'nothing'"):
        rotated.load("nothing")


@pytest.mark.parametrize("leaf", ["q_proj", "o_proj"])
def test_rows_that_a_tensor_does_not_have_are_refused(leaf: str, write: Callable[..., Checkpoint]) -> None:
    rotated = RotatedCheckpoint.of(write("llama"), seed=SEED)
    with pytest.raises(HalfbyteError, match="has no rows 100:200"):
        rotated.load_rows(f"model.layers.0.self_attn.{leaf}.weight", 100, 200)
