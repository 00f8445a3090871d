"""Which configuration of the Hopper kernel is fastest for a shape: what its table is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from halfbyte.bench.kernels.accuracy import relative_error
from halfbyte.bench.kernels.operands import Operands, Shape
from halfbyte.bench.kernels.ours import scheme_of
from halfbyte.bench.kernels.timing import Replay, rotation
from halfbyte.errors import HalfbyteError
from halfbyte.kernels.hopper.w4a8_config import MULTIPROCESSORS, W4A8Config, choose_config, fitted
from halfbyte.kernels.hopper_w4a8 import HopperW4A8
from halfbyte.kernels.problem import LinearProblem
from halfbyte.kernels.quantized_inputs import FP8_TOKEN, QuantizedInputs

_MOST_ERROR = 3e-3
_FEW = 64
_GROUP = 128


def candidates(tokens: int, features: int) -> list[W4A8Config]:
    """Configurations worth timing for so many tokens: those whose blocks fill the GPU but do not queue for it."""
    found = []
    for config in _shapes(tokens):
        blocks = config.blocks(tokens, features)
        enough = blocks * 2 > MULTIPROCESSORS
        queued = config.split > 1 and blocks > MULTIPROCESSORS * config.blocks_per_sm * 1.1
        if enough and not queued:
            found.append(config)
    return found


def _shapes(tokens: int) -> Iterator[W4A8Config]:
    if tokens <= 32:
        tile = max(8, 1 << (tokens - 1).bit_length())
        for rows, blocks, stages in (
            (64, 4, 8),
            (64, 3, 10),
            (64, 2, 14),
            (128, 2, 8),
            (128, 2, 6),
            (128, 1, 14),
        ):
            for split in (1, 2, 4, 8):
                yield W4A8Config(tile, rows, split, 1, stages, blocks)
        return
    for tile in (64, 128, 192) if tokens > _FEW else (64,):
        for split in (1, 2, 4) if tokens <= 512 else (1,):
            for share in (1, 2):
                yield W4A8Config(tile, 128, split, share, 8)


def tune(
    shapes: Sequence[Shape], rows: Sequence[int], passes: int, device: torch.device
) -> Iterator[list[dict[str, Any]]]:
    """For each shape and number of tokens a row ``{op, kernel, N, K, M, config, us, rel_err, chosen}`` for each
    candidate, the fastest first.

    chosen: whether the table has this configuration for the case now.
    Errors: a GPU that the kernel does not run on; a configuration that computes something else.
    """
    kernel, scheme = HopperW4A8(), scheme_of("w4a8", _GROUP)
    for shape in shapes:
        problem = LinearProblem(scheme, *shape, device, torch.bfloat16)
        able, reason = kernel.can_implement(problem)
        if not able:
            raise HalfbyteError(f"{kernel.name} cannot be tuned for {shape[0]}x{shape[1]}: {reason}")
        operands = Operands(shape, max(rows), device)
        prepared = kernel.prepare(operands.quantized(scheme.weights), problem)
        packed = prepared.tensors["weight"]
        copies = [packed, *(packed.clone() for _ in range(rotation(packed.nbytes, operands.cache) - 1))]
        for tokens in rows:
            inputs = kernel.quantize(operands.x[:tokens], prepared)
            yield _of_case(kernel.name, problem, operands, inputs, copies, passes)


def _of_case(
    name: str,
    problem: LinearProblem,
    operands: Operands,
    inputs: QuantizedInputs,
    copies: Sequence[torch.Tensor],
    passes: int,
) -> list[dict[str, Any]]:
    from halfbyte.kernels.hopper.w4a8 import run_w4a8

    tokens, features, size = len(inputs.codes), problem.out_features, copies[0].shape[2]
    chosen = choose_config(tokens, features, problem.in_features, _GROUP, size)
    weight = operands.quantized(problem.scheme.weights)
    rows = []
    for config in dict.fromkeys(fitted(c, _GROUP, size) for c in (chosen, *candidates(tokens, features))):
        out = torch.full((tokens, features), torch.nan, device=problem.device, dtype=problem.dtype)
        run = partial(run_w4a8, config, *inputs)
        kind = (None, out, _GROUP, torch.bfloat16, False)
        run(copies[0], *kind)
        error = relative_error(out, operands.x[:tokens], weight, FP8_TOKEN)
        if error > _MOST_ERROR:
            raise HalfbyteError(f"{config} is wrong for M = {tokens}: relative error {error:.1e}")
        replay = Replay([partial(run, copy, *kind) for copy in copies], soak=tokens > 256)
        rows.append(
            {
                "op": "w4a8_linear",
                "kernel": name,
                "N": features,
                "K": problem.in_features,
                "M": tokens,
                "config": asdict(config),
                "us": min(replay.one_pass() for _ in range(passes)),
                "rel_err": error,
                "chosen": config == chosen,
            }
        )
    return sorted(rows, key=lambda row: row["us"])
