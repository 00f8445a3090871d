"""Fused decoder layers compute what the model computes, and leave what is saved as it was loaded."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.engines.transformers.decoding import Decoder, Frame
from halfbyte.engines.transformers.fusion import FUSED, fuse, running_linears
from halfbyte.engines.transformers.loading import load
from halfbyte.layers.linear import QuantLinear
from halfbyte.layers.merged import MergedLinear
from tests.engines.checkpoints import Checkpoints
from tests.engines.transformers.models import NoWaiting, generated, prompts, random_model
from tests.kernels import sharing

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ALSO_KNOWN = ("ministral", "seed_oss", "smollm3")


def logits(model: Any, padded: bool = False) -> torch.Tensor:
    ids, mask = prompts(padded)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits


def without_ties(model: Any) -> Any:
    """Embeddings of a checkpoint are short numbers, and what becomes of them may lie halfway between two codes, where
    the last bit of a norm would decide.
    """
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight *= 1 + 1e-3 * torch.rand(weight.shape, generator=torch.Generator().manual_seed(0))
    return model


def same_state(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return list(state) == list(other) and all(
        state[name].dtype == other[name].dtype and torch.equal(raw(state[name]), raw(other[name]))
        for name in state
    )


@pytest.mark.parametrize("scheme", ["w4a8", "fp8", "w4a16", "w8a8-int8", "w4a8-int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_results_and_what_is_saved_stay(
    family: str, scheme: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = sharing.install(monkeypatch)
    model = without_ties(load(checkpoints.quantized(family, scheme), dtype=torch.float32)[0])
    want, state = logits(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kernel.calls.clear()
    assert fuse(model) == 2
    assert fuse(model) == 2
    off = (logits(model) - want).abs().amax(-1)
    # INT8 has 255 codes where E4M3 has steps of a sixteenth: the last bit of a norm decides one of them now and then.
    turned = off > 1e-4
    assert turned.sum() <= (2 if "int8" in scheme else 0)
    assert off.max() < (0.05 if turned.any() else 1e-4)
    assert same_state(model.state_dict(), state)
    # Attention and gated unit of each layer, and what leads out of the gate; attention's output quantizes itself.
    shared = [(27, 128), (27, 128), (27, 256)] * 2 if scheme != "w4a16" else []
    assert kernel.calls == shared


@pytest.mark.parametrize("family", [*FAMILIES, *ALSO_KNOWN])
def test_unquantized_models_too(family: str) -> None:
    model = random_model(family)
    want, state = logits(model, padded=True), dict(model.state_dict())
    assert fuse(model) == 2
    torch.testing.assert_close(logits(model, padded=True), want, rtol=1e-4, atol=1e-4)
    assert same_state(model.state_dict(), state)


@pytest.mark.parametrize("overrides", [{}, {"sliding_window": 16, "use_sliding_window": True}], ids=str)
@pytest.mark.parametrize("family", [*FAMILIES, *ALSO_KNOWN])
def test_decoding_on_a_fixed_cache(family: str, overrides: dict) -> None:
    if family in ("qwen2", "qwen3") and overrides:
        overrides = {**overrides, "max_window_layers": 1}
    model = random_model(family, **({} if family == "llama" else overrides))
    ids, mask = prompts(padded=True)
    want = generated(model, ids, mask, 40)
    assert fuse(model) == 2
    decoder = Decoder(model, Frame(3, 64))
    decoder.read(ids, mask)
    found = [decoder.tokens.clone()]
    for _ in range(39):
        with NoWaiting():
            decoder.step()
        found.append(decoder.tokens.clone())
    assert torch.equal(torch.stack(found, 1), want)
    assert len(want.unique()) > 10, "the model repeats itself, so this shows little"


def test_decoding_from_quantized_inputs(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    sharing.install(monkeypatch)
    model = without_ties(load(checkpoints.quantized("qwen3", "w4a8"), dtype=torch.float32)[0])
    model.generation_config.eos_token_id = None
    ids, mask = prompts(padded=True)
    want = generated(model, ids, mask, 16)
    fuse(model)
    decoder = Decoder(model, Frame(3, 64))
    decoder.read(ids, mask)
    for column in want.T:
        assert torch.equal(decoder.tokens, column)
        decoder.step()


def test_a_fused_model_may_move_to_where_another_kernel_runs(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = sharing.install(monkeypatch)
    path = checkpoints.quantized("llama", "w4a8")
    model, other = (load(path, dtype=torch.float32)[0] for _ in range(2))
    fuse(model)
    logits(model)
    kernel.calls.clear()
    torch.testing.assert_close(logits(model.bfloat16()), logits(other.bfloat16()))
    assert not kernel.calls


def test_generate_by_transformers_runs_fused(checkpoints: Checkpoints) -> None:
    model, _ = load(checkpoints.quantized("llama", "w4a16"), dtype=torch.float32)
    ids, mask = prompts(padded=True)
    want = generated(model, ids, mask, 16)
    fuse(model)
    assert torch.equal(generated(model, ids, mask, 16), want)


def test_a_fused_model_is_saved_as_it_was_loaded(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = checkpoints.quantized("qwen2", "w4a8")
    model, _ = load(source)
    fuse(model)
    model.save_pretrained(tmp_path / "saved")
    written = load_file(tmp_path / "saved" / "model.safetensors")
    stored = load_file(source / "model.safetensors")
    assert same_state(dict(sorted(written.items())), dict(sorted(stored.items())))
    again, _ = load(tmp_path / "saved")
    torch.testing.assert_close(logits(again), logits(model))


def test_an_unquantized_fused_model_is_saved_in_full(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = checkpoints.plain("llama")
    model, _ = load(source)
    fuse(model)
    model.save_pretrained(tmp_path / "saved")
    written = load_file(tmp_path / "saved" / "model.safetensors")
    assert same_state(
        dict(sorted(written.items())), dict(sorted(load_file(source / "model.safetensors").items()))
    )


def test_copies_are_fused_and_stand_alone(checkpoints: Checkpoints) -> None:
    model, _ = load(checkpoints.quantized("llama", "w4a8"))
    fuse(model)
    other = copy.deepcopy(model)
    want = logits(model)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.zero_()
    assert torch.equal(logits(other), want)
    assert not torch.equal(logits(model), want)


def test_layers_by_themselves_still_run(checkpoints: Checkpoints) -> None:
    model, _ = load(checkpoints.quantized("qwen2", "w4a8"))
    layer = model.get_submodule("model.layers.1.self_attn.k_proj")
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    want, kernel = layer(x), layer.kernel
    fuse(model)
    torch.testing.assert_close(layer(x), want)
    assert layer.kernel == kernel
    assert "kernel=cpu-int4" in repr(layer)


def test_gradients_take_the_models_own_path() -> None:
    model = random_model("llama")
    want = logits(model)
    fuse(model)
    output = model(input_ids=prompts()[0]).logits
    torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-4)
    output.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


def test_hidden_states_and_attentions_can_be_asked_for() -> None:
    model = random_model("llama")
    model.set_attn_implementation("eager")
    ids, _ = prompts()
    ask = {"input_ids": ids, "output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        want = model(**ask)
        fuse(model)
        found = model(**ask)
    for name in ("hidden_states", "attentions"):
        assert len(found[name]) == len(want[name])
        for one, other in zip(found[name], want[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "phi3", "gpt2", "mixtral"])
def test_what_is_not_known_stays(family: str) -> None:
    model = random_model(family)
    want = logits(model)
    assert fuse(model) == 0
    assert torch.equal(logits(model), want)


def test_layers_that_cannot_be_merged_stay_and_say_why(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = load(checkpoints.quantized("llama", "fp8_per_tensor"))
    want = logits(model)
    with caplog.at_level("INFO"):
        assert fuse(model) == 0
    reason = "q_proj, k_proj, v_proj: each has one scale for its whole weight"
    assert f"A LlamaDecoderLayer stays as it is: {reason}" in caplog.text
    assert torch.equal(logits(model), want)


def test_an_unknown_gate_stays() -> None:
    assert fuse(random_model("llama", hidden_act="relu")) == 0
    assert fuse(random_model("llama", hidden_act="gelu_pytorch_tanh")) == 2


def test_the_linear_layers_that_run(checkpoints: Checkpoints) -> None:
    model, _ = load(checkpoints.quantized("llama", "w4a8"))
    assert len(running_linears(model)) == 15
    fuse(model)
    found = running_linears(model)
    assert [layer.out_features for layer in found] == [128, 128, 256, 512, 128, 128, 256, 512, 264]
    assert sum(isinstance(layer, MergedLinear) for layer in found) == 4
    assert all(isinstance(layer, QuantLinear) for layer in found[:-1])


def test_config_is_untouched(checkpoints: Checkpoints) -> None:
    path = checkpoints.quantized("llama", "w4a8")
    model, _ = load(path)
    fuse(model)
    stored = json.loads((path / "config.json").read_text())["quantization_config"]
    assert model.config.quantization_config.to_dict()["quant_method"] == stored["quant_method"]
    assert FUSED in dict(model.model.layers[0].named_children())


def test_a_loaded_model_is_fused_when_it_first_runs_on_a_gpu(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load(checkpoints.plain("llama"))
    want = logits(model)
    layers = model.model.layers
    assert not any(FUSED in layer._modules for layer in layers), "fused on the CPU"
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    # To fuse what is not quantized takes no device.
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    for each in (model, copied):
        torch.testing.assert_close(logits(each), want, rtol=2e-2, atol=2e-2)
        assert all(FUSED in layer._modules for layer in each.model.layers)
        assert not each._forward_pre_hooks
