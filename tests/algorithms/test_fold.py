"""Folding changes no logit: what a fold is, on real tiny models of every family."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from halfbyte.algorithms.fold import fold_scales_, folded_statistics, weight_view
from halfbyte.calibration.statistics import InputMoments
from halfbyte.errors import HalfbyteError
from halfbyte.models.describe import describe
from halfbyte.models.folding import Fold, Folds, find_folds
from halfbyte.models.layout import WeightSource
from halfbyte.models.producers import NormProducer
from tests.tiny import FAMILIES, tiny_model

_LLAMA = FAMILIES["llama"]
_EXPERTS = {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED = {
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_TIED = {**_LLAMA, "tie_word_embeddings": True}
_LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_NEXT = {**FAMILIES["qwen3_moe"], "shared_expert_intermediate_size": 128, **_LINEAR_ATTENTION}
_GPTJ = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 256, "rotary_dim": 16}
# Beyond the families of tests.tiny, all others that have folds; what follows a colon is a variant.
OTHERS: dict[str, dict[str, Any]] = {
    "cohere": _TIED,
    "cohere2": {**_TIED, "sliding_window": 64},
    "deepseek_v2": {**FAMILIES["deepseek_v3"], "topk_method": "greedy"},
    "deepseek_v3:full-rank queries": {**FAMILIES["deepseek_v3"], "q_lora_rank": None},
    "dots1": {**FAMILIES["deepseek_v3"], "head_dim": 32},
    "ernie4_5_moe": {**_LLAMA, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 128},
    "exaone4": {**_LLAMA, "sliding_window": 64, "sliding_window_pattern": 2},
    "gemma": _TIED,
    "glm4": _LLAMA,
    "glm4_moe": {**_LLAMA, **_SHARED, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "gptj": _GPTJ,
    "gpt_neox:sequential": {**FAMILIES["gpt_neox"], "use_parallel_residual": False},
    "granite": _LLAMA,
    "granitemoe": _EXPERTS,
    "hunyuan_v1_moe": {**_LLAMA, "num_experts": 4, "moe_topk": 2},
    "llama:biases": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "minimax_m2": {**_EXPERTS, "rotary_dim": 16},
    "nemotron": _LLAMA,
    "olmo2": _LLAMA,
    "olmoe:clipped": {**FAMILIES["olmoe"], "clip_qkv": 0.1},
    "opt:post-norm": {**FAMILIES["opt"], "do_layer_norm_before": False},
    "phi": _LLAMA,
    "phimoe": _EXPERTS,
    "qwen3_5_moe_text": _NEXT,
    "qwen3_5_text": {**_LLAMA, **_LINEAR_ATTENTION},
    "qwen3_next": _NEXT,
    "seed_oss": _LLAMA,
    "smollm3": _LLAMA,
    "stablelm": _LLAMA,
    "stablelm:parallel": {**_LLAMA, "use_parallel_residual": True},
    "starcoder2": _LLAMA,
}
TOKENS = torch.arange(40).view(2, 20) * 5 % 250


def randomized(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, norms and biases random too: those of a new model hide what is left out."""
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 or name.endswith("bias"):
            tensor += torch.rand(tensor.shape, generator=generator) * 0.5
    return tensors


def folds_of(path: Path, tensors: dict[str, torch.Tensor]) -> tuple[Folds, dict[str, WeightSource]]:
    config = json.loads((path / "config.json").read_text())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layout = describe(config, shapes)
    return find_folds(layout, shapes, config), {module.name: module.source for module in layout.modules}


def random_scales(fold: Fold, seed: int) -> torch.Tensor:
    return torch.exp2(torch.rand(fold.channels, generator=torch.Generator().manual_seed(seed)) * 4 - 2)


def outputs(path: Path, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Logits, then what every router puts out, in the order of the layers."""
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    routed: list[torch.Tensor] = []

    def remember(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        routed.append(output[0] if isinstance(output, tuple) else output)

    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_hook(remember)
    with torch.no_grad():
        logits = model(TOKENS).logits
    return [logits, *routed]


def assert_folds_change_nothing(path: Path) -> Folds:
    tensors = randomized(path)
    before = outputs(path, tensors)
    folds, sources = folds_of(path, tensors)
    for seed, fold in enumerate(folds.folds):
        fold_scales_(tensors, sources, fold, random_scales(fold, seed))
    after = outputs(path, tensors)
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)
    return folds


@pytest.mark.parametrize("family", FAMILIES)
def test_folds_change_nothing(family: str, tmp_path: Path) -> None:
    folds = assert_folds_change_nothing(tiny_model(family, tmp_path, torch.float32))
    consumers = [consumer for fold in folds.folds for consumer in fold.consumers]
    assert len(set(consumers)) == len(consumers)
    assert consumers
    without = ("gpt2", "gpt_neox", "gpt_oss")  # their activations pass no factor on
    assert bool(folds.left_out) == (family in without)


@pytest.mark.parametrize("family", OTHERS)
def test_folds_of_further_families_change_nothing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = family.partition(":")[0]
    monkeypatch.setitem(FAMILIES, kind, OTHERS[family])
    assert assert_folds_change_nothing(tiny_model(kind, tmp_path, torch.float32)).folds


@pytest.mark.parametrize("forgotten", [".gate", ".shared_expert_gate", ".experts.1.up_proj"])
def test_a_forgotten_reader_shows(forgotten: str, tmp_path: Path) -> None:
    """What the tests above would miss if they could miss it: a router that is not divided back."""
    path = tiny_model("qwen2_moe", tmp_path, torch.float32)
    tensors = randomized(path)
    before = outputs(path, tensors)[0]
    folds, sources = folds_of(path, tensors)
    for fold in folds.folds:
        kept = tuple(consumer for consumer in fold.consumers if not consumer.endswith(forgotten))
        fold_scales_(tensors, sources, replace(fold, consumers=kept), random_scales(fold, 0))
    assert (outputs(path, tensors)[0] - before).abs().max() > 1e-2


def one_norm(weight: torch.Tensor, offset: float, bias: bool = False) -> tuple[dict[str, torch.Tensor], Fold]:
    tensors = {"norm": weight, "reader": torch.full((2, len(weight)), 3.0)}
    if bias:
        tensors["bias"] = torch.ones(len(weight))
    producer = NormProducer("norm", "bias" if bias else None, offset)
    return tensors, Fold(producer, ("reader",), len(weight), len(weight))


READER = {"reader": WeightSource("reader")}


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_rounded_gain_is_made_good_by_its_readers(offset: float) -> None:
    weight = (torch.rand(64, generator=torch.Generator().manual_seed(0)) - 0.5).bfloat16()
    tensors, fold = one_norm(weight.clone(), offset)
    scales = random_scales(fold, 3)
    took = fold_scales_(tensors, READER, fold, scales)
    output = (tensors["norm"].float() + offset) * tensors["reader"]
    torch.testing.assert_close(output, (weight.float() + offset) * 3 * torch.ones(2, 1), rtol=1e-6, atol=0)
    torch.testing.assert_close(took, scales, rtol=0.05 if offset else 0.005, atol=0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_channels_that_a_norm_silences_stay_as_they_are(offset: float) -> None:
    tensors, fold = one_norm(torch.tensor([-offset, 2.0]), offset, bias=True)
    took = fold_scales_(tensors, READER, fold, torch.tensor([4.0, 4.0]))
    assert took.tolist() == [1.0, 4.0]
    assert tensors["norm"][0] == -offset
    assert tensors["bias"].tolist() == [1.0, 0.25]
    assert tensors["reader"][0].tolist() == [3.0, 12.0]


@pytest.mark.parametrize(
    "scales",
    [torch.ones(3), torch.tensor([1.0, 0.0]), torch.tensor([1.0, -1.0]), torch.tensor([1.0, torch.inf])],
)
def test_scales_that_cannot_be_folded_are_refused(scales: torch.Tensor) -> None:
    tensors, fold = one_norm(torch.ones(2), 0.0)
    with pytest.raises(HalfbyteError, match="norm"):
        fold_scales_(tensors, READER, fold, scales)
    assert tensors["norm"].tolist() == [1.0, 1.0]


def test_folded_statistics_are_those_of_the_divided_inputs() -> None:
    inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    columns = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.25, 1.5])
    given, divided = InputMoments(6, inputs.device), InputMoments(6, inputs.device)
    given.add(inputs[None])
    divided.add((inputs / columns)[None])
    (before,), (expected,) = given.finish(), divided.finish()
    folded = folded_statistics(before, columns)
    assert folded.tokens == expected.tokens
    for name in ("moment", "absmean", "absmax"):
        torch.testing.assert_close(getattr(folded, name), getattr(expected, name), rtol=1e-5, atol=1e-6)


def test_weight_view_is_what_the_source_says() -> None:
    stored = torch.arange(24.0).view(2, 3, 4)
    view = weight_view({"t": stored}, WeightSource("t", expert=1, rows=(1, 4, 2), transposed=True))
    assert view.tolist() == [[13.0, 17.0, 21.0], [15.0, 19.0, 23.0]]
    view.zero_()
    assert stored[1, :, 1].eq(0).all()
    assert stored[0].ne(0).sum() == 11
