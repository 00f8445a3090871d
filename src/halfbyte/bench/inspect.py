"""How long ``halfbyte inspect`` takes, interpreter start included, on a checkpoint of many headers."""

from __future__ import annotations

from pathlib import Path

from halfbyte.bench.process import halfbyte_command, measure
from halfbyte.bench.record import Row
from halfbyte.bench.synthetic import deepseek_v3, write_sparse_checkpoint

SHARDS = 163


def bench_inspect(folder: Path, repeats: int = 5) -> list[Row]:
    """Inspect a 671B-parameter model in 163 shards of true headers and empty data: BF16 and block FP8.

    The fastest and slowest of ``repeats`` whole processes.
    """
    rows: list[Row] = []
    for scheme, blocks in (("bf16", False), ("fp8_per_block", True)):
        path = folder / f"deepseek-v3-{scheme}"
        config, tensors = deepseek_v3(fp8_blocks=blocks)
        write_sparse_checkpoint(path, config, tensors, shards=SHARDS)
        costs = [measure(halfbyte_command("inspect", str(path))) for _ in range(repeats)]
        rows.append(
            {
                "op": "inspect",
                "scheme": scheme,
                "shards": SHARDS,
                "tensors": len(tensors),
                "seconds": round(min(c.seconds for c in costs), 3),
                "slowest_seconds": round(max(c.seconds for c in costs), 3),
                "peak_rss_gb": round(max(c.peak_rss for c in costs) / 1e9, 3),
            }
        )
    return rows
