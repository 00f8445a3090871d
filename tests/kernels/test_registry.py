from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.problem import LinearProblem
from halfbyte.kernels.registry import explain, forced_kernel, select
from tests.kernels.cases import settled

CPU = torch.device("cpu")


def problem(
    name: str = "w4a8", rows: int = 64, columns: int = 256, dtype: torch.dtype = torch.bfloat16
) -> LinearProblem:
    return LinearProblem(settled(name), rows, columns, CPU, dtype)


def test_the_best_kernel_is_chosen_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "halfbyte"):
        assert select(problem(), module="model.layers.0.mlp.up_proj").name == "cpu-int4"
        assert select(problem("w8a8-int8"), module="m").name == "cpu-int8"
        assert select(problem(dtype=torch.float32), module="m").name == "dequantize"
    assert "Selected cpu-int4 for model.layers.0.mlp.up_proj" in caplog.text
    assert "bfloat16 only, not in torch.float32" in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": torch.device("meta")}, "not on meta"),
        ({"dtype": torch.float16}, "bfloat16 only"),
        ({"scheme": settled("fp8")}, "must be INT4"),
        ({"scheme": settled("w4a16", "f16")}, "must be bf16, not f16"),
        (
            {"scheme": replace(settled("w4a16"), weights=settled("w4a16").weights.with_group_size(16))},
            "32, 64, 128 or 256",
        ),
        ({"out_features": 24}, "multiple of 16"),
    ],
)
def test_the_int4_kernel_says_why_not(change: dict, reason: str) -> None:
    assert reason in explain(replace(problem(), **change))["cpu-int4"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("name", ["w4a8", "w4a16", "fp8", "w8a8-int8"])
def test_gpu_problems_are_explained_without_a_gpu(name: str) -> None:
    reasons = explain(replace(problem(name), device=torch.device("cuda")))
    for kernel in ("hopper-w4a8", "scaled-mm", "triton-w4a8", "triton-w4a16", "triton-fp8", "triton-int8"):
        assert reasons[kernel]
    assert "no CUDA GPU is there" in reasons.values()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_rounded_for_vllm_runs_in_its_numbers(dtype: torch.dtype) -> None:
    meant = replace(problem(dtype=dtype), scheme=settled("w4a8").aimed_at("vllm"))
    assert select(meant).name == "dequantize-fp8-scales"
    assert next(iter(explain(meant))) == "hopper-w4a8-fp8-scales"
    assert select(meant, force="dequantize").name == "dequantize"


def test_forcing_by_name() -> None:
    assert select(problem(), force="reference").name == "reference"
    with forced_kernel("dequantize"):
        assert select(problem()).name == "dequantize"
        with forced_kernel(None):
            assert select(problem()).name == "dequantize"
    assert select(problem()).name == "cpu-int4"


def test_a_forced_kernel_that_cannot_says_why() -> None:
    with pytest.raises(HalfbyteError, match=r"^lm_head: no kernel can run it; cpu-int8: inputs must be INT8"):
        select(problem(), force="cpu-int8", module="lm_head")


def test_an_unknown_kernel_lists_those_known() -> None:
    with (
        pytest.raises(HalfbyteError, match="'marlin' is not known; known kernels: cpu-int4, cpu-int8"),
        forced_kernel("marlin"),
    ):
        pass
