"""vLLM's kernels, called as its linear layers call them (0.26; operations of its extension module)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from halfbyte.bench.kernels.contender import Contender, Load, MissingError, Task, clones, linear
from halfbyte.bench.kernels.operands import Operands
from halfbyte.bench.kernels.peers import Peers
from halfbyte.formats.activations import quantize_activations
from halfbyte.formats.packing import pack_int32
from halfbyte.formats.packing_awq import pack_awq
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.formats.vllm_scales import split_scales

_FP8, _INT8 = ActivationFormat("e4m3", "token"), ActivationFormat("int8", "token")

# vLLM names element types by numbers that hold their properties: mantissa bits from bit 8 on (4), from bit 17 on
# what stored codes have in excess (8), and from bit 50 on the kind of NaN (1: as IEEE has it).
_UINT4 = 4 << 8 | 1 << 50
_UINT4_BIAS_8 = _UINT4 | 8 << 17
_TOP_BITS = -0x77777778  # 0x88888888 as int32: the top bit of every nibble
_CUTLASS_GROUP = 128
_INT16_SCALE_STEPS = 4096


def contenders(peers: Peers, group_size: int | None) -> list[Contender]:
    def contender(
        name: str,
        op: str,
        scheme: str,
        group: int | None,
        load: Callable[..., Callable[[int], Task]],
        eight: bool,
    ) -> Contender:
        return Contender(
            f"vllm-{name}", op, scheme, group, "quantized" if eight else "bf16", _after_loading(peers, load)
        )

    grouped = partial(_marlin, group_size=group_size)
    return [
        contender(
            "cutlass-w4a8",
            "w4a8_linear",
            "w4a8",
            group_size,
            partial(_cutlass_w4a8, group_size=group_size),
            True,
        ),
        contender(
            "marlin-w4a8-int8",
            "w4a8_linear",
            "w4a8-int8",
            group_size,
            partial(grouped, activations=_INT8),
            True,
        ),
        *(
            contender(
                f"{name}-w4a16", "w4a16_linear", scheme, group_size, partial(load, symmetric=symmetric), False
            )
            for name, load in (
                ("marlin", partial(grouped, activations=None)),
                ("machete", partial(_machete, group_size=group_size)),
            )
            for scheme, symmetric in (("w4a16", True), ("w4a16-asym", False))
        ),
        contender("cutlass-fp8", "fp8_linear", "fp8", None, _cutlass_fp8, True),
    ]


def _after_loading(peers: Peers, load: Callable[..., Callable[[int], Task]]) -> Load:
    def loaded(operands: Operands) -> Callable[[int], Task]:
        peers.load_vllm()
        return load(operands)

    return loaded


def _cutlass_w4a8(operands: Operands, group_size: int | None) -> Callable[[int], Task]:
    if group_size != _CUTLASS_GROUP:
        raise MissingError(f"takes groups of {_CUTLASS_GROUP} only")
    weight = operands.seven(group_size)
    # Signed nibbles: stored codes are code + 8, which differs from two's complement in the top bit alone.
    codes = torch.ops._C.cutlass_encode_and_reorder_int4b((pack_int32(weight.codes, 4) ^ _TOP_BITS).T)
    group_scales, channel_scales = split_scales(weight.scales)
    channel_scales = channel_scales.unsqueeze(1)
    packed_scales = torch.ops._C.cutlass_pack_scale_fp8(group_scales.T.contiguous())

    def call(copy: Any, fed: Any, room: torch.Tensor) -> torch.Tensor:
        return torch.ops._C.cutlass_w4a8_mm(
            fed[0], copy[0], copy[1], group_size, channel_scales, fed[1], None, None
        )

    return linear(
        operands,
        weight=weight,
        activations=_FP8,
        copies=clones((codes, packed_scales), operands.cache),
        call=call,
        feed=partial(quantize_activations, fmt=_FP8),
        quantized=True,
    )


def _cutlass_fp8(operands: Operands) -> Callable[[int], Task]:
    weight = operands.quantized(TensorFormat("e4m3", "channel", scale="f32"))

    def call(copy: Any, fed: Any, room: torch.Tensor) -> torch.Tensor:
        torch.ops._C.cutlass_scaled_mm(room, fed[0], copy[0].T, fed[1], weight.scales, None)
        return room

    return linear(
        operands,
        weight=weight,
        activations=_FP8,
        copies=clones((weight.codes,), operands.cache),
        call=call,
        feed=partial(quantize_activations, fmt=_FP8),
        quantized=True,
    )


def _grouped(operands: Operands, group_size: int | None, symmetric: bool) -> tuple[QuantizedTensor, int]:
    """The weight in groups, symmetric without -8 or with zero points, and vLLM's number for the type of its codes."""
    if group_size is None:
        raise MissingError("takes groups only, not a scale per channel")
    if symmetric:
        return operands.seven(group_size), _UINT4_BIAS_8
    return operands.quantized(TensorFormat("int4", "group", group_size, symmetric=False)), _UINT4


def _unsigned_zeros(weight: QuantizedTensor) -> torch.Tensor | None:
    """Zero points of stored codes, which are 8 larger, uint8 ``[G, N]``, or none."""
    return None if weight.zero_points is None else (weight.zero_points.T + 8).to(torch.uint8)


def _machete(operands: Operands, group_size: int | None, symmetric: bool) -> Callable[[int], Task]:
    weight, kind = _grouped(operands, group_size, symmetric)
    codes = torch.ops._C.machete_prepack_B(
        pack_int32(weight.codes, 4).T, torch.bfloat16, kind, torch.bfloat16
    )
    scales, zeros = weight.scales.T.contiguous(), _unsigned_zeros(weight)
    offsets = (
        None if zeros is None else zeros.contiguous().to(scales.dtype) * -scales
    )  # added to code times scale

    def call(copy: Any, x: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        return torch.ops._C.machete_mm(x, copy[0], kind, None, copy[1], copy[2], group_size, None, None, None)

    return linear(
        operands,
        weight=weight,
        activations=None,
        copies=clones((codes, scales, offsets), operands.cache),
        call=call,
        feed=lambda x: x,
        quantized=False,
    )


def _marlin(
    operands: Operands,
    group_size: int | None,
    activations: ActivationFormat | None,
    symmetric: bool = True,
) -> Callable[[int], Task]:
    weight, kind = _grouped(operands, group_size, symmetric)
    out_features, in_features = operands.shape
    eight = activations is not None
    nothing = torch.empty(0, dtype=torch.int32, device=operands.device)
    codes = torch.ops._C.gptq_marlin_repack(
        pack_int32(weight.codes, 4).T.contiguous(), nothing, in_features, out_features, 4, eight
    )
    plain = eight or weight.scales.shape[1] == 1
    scales = _marlin_order(weight.scales.T.contiguous(), plain=plain)
    unsigned = _unsigned_zeros(weight)
    # Marlin packs them in AutoAWQ's order of nibbles.
    zeros = nothing if unsigned is None else pack_awq(_marlin_order(unsigned, plain=False))
    step = torch.ones((), device=operands.device)
    if eight:
        # Integers in the place of BF16; what they are steps of goes to the tokens' scales.
        step = scales.max().float() / _INT16_SCALE_STEPS
        scales = (scales / scales.max() * _INT16_SCALE_STEPS).round().to(torch.int16).view(torch.bfloat16)
    processors = torch.cuda.get_device_properties(operands.device).multi_processor_count
    locks = torch.zeros(processors, dtype=torch.int32, device=operands.device)

    def feed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if activations is None:
            return x, None
        inputs, token_scales = quantize_activations(x, activations)
        return inputs, token_scales * step

    def call(copy: Any, fed: Any, room: torch.Tensor) -> torch.Tensor:
        inputs, token_scales = fed
        # A global scale is absent, as are group indices and a permutation.
        others = (None, copy[2], nothing, nothing)
        sizes = (inputs.shape[0], out_features, in_features)
        whole_k, atomic_add, fp32_reduce, float_zeros = True, False, True, False
        return torch.ops._C.marlin_gemm(
            inputs,
            room,
            copy[0],
            None,
            copy[1],
            token_scales,
            *others,
            locks,
            kind,
            *sizes,
            whole_k,
            atomic_add,
            fp32_reduce,
            float_zeros,
        )

    return linear(
        operands,
        weight=weight,
        activations=activations,
        copies=clones((codes, scales, zeros), operands.cache),
        call=call,
        feed=feed,
        quantized=eight,
    )


def _marlin_order(scales: torch.Tensor, plain: bool) -> torch.Tensor:
    """Scales ``[G, N]`` in the order in which Marlin's threads read them.

    Within 64 columns, an 8 x 8 transposition. Where they are applied to results (plain), within 32 columns: pairs
    of neighbours, four of them eight columns apart, then the next four.
    """
    blocks = (4, 4, 2) if plain else (8, 8)
    return scales.reshape(-1, *blocks).transpose(1, 2).reshape(scales.shape).contiguous()
