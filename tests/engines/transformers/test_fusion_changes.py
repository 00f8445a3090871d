"""Fused models that somebody hooks, patches, moves, loads into, copies or stores: they never compute anything else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from halfbyte.engines.transformers.fusion import fuse
from halfbyte.engines.transformers.one_kernel_norm import is_one_kernel
from halfbyte.layers.merged import MergedPlain
from tests.engines.transformers.models import prompts, random_model

MODULES = (
    "input_layernorm",
    "self_attn",
    "self_attn.q_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp",
    "mlp.gate_proj",
    "mlp.act_fn",
    "mlp.down_proj",
)


def logits(model: Any) -> torch.Tensor:
    ids, mask = prompts(padded=True)
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits


def runs_fused(model: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many merged layers a call of the model runs."""
    calls: list[int] = []
    forward = MergedPlain.forward
    with monkeypatch.context() as patch:
        patch.setattr(MergedPlain, "forward", lambda layer, x: calls.append(1) or forward(layer, x))
        logits(model)
    return len(calls)


def halve(model: Any, name: str) -> None:
    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return (output[0] / 2, *output[1:]) if isinstance(output, tuple) else output / 2

    model.model.layers[0].get_submodule(name).register_forward_hook(hook)


def patch(model: Any, name: str) -> None:
    module = model.model.layers[0].get_submodule(name)
    forward = module.forward

    def patched(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return (output[0] / 2, *output[1:]) if isinstance(output, tuple) else output / 2

    module.forward = patched


class Halved(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        return (output[0] / 2, *output[1:]) if isinstance(output, tuple) else output / 2


def replace(model: Any, name: str) -> None:
    layer = model.model.layers[0]
    layer.set_submodule(name, Halved(layer.get_submodule(name)))


@pytest.mark.parametrize("late", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("change", [halve, patch, replace])
@pytest.mark.parametrize("name", MODULES)
def test_changed_modules_count(
    name: str, change: Callable[[Any, str], None], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = random_model("llama"), random_model("llama")
    change(plain, name)
    if late:
        assert fuse(model) == 2
        assert runs_fused(model, monkeypatch) == 4
        change(model, name)
    else:
        change(model, name)
        # What leads out of attention and MLP is called, not read, so that it may be any module.
        free = change is replace and name in ("self_attn.o_proj", "mlp.down_proj")
        assert fuse(model) == (2 if free else 1)
    want = logits(plain)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(want, logits(random_model("llama")), atol=1e-3)


def test_a_norm_that_is_taken_out() -> None:
    model, plain = random_model("llama"), random_model("llama")
    fuse(model)
    for each in (model, plain):
        each.model.layers[0].input_layernorm = nn.Identity()
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-4)


def test_hooks_see_what_the_model_passes() -> None:
    model, shapes = random_model("llama"), []
    fuse(model)
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["hidden_states"].shape), with_kwargs=True
    )
    logits(model)
    assert shapes == [(3, 9, model.config.hidden_size)]


def test_a_hook_that_goes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama")
    fuse(model)
    handle = model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: None)
    assert runs_fused(model, monkeypatch) == 2
    handle.remove()
    assert runs_fused(model, monkeypatch) == 4
    with torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: None):
        assert runs_fused(model, monkeypatch) == 0


def test_attention_weights_that_were_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama")
    model.set_attn_implementation("eager")
    fuse(model)
    with torch.no_grad():
        model(input_ids=prompts()[0], output_attentions=True)
    assert runs_fused(model, monkeypatch) == 4


def test_an_activation_that_the_config_does_not_name() -> None:
    model = random_model("llama")
    model.model.layers[1].mlp.act_fn = nn.ReLU()
    want = logits(model)
    assert fuse(model) == 1
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("base", [LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm])
def test_names_alone_do_not_tell(base: type) -> None:
    model = random_model("llama")
    own = type(base.__name__, (base,), {"forward": lambda self, *a, **k: base.forward(self, *a, **k) / 2})
    for module in model.modules():
        if type(module) is base:
            module.__class__ = own
    want = logits(model)
    assert fuse(model) == 0
    torch.testing.assert_close(logits(model), want)


def test_a_class_patched_by_somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x) / 2)
    assert fuse(random_model("llama")) == 0


def test_norms_of_another_dtype_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama").bfloat16()
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.float()
    assert fuse(model) == 0
    assert not any(map(is_one_kernel, model.modules()))
    assert fuse(random_model("llama").double()) == 0
    later = random_model("llama")
    fuse(later)
    later.model.layers[0].input_layernorm.double()
    later.model.layers[0].self_attn.double()
    with pytest.raises(RuntimeError, match="dtype"):  # as without fusion
        logits(later)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_stored_and_copied_models(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(family)
    want = logits(model)
    fuse(model)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), model):
        torch.testing.assert_close(logits(other), want, rtol=1e-4, atol=1e-4)
        assert runs_fused(other, monkeypatch) == 4
        with torch.no_grad():
            other.model.layers[0].self_attn.v_proj.weight.zero_()
            other.model.layers[0].input_layernorm.weight.zero_()
        assert not torch.allclose(logits(other), want, atol=1e-3)


def test_a_norm_alone_can_be_stored() -> None:
    model = random_model("llama", hidden_act="relu")
    want = logits(model)
    assert fuse(model) == 0
    torch.testing.assert_close(logits(pickle.loads(pickle.dumps(model))), want)


def test_dropout_follows_the_mode_of_the_model() -> None:
    model = random_model("llama", attention_dropout=0.5).train()
    fuse(model)
    model.eval()
    assert torch.equal(logits(model), logits(model))
    model.train()
    assert not torch.equal(logits(model), logits(model))


def test_fused_in_inference_mode() -> None:
    model = random_model("llama")
    with torch.inference_mode():
        assert fuse(model) == 2
    model.load_state_dict(random_model("llama").state_dict())
    model(input_ids=prompts()[0]).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


def test_arguments_by_position() -> None:
    model, captured = random_model("llama"), []
    layer = model.model.layers[0]
    handle = layer.register_forward_pre_hook(
        lambda module, args, kwargs: captured.append((args, kwargs)), with_kwargs=True
    )
    logits(model)
    handle.remove()
    ((hidden, *_), kwargs) = captured[0]
    mask, angles = kwargs["attention_mask"], kwargs["position_embeddings"]
    with torch.no_grad():
        want = layer(hidden, mask, position_embeddings=angles)
        fuse(model)
        torch.testing.assert_close(layer(hidden, mask, None, None, False, angles), want)
