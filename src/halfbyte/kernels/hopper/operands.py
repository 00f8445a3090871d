"""What the ops have in common: their operands' checks, the kernel's description of a problem, the launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, cast

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.hopper.blocks import INPUTS, ROWS, BlockFormat
from halfbyte.kernels.hopper.compiler import Source
from halfbyte.kernels.hopper.config import Config, Schedule, TileConfig, ceil_div, fitted
from halfbyte.kernels.hopper.driver import Launch, current_stream, function, pointer, tensor_map
from halfbyte.kernels.hopper.workspace import FLAG_BYTES, space

NAMES = {torch.bfloat16: "Bf16", torch.float16: "Half", torch.float32: "Float"}
"""The types of ``hopper.cuh`` by dtype."""
OUTPUTS = (torch.bfloat16, torch.float16)

# Tiles of tokens run together, so that weights are read once for them: so many bytes of activations, which stay in the
# second-level cache, and not more than so many tiles.
_TOGETHER = 16 * 2**20
_MOST_TILES = 8


class Problem(ctypes.Structure):
    """``struct Problem`` of ``schedule.cuh``."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("tokens", "features", "blocks_k", "rows64", "raster")),
        *((name, ctypes.c_int) for name in ("streamed", "quantum")),
        *((name, ctypes.c_void_p) for name in ("partials", "flags", "runs", "tiles")),
        ("most_tiles", ctypes.c_int),
    ]


class Features(NamedTuple):
    """What belongs to output features: all, or those of one launch. weight: packed. vectors: with a number for each."""

    weight: torch.Tensor
    out: torch.Tensor
    vectors: tuple[torch.Tensor | None, ...]

    def launches(self, config: Config, fmt: BlockFormat) -> Sequence[tuple[Config, Features]]:
        """All at once as ``config`` says, or those that fill whole rounds and then its ``rest``."""
        (tokens, features), rest = self.out.shape, config.rest and fitted(config.rest, fmt)
        first = config.first_features(tokens, features, rest) if rest else features
        if rest is None or first == features:  # nearly always: views cost time
            return ((config, self),)
        return (config, self._part(0, first)), (cast("Config", rest), self._part(first, features))

    def _part(self, begin: int, end: int) -> Features:
        """From ``begin``, where a block of the weight begins, to ``end``."""
        blocks = self.weight[begin // ROWS : ceil_div(end, ROWS)]
        vectors = (each if each is None else each[begin:end] for each in self.vectors)
        return Features(blocks, self.out[:, begin:end], tuple(vectors))


@dataclass(frozen=True)
class Linear:
    """One product to run: ``x [M, K]``, packed ``weight``, ``out [M, N]``, whose rows may be farther than N apart where
    the configuration takes finished tiles out by copies.
    """

    config: TileConfig
    fmt: BlockFormat
    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor

    def launch(self, source: Source, *arguments: torch.Tensor | ctypes.Array | None) -> None:
        """Run the kernel on the current stream. arguments: what it takes between the maps and the problem."""
        with torch.cuda.device_of(self.out):
            maps = (self._x_map(), self._out_map())
            problem, shape = self._problem()
            given = (each if isinstance(each, ctypes.Array) else pointer(each) for each in arguments)
            function(source, self.out.device.index)(shape, [*maps, *given, problem])

    def _problem(self) -> tuple[Problem, Launch]:
        tokens, (rows64, blocks_k, _) = self.x.shape[0], self.weight.shape
        features = self.out.shape[1]
        config, case, address = self.config, (self.fmt, tokens, features, blocks_k), None
        schedule, shape = _shape(config, *case)
        if schedule.streamed:
            address = space(self.out.device.index, current_stream(self.out.device.index))
            if address is None:
                schedule, shape = _shape(replace(config, stream=False), *case)
        of_tile = config.tokens * self.x.shape[1] * self.x.element_size()
        raster = max(1, min(_TOGETHER // of_tile, _MOST_TILES))
        sums = address + FLAG_BYTES if address else None
        numbers = (tokens, features, blocks_k, rows64, raster, schedule.streamed, schedule.quantum)
        return Problem(*numbers, sums, address), shape

    def _x_map(self) -> ctypes.Array:
        (tokens, inputs), size = self.x.shape, self.x.element_size()
        box = self.config.tokens // self.config.share
        kind = "u8" if size == 1 else "bf16"
        return tensor_map(self.x.data_ptr(), kind, tokens, inputs, inputs * size, box, 128 // size, 128)

    def _out_map(self) -> ctypes.Array:
        tokens, features = self.out.shape
        box = self.config.staged_tokens or self.config.tokens  # in the second case nothing is copied by it
        return tensor_map(
            self.out.data_ptr(), "bf16", tokens, features, self.out.stride(0) * 2, box, ROWS, 128
        )


@lru_cache(maxsize=4096)
def _shape(
    config: TileConfig, fmt: BlockFormat, tokens: int, features: int, blocks_k: int
) -> tuple[Schedule, Launch]:
    schedule = config.schedule(tokens, features, blocks_k, fmt)
    shared = config.shared_bytes(fmt)
    return schedule, Launch((schedule.blocks, 1, 1), config.threads, shared, config.cluster)


Condition = tuple[bool, str | Callable[[], str], torch.Tensor | None]
"""Whether it holds; what is required, made only where it does not; the tensor that it is about."""


def require(op: str, *conditions: Condition) -> None:
    """Errors: the first condition that does not hold."""
    for holds, what, tensor in conditions:
        if not holds and tensor is not None:
            required = what if isinstance(what, str) else what()
            kind = str(tensor.dtype).removeprefix("torch.")
            raise HalfbyteError(f"{op}: {required}, not {kind} {list(tensor.shape)}")


def packed(weight: torch.Tensor, x: torch.Tensor, shape: Sequence[int], fmt: BlockFormat) -> Condition:
    """``weight`` has the blocks for these inputs and as many outputs. shape: of what has a number for each output
    feature, with the experts first if there are such.
    """
    blocks = (*shape[:-1], ceil_div(shape[-1], ROWS), ceil_div(x.shape[1], INPUTS), fmt.nbytes)
    holds = weight.dtype == torch.uint8 and weight.shape == blocks and weight.is_contiguous()
    return holds, lambda: f"weight must be packed for {_by(shape)} x {x.shape[1]}", weight


def of_tokens(name: str, numbers: torch.Tensor, dtype: torch.dtype, tokens: int) -> Condition:
    """``numbers`` has one for each token."""
    holds = numbers.dtype == dtype and numbers.numel() == tokens and numbers.is_contiguous()
    kind = str(dtype).removeprefix("torch.")
    return (
        holds,
        lambda: f"{name} must be contiguous {kind} with one number for each of {tokens} tokens",
        numbers,
    )


def of_features(
    name: str, numbers: torch.Tensor | None, dtype: torch.dtype, shape: Sequence[int], out: torch.Tensor
) -> Condition:
    """``numbers`` is none or has one for each output feature, where ``out`` is. shape: as :func:`packed` takes it."""
    holds = numbers is None or (
        (numbers.dtype, numbers.shape, numbers.device) == (dtype, tuple(shape), out.device)
        and numbers.is_contiguous()
    )
    kind = str(dtype).removeprefix("torch.")
    return holds, lambda: f"{name} must be contiguous {kind} with {_by(shape)} numbers", numbers


def written(out: torch.Tensor) -> Condition:
    """``out`` is of a kind that the kernels write."""
    holds = out.dtype in OUTPUTS and out.shape[1] % 8 == 0 and out.is_contiguous()
    return holds, "out must be contiguous bfloat16 or float16 with a multiple of 8 columns", out


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
