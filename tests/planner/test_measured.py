"""Measured times are given back, others lie near them, and the file is what the records say."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.errors import HalfbyteError
from halfbyte.planner.measured import MeasuredTable, Shape, measured_table

ROOT = Path(__file__).resolve().parents[2]
TABLE = measured_table("H200")


def points(table: MeasuredTable) -> Iterator[tuple[str, Shape, int, float]]:
    for scheme, shapes in table.times.items():
        for shape, times in shapes.items():
            for tokens, us in times.items():
                yield scheme, shape, tokens, us


def test_the_file_is_made_of_the_records() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "measured_table.py"))
    assert script["TABLE"].read_text(encoding="utf-8") == script["text"](script["measured"]())


def test_what_was_measured_is_given_back() -> None:
    record = json.loads((ROOT / "benchmarks" / "h200" / "w4a8_int8.json").read_text())
    rows = [row for row in record["rows"] if row["kernel"] == "hopper-w4a8-int8"]
    assert len(rows) == 40
    for row in rows:
        assert TABLE.microseconds("w4a8-int8", (row["N"], row["K"]), row["M"]) == row["us"]


def off(table: MeasuredTable, case: tuple[str, Shape, int, float]) -> float:
    scheme, shape, tokens, us = case
    return abs(table.microseconds(scheme, shape, tokens) / us - 1)


def test_shapes_that_are_left_out_are_estimated_within_a_quarter() -> None:
    """Nine of ten, from the other shapes alone."""
    errors = []
    for scheme, shapes in TABLE.times.items():
        for left_out, times in shapes.items():
            others = {shape: of for shape, of in shapes.items() if shape != left_out}
            known = {tokens for of in others.values() for tokens in of}
            table = MeasuredTable(f"H200 without {left_out}", {scheme: others})
            errors += [
                off(table, (scheme, left_out, tokens, us)) for tokens, us in times.items() if tokens in known
            ]
    assert len(errors) > 150
    assert sum(error < 0.25 for error in errors) >= 0.9 * len(errors)


def test_numbers_of_tokens_that_are_left_out_are_estimated_within_a_quarter() -> None:
    for scheme, shapes in TABLE.times.items():
        counts = sorted({tokens for times in shapes.values() for tokens in times})
        for left_out in counts[1:-1]:
            table = MeasuredTable(
                f"H200 without {left_out}",
                {
                    scheme: {
                        shape: {m: us for m, us in times.items() if m != left_out}
                        for shape, times in shapes.items()
                    }
                },
            )
            for shape, times in shapes.items():
                if left_out in times:
                    assert off(table, (scheme, shape, left_out, times[left_out])) < 0.25


@given(
    st.sampled_from(TABLE.schemes),
    st.integers(1, 1024).map(lambda n: n * 32),
    st.integers(1, 1024).map(lambda n: n * 32),
    st.integers(1, 100_000),
)
def test_any_layer_takes_some_time(scheme: str, out_features: int, in_features: int, tokens: int) -> None:
    found = TABLE.microseconds(scheme, (out_features, in_features), tokens)
    # No faster than two bits a weight at the memory's speed, or two eight-bit products at once.
    least = max(out_features * in_features / 4 / 4.3e6, out_features * in_features * tokens / 1.6e9)
    assert least < found < 1e8


def test_a_gpu_or_scheme_that_was_not_measured() -> None:
    with pytest.raises(HalfbyteError, match="no products were measured on the GPU H20; measured: H200"):
        measured_table("H20")
    with pytest.raises(HalfbyteError, match="scheme mxfp4 was not measured on H200; measured: bf16, fp8"):
        TABLE.microseconds("mxfp4", (4096, 4096), 1)
