"""What a plan's identity is made of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from halfbyte.quantization import job, plan
from halfbyte.recipe import Recipe
from tests.tiny import tiny_model

ROTATED = Recipe(algorithm="rotation")


def fingerprint(source: Path, recipe: Recipe) -> str:
    return job.prepare(source, recipe).fingerprint


def test_everything_that_changes_the_bytes_is_in_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model("llama", tmp_path)
    found = [fingerprint(source, recipe) for recipe in (Recipe(), Recipe(clip="mse"), ROTATED)]
    with monkeypatch.context() as changed:
        changed.setattr(torch, "__version__", "9.9.9")
        found.append(fingerprint(source, Recipe()))
    with monkeypatch.context() as changed:
        changed.setattr(plan, "VERSION", "9.9.9")
        found.append(fingerprint(source, Recipe()))
    weights = source / "model.safetensors"
    os.utime(weights, ns=(0, 0))
    found.append(fingerprint(source, Recipe()))
    assert len(set(found)) == len(found)
    assert fingerprint(source, Recipe()) == found[-1]


def test_hardware_is_in_the_fingerprint_of_what_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model("llama", tmp_path)
    before = [fingerprint(source, recipe) for recipe in (ROTATED, Recipe())]
    monkeypatch.setattr(plan, "hardware", lambda device: f"another {device}")
    rotated, plain = (fingerprint(source, recipe) for recipe in (ROTATED, Recipe()))
    assert rotated != before[0]
    assert plain == before[1]
