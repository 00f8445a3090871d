from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch

from halfbyte.bench import latency
from halfbyte.bench.latency import bench_latency
from halfbyte.engines.transformers.latency import RandomModel
from halfbyte.engines.transformers.random_llama import LlamaShape
from halfbyte.errors import HalfbyteError
from halfbyte.schemes import resolve

SHAPE = LlamaShape(layers=2, hidden=128, intermediate=256, heads=4, kv_heads=2, vocabulary=300)


def build(scheme: str) -> RandomModel:
    return RandomModel(SHAPE, None if scheme == "bf16" else resolve(scheme), positions=24)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_row_for_each_scheme_and_batch() -> None:
    rows = list(bench_latency(build, ["bf16", "w4a8"], [1, 3], prompt_tokens=16, new_tokens=4))
    assert [(row["scheme"], row["batch"], row["kernel"]) for row in rows] == [
        ("bf16", 1, "torch"),
        ("bf16", 3, "torch"),
        ("w4a8", 1, "cpu-int4"),
        ("w4a8", 3, "cpu-int4"),
    ]
    for row in rows:
        assert (row["op"], row["engine"]) == ("latency", "transformers")
        assert (row["prompt_tokens"], row["new_tokens"]) == (16, 4)
        assert min(row["ttft_ms"], row["tpot_ms"], row["gemm_ms"]) > 0
        assert row["gemm_share"] == pytest.approx(row["gemm_ms"] / row["tpot_ms"], abs=2e-3)
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 1e3 / row["tpot_ms"], rel=1e-2)
        assert "memory_gb" not in row


class Counting:
    """A model that does nothing, slowly the first time."""

    engine, kernels, device = "counting", "none", torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[str] = []

    def run(self, batch: int, prompt_tokens: int, new_tokens: int) -> Counting:
        self.calls.append(f"run {batch} {prompt_tokens} {new_tokens}")
        return self

    def read(self) -> None:
        if "read" not in self.calls:
            time.sleep(0.05)
        self.calls.append("read")

    def step(self) -> None:
        self.calls.append("step")

    def linears(self) -> None:
        self.calls.append("linears")


def test_a_round_is_a_prompt_and_its_answer_and_the_first_round_does_not_count() -> None:
    models: list[Counting] = []

    def counting(scheme: str) -> Counting:
        models.append(Counting())
        return models[-1]

    (row,) = bench_latency(counting, ["any"], [2], prompt_tokens=5, new_tokens=3)
    rounds = ["read", "step", "step"] * (latency._ROUNDS + 1)
    assert models[0].calls == ["run 2 5 3", *rounds, "linears", "linears"]
    assert row["ttft_ms"] < 50


def test_one_model_at_a_time() -> None:
    alive: weakref.WeakSet[Counting] = weakref.WeakSet()

    def counting(scheme: str) -> Counting:
        gc.collect()
        assert not alive
        model = Counting()
        alive.add(model)
        return model

    assert len(list(bench_latency(counting, ["one", "two"], [1], prompt_tokens=2, new_tokens=2))) == 2


class Full(Counting):
    """A model that only one prompt fits beside."""

    def run(self, batch: int, prompt_tokens: int, new_tokens: int) -> Counting:
        if batch > 1:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return super().run(batch, prompt_tokens, new_tokens)


def test_rows_come_one_by_one_until_memory_is_full() -> None:
    rows = bench_latency(lambda scheme: Full(), ["any"], [1, 2], prompt_tokens=2, new_tokens=2)
    assert next(rows)["batch"] == 1
    with pytest.raises(HalfbyteError, match=r"scheme any with batch 2 does not fit .* 2 GiB"):
        next(rows)
