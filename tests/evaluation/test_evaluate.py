from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from halfbyte.errors import HalfbyteError, NonFiniteError
from halfbyte.evaluation.evaluate import evaluate
from tests.tiny import tiny_model, tiny_tokenizer

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("models")
    paths = [tiny_model("llama", folder / str(seed), torch.float32, seed=seed) for seed in (0, 1)]
    return [AutoModelForCausalLM.from_pretrained(path).eval() for path in paths]


def test_perplexity_is_transformers_own_loss(models: list[Any]) -> None:
    tokenizer = tiny_tokenizer()
    found = evaluate(models[0], tokenizer, TEXT, context=64)
    ids = torch.tensor(tokenizer(TEXT, add_special_tokens=False).input_ids)
    windows = ids[: len(ids) // 64 * 64].reshape(-1, 64)
    with torch.no_grad():
        losses = [models[0](row[None], labels=row[None]).loss.item() for row in windows]
    assert found.nll == pytest.approx(statistics.mean(losses), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.nll))
    assert found.windows == found.windows_in_text == len(windows)
    assert found.tokens_scored == 63 * len(windows)
    assert (found.context, found.stride, found.text_tokens) == (64, 64, len(ids))
    assert found.baseline is None


def test_comparison_against_the_definition(models: list[Any]) -> None:
    tokenizer = tiny_tokenizer()
    found = evaluate(models[0], tokenizer, TEXT, baseline=models[1], context=64, windows=3)
    ids = torch.tensor(tokenizer(TEXT, add_special_tokens=False).input_ids)[: 3 * 64].reshape(3, 64)
    with torch.no_grad():
        log_q, log_p = (model(ids).logits[:, :-1].double().log_softmax(-1) for model in models)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    losses = [
        F.nll_loss(x.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").reshape(3, 63)
        for x in (log_q, log_p)
    ]
    extra = (losses[0] - losses[1]).mean(1)

    against = found.baseline
    assert against is not None
    assert against.kl_mean == pytest.approx(kl.mean().item(), rel=1e-4)
    assert against.kl_p99 == pytest.approx(np.quantile(kl.numpy(), 0.99), rel=1e-4)
    assert against.top1_agreement == pytest.approx(
        (log_q.argmax(-1) == log_p.argmax(-1)).double().mean().item()
    )
    assert against.extra_nll == pytest.approx(extra.mean().item(), abs=1e-6)
    assert against.extra_nll_se == pytest.approx(statistics.stdev(extra.tolist()) / math.sqrt(3), rel=1e-3)
    assert against.perplexity == pytest.approx(math.exp(losses[1].mean()), rel=1e-5)
    assert against.perplexity_increase == pytest.approx(found.perplexity / against.perplexity - 1, rel=1e-5)


def test_a_model_against_itself(models: list[Any]) -> None:
    against = evaluate(models[0], tiny_tokenizer(), TEXT, baseline=models[0], context=64, windows=1).baseline
    assert against is not None
    assert (against.kl_mean, against.kl_p99, against.extra_nll, against.top1_agreement) == (0, 0, 0, 1)
    assert against.extra_nll_se is None  # one window says nothing about spread


def test_overlap_gives_each_token_its_context(models: list[Any]) -> None:
    tokenizer = tiny_tokenizer()
    found = evaluate(models[0], tokenizer, TEXT, context=64, stride=16, windows=2)
    ids = torch.tensor(tokenizer(TEXT, add_special_tokens=False).input_ids)
    with torch.no_grad():
        first, second = (models[0](ids[None, start : start + 64]).logits[0] for start in (0, 16))
    losses = [*F.cross_entropy(first[:-1], ids[1:64], reduction="none")]
    losses += [*F.cross_entropy(second[47:-1], ids[64:80], reduction="none")]
    assert found.tokens_scored == 79
    assert found.nll == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


def test_start_token(models: list[Any]) -> None:
    tokenizer = tiny_tokenizer()
    found = evaluate(models[0], tokenizer, TEXT, context=64, windows=1, bos=True)
    ids = torch.tensor([tokenizer.bos_token_id, *tokenizer(TEXT, add_special_tokens=False).input_ids[:63]])
    with torch.no_grad():
        loss = F.cross_entropy(models[0](ids[None]).logits[0, :-1], ids[1:])
    assert found.tokens_scored == 63
    assert found.nll == pytest.approx(loss.item(), rel=1e-5)


def test_any_function_of_ids_is_a_model() -> None:
    def uniform(ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*ids.shape, 1000)

    reports: list[tuple[int, int]] = []
    found = evaluate(
        uniform,
        tiny_tokenizer(),
        TEXT,
        context=32,
        windows=2,
        on_window=lambda *report: reports.append(report),
    )
    assert found.perplexity == pytest.approx(1000, rel=1e-5)
    assert reports == [(0, 2), (1, 2), (2, 2)]
    assert found.to_dict()["tokens_scored"] == 62


def _constant(value: float, size: int = 300) -> Any:
    return lambda ids: torch.full((*ids.shape, size), value)


def test_refusals(models: list[Any]) -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(HalfbyteError, match="the text has 5 tokens, one window needs 64"):
        evaluate(models[0], tokenizer, "short", context=64)
    with pytest.raises(HalfbyteError, match="context 513 is longer than the model's 512 positions"):
        evaluate(models[0], tokenizer, TEXT * 9, context=513)
    with pytest.raises(HalfbyteError, match="300 output tokens, the baseline 264"):
        evaluate(_constant(0.0), tokenizer, TEXT, baseline=models[0], context=32)
    with pytest.raises(NonFiniteError, match=r"window 1 of 2: the model's logits hold NaN"):
        evaluate(_constant(math.nan), tokenizer, TEXT, context=32, windows=2)
    other = tiny_tokenizer()
    other.add_tokens(["best of times"])
    with pytest.raises(HalfbyteError, match="splits the text into other tokens"):
        evaluate(models[0], tokenizer, TEXT, baseline=models[1], baseline_tokenizer=other, context=32)
    tokenizer.bos_token = None
    with pytest.raises(HalfbyteError, match="has no start token"):
        evaluate(models[0], tokenizer, TEXT, context=32, bos=True)
