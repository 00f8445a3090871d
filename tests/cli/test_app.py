"""What every command does alike: one line for bad input, exit codes, streams that close."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.run import halfbyte
from tests.tiny import tiny_model


@pytest.mark.parametrize(
    "arguments",
    [
        ("quantize", "model"),
        ("quantize", "model", "-o", "out", "--tp", "x"),
        ("quantize", "model", "-o", "out", "--bogus"),
        ("bogus",),
        ("generate", "model", "hi", "--max-new-tokens", "0"),
        ("generate", "model", "hi", "--threads", "100000"),
        ("bench", "linear", "--rows", "²"),
        ("bench", "quantize", "--gigabytes", "-1"),
    ],
)
def test_usage_errors_are_one_line(arguments: tuple[str, ...]) -> None:
    ran = halfbyte(*arguments)
    assert ran.code == 2
    assert ran.complaint
    assert not ran.out


def test_no_command_shows_the_commands() -> None:
    ran = halfbyte()
    assert ran.code == 2
    assert "quantize" in ran.out + ran.err


def test_a_reader_that_leaves_is_no_failed_check(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path)
    command = [sys.executable, "-m", "halfbyte", "inspect", str(model), "--all"]
    read, write = os.pipe()
    process = subprocess.Popen(command, stdout=write)
    os.close(write)
    os.close(read)
    assert process.wait() != 1


def test_closed_streams(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path)
    done = subprocess.run(f"{sys.executable} -m halfbyte inspect {model} >&- 2>&-", shell=True, check=False)
    assert done.returncode == 0


def test_output_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path)
    command = [sys.executable, "-m", "halfbyte", "quantize", str(model), "-o", str(tmp_path / "xé")]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=False)
    assert done.returncode == 0
