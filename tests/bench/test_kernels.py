from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.bench.kernels import row_ops, run, torch_ops, vllm
from halfbyte.bench.kernels.accuracy import WrongResultError, checked_strips, exact_rows, relative_error
from halfbyte.bench.kernels.contender import MissingError
from halfbyte.bench.kernels.operands import Inputs, Operands
from halfbyte.bench.kernels.ours import scheme_of
from halfbyte.bench.kernels.peers import Peers
from halfbyte.bench.kernels.request import OPS, Request, choose
from halfbyte.bench.kernels.results import Results, figures
from halfbyte.bench.kernels.timing import replays, rotation, turns
from halfbyte.errors import HalfbyteError
from halfbyte.formats.packing import pack_int32
from halfbyte.formats.packing_awq import pack_awq
from halfbyte.formats.quantize import quantize
from halfbyte.formats.spec import ActivationFormat
from halfbyte.kernels.reference import exact_weight, reference_linear
from halfbyte.kernels.roofline import H200, Work, ceilings_of, linear_work
from halfbyte.schemes import PRESETS
from tests.kernels.cases import settled

CPU = torch.device("cpu")
W4A8 = scheme_of("w4a8", 128)


def test_floor_is_the_longer_of_bytes_and_operations() -> None:
    def floor(rows: int) -> float:
        return linear_work(4096, 4096, rows, W4A8.weights, W4A8.activations, True).floor_us(H200)

    # Per group of 128: 64 bytes of codes and a BF16 scale. Per row: E4M3 codes, an fp32 scale, BF16 results.
    nbytes = 4096 * 4096 / 128 * (64 + 2) + 4096 + 4 + 2 * 4096
    assert floor(1) == pytest.approx(nbytes / 4.27e12 * 1e6)
    assert floor(1) == pytest.approx(2.0, abs=0.05)
    assert floor(8192) == pytest.approx(2 * 8192 * 4096 * 4096 / 1.4e15 * 1e6)


def test_sixteen_bit_inputs_multiply_at_the_sixteen_bit_rate() -> None:
    w4a16 = linear_work(4096, 4096, 8192, scheme_of("w4a16", 128).weights, None, False)
    assert w4a16.floor_us(H200) == pytest.approx(2 * 8192 * 4096 * 4096 / 0.69e15 * 1e6)
    plain = linear_work(1024, 512, 3, None, None, False)
    assert plain.nbytes == 2 * (1024 * 512 + 3 * 512 + 3 * 1024)
    whole = linear_work(1024, 512, 3, W4A8.weights, W4A8.activations, False)
    given_codes = linear_work(1024, 512, 3, W4A8.weights, W4A8.activations, True)
    assert whole.nbytes - given_codes.nbytes == 3 * (2 * 512 - (512 + 4))


@pytest.mark.parametrize(
    ("name", "known"), [("NVIDIA H200", True), ("NVIDIA H20", False), ("NVIDIA H100 80GB HBM3", False)]
)
def test_only_measured_gpus_have_ceilings(name: str, known: bool) -> None:
    assert (ceilings_of(name) is not None) == known


@given(st.integers(1, 10**9), st.integers(0, 10**8))
def test_copies_exceed_three_caches_and_no_more_than_that(nbytes: int, cache: int) -> None:
    copies = rotation(nbytes, cache)
    assert copies >= 2
    assert copies * nbytes > 3 * cache
    assert copies == 2 or (copies - 1) * nbytes <= 3 * cache


@given(st.floats(1e-3, 1e3))
def test_a_graph_lasts_a_millisecond(turn_ms: float) -> None:
    count = turns(turn_ms)
    assert count * turn_ms >= 1.0 - 1e-9
    assert count == 1 or (count - 1) * turn_ms < 1.0


@given(st.floats(0.1, 1e3), st.booleans())
def test_a_pass_is_a_median_of_several_replays(graph_ms: float, soak: bool) -> None:
    assert 10 <= replays(graph_ms, soak) <= 100


@given(st.integers(1, 70_000), st.integers(1, 16_384), st.integers(1, 8192))
def test_checked_columns_are_all_or_five_hundred(out_features: int, in_features: int, rows: int) -> None:
    strips = checked_strips(out_features, in_features, rows)
    columns = [column for strip in strips for column in range(strip.start, strip.stop)]
    assert columns[0] == 0
    assert columns[-1] == out_features - 1
    assert columns == sorted(set(columns))
    assert all(strip.start % 128 == 0 for strip in strips)
    if out_features * in_features * rows <= 2**37 or out_features <= 512:
        assert len(columns) == out_features
    else:
        assert 384 < len(columns) <= 512


@pytest.mark.parametrize("name", [*PRESETS])
def test_error_is_relative_to_the_reference(name: str) -> None:
    scheme = settled(name)
    generator = torch.Generator().manual_seed(1)
    weight = quantize(torch.randn(300, 256, generator=generator) * 0.02, scheme.weights)
    x = torch.randn(5, 256, generator=generator).bfloat16()
    exact = reference_linear(x, weight, scheme.activations)
    assert relative_error(exact, x, weight, scheme.activations) < 1e-12
    assert relative_error(exact * 1.001, x, weight, scheme.activations) == pytest.approx(1e-3)
    wrong = exact.clone()
    wrong[:, 299] = 0
    share = (exact[:, 299].square().sum() / exact.square().sum()).sqrt()
    assert relative_error(wrong, x, weight, scheme.activations) == pytest.approx(float(share))
    assert torch.equal(exact_rows(weight, slice(128, 300)), exact_weight(weight)[128:])


def test_results_that_were_not_written_are_no_results() -> None:
    x, weight = torch.ones(2, 8), torch.ones(4, 8)
    result = x @ weight.T
    result[1, 3] = torch.nan
    with pytest.raises(WrongResultError, match="1 of 8 results"):
        relative_error(result, x, weight, None)
    with pytest.raises(WrongResultError, match=r"\[1, 4\], not \[2, 4\]"):
        relative_error(result[:1], x, weight, None)


def test_torch_products_mean_what_their_rows_say() -> None:
    """The same operations run on a CPU: only their times need a GPU."""
    operands = Operands((256, 128), 20, CPU)
    for contender in torch_ops.contenders():
        for rows in (1, 20):
            task = contender.load(operands)(rows)
            assert task.check() < 4e-3, contender.name
            assert len(task.calls) == rotation(256 * 128, operands.cache)


def test_torch_rows_mean_what_their_rows_say() -> None:
    inputs = Inputs(192, 20, CPU)
    mine = [contender for contender in row_ops.contenders(Peers(None)) if contender.name == "torch-eager"]
    assert {contender.op for contender in mine} == {"rms_norm", "add_rms_norm", "silu_and_mul"}
    for contender in mine:
        for rows in (1, 20):
            assert contender.load(inputs)(rows).check() < 4e-3, contender.op


def test_seven_leaves_out_the_code_minus_eight() -> None:
    operands = Operands((64, 256), 1, CPU)
    for group_size in (128, None):
        weight = operands.seven(group_size)
        assert weight.scales.shape == (64, 256 // (group_size or 256))
        assert int(weight.codes.amin()) == -7
        assert int(weight.codes.amax()) == 7
    assert int(operands.quantized(W4A8.weights).codes.amin()) == -8


def test_group_sizes_reach_int4_schemes_only() -> None:
    assert scheme_of("w4a16", 64).weights.group_size == 64
    assert scheme_of("w4a8", None).weights.granularity == "channel"
    assert scheme_of("fp8", 64) == settled("fp8")


@given(st.lists(st.integers(-8, 7), min_size=8, max_size=8))
def test_vllm_gets_signed_nibbles(codes: list[int]) -> None:
    word = int(pack_int32(torch.tensor([codes], dtype=torch.int8), 4) ^ vllm._TOP_BITS) & 0xFFFFFFFF
    assert [word >> 4 * place & 15 for place in range(8)] == [code % 16 for code in codes]


def test_marlin_reads_scales_in_its_order() -> None:
    """Sources of columns as vLLM lists them (marlin_utils, get_scale_perms)."""
    columns = torch.arange(128).unsqueeze(0)
    grouped = [i + 8 * j for i in range(8) for j in range(8)]
    plain = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    assert vllm._marlin_order(columns, plain=False)[0, :64].tolist() == grouped
    assert vllm._marlin_order(columns, plain=True)[0, :32].tolist() == plain
    assert vllm._marlin_order(columns, plain=True)[0, 32:64].tolist() == [32 + column for column in plain]


def test_marlin_reads_zero_points_in_its_order() -> None:
    """As vLLM packs them (marlin_utils, marlin_zero_points): scales' order, then eight of them interleaved."""
    zeros = torch.randint(0, 16, (3, 128), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    columns = [i + 8 * j for i in range(8) for j in range(8)]
    interleaved = [columns[8 * eight + i] for eight in range(8) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    words = pack_awq(vllm._marlin_order(zeros, plain=False))
    for place, column in enumerate(interleaved):
        for half in (0, 1):
            found = words[:, 8 * half + place // 8] >> 4 * (place % 8) & 0xF
            assert torch.equal(found, zeros[:, 64 * half + column].int())


def chosen(request: Request) -> tuple[list[str], Results]:
    results = Results("a CPU", {})
    contenders = choose(request, Peers(request.peers), CPU, results).contenders
    return list(dict.fromkeys(contender.name for contender in contenders)), results


def test_everyone_takes_part_but_those_on_request() -> None:
    names, results = chosen(Request(shapes=[(256, 512)], ops=["w4a8_linear"]))
    assert {"torch-bf16", "torch-fp8-rowwise", "torch-fp8-tensor", "vllm-cutlass-w4a8"} < set(names)
    assert {"humming-w4a8-g128", "humming-w4a8-channel", "humming-w4a8-int8-g128"} < set(names)
    assert not any("w4a16" in name or name.startswith("gemlite") for name in names)
    noted = {entry["kernel"]: entry["reason"] for entry in results.missing}
    assert "if it is named" in noted["gemlite-w4a8"]
    assert noted["halfbyte"].startswith("no GPU kernel"), "on a CPU there is none"


def test_patterns_choose() -> None:
    names, results = chosen(Request(ops=["w4a8_linear"], kernels=["torch-fp8-*", "gemlite-w4a8"]))
    assert names == ["torch-fp8-rowwise", "torch-fp8-tensor", "gemlite-w4a8"]
    assert {entry["kernel"] for entry in results.missing} == {"halfbyte"}
    with pytest.raises(HalfbyteError, match=r"'cublas'.*torch-bf16"):
        chosen(Request(ops=["fp8_linear"], kernels=["cublas"]))


def test_group_size_is_in_the_names_of_those_that_have_both() -> None:
    names, _ = chosen(Request(ops=["w4a8_linear"], group_size=64, kernels=["humming-w4a8-*"]))
    assert names == [
        "humming-w4a8-g64",
        "humming-w4a8-channel",
        "humming-w4a8-int8-g64",
        "humming-w4a8-int8-channel",
    ]
    names, _ = chosen(Request(ops=["w4a8_linear"], group_size=None, kernels=["humming-w4a8-*"]))
    assert names == ["humming-w4a8-channel", "humming-w4a8-int8-channel"]


def test_unknown_op_is_refused() -> None:
    with pytest.raises(HalfbyteError, match=r"'w4a4_linear'.*repack"):
        Request(ops=["w4a4_linear"])
    assert Request().ops == OPS


def test_rivals_come_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))  # so that what Peers adds is undone
    (tmp_path / "rival_kernels.py").write_text("ANSWER = 7\n")
    peers = Peers(tmp_path)
    assert peers.module("rival_kernels").ANSWER == 7
    with pytest.raises(MissingError, match="rival_that_is_not"):
        peers.module("rival_that_is_not")
    (tmp_path / "_C_stable_libtorch.abi3.so").write_bytes(b"no library")
    with pytest.raises(MissingError, match=r"_C_stable_libtorch\.abi3\.so does not load"):
        peers.load_vllm()
    with pytest.raises(HalfbyteError, match="is no folder"):
        Peers(tmp_path / "nowhere")


def test_figures_follow_from_times() -> None:
    work = Work(nbytes=4.27e6, operations=2.8e9, bits=8)
    row = figures(work, [4.0, 2.5, 3.0], H200)
    assert (row["us"], row["us_median"], row["passes"]) == (2.5, 3.0, [4.0, 2.5, 3.0])
    assert row["floor_us"] == pytest.approx(2.0), "operations: 2.8e9 at 1.4e15 a second; bytes would take 1"
    assert row["tbps"] == pytest.approx(4.27e6 / 2.5e-6 / 1e12, abs=1e-3)
    assert row["tflops"] == pytest.approx(2.8e9 / 2.5e-6 / 1e12, abs=0.1)
    assert figures(work, [1.0, 2.0], None)["floor_us"] is None
    assert figures(work, [1.0, 2.0], None)["us_median"] == 1.5


def test_record_has_the_usual_form_with_what_is_missing() -> None:
    results = Results("NVIDIA H200", {"humming-kernels": "0.1"})
    results.rows.append({"op": "w4a8_linear", "us": 1.0})
    results.miss("vllm-cutlass-w4a8", MissingError("vllm is not installed"), N=8, K=8)
    results.miss("vllm-cutlass-w4a8", MissingError("vllm is not installed"), N=8, K=8)
    results.miss("other", ValueError("two\nlines"))
    record = json.loads(json.dumps(results.record("halfbyte bench kernels"), allow_nan=False))
    assert {"commit", "command", "versions", "date", "gpu"} < record["meta"].keys()
    assert record["meta"]["versions"]["humming-kernels"] == "0.1"
    assert record["meta"]["gpu"] == "NVIDIA H200"
    assert record["rows"] == results.rows
    assert record["missing"] == [
        {"kernel": "vllm-cutlass-w4a8", "N": 8, "K": 8, "reason": "vllm is not installed"},
        {"kernel": "other", "reason": "ValueError: two lines"},
    ]


def test_activation_quantization_is_part_of_the_exact_result() -> None:
    """FP8 inputs are 2 to 3 % from what they were; a kernel on them must not be charged for that."""
    x, weight = torch.randn(4, 256), torch.randn(128, 256)
    plain = (x.double() @ weight.double().T).float()
    error = relative_error(plain, x, weight, ActivationFormat("e4m3", "token"))
    assert 0.005 < error < 0.06
    assert math.isclose(relative_error(plain, x, weight, None), 0, abs_tol=1e-6)


def test_a_shape_that_does_not_fit_is_noted_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> Operands:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(run, "gpu", lambda command: CPU)
    monkeypatch.setattr(run, "Operands", full)
    monkeypatch.setattr(run, "Inputs", full)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "made-up GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    comparison = run.Comparison(Request(shapes=[(64, 128), (128, 256)], rows=[1, 2]))
    steps: list[float] = []
    *_, results = comparison.measure(lambda step=1, what=None: steps.append(step))
    assert results.rows == []
    reason = "OutOfMemoryError: tried to allocate 2 GiB"
    assert [entry for entry in results.missing if entry["reason"] == reason] == [
        {"kernel": "all kernels", "N": 64, "K": 128, "reason": reason},
        {"kernel": "all kernels", "N": 128, "K": 256, "reason": reason},
        {"kernel": "all ops on rows", "N": None, "K": 128, "reason": reason},
        {"kernel": "all ops on rows", "N": None, "K": 256, "reason": reason},
    ]
    assert sum(steps) == comparison.steps > 0
