"""Steps replayed from a CUDA graph against the same steps launched kernel by kernel."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from halfbyte.engines.transformers import cuda_graphs, session
from halfbyte.engines.transformers.cuda_graphs import captured
from halfbyte.engines.transformers.decoding import Frame
from halfbyte.engines.transformers.fusion import FUSED
from halfbyte.engines.transformers.generation import generate
from halfbyte.engines.transformers.loading import load
from halfbyte.engines.transformers.session import Session
from tests.engines.checkpoints import Checkpoints
from tests.engines.transformers.models import PAD, PROMPT_TOKENS, generated, prompts, random_model

pytestmark = pytest.mark.gpu
NEW = 40
CUDA = torch.device("cuda", 0)


def answers(ready: Session, padded: bool = True, **options: Any) -> torch.Tensor:
    ids, mask = (tensor.cuda() for tensor in prompts(padded))
    return torch.stack(list(ready.answer(ids, mask, max_new_tokens=NEW, pad=PAD, **options)), dim=1)


def uncaptured(model: Any, frame: Frame, monkeypatch: pytest.MonkeyPatch) -> Session:
    with monkeypatch.context() as patch:
        patch.setattr(session, "captured", lambda step, device: step)
        return Session(model, frame)


@pytest.fixture(autouse=True)
def no_warnings_so_far() -> None:
    cuda_graphs._warn.cache_clear()


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma2", "phi3", "gpt2", "opt", "gpt_neox"])
def test_tokens_are_those_of_generate(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(family).to(CUDA)
    ids, mask = (tensor.cuda() for tensor in prompts(padded=True))
    want = generated(model, ids, mask, NEW)
    with caplog.at_level(logging.WARNING):
        ready = Session(model, Frame(3, 128))
    assert not caplog.records, "it was not captured"
    assert torch.equal(answers(ready), want.cpu())
    assert torch.equal(answers(ready), want.cpu()), "the second time"


@pytest.mark.parametrize("scheme", ["w4a8", "w4a16", "fp8"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_quantized_layers(
    family: str, scheme: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    model, _ = load(checkpoints.quantized(family, scheme))
    model = model.to(CUDA)
    frame = Frame(3, 128)
    want = answers(uncaptured(model, frame, monkeypatch))
    with caplog.at_level(logging.WARNING):
        ready = Session(model, frame)
    assert not caplog.records, "it was not captured"
    assert torch.equal(answers(ready), want)
    assert torch.equal(answers(ready), want), "the second time"


def test_sampling_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama").to(CUDA)
    frame = Frame(3, 128, sampled=True, penalized=True)
    options = {"temperature": 1.5, "penalty": 1.2}
    by_kernel, by_graph = uncaptured(model, frame, monkeypatch), Session(model, frame)
    found = []
    for ready in (by_kernel, by_graph, by_graph):
        torch.manual_seed(5)
        found.append(answers(ready, **options))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])
    torch.manual_seed(6)
    assert not torch.equal(answers(by_graph, **options), found[0])


def test_a_capture_leaves_the_random_state() -> None:
    torch.manual_seed(3)
    want = torch.rand(4, device=CUDA)
    torch.manual_seed(3)
    Session(random_model("llama").to(CUDA), Frame(1, 128, sampled=True))
    assert torch.equal(torch.rand(4, device=CUDA), want)


def test_what_waits_runs_as_it_is_with_one_warning(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = load(checkpoints.quantized("mixtral", "w4a16"))
    model.generation_config.eos_token_id = None
    model = model.to(CUDA)
    with caplog.at_level(logging.WARNING, logger="halfbyte"):
        ready = Session(model, Frame(3, 128))
        Session(model, Frame(2, 128))
    (record,) = caplog.records
    assert record.message.startswith("Decoding runs without a CUDA graph, kernel by kernel: ")
    assert answers(ready).shape == (3, NEW)
    # The device is in order afterwards: another model is captured.
    other = Session(random_model("llama").to(CUDA), Frame(3, 128))
    assert isinstance(other._step, cuda_graphs.CapturedStep)


def test_any_step_can_be_captured_or_not(caplog: pytest.LogCaptureFixture) -> None:
    total = torch.zeros(1, device=CUDA)
    step = captured(lambda: total.add_(1), CUDA)
    total.zero_()
    step()
    step()
    assert total.item() == 2

    def waits() -> None:
        total.item()

    with caplog.at_level(logging.WARNING):
        assert captured(waits, CUDA) is waits
    assert "synchroniz" in caplog.text
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tokens_come_from_a_device_that_is_not_current() -> None:
    other = torch.device("cuda", 1)
    model = random_model("llama").to(other)
    ids, mask = (tensor.to(other) for tensor in prompts(padded=True))
    want = generated(model, ids, mask, NEW).cpu()
    ready = Session(model, Frame(3, 128))
    with torch.cuda.device(0):
        found = list(ready.answer(ids, mask, max_new_tokens=NEW, pad=PAD))
    assert torch.equal(torch.stack(found, dim=1), want)


def test_weights_that_are_loaded_into_a_fused_model() -> None:
    model, other = random_model("qwen2").to(CUDA), random_model("qwen2", initializer_range=0.2).to(CUDA)
    first = session.session(model, 3, PROMPT_TOKENS + NEW)
    before = answers(first)
    model.load_state_dict(other.state_dict())
    after = answers(session.session(model, 3, PROMPT_TOKENS + NEW))
    assert torch.equal(after, answers(session.session(other, 3, PROMPT_TOKENS + NEW)))
    assert not torch.equal(after, before)


def test_sessions_follow_weights_that_move() -> None:
    model = random_model("llama").to(CUDA)
    first = session.session(model, 3, PROMPT_TOKENS + NEW)
    want = answers(first)
    model.to("cpu")
    model.to(CUDA)
    second = session.session(model, 3, PROMPT_TOKENS + NEW)
    assert torch.equal(answers(second), want)


def test_a_loaded_model_is_fused_when_it_first_runs_here(checkpoints: Checkpoints) -> None:
    model, _ = load(checkpoints.quantized("llama", "w4a16"))
    model = model.to(CUDA)
    assert FUSED not in model.model.layers[0]._modules
    with torch.no_grad():
        model(input_ids=prompts()[0].to(CUDA))
    assert FUSED in model.model.layers[0]._modules
    assert not model._forward_pre_hooks


def test_generate_runs_on_a_session(checkpoints: Checkpoints) -> None:
    model, tokenizer = load(checkpoints.quantized("llama", "w4a16"))
    on_cpu = generate(model, tokenizer, "Half a byte", max_new_tokens=4)
    model.to(CUDA)
    pieces: list[str] = []
    found = generate(model, tokenizer, "Half a byte", max_new_tokens=4, on_text=pieces.append)
    assert model in session._sessions
    assert (found.prompt_tokens, found.new_tokens) == (on_cpu.prompt_tokens, on_cpu.new_tokens)
    assert "".join(pieces) == found.text
