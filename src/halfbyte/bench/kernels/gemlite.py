"""gemlite's Triton kernels through its layers, which quantize their inputs themselves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from halfbyte.bench.kernels.contender import Contender, MissingError, Task, linear
from halfbyte.bench.kernels.operands import Operands
from halfbyte.bench.kernels.peers import Peers
from halfbyte.bench.kernels.timing import rotation
from halfbyte.formats.spec import ActivationFormat

_TUNES = "it tries about twenty kernels for each shape and number of rows when first called"
_LAYERS = {"w4a8": "A8W4_HQQ_INT_dynamic", "w4a16": "A16W4_HQQ_INT"}
_ZERO = 8


def contenders(peers: Peers, group_size: int | None) -> list[Contender]:
    return [
        Contender(
            f"gemlite-{scheme}",
            f"{scheme}_linear",
            scheme,
            group_size,
            "bf16",
            partial(_load, peers=peers, scheme=scheme, group_size=group_size),
            on_request=_TUNES,
        )
        for scheme in _LAYERS
    ]


def _load(operands: Operands, peers: Peers, scheme: str, group_size: int | None) -> Callable[[int], Task]:
    if group_size is None:
        raise MissingError("takes groups only, not a scale per channel")
    peers.module("gemlite")
    helper = peers.module("gemlite.helper")
    weight = operands.seven(group_size)
    make = getattr(helper, _LAYERS[scheme])(device=str(operands.device), dtype=torch.bfloat16)
    stored = (weight.codes + _ZERO).to(torch.uint8)
    nbytes = weight.codes.numel() // 2 + weight.scales.nbytes
    layers = [
        make.from_weights(stored, weight.scales, torch.full_like(weight.scales, _ZERO))
        for _ in range(rotation(nbytes, operands.cache))
    ]
    return linear(
        operands,
        weight=weight,
        activations=ActivationFormat("e4m3", "token") if scheme == "w4a8" else None,
        copies=layers,
        call=lambda layer, x, _: layer(x),
        feed=lambda x: x,
        quantized=False,
    )
