from __future__ import annotations

from halfbyte.bench.linear import bench_linear


def test_rows_stand_beside_bf16() -> None:
    rows = bench_linear([(64, 192)], [1, 3], ["w4a16", "w4a8"], seconds=0.01)
    assert [(row["scheme"], row["M"]) for row in rows] == [
        (scheme, m) for scheme in ("bf16", "w4a16", "w4a8") for m in (1, 3)
    ]
    assert all(row["us"] > 0 for row in rows)
    assert all(row["rel_err"] < 5e-3 for row in rows), (
        "BF16 outputs are within 2^-8 of the scheme's arithmetic"
    )
    assert {row["ratio"] for row in rows if row["scheme"] == "bf16"} == {1.0}
