"""Every family runs on quantized weights as it would on what they mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from halfbyte.api import quantize
from halfbyte.engines.transformers.loading import load
from halfbyte.formats.activations import quantize_activations
from halfbyte.formats.vllm_scales import vllm_dequantize
from halfbyte.kernels.quantized_inputs import FP8_TOKEN
from halfbyte.kernels.reference import reference_linear
from halfbyte.layers.experts import QuantExperts
from halfbyte.layers.linear import QuantLinear
from halfbyte.recipe import Recipe
from tests.engines.checkpoints import Checkpoints
from tests.tiny import FAMILIES

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")
WEIGHT_ONLY = ("w4a16", "w4a16-asym", "w8a16", "mxfp4", "nvfp4")
IDS = torch.arange(3, 60).reshape(3, 19)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_computes_what_its_weights_mean(family: str, checkpoints: Checkpoints) -> None:
    model, _ = load(checkpoints.quantized(family, "w4a16"), dtype=torch.float32)
    meant, _ = load(checkpoints.meant(family, "w4a16"))
    assert any(isinstance(module, QuantLinear) for module in model.modules())
    assert any(isinstance(module, QuantExperts) for module in model.modules()) == (family in MIXTURES)
    torch.testing.assert_close(logits(model), logits(meant), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", WEIGHT_ONLY)
def test_a_scheme_computes_what_its_weights_mean(scheme: str, checkpoints: Checkpoints) -> None:
    model, _ = load(checkpoints.quantized("llama", scheme), dtype=torch.float32)
    meant, _ = load(checkpoints.meant("llama", scheme))
    torch.testing.assert_close(logits(model), logits(meant), rtol=1e-4, atol=1e-4)


QUANTIZED_INPUTS = ("w4a8", "w4a8-int8", "w8a8-int8", "fp8", "fp8_per_tensor", "fp8_per_block", "mxfp8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("scheme", QUANTIZED_INPUTS)
def test_every_layer_computes_its_scheme(
    scheme: str, family: str, dtype: torch.dtype, checkpoints: Checkpoints
) -> None:
    # Layer by layer: over a whole model, an input that rounds the other way changes all that follow.
    model, _ = load(checkpoints.quantized(family, scheme), dtype=dtype)
    seen = []

    def check(layer: QuantLinear, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        x = inputs[0].reshape(-1, layer.in_features)
        want = reference_linear(x, layer.unpack(), layer.scheme.activations, bias=layer.bias)
        error = (output.reshape(want.shape).double() - want).norm()
        assert error <= want.norm() * (1e-5 if dtype == torch.float32 else 2**-8)
        seen.append(layer.kernel)

    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.register_forward_hook(check)
    assert logits(model).isfinite().all()
    if scheme == "w4a8":
        assert set(seen) == {"dequantize" if dtype == torch.float32 else "cpu-int4"}
    assert len(seen) >= 8


def test_what_was_rounded_for_vllm_is_computed_in_its_numbers(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    quantize(checkpoints.plain("llama"), tmp_path / "out", target="vllm")
    model, _ = load(tmp_path / "out", dtype=torch.float32)
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    assert {layer.kernel for layer in layers} == {"dequantize-fp8-scales"}
    x = torch.randn(3, layers[0].in_features, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_activations(x, FP8_TOKEN)
    want = (codes.float() * scales) @ vllm_dequantize(layers[0].unpack()).T
    torch.testing.assert_close(layers[0](x).detach(), want, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config["quantization_config"]["halfbyte_target"] == "vllm"


def test_some_layers_left_alone(checkpoints: Checkpoints, tmp_path: Path) -> None:
    out = tmp_path / "mixed"
    quantize(checkpoints.plain("mixtral"), out, "w4a16", ignore=["re:.*layers.0.*", "re:.*self_attn.*"])
    model, _ = load(out, dtype=torch.float32)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["model.layers.0.mlp.experts"] == "MixtralExperts"
    assert kinds["model.layers.1.mlp.experts"] == "QuantExperts"
    assert kinds["model.layers.1.self_attn.q_proj"] == "Linear"
    assert logits(model).isfinite().all()


def test_some_experts_left_alone(checkpoints: Checkpoints, tmp_path: Path) -> None:
    out = tmp_path / "mixed"
    quantize(checkpoints.plain("qwen3_moe"), out, "w4a16", ignore=["re:.*experts.2.*"])
    model, _ = load(out, dtype=torch.float32)
    experts = model.get_submodule("model.layers.1.mlp.experts")
    assert isinstance(experts.get_submodule("1.up_proj"), QuantLinear)
    assert type(experts.get_submodule("2.up_proj")) is torch.nn.Linear
    plain, _ = load(checkpoints.plain("qwen3_moe"), dtype=torch.float32)
    stored = plain.get_submodule("model.layers.1.mlp.experts").gate_up_proj[2].chunk(2)[1]
    assert torch.equal(experts.get_submodule("2.up_proj").weight, stored)
    assert logits(model).isfinite().all()


def test_no_weight_is_kept_unpacked(checkpoints: Checkpoints) -> None:
    model, _ = load(checkpoints.quantized("llama", "w4a16"))
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(layer, QuantLinear)
    logits(model)
    assert not list(layer.parameters()) + list(layer.buffers())
    assert layer._prepared is not None
    held = sum(tensor.nbytes for tensor in layer._prepared.tensors.values())
    assert held <= layer.in_features * layer.out_features * 0.6


def test_a_quantized_head_is_not_tied_to_the_embedding(checkpoints: Checkpoints, tmp_path: Path) -> None:
    recipe = Recipe(scheme="none", targets={"lm_head": "w8a16"})
    quantize(checkpoints.plain("llama"), tmp_path / "out", recipe=recipe)
    file = tmp_path / "out" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    model, _ = load(tmp_path / "out", dtype=torch.float32)
    assert isinstance(model.lm_head, QuantLinear)
    plain, _ = load(checkpoints.plain("llama"), dtype=torch.float32)
    got, want = logits(model), logits(plain)
    assert (got - want).norm() < 0.02 * want.norm()
