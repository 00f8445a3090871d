from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.run import halfbyte
from tests.tiny import tiny_model

W4AFP8 = ("--scheme", "w4a8", "--format", "w4afp8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("qwen3_moe", tmp_path_factory.mktemp("w4afp8"), num_hidden_layers=1)


def test_written_inspected_and_verified(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = halfbyte("quantize", source, "-o", out, *W4AFP8)
    assert ran.code == 0, ran.err
    assert "input_scale of all experts is 1 without data" in ran.out + ran.err
    shown = halfbyte("inspect", out)
    assert shown.code == 0
    assert "w4afp8" in shown.out
    assert halfbyte("verify", out, "--against", source).code == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--scheme", "w4a16"),
            "scheme w4a16 cannot be stored as w4afp8; accepted: w4a8 with group_size 128",
        ),
        (("--ignore", "*.o_proj"), "is left alone, but config.json cannot say so; accepted: fp8_per_block"),
        (("--target", "vllm"), "target vllm is of another kernel than w4afp8's"),
    ],
)
def test_what_the_form_cannot_hold_is_one_line(
    options: tuple[str, ...], words: str, source: Path, tmp_path: Path
) -> None:
    ran = halfbyte("quantize", source, "-o", tmp_path / "out", *W4AFP8, *options)
    assert ran.code == 2
    assert words in ran.complaint
    assert not (tmp_path / "out").exists()
