from __future__ import annotations

import pytest
import torch

from halfbyte.bench.kernels import timing
from halfbyte.bench.kernels.accuracy import poison
from halfbyte.bench.kernels.request import LINEAR_OPS, OPS, Request
from halfbyte.bench.kernels.run import Comparison

pytestmark = pytest.mark.gpu


def test_every_kernel_of_ours_and_torchs_has_a_right_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_REST_SECONDS", 0)
    request = Request(shapes=[(512, 1024)], rows=[1, 17, 300], passes=2)
    comparison = Comparison(request)
    done = 0.0

    def advance(step: float = 1, what: str | None = None) -> None:
        nonlocal done
        done += step

    *_, results = comparison.measure(advance)
    assert done == pytest.approx(comparison.steps)
    others = ("vllm-", "humming-", "gemlite-")
    assert [entry for entry in results.missing if not entry["kernel"].startswith(others)] == []
    measured = {(row["op"], row["kernel"].startswith("torch-")) for row in results.rows}
    assert {(op, False) for op in OPS} - measured == {("silu_and_mul", False)}, "ours is fused only"
    assert ("bf16_linear", True) in measured
    for row in results.rows:
        assert 0 < row["us"] <= row["us_median"], row
        exact = row["op"] in LINEAR_OPS and row["kernel"] != "hopper-w4a8-fp8-scales"
        limit = 4e-3 if exact else 5e-2
        assert row["rel_err"] <= limit, row


def test_memory_that_nobody_writes_shows() -> None:
    poison(1 << 22, torch.device("cuda"))
    assert bool(torch.empty(1 << 21, dtype=torch.bfloat16, device="cuda").isnan().all())
