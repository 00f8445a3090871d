"""The linear layers of a model in each scheme, from its headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.planner.linear_layers import LinearTimes, linear_times
from halfbyte.planner.measured import MeasuredTable
from tests.tiny import tiny_model

FIVE = MeasuredTable(
    "H200",
    {
        scheme: {(256, 128): {1: 10.0 * factor}, (128, 128): {1: 5.0 * factor}}
        for scheme, factor in (("bf16", 2.0), ("w4a8", 1.0))
    },
)


def times(**of: tuple[float, ...]) -> LinearTimes:
    named = {scheme.replace("_", "-"): found for scheme, found in of.items()}
    return LinearTimes("H200", "model", (1, 16, 64, 256), {(8, 8): 1}, named)


def test_layers_that_run_as_one_count_as_one(tmp_path: Path) -> None:
    found = linear_times(Checkpoint.open(tiny_model("llama", tmp_path)), FIVE, [1])
    # In each of two blocks: q, k and v one below the other, o, gate and up, down.
    assert sum(found.products.values()) == 2 * 4
    for (out_features, in_features), count in found.products.items():
        assert count % 2 == 0
        assert out_features % 64 == in_features % 64 == 0
    assert found.times["bf16"][0] > found.times["w4a8"][0] > 0
    assert found.fastest(0) == "w4a8"
    found = linear_times(Checkpoint.open(tiny_model("qwen2", tmp_path)), FIVE, [1, 7])
    assert "w4a8: estimated from other numbers of tokens at 7" in found.notes


def test_layers_far_smaller_than_what_was_measured_are_said(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_model("llama", tmp_path))
    large = MeasuredTable("H200", {scheme: {(4096, 4096): {1: 5.0}} for scheme in ("bf16", "w4a8")})
    (note,) = [note for note in linear_times(checkpoint, large, [1]).notes if "far smaller" in note]
    assert "(4096x4096 and up), so these times are rough" in note
    assert not any("far smaller" in note for note in linear_times(checkpoint, FIVE, [1]).notes)


def test_experts_are_left_out_and_said(tmp_path: Path) -> None:
    found = linear_times(Checkpoint.open(tiny_model("qwen3_moe", tmp_path)), FIVE, [1])
    assert any("weights of experts are left out" in note for note in found.notes)


def test_a_model_without_linear_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.open(tiny_model("llama", tmp_path))
    monkeypatch.setattr("halfbyte.planner.linear_layers._products", lambda layout: ({}, []))
    with pytest.raises(HalfbyteError, match="no linear layers outside of experts"):
        linear_times(checkpoint, FIVE, [1])


def test_who_wins_where_is_said_in_stretches() -> None:
    found = times(one=(1.0, 2.0, 3.0, 4.0), two=(1.02, 2.0, 2.0, 8.0))
    assert found.comparison("one", "two") == [
        "1 to 16 tokens: one is level with two (0.98 to 1.00 of its time)",
        "64 tokens: one loses to two (1.50 of its time)",
        "256 tokens: one beats two (0.50 of its time)",
    ]
    assert [found.fastest(index) for index in range(4)] == ["one", "one", "two", "one"]
