from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from halfbyte.cli import app, bench_gpu
from halfbyte.engines.transformers import latency, random_llama
from halfbyte.engines.transformers.random_llama import LlamaShape
from halfbyte.errors import HalfbyteError
from halfbyte.schemes import PRESETS
from tests.cli.run import halfbyte

TINY = LlamaShape(layers=1, hidden=128, intermediate=256, heads=4, kv_heads=2, vocabulary=300)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--schemes", ""),
        ("--schemes", "bf16,"),
        ("--batches", ""),
        ("--batches", "9" * 5000),
        ("--batches", "99999999999999"),
        ("--layers", "99999999999999"),
        ("--prompt-tokens", "9" * 5000),
        ("--new-tokens", "99999999999999"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, str]) -> None:
    ran = halfbyte("bench", "latency", *arguments)
    assert ran.code == 2
    assert arguments[0] in ran.complaint


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a model is made."""

    def never(*arguments: object) -> None:
        pytest.fail("a model was made before all arguments were looked at")

    monkeypatch.setattr(latency, "RandomModel", never)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["halfbyte", "bench", "latency", *map(str, arguments)])
    app.app(standalone_mode=False)


@pytest.mark.usefixtures("unmeasured")
def test_a_model_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HalfbyteError, match="--model 'gpt-5'; accepted: llama-3-8b, qwen3-30b-a3b"):
        run(monkeypatch, "--model", "gpt-5", "--batches", "1")


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("scheme", "reason"),
    [("w9", "'w9' is not known"), *((name, name) for name in ("mxfp8", "mxfp4", "nvfp4"))],
)
def test_the_last_scheme_is_looked_at_before_the_first_is_measured(
    monkeypatch: pytest.MonkeyPatch, scheme: str, reason: str
) -> None:
    with pytest.raises(HalfbyteError, match=f"scheme {reason}"):
        run(monkeypatch, "--schemes", f"bf16,{scheme}", "--batches", "1")


@pytest.mark.usefixtures("unmeasured")
def test_the_folder_of_the_record_is_looked_at_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HalfbyteError, match="cannot be written"):
        run(monkeypatch, "-o", tmp_path / "file" / "latency.json")
    with pytest.raises(HalfbyteError, match="is a folder"):
        run(monkeypatch, "-o", tmp_path)


@pytest.mark.parametrize("name", PRESETS)
def test_the_early_look_says_what_the_model_would_say(name: str) -> None:
    import torch

    def refused(call: object, *arguments: object) -> bool:
        try:
            call(*arguments)  # type: ignore[operator]
        except HalfbyteError:
            return True
        return False

    model = (TINY, PRESETS[name], 8, torch.device("cpu"))
    assert refused(bench_gpu._random_scheme, name) == refused(random_llama.random_llama, *model)


def test_what_was_measured_before_an_error_is_in_the_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class StoppedError(Exception):
        pass

    class Once(latency.RandomModel):
        def run(self, batch: int, prompt_tokens: int, new_tokens: int) -> latency.RandomRun:
            if batch > 1:
                raise StoppedError
            return super().run(batch, prompt_tokens, new_tokens)

    monkeypatch.setattr(random_llama, "LlamaShape", lambda: TINY)
    monkeypatch.setattr(latency, "RandomModel", Once)
    path = tmp_path / "new" / "latency.json"
    arguments = ("--schemes", "bf16", "--batches", "1,2", "--prompt-tokens", "4", "--new-tokens", "3")
    with pytest.raises(StoppedError):
        run(monkeypatch, *arguments, "-o", path)
    record = json.loads(path.read_text())
    assert [(row["scheme"], row["batch"]) for row in record["rows"]] == [("bf16", 1)]
    assert record["meta"]["command"].startswith("halfbyte bench latency --schemes bf16")
