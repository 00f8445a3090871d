"""What the row kernels become on GPUs: compiled here, without one, for the launches that the ops make."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch

import halfbyte.kernels.triton.activations as activations
import halfbyte.kernels.triton.experts as experts
import halfbyte.kernels.triton.norms as norms
from tests.kernels.compile_triton import Compiled, compile_for, machine_code
from tests.kernels.triton.runners import Call, run

KERNELS = (
    (activations, "quantize_kernel"),
    (activations, "gated_kernel"),
    (experts, "route_kernel"),
    (experts, "route_quantize_kernel"),
    (experts, "combine_kernel"),
    (norms, "norm_kernel"),
)
FP8 = (89, 90)
ALL = (80, *FP8)
WIDTHS = (64, 128, 576, 4096, 8192)


def calls(
    columns: int, dtype: torch.dtype, group: int = 128, rows: int = 2
) -> Iterator[tuple[Call, tuple[int, ...]]]:
    """Every op on rows of that length, and the compute capabilities that it is for."""
    x, weight = torch.zeros(rows, columns, dtype=dtype), torch.ones(columns, dtype=dtype)
    yield ("quantize_int8_per_token", (x,)), ALL
    yield ("rms_norm", (x, weight, 1e-5)), ALL
    yield ("add_rms_norm", (x, x, weight, 1e-5)), ALL
    yield ("rms_norm_quantize_int8", (x, weight, 1e-5)), ALL
    yield ("add_rms_norm_quantize_int8", (x, x, weight, 1e-5)), ALL
    yield ("quantize_fp8_per_token", (x, group)), FP8
    yield ("rms_norm_quantize_fp8", (x, weight, 1e-5, group)), FP8
    yield ("add_rms_norm_quantize_fp8", (x, x, weight, 1e-5, group)), FP8
    for activation in ("silu", "gelu_tanh"):
        yield (f"{activation}_and_mul", (x, x)), ALL
        yield (f"{activation}_and_mul_quantize_int8", (x, x)), ALL
        yield (f"{activation}_and_mul_quantize_fp8", (x, x, group)), FP8


def routed_calls(columns: int, dtype: torch.dtype) -> Iterator[tuple[Call, tuple[int, ...]]]:
    """Those around a mixture's experts."""
    x, place = torch.zeros(2, columns, dtype=dtype), torch.zeros(2, 4, dtype=torch.int32)
    yield ("route_rows", (x, place)), ALL
    yield ("route_quantize_int8", (x, place)), ALL
    yield ("route_quantize_fp8", (x, place, 128)), FP8
    yield ("combine_experts", (torch.zeros(8, columns, dtype=dtype), place, torch.zeros(2, 4))), ALL


class Launch:
    """Stands in for a kernel, and keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arguments: dict[str, Any] = {}
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Launch:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        names = [parameter.name for parameter in self.kernel.params]
        self.options = {name: value for name, value in named.items() if name not in names}
        self.arguments = {**dict(zip(names, arguments, strict=False)), **named}
        self.arguments = {name: self.arguments[name] for name in names}

    def compiled(self, capability: int) -> Compiled:
        arguments = {
            name: value.dtype if isinstance(value, torch.Tensor) else value
            for name, value in self.arguments.items()
        }
        overlap = capability >= 90
        options = {**self.options, "launch_pdl": overlap}
        return compile_for(self.kernel, capability, {**arguments, "PDL": overlap}, **options)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the launch that a call makes."""
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)  # the CPU will do
    launches = []
    for module, name in KERNELS:
        launch = Launch(getattr(module, name))
        launches.append(launch)
        monkeypatch.setattr(module, name, launch)

    def launched_by(call: Call) -> Launch:
        for launch in launches:
            launch.arguments = {}
        name, arguments = call
        run(name, *arguments)
        (used,) = (launch for launch in launches if launch.arguments)
        return used

    return launched_by


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_nothing_spills(launched: Any, dtype: torch.dtype) -> None:
    for columns in WIDTHS if dtype == torch.bfloat16 else (4096,):
        for call, capabilities in chain(calls(columns, dtype), routed_calls(columns, dtype)):
            for capability in capabilities:
                assert launched(call).compiled(capability).spills == 0, (call[0], columns, capability)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 64, 256, 2048])
def test_long_rows_do_not_spill_either(launched: Any, rows: int, dtype: torch.dtype) -> None:
    for columns in (4096, 14336, 16384, 32768, 53248):
        for call, _ in calls(columns, dtype, rows=rows):
            if columns <= 16384 or "norm" not in call[0]:
                # In rows of several tiles two registers may make room, once for each tile.
                allowed = 8 if columns > 32768 else 0
                assert launched(call).compiled(90).spills <= allowed, (call[0], columns)


@pytest.mark.parametrize("columns", [200, 2048, 7168])
def test_codes_are_widened_from_their_own_registers(launched: Any, columns: int) -> None:
    """ptxas 12.8 takes the stack pointer for half of them where they are packed for a store of 32 bits later on."""
    for dtype in (torch.bfloat16, torch.float32):
        for call, capabilities in chain(calls(columns, dtype), routed_calls(columns, dtype)):
            if capabilities == FP8:
                code = machine_code(launched(call).compiled(90))
                assert "UNPACK" in code
                assert not re.search(r"F2FP\S*UNPACK\S* R\d+, R1 ", code), call[0]


@pytest.mark.parametrize("group", [32, 128])
def test_threads_keep_neighbouring_values_in_16_bytes(launched: Any, group: int) -> None:
    for call, _ in calls(4096, torch.bfloat16, group):
        asm = launched(call).compiled(90).asm
        loads = re.findall(r"ld\.global\S*", asm["ptx"])
        assert set(loads) == {"ld.global.v4.b32"}, call[0]
        assert "convert_layout" not in asm["ttgir"], call[0]
        if call[0] not in ("silu_and_mul", "gelu_tanh_and_mul"):
            eights = (group if "fp8" in call[0] else 128) // 8
            layout = f"sizePerThread = [1, 1, 8], threadsPerWarp = [{eights}, {32 // eights}, 1]"
            assert layout in asm["ttgir"], call[0]


def test_memory_waits_for_the_kernel_in_front(launched: Any) -> None:
    # All but the weights of a norm, which no kernel writes.
    for call, _ in calls(4096, torch.bfloat16):
        before, after = launched(call).compiled(90).asm["ptx"].split("griddepcontrol.wait")
        assert "griddepcontrol.launch_dependents" in before
        assert "st.global" not in before
        inputs = sum(isinstance(each, torch.Tensor) and each.dim() == 2 for each in call[1])
        weights = after.count("ld.global") // inputs if "norm" in call[0] else 0
        assert before.count("ld.global") == weights, call[0]


def test_other_gpus_are_not_asked_to_overlap(launched: Any) -> None:
    for call, capabilities in calls(576, torch.bfloat16):
        assert "griddepcontrol" not in launched(call).compiled(capabilities[0]).asm["ptx"]


def test_torch_agrees_with_the_schemas(launched: Any) -> None:
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for (name, arguments), _ in chain(calls(576, torch.bfloat16), routed_calls(576, torch.bfloat16)):
        torch.library.opcheck(getattr(torch.ops.halfbyte, name).default, arguments, test_utils=checks)
