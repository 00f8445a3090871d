"""Running block by block is running the model."""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from halfbyte.calibration.blocks import BlockModel
from halfbyte.calibration.loaded_block import Sample
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError, NonFiniteError
from halfbyte.models.describe import describe
from tests.calibration.running import run
from tests.tiny import FAMILIES, HIDDEN, VOCAB_SIZE, tiny_model

LENGTHS = (80, 7)


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(request.param, tmp_path_factory.mktemp("models"), torch.float32)


def opened(path: Path) -> BlockModel:
    checkpoint = Checkpoint.open(path)
    return BlockModel.open(checkpoint, describe(checkpoint.config, checkpoint.shapes))


def whole(path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_block_by_block_gives_the_model_s_logits(path: Path) -> None:
    expected, model = whole(path), opened(path)
    for length in LENGTHS:
        ids = tokens(length)
        hidden = model.enter(ids)
        for index in range(len(model.blocks)):
            with model.block(index) as block:
                hidden = run(block, hidden, ids)
        torch.testing.assert_close(model.leave(hidden), expected(ids).logits, rtol=1e-5, atol=1e-5)


def test_weights_read_back_as_stored(path: Path) -> None:
    checkpoint, model = Checkpoint.open(path), opened(path)
    sources = {
        module.name: module.source for module in describe(checkpoint.config, checkpoint.shapes).modules
    }
    seen: list[str] = []
    for index in range(len(model.blocks)):
        with model.block(index) as block:
            assert block.modules == model.modules(index)
            seen += block.modules
            for name in block.modules:
                assert torch.equal(block.weight(name), checkpoint.load_source(sources[name]))
            for name in block.tensors:
                assert torch.equal(block.parameter(name), checkpoint.load(name))
    layout = describe(checkpoint.config, checkpoint.shapes)
    assert {module.name for module in layout.modules if module.role.quantizable} <= set(seen)
    assert len(seen) == len(set(seen))


@torch.no_grad()
def test_a_weight_put_into_a_block_acts_as_if_the_checkpoint_had_it(path: Path, tmp_path: Path) -> None:
    checkpoint, model, ids = Checkpoint.open(path), opened(path), tokens(9)
    layout = describe(checkpoint.config, checkpoint.shapes)
    chosen = [
        module for module in layout.modules if module.name in model.modules(1) and module.role.quantizable
    ]
    generator = torch.Generator().manual_seed(1)
    weights = {module.name: torch.randn(module.shape, generator=generator) * 0.05 for module in chosen}
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    tensors = load_file(path / "model.safetensors")
    for module in chosen:
        source = module.source
        stored = tensors[source.tensor]
        if source.expert is not None:
            stored = stored[source.expert]
        if source.transposed:
            stored = stored.T
        stored[slice(*source.rows) if source.rows else slice(None)] = weights[module.name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    hidden = model.enter(ids)
    with model.block(0) as block:
        hidden = run(block, hidden, ids)
    with model.block(1) as block:
        before = run(block, hidden, ids)
        for name, weight in weights.items():
            block.put(name, weight)
            assert torch.equal(block.weight(name), weight)
        after = run(block, hidden, ids)
    assert not torch.allclose(before, after, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(model.leave(after), whole(tmp_path)(ids).logits, rtol=1e-5, atol=1e-5)


def live_bytes() -> int:
    """Bytes of all tensors in memory, storages counted once."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor) and not item.is_meta]
    return sum(
        {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in tensors}.values()
    )


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "mixtral", "llama4_text", "deepseek_v3"])
def test_no_more_than_the_entered_block_is_in_memory(family: str, tmp_path: Path) -> None:
    model = opened(tiny_model(family, tmp_path, torch.float32))
    at_rest = live_bytes()
    with model.block(1) as block:
        size = sum(4 * block.parameter(name).numel() for name in block.tensors)
        assert live_bytes() - at_rest == size
    assert live_bytes() == at_rest
    model.enter(tokens(5))
    assert live_bytes() - at_rest > 4 * HIDDEN * VOCAB_SIZE
    model.release()
    assert live_bytes() - at_rest < 4 * HIDDEN * VOCAB_SIZE // 8


@torch.no_grad()
def test_embeddings_leave_with_the_block_that_needed_them_again(tmp_path: Path) -> None:
    model = opened(tiny_model("llama", tmp_path, torch.float32))
    model.enter(tokens(5))
    model.release()
    at_rest = live_bytes()
    with model.block(0) as block:
        block.run(torch.zeros(1, 7, HIDDEN), tokens(7))
    assert live_bytes() - at_rest < 4 * HIDDEN * VOCAB_SIZE // 8


def test_a_block_is_released_after_an_error_too(tmp_path: Path) -> None:
    model = opened(tiny_model("llama", tmp_path, torch.float32))
    at_rest = live_bytes()
    with pytest.raises(ZeroDivisionError), model.block(0):
        raise ZeroDivisionError
    assert live_bytes() == at_rest


def test_changes_are_lost_when_a_block_is_left(tmp_path: Path) -> None:
    model = opened(tiny_model("llama", tmp_path, torch.float32))
    name = "model.layers.0.input_layernorm.weight"
    with model.block(0) as block:
        before = block.parameter(name)
        block.put_parameter(name, before + 1)
        assert torch.equal(block.parameter(name), before + 1)
    with model.block(0) as block:
        assert torch.equal(block.parameter(name), before)


def test_what_was_read_does_not_change_with_what_is_put(tmp_path: Path) -> None:
    with opened(tiny_model("llama", tmp_path, torch.float32)).block(0) as block:
        name = block.modules[0]
        before = block.weight(name)
        kept = before.clone()
        block.put(name, before * 2)
        assert torch.equal(before, kept)
        assert torch.equal(block.weight(name), kept * 2)


@torch.no_grad()
def test_released_embeddings_come_back_for_a_length_that_was_never_entered(tmp_path: Path) -> None:
    path = tiny_model("gemma3_text", tmp_path, torch.float32)
    model, fresh, ids = opened(path), opened(path), tokens(12)
    hidden = torch.randn(1, 12, HIDDEN, generator=torch.Generator().manual_seed(0))
    model.enter(tokens(5))
    model.release()
    fresh.enter(ids)
    with model.block(1) as block, fresh.block(1) as other:
        assert torch.equal(run(block, hidden, ids), run(other, hidden, ids))


@torch.no_grad()
def test_bf16_keeps_in_fp32_what_the_family_keeps_so(tmp_path: Path) -> None:
    path, ids = tiny_model("deepseek_v3", tmp_path), tokens(20)
    checkpoint = Checkpoint.open(path)
    model = BlockModel.open(checkpoint, describe(checkpoint.config, checkpoint.shapes), dtype=torch.bfloat16)
    hidden = model.enter(ids)
    for index in range(2):
        with model.block(index) as block:
            hidden = run(block, hidden, ids)
            assert hidden.dtype == torch.bfloat16
    expected = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    assert torch.equal(model.leave(hidden), expected(ids).logits)
    with model.block(1) as block:
        assert block.parameter("model.layers.1.mlp.gate.e_score_correction_bias").dtype == torch.float32
        assert block.weight("model.layers.1.self_attn.o_proj").dtype == torch.bfloat16


def test_an_output_that_is_not_finite_names_the_block_and_the_sample(tmp_path: Path) -> None:
    model, ids = opened(tiny_model("llama", tmp_path, torch.float32)), tokens(6)
    hidden = model.enter(ids)
    with model.block(1) as block:
        name = "model.layers.1.mlp.down_proj"
        block.put(name, torch.full_like(block.weight(name), float("inf")))
        with pytest.raises(NonFiniteError, match=r"model\.layers\.1: .*sample 7"):
            run(block, hidden, ids, "sample 7")


def test_the_first_sample_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model, ids = opened(tiny_model("llama", tmp_path, torch.float32)), tokens(6)
    hidden = model.enter(ids)
    samples = [
        Sample(hidden * factor, ids, f"sample {n}") for n, factor in enumerate((1.0, torch.inf, torch.inf))
    ]
    with model.block(1) as block, pytest.raises(NonFiniteError, match="sample 1 holds"):
        for _ in block.run(samples):
            pass


@pytest.mark.parametrize("leaf", ["mlp.down_proj", "input_layernorm"])
def test_a_tensor_that_is_not_finite_is_named(leaf: str, tmp_path: Path) -> None:
    model = opened(tiny_model("llama", tmp_path, torch.float32))
    with model.block(1) as block:
        block.require_finite()
        name = f"model.layers.1.{leaf}.weight"
        values = block.parameter(name)
        values.view(-1)[7] = torch.nan
        block.put_parameter(name, values)
        with pytest.raises(NonFiniteError, match=rf"^{name}: holds NaN or Inf"):
            block.require_finite()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "phi3"])
def test_weights_that_are_set_aside_come_back_one_by_one(family: str, tmp_path: Path) -> None:
    model, ids = opened(tiny_model(family, tmp_path, torch.float32)), tokens(6)
    hidden = model.enter(ids)
    with model.block(1) as block:
        before = run(block, hidden, ids)
        weights = {name: block.weight(name) for name in block.modules}
        kept = block.modules[0]
        block.set_aside(set(block.modules) - {kept})
        for name, weight in weights.items():
            assert torch.equal(block.weight(name), weight), name
        for name, weight in weights.items():
            block.put(name, weight if name == kept else weight * 2)
            assert torch.equal(block.weight(name), weight if name == kept else weight * 2), name
        for name, weight in weights.items():
            block.put(name, weight)
        assert torch.equal(run(block, hidden, ids), before)


def test_a_wrong_shape_or_name_is_refused(tmp_path: Path) -> None:
    with opened(tiny_model("llama", tmp_path, torch.float32)).block(0) as block:
        with pytest.raises(HalfbyteError, match=r"q_proj: is \[128, 128\], so \[1, 128\] cannot"):
            block.put("model.layers.0.self_attn.q_proj", torch.zeros(1, 128))
        with pytest.raises(HalfbyteError, match=r"no module 'model.layers.1.self_attn.q_proj'"):
            block.weight("model.layers.1.self_attn.q_proj")
        with pytest.raises(HalfbyteError, match=r"no tensor 'model.norm.weight'"):
            block.parameter("model.norm.weight")


def test_a_checkpoint_of_the_base_model_fits(tmp_path: Path) -> None:
    path = tiny_model("gpt2", tmp_path, torch.float32)
    file = path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    with opened(path).block(1) as block:
        assert "h.1.attn.c_attn" in block.modules


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    path = tiny_model("mixtral", tmp_path, torch.float32)
    file = path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        HalfbyteError, match=r"lacks 1 tensors .*model\.layers\.1\.mlp\.experts\.gate_up_proj"
    ):
        opened(path)


def test_a_model_without_a_list_of_blocks_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_model("llama", tmp_path, torch.float32))
    layout = describe(checkpoint.config, checkpoint.shapes)
    heads = [module for module in layout.modules if not module.role.quantizable]
    with pytest.raises(HalfbyteError, match="LlamaForCausalLM: no decoder blocks found"):
        BlockModel.open(checkpoint, replace(layout, modules=heads))


def test_a_family_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path, torch.float32)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "lama"'))
    with pytest.raises(HalfbyteError, match="lama: transformers cannot build it"):
        opened(path)
