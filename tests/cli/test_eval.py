from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from halfbyte.api import quantize
from halfbyte.evaluation.evaluate import evaluate
from tests.cli.run import halfbyte
from tests.tiny import tiny_model, tiny_tokenizer

SHORT = ("--context", 64, "--windows", 2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    first, second = (tiny_model("llama", folder / str(seed), torch.float32, seed=seed) for seed in (0, 1))
    return first, second


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 9)
    return tmp_path / "text.txt"


def test_json_holds_what_the_evaluator_finds(models: tuple[Path, Path], text: Path) -> None:
    ran = halfbyte(
        "eval", models[0], "--baseline", models[1], "--text", text, *SHORT, "--device", "cpu", "--json"
    )
    assert ran.code == 0, ran.err
    first, second = (AutoModelForCausalLM.from_pretrained(path).eval() for path in models)
    found = evaluate(
        first, tiny_tokenizer(), text.read_text(), baseline=second, context=64, windows=2
    ).to_dict()
    printed = ran.json["texts"][str(text)]
    assert printed["baseline"] == pytest.approx(found.pop("baseline"), rel=1e-4)
    assert printed["perplexity"] == pytest.approx(found["perplexity"], rel=1e-4)
    assert printed["tokens_scored"] == 126
    assert (ran.json["dtype"], ran.json["device"]) == ("float32", "cpu")
    assert ran.json["gate"] is None


def test_default_texts_and_table(models: tuple[Path, Path]) -> None:
    ran = halfbyte("eval", models[0], *SHORT)
    assert ran.code == 0, ran.err
    assert "prose" in ran.out
    assert "code" in ran.out
    assert "windows of 64 tokens, stride 64, no start token, float32 on c" in ran.out
    assert "KL" not in ran.out  # nothing to compare with


def test_gate(models: tuple[Path, Path], text: Path) -> None:
    command = ("eval", models[0], "--text", text, *SHORT)
    same = halfbyte(*command, "--baseline", models[0], "--max-kl", 0, "--min-top1", 1, "--json")
    assert same.code == 0, same.err
    assert same.json["gate"]["passed"]
    other = halfbyte(*command, "--baseline", models[1], "--max-kl", 0.001, "--min-top1", 0.99)
    assert other.code == 1
    assert "gate failed" in other.err
    assert "mean KL is" in other.err
    assert "top-1 agreement is" in other.err
    alone = halfbyte(*command, "--max-kl", 1)
    assert alone.code == 2
    assert "--baseline" in alone.complaint


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"too short", "the text has 9 tokens, one window needs 64"), (b"caf\xe9" * 99, "is no UTF-8 text")],
)
def test_texts_that_cannot_be_used(
    models: tuple[Path, Path], tmp_path: Path, content: bytes, complaint: str
) -> None:
    (tmp_path / "bad.txt").write_bytes(content)
    ran = halfbyte("eval", models[0], "--text", tmp_path / "bad.txt", *SHORT)
    assert ran.code == 2
    assert complaint in ran.complaint


def test_a_kernel_by_name_runs_the_model_and_not_the_baseline(
    models: tuple[Path, Path], text: Path, tmp_path: Path
) -> None:
    quantize(models[0], tmp_path / "w4a8", "w4a8")
    command = ("eval", tmp_path / "w4a8", "--text", text, *SHORT, "--device", "cpu", "--json")
    chosen, named = (halfbyte(*command, *options) for options in ((), ("--kernel", "reference")))
    assert (chosen.code, named.code) == (0, 0), (chosen.err, named.err)
    scores = [ran.json["texts"][str(text)]["perplexity"] for ran in (chosen, named)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-3)
    against = halfbyte(*command, "--kernel", "reference", "--baseline", models[0])
    assert against.code == 0, against.err
    unable = halfbyte(*command, "--kernel", "hopper-w4a8")
    assert unable.code == 2
    assert "no kernel can run it; hopper-w4a8: " in unable.complaint


def test_help_has_an_example() -> None:
    assert "Example: halfbyte eval" in halfbyte("eval", "--help").out
