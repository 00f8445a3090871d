"""``halfbyte generate`` as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from halfbyte.api import quantize
from tests.cli.run import halfbyte
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    quantize(tiny_model("llama", folder), folder / "w4a8", "w4a8")
    return folder / "w4a8"


def test_text_on_stdout_and_speed_on_stderr(model: Path) -> None:
    ran = halfbyte("generate", model, "Half a byte", "--max-new-tokens", 6, "--threads", 1)
    assert ran.code == 0, ran.err
    assert ran.out.endswith("\n")
    assert re.fullmatch(
        r"prompt: 11 tokens in [\d,]+ ms \([\d,.]+ tokens/s\); new: \d+ tokens, [\d,.]+ ms each \([\d,.]+ tokens/s\); "
        r"(cpu, peak memory \d+\.\d\d GB|cuda:\d, peak memory \d+\.\d\d GB, of the GPU \d+\.\d\d GB)\n",
        ran.err,
    ), ran.err


def test_json(model: Path) -> None:
    ran = halfbyte("generate", model, "Half a byte", "--max-new-tokens", 6, "--json", "--kernel", "reference")
    assert ran.code == 0, ran.err
    assert ran.json["prompt_tokens"] == 11
    assert 1 <= ran.json["new_tokens"] <= 6
    assert set(ran.json) == {
        "text",
        "prompt_tokens",
        "new_tokens",
        "ttft_ms",
        "tpot_ms",
        "tokens_per_s",
        "device",
        "peak_memory_bytes",
        "peak_gpu_memory_bytes",
    }
    assert ran.err == ""


def test_on_the_cpu_nothing_is_on_a_gpu(model: Path) -> None:
    ran = halfbyte("generate", model, "a", "--max-new-tokens", 1, "--json", "--device", "cpu")
    assert ran.code == 0, ran.err
    assert ran.json["device"] == "cpu"
    assert ran.json["peak_gpu_memory_bytes"] is None


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [[], ["--device", "cuda"], ["--dtype", "float32"]], ids=str)
def test_on_a_gpu_if_there_is_one(arguments: list[str], model: Path) -> None:
    ran = halfbyte("generate", model, "Half a byte", "--max-new-tokens", 6, "--json", *arguments)
    assert ran.code == 0, ran.err
    assert ran.json["device"] == "cuda:0"
    assert ran.json["peak_gpu_memory_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", "marlin"], "kernel 'marlin' is not known; known kernels: "),
        (["--kernel", "cpu-int8", "--device", "cpu"], "no kernel can run it; cpu-int8: inputs must be INT8"),
        (["--chat"], "the tokenizer has no chat template"),
        (["--device", "gpu"], "device 'gpu' is not known; accepted: auto, cpu, cuda, cuda:N"),
        (["--device", "cuda:99"], "device 'cuda:99'"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, model: Path) -> None:
    ran = halfbyte("generate", model, "a", *arguments)
    assert ran.code == 2
    assert message in ran.complaint


def test_no_such_model(tmp_path: Path) -> None:
    ran = halfbyte("generate", tmp_path / "none", "a")
    assert ran.code == 2
    assert "no such directory" in ran.complaint


def test_help_has_an_example() -> None:
    ran = halfbyte("generate", "--help")
    assert ran.code == 0
    assert "halfbyte generate ./" in ran.out
