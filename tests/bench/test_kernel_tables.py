"""Tables and plots from made-up rows: what stands where, not what is fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from halfbyte.bench.kernels.plot import plot, require_matplotlib
from halfbyte.bench.kernels.table import comparisons, markdown, missing_lines
from halfbyte.errors import HalfbyteError


def row(
    kernel: str, us: float, *, op: str = "w4a8_linear", rel_err: float = 2e-3, **more: Any
) -> dict[str, Any]:
    base = {"op": op, "scheme": "w4a8", "inputs": "quantized", "N": 512, "K": 256, "M": 1, "floor_us": 1.5}
    return {**base, "kernel": kernel, "us": us, "rel_err": rel_err, **more}


BASELINE = row("torch-bf16", 9.0, op="bf16_linear", scheme="bf16", inputs="bf16", floor_us=4.0)


def test_one_table_for_each_op_and_shape_with_torch_in_all() -> None:
    rows = [
        row("ours", 5.0),
        row("theirs", 4.0, M=16, floor_us=1.6),
        row("ours", 6.0, M=16, floor_us=1.6),
        row("ours", 50.0, N=1024),
        row("ours16", 7.0, op="w4a16_linear", scheme="w4a16", inputs="bf16"),
        BASELINE,
        row("halfbyte", 2.0, op="rms_norm", scheme="bf16", N=None),
    ]
    tables = comparisons(rows)
    assert [table.title for table in tables] == [
        "w4a8_linear, 512 x 256",
        "w4a8_linear, 1024 x 256",
        "w4a16_linear, 512 x 256",
        "rms_norm, K 256",
    ]
    first = tables[0]
    assert first.columns == ("ours", "theirs", "torch-bf16")
    assert [(line.rows, line.floor_us) for line in first.lines] == [(1, 1.5), (16, 1.6)]
    assert [cell and cell.us for cell in first.lines[0].cells] == [5.0, None, 9.0]
    assert [cell and cell.us for cell in first.lines[1].cells] == [6.0, 4.0, None]
    assert tables[2].columns == ("ours16", "torch-bf16")
    assert tables[3].columns == ("halfbyte",)


def test_the_best_is_exact() -> None:
    (table,) = comparisons([row("exact", 5.0), row("slow", 6.0), row("rounded", 4.0, rel_err=3.5e-2)])
    assert [(cell.best, str(cell)) for cell in table.lines[0].cells if cell] == [
        (True, "5.0 (2.0e-3)"),
        (False, "6.0 (2.0e-3)"),
        (False, "4.0 (3.5e-2)"),
    ]


def test_results_in_fp8_may_have_codes_that_are_one_off() -> None:
    rows = [row("halfbyte", 2.0, op="rms_norm_quantize_fp8", N=None, rel_err=1.2e-2)]
    assert [cell.best for cell in comparisons(rows)[0].lines[0].cells if cell] == [True]


def test_columns_say_what_tells_them_apart() -> None:
    rows = [
        row("ours", 5.0),
        row("ours", 8.0, inputs="bf16"),
        row("theirs", 5.0, scheme="w4a8"),
        row("theirs", 5.5, scheme="w4a8-int8"),
    ]
    assert comparisons(rows)[0].columns == (
        "ours",
        "ours from bf16",
        "theirs w4a8",
        "theirs w4a8-int8",
    )
    packed = [row("ours", 5.0, op="repack", inputs=inputs) for inputs in ("codes", "awq")]
    assert comparisons(packed)[0].columns == ("ours", "ours from awq")


def test_torch_alone_has_tables_of_its_own() -> None:
    fp8 = row("torch-fp8-rowwise", 7.0, op="fp8_linear", scheme="fp8")
    assert [table.title for table in comparisons([BASELINE, fp8])] == [
        "bf16_linear, 512 x 256",
        "fp8_linear, 512 x 256",
    ]


def test_an_unknown_floor_and_no_rows_stay_empty() -> None:
    (table,) = comparisons([row("ours", 100.0, op="repack", M=None, floor_us=None, rel_err=0.0)])
    assert (table.lines[0].rows, table.lines[0].floor_us) == (None, None)
    text = markdown(record([row("ours", 12345.6, op="repack", M=None, floor_us=None, rel_err=0.0)]))
    assert "|  |  | **12346 (0)** |" in text


def record(rows: list[dict[str, Any]], missing: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    meta = {
        "commit": "abc123",
        "command": "halfbyte bench kernels",
        "versions": {"torch": "2.11.0"},
        "date": "2030-01-02",
        "gpu": "NVIDIA H200",
    }
    return {"meta": meta, "rows": rows, "missing": missing or []}


def test_markdown_says_where_numbers_come_from() -> None:
    missing = [
        {"kernel": "theirs", "op": "w4a8_linear", "N": 512, "K": 256, "M": 1, "reason": "out of memory"},
        {"kernel": "theirs", "op": "w4a8_linear", "N": 512, "K": 256, "M": 16, "reason": "out of memory"},
        {"kernel": "absent", "reason": "cannot be imported"},
    ]
    text = markdown(record([row("ours", 5.0), BASELINE], missing))
    assert text.startswith("# GPU kernels on NVIDIA H200\n")
    assert "`halfbyte bench kernels` at abc123, 2030-01-02; torch 2.11.0." in text
    assert (
        "| M | floor | ours | torch-bf16 |\n|---|---|---|---|\n| 1 | 1.5 | **5.0 (2.0e-3)** | 9.0 (2.0e-3) |"
        in text
    )
    assert missing_lines(record([], missing)) == [
        "theirs (w4a8_linear; 512 x 256; M 1, M 16): out of memory",
        "absent: cannot be imported",
    ]
    assert "- absent: cannot be imported" in text


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        row(name, 2.0 * m, M=m, N=n) for name in ("ours", "torch-bf16") for m in (1, 16) for n in (256, 512)
    ]
    path = tmp_path / "new" / "plot.svg"
    plot(rows, path)
    assert "w4a8_linear, 512 x 256" in path.read_text() or path.stat().st_size > 1000
    with pytest.raises(HalfbyteError, match="nothing to plot"):
        plot([row("ours", 2.0, floor_us=None)], path)
    with pytest.raises(HalfbyteError, match=r"plot\.wav"):
        plot(rows, tmp_path / "plot.wav")


def test_plots_without_matplotlib_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(HalfbyteError, match=r"halfbyte\[plot\]"):
        require_matplotlib()
