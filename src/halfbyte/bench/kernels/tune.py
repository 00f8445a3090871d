"""Which configuration of a Hopper kernel is fastest for a shape: what its table is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Any, Protocol

import torch

from halfbyte.bench.kernels.accuracy import relative_error
from halfbyte.bench.kernels.operands import Operands, Shape
from halfbyte.bench.kernels.ours import scheme_of
from halfbyte.bench.kernels.timing import Replay, rotation
from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.vllm_scales import rounded_weight
from halfbyte.kernels.hopper import w4a8_config, w4a8_fp8_scales_config, w4a8_int8_config, w4a16_config
from halfbyte.kernels.hopper.blocks import INPUTS, BlockFormat
from halfbyte.kernels.hopper.config import MULTIPROCESSORS, Table, TileConfig, ceil_div, fitted
from halfbyte.kernels.hopper_fp8_scales import HopperW4A8Fp8Scales
from halfbyte.kernels.hopper_int4 import HopperW4A8, HopperW4A16
from halfbyte.kernels.hopper_int8 import HopperW4A8Int8
from halfbyte.kernels.problem import LinearProblem, Prepared

# Tokens and rows of tiles, and in how many parts the tokens are multiplied.
_SIXTY_FOUR = ((64, 64, 1), (64, 128, 1), (64, 192, 1), (64, 256, 1))
_MANY = (
    (64, 128, 1),
    (128, 64, 1),
    (128, 128, 1),
    (128, 128, 2),
    (128, 192, 1),
    (128, 256, 1),
    (256, 64, 1),
    (256, 128, 1),
    (256, 128, 2),
    (256, 128, 4),
)
_REST_TOKENS, _REST_ROWS = 128, (128, 192)
_STAGES = ((4, 2), (4, 1), (8, 1))  # and blocks of K in each
_GROUP = 128

Run = Callable[[TileConfig, BlockFormat, torch.Tensor, torch.Tensor], None]
"""Runs a configuration on a packed weight, into an output."""


class Tunable(Protocol):
    """A kernel with a table of configurations."""

    name: str

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]: ...

    def prepare(self, q: QuantizedTensor, problem: LinearProblem) -> Prepared: ...

    def block_format(self, prepared: Prepared) -> BlockFormat: ...


@dataclass(frozen=True)
class Subject:
    """A kernel to tune.

    configs: what makes its configurations, each a class or one with something fixed. table: those now in use. bind: the
    kernel on given inputs. weight: the weight that it multiplies; most_error: against that one.
    """

    kernel: Tunable
    scheme: str
    configs: Sequence[Callable[..., TileConfig]]
    table: Table[Any]
    bind: Callable[[torch.Tensor, Prepared], Run]
    weight: Callable[[QuantizedTensor], QuantizedTensor | torch.Tensor] = lambda q: q
    most_error: float = 3e-3


def subjects() -> dict[str, Subject]:
    """By op."""
    return {
        "w4a8_linear": Subject(
            HopperW4A8(),
            "w4a8",
            (
                w4a8_config.W4A8Config,
                partial(w4a8_config.W4A8Config, halves=True),
                partial(w4a8_config.W4A8Config, fp16_sums=True),
            ),
            w4a8_config.FP16,
            _bind_w4a8,
        ),
        "w4a16_linear": Subject(
            HopperW4A16(),
            "w4a16",
            (w4a16_config.W4A16Config, partial(w4a16_config.W4A16Config, rounded=True)),
            w4a16_config.ROUNDED,
            _bind_w4a16,
        ),
        "w4a8_fp8_scales_linear": Subject(
            HopperW4A8Fp8Scales(),
            "w4a8",
            (w4a8_fp8_scales_config.W4A8Fp8ScalesConfig,),
            w4a8_fp8_scales_config.TABLE,
            _bind_w4a8_fp8_scales,
            weight=lambda q: rounded_weight(q.codes, q.scales),
            most_error=5e-3,  # sums stay in the tensor cores, which keep fewer digits
        ),
        "w4a8_int8_linear": Subject(
            HopperW4A8Int8(),
            "w4a8-int8",
            (w4a8_int8_config.W4A8Int8Config,),
            w4a8_int8_config.TABLE,
            _bind_w4a8_int8,
        ),
    }


def candidates(
    subject: Subject, tokens: int, features: int, inputs: int, fmt: BlockFormat
) -> list[TileConfig]:
    """Configurations worth timing, with as many stages as fit: what the table has for so many tokens, and of all that
    there can be those whose blocks fill the GPU but do not queue for it.
    """
    found = subject.table.alike(tokens)
    for one in chain.from_iterable(_tiles(config, tokens) for config in subject.configs):
        blocks = one.schedule(tokens, features, ceil_div(inputs, INPUTS), fmt).blocks
        enough = blocks * 2 > MULTIPROCESSORS
        queued = one.split > 1 and blocks > MULTIPROCESSORS * one.blocks_per_sm * 1.1
        if enough and not queued:
            found += [one, *_with_rests(one, tokens, features, fmt)]
    fitting = (fitted(config, fmt) for config in found)
    return list(dict.fromkeys(config for config in fitting if config is not None))


def _with_rests(config: TileConfig, tokens: int, features: int, fmt: BlockFormat) -> Iterator[TileConfig]:
    """The same with a second launch in smaller tiles, where there are features for one."""
    if config.split > 1 or config.stream:
        return
    for rows in _REST_ROWS:
        rest = replace(
            config,
            tokens=min(config.tokens, _REST_TOKENS),
            rows=rows,
            share=1,
            stages=8,
            blocks_per_sm=1,
            parts=1,
            stage_blocks=1,
        )
        smaller = rest.tokens * rest.rows < config.tokens * config.rows
        if smaller and fitted(rest, fmt) and config.first_features(tokens, features, rest) < features:
            yield replace(config, rest=rest)


def _tiles(config: Callable[..., TileConfig], tokens: int) -> Iterator[TileConfig]:
    if tokens <= 32:
        tile = max(8, 1 << (tokens - 1).bit_length())
        for rows, blocks, stages in ((64, 4, 8), (64, 3, 10), (128, 2, 8), (128, 2, 6), (128, 1, 14)):
            for split in (1, 2, 4, 8):
                yield config(tile, rows, split, 1, stages, blocks)
        return
    splits = (1, 2, 4, 8) if tokens <= 256 else (1, 2) if tokens <= 512 else (1,)
    tiles = [tile for tile in _MANY if tile[0] < 2 * tokens] if tokens > 64 else _SIXTY_FOUR
    for (tile, rows, parts), (stages, blocks), split, share in product(tiles, _STAGES, splits, (1, 2)):
        if split * share > 8:
            continue
        streams = (False, True) if split == 1 else (False,)
        for stream, per_sm in product(streams, (1, 2) if rows == 64 else (1,)):
            yield config(tile, rows, split, share, stages, per_sm, parts, stream, blocks)


def tune(
    op: str, shapes: Sequence[Shape], rows: Sequence[int], passes: int, device: torch.device
) -> Iterator[list[dict[str, Any]]]:
    """For each shape and number of tokens a row ``{op, kernel, N, K, M, config, us, rel_err, chosen}`` for each
    candidate, the fastest first.

    chosen: whether the table has this configuration for the case now.
    Errors: a GPU that the kernel does not run on; a configuration that computes something else.
    """
    subject = subjects()[op]
    scheme = scheme_of(subject.scheme, _GROUP)
    for shape in shapes:
        problem = LinearProblem(scheme, *shape, device, torch.bfloat16)
        able, reason = subject.kernel.can_implement(problem)
        if not able:
            raise HalfbyteError(f"{subject.kernel.name} cannot be tuned for {shape[0]}x{shape[1]}: {reason}")
        operands = Operands(shape, max(rows), device)
        quantized = operands.quantized(scheme.weights)
        prepared, weight = subject.kernel.prepare(quantized, problem), subject.weight(quantized)
        packed = prepared.tensors["weight"]
        copies = [packed, *(packed.clone() for _ in range(rotation(packed.nbytes, operands.cache) - 1))]
        for tokens in rows:
            yield _of_case(op, subject, prepared, weight, operands.x[:tokens], copies, passes)


def _of_case(
    op: str,
    subject: Subject,
    prepared: Prepared,
    weight: QuantizedTensor | torch.Tensor,
    x: torch.Tensor,
    copies: Sequence[torch.Tensor],
    passes: int,
) -> list[dict[str, Any]]:
    problem, fmt = prepared.problem, subject.kernel.block_format(prepared)
    tokens, run = len(x), subject.bind(x, prepared)
    chosen = subject.table.choose(tokens, problem.out_features, problem.in_features, fmt)
    rows = []
    others = candidates(subject, tokens, problem.out_features, problem.in_features, fmt)
    for config in dict.fromkeys((chosen, *others)):
        out = x.new_full((tokens, problem.out_features), torch.nan)
        run(config, fmt, copies[0], out)
        error = relative_error(out, x, weight, problem.scheme.activations)
        if error > subject.most_error:
            raise HalfbyteError(f"{config} is wrong for M = {tokens}: relative error {error:.1e}")
        replay = Replay([partial(run, config, fmt, copy, out) for copy in copies], soak=tokens > 256)
        rows.append(
            {
                "op": op,
                "kernel": subject.kernel.name,
                "N": problem.out_features,
                "K": problem.in_features,
                "M": tokens,
                "config": asdict(config),
                "us": min(replay.one_pass() for _ in range(passes)),
                "rel_err": error,
                "chosen": config == chosen,
            }
        )
    return sorted(rows, key=lambda row: row["us"])


def _bind_w4a8(x: torch.Tensor, prepared: Prepared) -> Run:
    from halfbyte.kernels.hopper.w4a8 import run_w4a8

    inputs, factors = HopperW4A8().quantize(x, prepared), prepared.tensors.get("row_factors")

    def run(config: TileConfig, fmt: BlockFormat, weight: torch.Tensor, out: torch.Tensor) -> None:
        assert isinstance(config, w4a8_config.W4A8Config)
        run_w4a8(config, fmt, *inputs, weight, factors, None, out)

    return run


def _bind_w4a16(x: torch.Tensor, prepared: Prepared) -> Run:
    from halfbyte.kernels.hopper.w4a16 import run_w4a16

    def run(config: TileConfig, fmt: BlockFormat, weight: torch.Tensor, out: torch.Tensor) -> None:
        assert isinstance(config, w4a16_config.W4A16Config)
        run_w4a16(config, fmt, x, weight, None, out)

    return run


def _bind_w4a8_fp8_scales(x: torch.Tensor, prepared: Prepared) -> Run:
    from halfbyte.kernels.hopper.w4a8_fp8_scales import run_w4a8_fp8_scales

    inputs = HopperW4A8Fp8Scales().quantize(x, prepared)

    def run(config: TileConfig, fmt: BlockFormat, weight: torch.Tensor, out: torch.Tensor) -> None:
        assert isinstance(config, w4a8_fp8_scales_config.W4A8Fp8ScalesConfig)
        operands = inputs.codes, inputs.scales, weight, prepared.tensors["channels"]
        run_w4a8_fp8_scales(config, *operands, None, out)

    return run


def _bind_w4a8_int8(x: torch.Tensor, prepared: Prepared) -> Run:
    from halfbyte.kernels.hopper.w4a8_int8 import run_w4a8_int8

    inputs, tensors = HopperW4A8Int8().quantize(x, prepared), prepared.tensors

    def run(config: TileConfig, fmt: BlockFormat, weight: torch.Tensor, out: torch.Tensor) -> None:
        assert isinstance(config, w4a8_int8_config.W4A8Int8Config)
        operands = weight, tensors["channels"], tensors.get("zeros")
        run_w4a8_int8(config, fmt, *inputs, *operands, None, out)

    return run
