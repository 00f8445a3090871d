"""humming's kernels with the configurations that its own heuristics choose for each number of rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch

from halfbyte.bench.kernels.contender import Contender, Task, clones, linear
from halfbyte.bench.kernels.operands import Operands, Shape
from halfbyte.bench.kernels.peers import Peers
from halfbyte.formats.activations import quantize_activations
from halfbyte.formats.packing import pack_int32
from halfbyte.formats.spec import ActivationFormat

_COMPUTE = json.dumps({"gemm_type": "dense"})
_INPUTS = {
    "float8e4m3": ActivationFormat("e4m3", "token"),
    "int8": ActivationFormat("int8", "token"),
    "bfloat16": None,
}
_WEIGHT_TENSORS = ("weight", "weight_scale", "weight_scale_2", "zero_point")


def contenders(peers: Peers, group_size: int | None) -> list[Contender]:
    """Groups of the size asked for, and one scale per channel beside them."""

    def contender(name: str, op: str, scheme: str, inputs: str, group: int | None) -> Contender:
        return Contender(
            f"humming-{name}-{f'g{group}' if group else 'channel'}",
            op,
            scheme,
            group,
            "quantized" if _INPUTS[inputs] else "bf16",
            partial(_load, peers=peers, inputs=inputs, group_size=group),
            compile=partial(_kernels, peers, inputs, group),
        )

    sizes = dict.fromkeys((group_size, None))
    return [
        *(contender("w4a8", "w4a8_linear", "w4a8", "float8e4m3", size) for size in sizes),
        *(contender("w4a8-int8", "w4a8_linear", "w4a8-int8", "int8", size) for size in sizes),
        contender("w4a16", "w4a16_linear", "w4a16", "bfloat16", group_size),
    ]


def _load(operands: Operands, peers: Peers, inputs: str, group_size: int | None) -> Callable[[int], Task]:
    peers.module("humming")
    layers, ops = peers.module("humming.layer"), peers.module("humming.ops")
    out_features, in_features = operands.shape
    weight, activations = operands.seven(group_size), _INPUTS[inputs]
    with torch.device(operands.device):
        layer = layers.HummingLayer(
            shape_n=out_features,
            shape_k=in_features,
            weight_config={"dtype": "int4", "group_size": group_size or 0},
            input_config={"dtype": inputs},
            torch_dtype=torch.bfloat16,
        ).to(operands.device)
    layer.load_from_tensors({"weight": pack_int32(weight.codes, 4), "weight_scale": weight.scales})
    layer.transform()
    config = layer.humming_config
    layer_config = config.to_str()
    tensors = tuple(getattr(layer, name, None) for name in _WEIGHT_TENSORS)

    @cache
    def tuning(rows: int) -> str:
        return json.dumps(_heuristics(peers, config, rows))

    def feed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        return (x, None) if activations is None else quantize_activations(x, activations)

    def call(copy: Any, fed: Any, room: torch.Tensor) -> torch.Tensor:
        ops.humming_gemm(
            layer_config=layer_config,
            compute_config=_COMPUTE,
            tuning_config=tuning(room.shape[0]),
            inputs=fed[0],
            input_scale=fed[1],
            outputs=room,
            locks=layer.locks,
            **dict(zip(_WEIGHT_TENSORS, copy, strict=True)),
        )
        return room

    return linear(
        operands,
        weight=weight,
        activations=activations,
        copies=clones(tuple(None if t is None else t.data for t in tensors), operands.cache),
        call=call,
        feed=feed,
        quantized=activations is not None,
    )


def _kernels(
    peers: Peers, inputs: str, group_size: int | None, shapes: Sequence[Shape], rows: Sequence[int]
) -> Iterator[Callable[[], object]]:
    """Compilations of what :func:`_load` will call: without them each waits for its own first call.

    Codes without -8 are kept as sign and magnitude for floating-point inputs, else with an offset.
    """
    configs, kernels = peers.module("humming.config"), peers.module("humming.kernel.humming")
    for out_features, in_features in shapes:
        config = configs.LayerConfig(
            shape_n=out_features,
            shape_k=in_features,
            a_dtype=inputs,
            b_dtype="uint4" if inputs == "int8" else "float4e0m3",
            c_dtype="bfloat16",
            weight_scale_group_size=group_size or 0,
        )
        for count in rows:
            yield partial(
                kernels.HummingKernel.prepare_kernels,
                config.to_str(),
                _COMPUTE,
                json.dumps(_heuristics(peers, config, count)),
                torch.cuda.current_device(),
            )


def _heuristics(peers: Peers, config: Any, rows: int) -> Any:
    tune = peers.module("humming.tune")
    return tune.get_heuristics_config(
        config, shape_m=rows, gemm_type="dense", device=torch.cuda.current_device()
    )
