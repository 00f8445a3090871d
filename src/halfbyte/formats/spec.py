"""What the numbers of a tensor are, as plain data: no torch here, so that headers can be described in no time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from halfbyte.errors import HalfbyteError

INTEGER_BITS = {f"int{bits}": bits for bits in range(2, 9)}
FLOAT_MAX = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
ELEMENT_BITS = {**INTEGER_BITS, "e4m3": 8, "e5m2": 8, "e2m1": 4}
SCALE_BITS = {"bf16": 16, "f16": 16, "f32": 32, "e8m0": 8, "e4m3": 8, "int8": 8}
GRANULARITIES = ("tensor", "channel", "group", "block")
TOKEN_GRANULARITIES = ("tensor", "token", "group")


@dataclass(frozen=True)
class TensorFormat:
    """How a weight of shape ``[..., out, in]`` is stored: ``w = (code - zero_point) * scale * outer_scale``.

    element: ``int2``..``int8`` (signed codes, two's complement range), ``e4m3``, ``e5m2`` or ``e2m1``.
    granularity: which weights share a scale; ``group`` runs along ``in``, ``block`` is ``[rows, columns]``.
    scale: the dtype that scales are rounded to before codes are chosen. ``model`` stands for the
        checkpoint's own 16-bit dtype and is resolved with :meth:`with_scale` before anything is computed.
    outer: a second fp32 scale over the whole tensor (NVFP4) or per output channel (QoQ, integer group scales).
    outer_dtype: the dtype that scales of channels over integer group scales are rounded to, and stored in: ``f32``,
        or ``f16`` in QServe's files.
    """

    element: str
    granularity: str
    group_size: int | None = None
    block_shape: tuple[int, int] | None = None
    symmetric: bool = True
    scale: str = "model"
    outer: str | None = None
    outer_dtype: str = "f32"

    def __post_init__(self) -> None:
        def refuse(what: str, value: object, accepted: object) -> None:
            raise HalfbyteError(f"number format: {what} {value!r} is not known; accepted: {accepted}")

        if self.element not in ELEMENT_BITS:
            refuse("element", self.element, ", ".join(ELEMENT_BITS))
        if self.granularity not in GRANULARITIES:
            refuse("granularity", self.granularity, ", ".join(GRANULARITIES))
        if self.scale not in SCALE_BITS and self.scale != "model":
            refuse("scale dtype", self.scale, ", ".join([*SCALE_BITS, "model"]))
        if self.outer not in (None, "tensor", "channel"):
            refuse("outer scale", self.outer, "tensor, channel or none")
        if self.outer_dtype != "f32" and (self.outer_dtype, self.scale) != ("f16", "int8"):
            refuse("dtype of outer scales", self.outer_dtype, "f32, or f16 with integer group scales")
        if (self.granularity == "group") != bool(self.group_size and self.group_size > 0):
            refuse("group size", self.group_size, "a positive group size, with granularity 'group' only")
        if (self.granularity == "block") != (self.block_shape is not None):
            refuse("block shape", self.block_shape, "[rows, columns], with granularity 'block' only")
        if not self.symmetric and not self.is_integer:
            refuse("asymmetric element", self.element, "asymmetric ranges with integer elements only")

    @property
    def is_integer(self) -> bool:
        return self.element in INTEGER_BITS

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return ELEMENT_BITS[self.element]

    @property
    def qmin(self) -> int:
        """Smallest integer code."""
        return -(1 << (self.bits - 1))

    @property
    def qmax(self) -> int:
        """Largest integer code."""
        return (1 << (self.bits - 1)) - 1

    @property
    def max_value(self) -> float:
        """Largest finite element: the top integer code or the float format's maximum."""
        return float(self.qmax) if self.is_integer else FLOAT_MAX[self.element]

    def with_scale(self, scale: str) -> TensorFormat:
        """The same format with its ``model`` scale dtype settled; others stay as they are."""
        return replace(self, scale=scale) if self.scale == "model" else self

    def with_group_size(self, group_size: int) -> TensorFormat:
        """The same format in groups of another size."""
        return replace(self, group_size=group_size)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the scales (and zero points) of a weight ``[..., out, in]``.

        Errors: ``in`` that is no multiple of the group size.
        """
        *lead, rows, columns = shape
        if self.granularity == "tensor":
            return (*lead, 1, 1)
        if self.granularity == "channel":
            return (*lead, rows, 1)
        if self.granularity == "block":
            assert self.block_shape is not None
            return (*lead, math.ceil(rows / self.block_shape[0]), math.ceil(columns / self.block_shape[1]))
        assert self.group_size is not None
        if columns % self.group_size:
            raise HalfbyteError(
                f"group size {self.group_size} does not divide in_features {columns} of a weight {list(shape)}"
            )
        return (*lead, rows, columns // self.group_size)

    def outer_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Shape of the outer scales of a weight ``[..., out, in]``, or none."""
        *lead, rows, _ = shape
        if self.outer is None:
            return None
        return (*lead, 1, 1) if self.outer == "tensor" else (*lead, rows, 1)

    def bits_per_weight(self, shape: Sequence[int]) -> float:
        """Stored bits per weight, scales, zero points and outer scales included."""
        groups = math.prod(self.scale_shape(shape))
        per_group = SCALE_BITS["bf16" if self.scale == "model" else self.scale]
        if not self.symmetric:
            per_group += 8 if self.scale == "int8" else self.bits
        outer = math.prod(self.outer_shape(shape) or (0,)) * SCALE_BITS[self.outer_dtype]
        return self.bits + (groups * per_group + outer) / math.prod(shape)


@dataclass(frozen=True)
class ActivationFormat:
    """How the inputs ``[..., in]`` of a layer are quantized when it runs.

    granularity: one scale per ``tensor``, per ``token`` (row), or per ``group`` along ``in``.
    dynamic: scales come from the values themselves at run time; otherwise the checkpoint holds them.
    """

    element: str
    granularity: str
    group_size: int | None = None
    dynamic: bool = True
    scale: str = "f32"

    def __post_init__(self) -> None:
        if self.element not in ELEMENT_BITS:
            raise HalfbyteError(
                f"activation element {self.element!r} is not known; accepted: {', '.join(ELEMENT_BITS)}"
            )
        if self.granularity not in TOKEN_GRANULARITIES:
            raise HalfbyteError(
                f"activation granularity {self.granularity!r} is not known; accepted: {', '.join(TOKEN_GRANULARITIES)}"
            )
        if (self.granularity == "group") != bool(self.group_size):
            raise HalfbyteError("activation group size goes with granularity 'group', and only with it")

    @property
    def bits(self) -> int:
        return ELEMENT_BITS[self.element]
