"""Other projects' grouped kernels: humming's and vLLM's, from a folder or installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from halfbyte.bench.experts.contender import Contender, Loaded
from halfbyte.bench.experts.mixtures import Mixture
from halfbyte.bench.experts.operands import Routing, Stack
from halfbyte.bench.experts.ours import copies_of
from halfbyte.bench.kernels.operands import second_level_cache
from halfbyte.bench.kernels.peers import Peers
from halfbyte.formats.activations import quantize_activations
from halfbyte.formats.packing import pack_int32
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.formats.vllm_scales import split_scales

_FP8 = ActivationFormat("e4m3", "token")
_GROUP = 128
_INT4 = TensorFormat("int4", "group", _GROUP)
_WITHOUT_MINUS_8 = 7.5 / 7
_HUMMING_TENSORS = ("weight", "weight_scale", "weight_scale_2", "zero_point")
_HUMMING_COMPUTE = json.dumps({"gemm_type": "indexed"})
# Beyond so many rows vLLM no longer swaps the operands of its FP8 kernel.
_MOST_SWAPPED = 64
_TOP_BITS = torch.tensor(0x88888888 - (1 << 32), dtype=torch.int32)


def contenders(peers: Peers) -> list[Contender]:
    return [
        *(
            Contender(
                f"humming-{scheme}",
                scheme,
                partial(_humming, peers, inputs),
                partial(_kernels, peers, inputs),
            )
            for scheme, inputs in (("w4a8", "float8e4m3"), ("w4a16", "bfloat16"))
        ),
        Contender("vllm-cutlass-w4a8", "w4a8", partial(_with_vllm, peers, _cutlass_w4a8)),
        Contender("vllm-cutlass-fp8", "fp8", partial(_with_vllm, peers, _cutlass_fp8)),
    ]


def _seven(stack: Stack) -> list[QuantizedTensor]:
    """Without the code -8: what kernels for sign and magnitude want to see."""
    return stack.quantized(_INT4, _WITHOUT_MINUS_8)


def _humming(peers: Peers, inputs: str, stack: Stack) -> Loaded:
    peers.load_vllm()  # sorts tokens into blocks, as humming leaves to vLLM
    layers, ops = peers.module("humming.layer"), peers.module("humming.ops")
    experts, (out_features, in_features) = _seven(stack), stack.shape
    count = stack.mixture.experts
    with torch.device(stack.device):
        layer = layers.HummingLayer(
            shape_n=out_features,
            shape_k=in_features,
            num_experts=count,
            weight_config={"dtype": "int4", "group_size": _GROUP},
            input_config={"dtype": inputs},
            torch_dtype=torch.bfloat16,
        ).to(stack.device)
    layer.load_from_tensors(
        {
            "weight": torch.stack([pack_int32(q.codes, 4) for q in experts]),
            "weight_scale": torch.stack([q.scales for q in experts]),
        }
    )
    layer.transform()
    config = layer.humming_config
    tensors = tuple(
        None if (tensor := getattr(layer, name, None)) is None else tensor.data for name in _HUMMING_TENSORS
    )
    activations = _FP8 if inputs == "float8e4m3" else None

    def feed(routing: Routing) -> Any:
        x, scales = (routing.x, None) if activations is None else quantize_activations(routing.x, activations)
        chosen = _heuristics(peers, config, routing.ids.numel())
        top_k = routing.ids.numel() // len(routing.x)
        return x, scales, top_k, json.dumps(chosen), _blocks(routing, chosen["block_shape"][0])

    def call(copy: Any, fed: Any, room: torch.Tensor) -> torch.Tensor:
        x, scales, top_k, chosen, (sorted_ids, expert_ids, padded) = fed
        ops.humming_gemm(
            layer_config=config.to_str(),
            compute_config=_HUMMING_COMPUTE,
            tuning_config=chosen,
            inputs=x,
            input_scale=scales,
            outputs=room,
            locks=layer.locks,
            sorted_ids=sorted_ids,
            expert_ids=expert_ids,
            num_tokens_padded=padded,
            top_k=top_k,
            valid_shape_m=len(room),
            **dict(zip(_HUMMING_TENSORS, copy, strict=True)),
        )
        return room

    nbytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    copies = copies_of(tensors, second_level_cache(stack.device))
    return Loaded(experts, activations, copies, nbytes, feed, call, in_order=False)


def _kernels(
    peers: Peers, inputs: str, mixture: Mixture, gemm: str, tokens: Sequence[int]
) -> Iterator[Callable[[], object]]:
    """Compilations of what :func:`_humming` will call: without them each waits for its own first call.

    Codes without -8 are kept as sign and magnitude.
    """
    configs, kernels = peers.module("humming.config"), peers.module("humming.kernel.humming")
    out_features, in_features = mixture.product(gemm)
    config = configs.LayerConfig(
        shape_n=out_features,
        shape_k=in_features,
        num_experts=mixture.experts,
        a_dtype=inputs,
        b_dtype="float4e0m3",
        c_dtype="bfloat16",
        weight_scale_group_size=_GROUP,
    )
    for count in tokens:
        yield partial(
            kernels.HummingKernel.prepare_kernels,
            config.to_str(),
            _HUMMING_COMPUTE,
            json.dumps(_heuristics(peers, config, count * mixture.top_k)),
            torch.cuda.current_device(),
        )


def _heuristics(peers: Peers, config: Any, rows: int) -> Any:
    tune = peers.module("humming.tune")
    device = torch.cuda.current_device()
    return tune.get_heuristics_config(config, shape_m=rows, gemm_type="indexed", device=device)


def _blocks(routing: Routing, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Choices in blocks of ``rows`` of one expert each, as vLLM's alignment makes them."""
    ids, experts = routing.ids, routing.experts
    most = ids.numel() + experts * (rows - 1)
    if ids.numel() < experts:
        most = min(ids.numel() * rows, most)
    sorted_ids = ids.new_empty(most)
    expert_ids, padded = ids.new_empty(-(-most // rows)), ids.new_empty(1)
    torch.ops._moe_C.moe_align_block_size(ids, experts, rows, sorted_ids, expert_ids, padded, None)
    return sorted_ids, expert_ids, padded


def _with_vllm(peers: Peers, load: Callable[[Stack], Loaded], stack: Stack) -> Loaded:
    peers.load_vllm()
    return load(stack)


def _feed_sorted(routing: Routing, stack: Stack) -> Any:
    """FP8 rows and their scales, where each expert's begin, and the sizes of each product, also swapped."""
    out_features, in_features = stack.shape
    counts = routing.counts
    others = [torch.full_like(counts, out_features), torch.full_like(counts, in_features)]
    sizes = torch.stack([counts, *others], 1).int().contiguous()
    swapped = torch.stack([others[0], counts, others[1]], 1).int().contiguous()
    starts = torch.tensor(routing.offsets[:-1], dtype=torch.int64, device=stack.device)
    return *quantize_activations(routing.rows, _FP8), starts, sizes, swapped


def _strides(stack: Stack, value: int) -> torch.Tensor:
    return torch.full((stack.mixture.experts,), value, device=stack.device, dtype=torch.int64)


def _cutlass_w4a8(stack: Stack) -> Loaded:
    experts, (out_features, in_features) = _seven(stack), stack.shape
    # Signed nibbles: stored codes are code + 8, which differs from two's complement in the top bit alone.
    top_bits = _TOP_BITS.to(stack.device)
    packed = torch.stack([pack_int32(q.codes, 4) ^ top_bits for q in experts])
    codes, weight_strides = torch.ops._C.cutlass_encode_and_reorder_int4b_grouped(packed)
    split = [split_scales(q.scales) for q in experts]
    groups = torch.stack([of_groups for of_groups, _ in split])
    channels = torch.stack([of_channels for _, of_channels in split]).unsqueeze(-1)
    scales = torch.ops._C.cutlass_pack_scale_fp8(groups.permute(0, 2, 1).contiguous())
    of_inputs, of_outputs = _strides(stack, in_features), _strides(stack, out_features)
    of_scales = torch.zeros(len(experts), 2, device=stack.device, dtype=torch.int64)
    of_scales[:, 0] = out_features

    def call(copy: Any, fed: Any, room: torch.Tensor) -> torch.Tensor:
        x, x_scales, starts, _, swapped = fed
        strides = (of_inputs, weight_strides, of_outputs, of_scales)
        torch.ops._C.cutlass_w4a8_moe_mm(
            room, x, copy[0], x_scales, channels, copy[1], _GROUP, starts, swapped, *strides, None
        )
        return room

    copies = copies_of((codes, scales), second_level_cache(stack.device))
    nbytes = codes.nbytes + scales.nbytes
    return Loaded(experts, _FP8, copies, nbytes, partial(_feed_sorted, stack=stack), call)


def _cutlass_fp8(stack: Stack) -> Loaded:
    experts, (out_features, in_features) = (
        stack.quantized(TensorFormat("e4m3", "channel", scale="f32")),
        stack.shape,
    )
    codes = torch.stack([q.codes for q in experts])
    scales = torch.stack([q.scales for q in experts])
    of_inputs, of_outputs = _strides(stack, in_features), _strides(stack, out_features)

    def call(copy: Any, fed: Any, room: torch.Tensor) -> torch.Tensor:
        x, x_scales, starts, sizes, swapped = fed
        shapes = swapped if len(room) <= _MOST_SWAPPED else sizes
        strides = (of_inputs, of_inputs, of_outputs)
        torch.ops._C.cutlass_moe_mm(room, x, copy[0], x_scales, scales, starts, shapes, *strides, True, True)
        return room

    copies = copies_of((codes,), second_level_cache(stack.device))
    return Loaded(experts, _FP8, copies, codes.nbytes, partial(_feed_sorted, stack=stack), call)
