"""What only a GPU can show of the row ops: graphs, torch.compile, kernels on each other's heels, other devices."""

from __future__ import annotations

import pytest
import torch

import halfbyte.kernels.triton.activations
import halfbyte.kernels.triton.linear_inputs
import halfbyte.kernels.triton.norms
import halfbyte.kernels.triton.scaled_product  # noqa: F401
from tests.kernels.triton.rows import assert_same, hostile_rows, normal_rows
from tests.kernels.triton.runners import Call, run

pytestmark = pytest.mark.gpu
ROWS = (1, 16, 64, 257)


def calls(rows: int, columns: int = 4096, dtype: torch.dtype = torch.bfloat16) -> list[Call]:
    """Every op, on the GPU."""
    x, y = (hostile_rows(rows, columns, dtype, seed).cuda() for seed in range(2))
    weight = normal_rows(1, columns, dtype, seed=2)[0].cuda()
    return [
        ("quantize_fp8_per_token", (x, 64)),
        ("quantize_int8_per_token", (x,)),
        ("quantize_per_tensor", (x, torch.float8_e4m3fn)),
        ("quantize_per_tensor", (x, torch.int8)),
        ("quantize_by_scale", (x, x.new_ones(1, dtype=torch.float32), torch.int8)),
        ("silu_and_mul", (x, y)),
        ("gelu_tanh_and_mul", (x, y)),
        ("silu_and_mul_quantize_fp8", (x, y, 128)),
        ("gelu_tanh_and_mul_quantize_fp8", (x, y, 32)),
        ("silu_and_mul_quantize_int8", (x, y)),
        ("gelu_tanh_and_mul_quantize_int8", (x, y)),
        ("rms_norm_quantize_int8", (x, weight, 1e-5)),
        ("add_rms_norm_quantize_int8", (x, y, weight, 1e-5)),
        ("rms_norm", (x, weight, 1e-5)),
        ("add_rms_norm", (x, y, weight, 1e-5)),
        ("rms_norm_quantize_fp8", (x, weight, 1e-5, 128)),
        ("add_rms_norm_quantize_fp8", (x, y, weight, 1e-5, 128)),
        ("scale_product", (x.float(), x[:, :1].float(), weight[None].float(), weight, dtype)),
    ]


def assert_all_same(found: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(found, want, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("rows", ROWS)
def test_the_same_bits_twice_and_in_a_graph(rows: int) -> None:
    for name, arguments in calls(rows):
        want = tuple(out.clone() for out in run(name, *arguments))
        assert_all_same(run(name, *arguments), want)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run(name, *arguments)
        for out in outputs:
            out.view(torch.uint8).fill_(255)
        graph.replay()
        assert_all_same(outputs, want)


def test_torch_compile_keeps_ops_whole() -> None:
    torch.compiler.reset()
    asked = calls(16)
    compiled = torch.compile(lambda all_: [run(name, *arguments) for name, arguments in all_], fullgraph=True)
    for outputs, (name, arguments) in zip(compiled(asked), asked, strict=True):
        assert_all_same(outputs, run(name, *arguments))


def chain(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each op reads what the one in front of it has just written, in memory that an earlier one has read."""
    ops = torch.ops.halfbyte
    hidden = x
    for _ in range(8):
        normed, hidden = ops.add_rms_norm(x, hidden, weight, 1e-5)
        product = ops.silu_and_mul(normed, hidden)
        x = ops.rms_norm(product, weight, 1e-5)
    return (
        *ops.add_rms_norm_quantize_fp8(x, hidden, weight, 1e-5, 128),
        *ops.quantize_fp8_per_token(x, 128),
        *ops.quantize_per_tensor(x, torch.int8),
    )


@pytest.mark.parametrize("rows", ROWS)
def test_kernels_wait_for_each_other(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [normal_rows(rows, 4096, torch.bfloat16, seed).cuda() for seed in range(20)]
    weight = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    overlapping = [chain(x, weight) for x in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = [chain(x, weight) for x in inputs]
    graph.replay()
    torch.cuda.synchronize()
    monkeypatch.setattr("halfbyte.kernels.triton.rows._overlaps", lambda device: False)
    for x, one, other in zip(inputs, overlapping, replayed, strict=True):
        want = chain(x, weight)
        assert_all_same(one, want)
        assert_all_same(other, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_device_of_the_inputs_runs_the_kernel() -> None:
    for name, arguments in calls(5, 640):
        moved = [a.to("cuda:1") if isinstance(a, torch.Tensor) else a for a in arguments]
        assert_all_same(
            tuple(out.cpu() for out in run(name, *moved)), tuple(o.cpu() for o in run(name, *arguments))
        )
