"""``generate`` by sessions, as on a GPU, against ``generate`` by transformers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from halfbyte.engines.transformers import generation
from halfbyte.engines.transformers.generation import Generation, generate
from halfbyte.engines.transformers.loading import load
from tests.engines.checkpoints import Checkpoints
from tests.engines.transformers.models import NoWaiting


@pytest.fixture(scope="module")
def loaded(checkpoints: Checkpoints) -> tuple[Any, Any]:
    # In float32, where one order of sums or another decides nothing.
    return load(checkpoints.quantized("llama", "w4a16"), dtype=torch.float32)


def both(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Generation]:
    results = []
    for itself in (False, True):
        monkeypatch.setattr(generation, "_decodes_itself", lambda model, itself=itself: itself)
        results.append(generate(*loaded, "Half a byte", max_new_tokens=24, **options))
    return results


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2.0, "seed": 3}, {"temperature": 0.7, "seed": 4}], ids=str
)
def test_the_text_is_the_same(loaded, monkeypatch: pytest.MonkeyPatch, options: dict) -> None:
    want, found = both(loaded, monkeypatch, **options)
    assert (found.text, found.prompt_tokens, found.new_tokens) == (want.text, 11, want.new_tokens)
    assert found.ttft_ms > 0
    assert found.tpot_ms is not None
    assert found.tpot_ms > 0


def test_it_ends_where_a_text_ends(loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    prompt = tokenizer("Half a byte", return_tensors="pt")
    token = int(model.generate(**prompt, max_new_tokens=6, do_sample=False)[0, -1])
    monkeypatch.setattr(model.generation_config, "eos_token_id", [token, 259])
    want, found = both(loaded, monkeypatch)
    assert found.new_tokens == want.new_tokens <= 6
    assert found.text == want.text


def test_the_checkpoints_repetition_penalty_counts(loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    free = both(loaded, monkeypatch)[0]
    monkeypatch.setattr(loaded[0].generation_config, "repetition_penalty", 1.5)
    want, found = both(loaded, monkeypatch)
    assert found.text == want.text != free.text


def test_text_comes_in_pieces(loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "_decodes_itself", lambda model: True)
    pieces: list[str] = []
    result = generate(*loaded, "Half a byte", max_new_tokens=24, on_text=pieces.append)
    assert "".join(pieces) == result.text


def test_on_the_cpu_transformers_decodes(loaded) -> None:
    assert not generation._decodes_itself(loaded[0])


def test_a_model_that_is_left_to_transformers_is_named_once(loaded, caplog: pytest.LogCaptureFixture) -> None:
    class OnGpu:
        """A model as far as the question goes."""

        device = torch.device("cuda")
        config = type("Config", (), {"is_encoder_decoder": True, "get_text_config": lambda self: self})()

    with caplog.at_level(logging.WARNING):
        assert not generation._decodes_itself(OnGpu())  # type: ignore[arg-type]
        assert not generation._decodes_itself(OnGpu())  # type: ignore[arg-type]
    assert [record.message for record in caplog.records] == [
        "OnGpu is decoded by transformers, without CUDA graphs: it has an encoder"
    ]


def test_quantized_experts_wait_for_the_device(checkpoints: Checkpoints) -> None:
    """Which is what keeps them from being captured, and what the tests of a step look for."""
    model, tokenizer = load(checkpoints.quantized("mixtral", "w4a16"))
    ids = tokenizer("a", return_tensors="pt")["input_ids"]
    with torch.no_grad(), pytest.raises(AssertionError, match="waits for the device"), NoWaiting():
        model(input_ids=ids)
