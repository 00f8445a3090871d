"""What people do with a model: batches, beams, dtypes, device maps."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from halfbyte.engines.transformers.loading import load
from halfbyte.layers.linear import QuantLinear
from tests.engines.checkpoints import Checkpoints

PROMPTS = ["Half a byte", "A longer prompt, for padding", "x"]


@pytest.mark.parametrize(("family", "scheme"), [("llama", "w4a8"), ("mixtral", "w4a16"), ("gpt2", "w4a8")])
def test_a_padded_batch_says_what_each_prompt_alone_says(
    family: str, scheme: str, checkpoints: Checkpoints
) -> None:
    model, tokenizer = load(checkpoints.quantized(family, scheme), dtype=torch.float32)
    tokenizer.padding_side = "left"
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    together = model.generate(**batch, max_new_tokens=8, do_sample=False)[:, -8:]
    for row, prompt in zip(together, PROMPTS, strict=True):
        alone = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=8, do_sample=False)
        assert row.tolist()[: len(alone[0, -8:])] == alone[0, -8:].tolist()


def test_beams(checkpoints: Checkpoints) -> None:
    model, tokenizer = load(checkpoints.quantized("llama", "w4a8"))
    output = model.generate(
        **tokenizer(PROMPTS[0], return_tensors="pt"),
        max_new_tokens=6,
        num_beams=3,
        num_return_sequences=3,
        do_sample=False,
    )
    assert output.shape == (3, len(PROMPTS[0]) + 6)
    assert len({tuple(row.tolist()) for row in output}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_dtypes(family: str, dtype: torch.dtype, checkpoints: Checkpoints) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoints.quantized(family, "w4a8"), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    with torch.inference_mode():
        logits = model(torch.arange(9)[None]).logits
    assert logits.dtype == dtype
    assert logits.isfinite().all()


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"])
def test_device_maps(device_map: object, checkpoints: Checkpoints) -> None:
    if device_map == "auto":
        pytest.importorskip("accelerate")
    path = checkpoints.quantized("llama", "w4a8")
    model = AutoModelForCausalLM.from_pretrained(path, device_map=device_map)
    assert any(isinstance(module, QuantLinear) for module in model.modules())
    plain, _ = load(path)
    with torch.inference_mode():
        assert torch.equal(model(torch.arange(9)[None]).logits, plain(torch.arange(9)[None]).logits)


def test_gradients_may_be_on(checkpoints: Checkpoints) -> None:
    model, _ = load(checkpoints.quantized("llama", "w4a8"))
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        want = model(ids).logits
    assert torch.equal(model(ids).logits.detach(), want)


def test_the_base_model_alone(checkpoints: Checkpoints) -> None:
    from transformers import AutoModel

    base = AutoModel.from_pretrained(checkpoints.quantized("mixtral", "w4a8"))
    whole, _ = load(checkpoints.quantized("mixtral", "w4a8"))
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        assert torch.equal(base(ids).last_hidden_state, whole.model(ids).last_hidden_state)
