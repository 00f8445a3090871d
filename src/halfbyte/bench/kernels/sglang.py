"""QServe's kernels as SGLang had them (sglang-kernel 0.4.5; operations of its extension module). Results are fp16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from halfbyte.bench.kernels.contender import Contender, MissingError, Task, clones, linear
from halfbyte.bench.kernels.operands import Operands
from halfbyte.bench.kernels.peers import Peers
from halfbyte.formats.activations import quantize_activations
from halfbyte.formats.packing_qserve import pack_qserve, pack_qserve_groups
from halfbyte.formats.spec import ActivationFormat, TensorFormat
from halfbyte.schemes import PRESETS

_INT8 = ActivationFormat("int8", "token")
_GROUP = 128


def contenders(peers: Peers, group_size: int | None) -> list[Contender]:
    def contender(name: str, group: int | None, load: Callable[[Operands, Peers], Any]) -> Contender:
        return Contender(
            f"sglang-qserve-{name}",
            "w4a8_linear",
            "w4a8-int8",
            group,
            "quantized",
            lambda operands: load(operands, peers),
        )

    return [
        contender(f"g{group_size or _GROUP}", group_size, partial(_per_group, group_size=group_size)),
        contender("channel", None, _per_channel),
    ]


def _per_group(operands: Operands, peers: Peers, group_size: int | None) -> Callable[[int], Task]:
    if group_size != _GROUP:
        raise MissingError(f"takes groups of {_GROUP} only")
    peers.load_sglang()
    q = operands.quantized(PRESETS["w4a8-int8"].weights)
    assert q.zero_points is not None
    assert q.outer_scales is not None
    channels = q.outer_scales.half()
    weight = replace(q, outer_scales=channels.float())
    zeros = -(q.zero_points + 8) * q.scales
    copies = clones(
        (pack_qserve(q.codes + 8), pack_qserve_groups(zeros), pack_qserve_groups(q.scales)), operands.cache
    )

    def call(copy: Any, fed: Any, room: torch.Tensor) -> torch.Tensor:
        out = room.view(torch.float16)
        torch.ops.sgl_kernel.qserve_w4a8_per_group_gemm(fed[0], *copy, channels.flatten(), fed[1], out)
        return out

    return linear(
        operands, weight=weight, activations=_INT8, copies=copies, call=call, feed=_feed, quantized=True
    )


def _per_channel(operands: Operands, peers: Peers) -> Callable[[int], Task]:
    peers.load_sglang()
    q = operands.quantized(TensorFormat("int4", "channel", symmetric=False, scale="f16"))
    assert q.zero_points is not None
    scales = q.scales.flatten()
    scaled_zeros = (q.zero_points + 8).flatten() * scales

    def call(copy: Any, fed: Any, room: torch.Tensor) -> torch.Tensor:
        out = room.view(torch.float16)
        codes, token_scales, sums = fed
        torch.ops.sgl_kernel.qserve_w4a8_per_chn_gemm(
            codes, copy[0], scales, token_scales, scaled_zeros, sums, out
        )
        return out

    def feed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes, token_scales = _feed(x)
        return codes, token_scales, (codes.sum(-1) * token_scales.float()).half()

    copies = clones((pack_qserve(q.codes + 8),), operands.cache)
    return linear(operands, weight=q, activations=_INT8, copies=copies, call=call, feed=feed, quantized=True)


def _feed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, which the kernels want in fp16."""
    codes, scales = quantize_activations(x, _INT8)
    return codes, scales.flatten().half()
