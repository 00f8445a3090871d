from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halfbyte.bench import remembered_logits
from halfbyte.engines.transformers import quality_scores
from halfbyte.engines.transformers.loading import load
from halfbyte.engines.transformers.quality_scores import QualityScores
from halfbyte.errors import HalfbyteError
from halfbyte.evaluation.evaluate import evaluate
from tests.tiny import tiny_model

TEXTS = {"fox": "The quick brown fox jumps over the lazy dog. " * 9, "bird": "A bird in the hand. " * 9}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    first, second = (tiny_model("llama", folder / str(seed), torch.float32, seed=seed) for seed in (0, 1))
    return first, second


def opened(original: Path, shares: list[float] | None = None, **options: Any) -> QualityScores:
    defaults = {
        "dtype": torch.float32,
        "device": "cpu",
        "context": 64,
        "windows": 2,
        "remembered_bytes": 10**8,
    }
    seen = [] if shares is None else shares
    return QualityScores(original, TEXTS, **{**defaults, **options}, on_share=seen.append)


@pytest.mark.parametrize("remembered_bytes", [0, 10**8])
def test_figures_are_those_of_the_evaluator(models: tuple[Path, Path], remembered_bytes: int) -> None:
    original, other = models
    scores = opened(original, remembered_bytes=remembered_bytes)
    alone, compared = scores.original(), scores.of(other)
    (model, tokenizer), (baseline, _) = load(other), load(original)
    for name, text in TEXTS.items():
        found = evaluate(model, tokenizer, text, baseline=baseline, context=64, windows=2)
        against = found.baseline
        assert against is not None
        assert alone[name] == {
            "context": 64,
            "windows": 2,
            "dtype": "float32",
            "device": "cpu",
            "tokens_scored": 126,
            "perplexity": pytest.approx(against.perplexity, rel=1e-5),
        }
        assert compared[name] == {
            **{key: alone[name][key] for key in ("context", "windows", "dtype", "device", "tokens_scored")},
            "perplexity": pytest.approx(found.perplexity, rel=1e-5),
            "baseline_perplexity": pytest.approx(against.perplexity, rel=1e-5),
            "increase": pytest.approx(against.perplexity_increase, abs=2e-6),
            "extra_nll": pytest.approx(against.extra_nll, abs=2e-6),
            "extra_nll_se": pytest.approx(against.extra_nll_se, abs=2e-6),
            "kl_mean": pytest.approx(against.kl_mean, abs=2e-6),
            "kl_p99": pytest.approx(against.kl_p99, abs=2e-6),
            "top1_agreement": pytest.approx(against.top1_agreement, abs=2e-6),
        }


def test_an_original_beside_itself_is_compared(models: tuple[Path, Path]) -> None:
    same = opened(models[0]).of(models[0])["fox"]
    assert (same["increase"], same["kl_mean"], same["top1_agreement"]) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(("remembered_bytes", "loads"), [(10**8, 1), (0, 3)])
def test_a_remembered_original_is_loaded_once(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, remembered_bytes: int, loads: int
) -> None:
    loaded: list[Path] = []

    def counting(path: Path, **options: Any) -> Any:
        loaded.append(path)
        return load(path, **options)

    monkeypatch.setattr(quality_scores, "load", counting)
    scores = opened(models[0], remembered_bytes=remembered_bytes)
    scores.original()
    scores.of(models[1])
    scores.of(models[1])
    assert loaded.count(models[0]) == loads


def test_shares_go_through_all_texts(models: tuple[Path, Path]) -> None:
    shares: list[float] = []
    opened(models[0], shares).of(models[1])
    assert shares == [0.0, 0.25, 0.5, 0.5, 0.75, 1.0]


def test_models_are_given_back_after_an_error_too(models: tuple[Path, Path], tmp_path: Path) -> None:
    scores = opened(models[0])
    with pytest.raises(HalfbyteError, match="nowhere"):
        scores.of(tmp_path / "nowhere")
    assert isinstance(scores._baseline, remembered_logits.RememberedLogits)
    assert scores._baseline._model is None


def test_a_context_longer_than_the_originals_is_refused(models: tuple[Path, Path]) -> None:
    with pytest.raises(HalfbyteError, match="context 513 is longer than the model's 512"):
        opened(models[0], context=513).original()
