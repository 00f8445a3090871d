"""Which tensors of a checkpoint are which part of the model: plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Role(str, Enum):
    """What a weight does in the model. Recipes decide by role, never by class name."""

    LINEAR = "linear"
    EXPERT = "expert"
    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    ROUTER = "router"
    NORM = "norm"
    OTHER = "other"

    @property
    def quantizable(self) -> bool:
        """Whether a scheme applies unless a recipe says otherwise."""
        return self in (Role.LINEAR, Role.EXPERT)


@dataclass(frozen=True)
class WeightSource:
    """Where a ``[out, in]`` weight lies inside a stored tensor.

    tensor: name of the stored tensor.
    expert: index on its first axis, for experts fused into one 3-D tensor.
    rows: ``(start, stop, step)`` along ``out``, after the transposition below; none for all of them.
    transposed: the stored matrix is ``[in, out]`` (GPT-2's Conv1D, some fused experts).
    """

    tensor: str
    expert: int | None = None
    rows: tuple[int, int, int] | None = None
    transposed: bool = False


@dataclass(frozen=True)
class ModuleInfo:
    """One two-dimensional weight of the model under the name that it has (or would have) as a Linear.

    name: module name, without ``.weight``; experts of a fused tensor get ``...experts.{i}.{projection}``.
    fused_group: modules that engines run as one GEMM (q/k/v, gate/up) share this key; they need one scheme.
    """

    name: str
    role: Role
    out_features: int
    in_features: int
    source: WeightSource
    fused_group: str | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features


@dataclass(frozen=True)
class ModelLayout:
    """What a checkpoint's names, shapes and config.json say about the model.

    family: ``model_type`` of config.json.
    modules: every 2-D weight (experts one by one), in the order of the stored tensors.
    tied: ``lm_head`` shares the embedding. A checkpoint may store a ``lm_head`` all the same.
    known: the family is in the table; otherwise roles come from names and shapes alone.
    heads, kv_heads: attention heads, and those of keys and values; none where config.json does not say.
    left_out: stored tensors of two or more dimensions that are no module (convolutions, unknown experts).
    """

    family: str
    modules: Sequence[ModuleInfo]
    tied: bool
    known: bool
    heads: int | None = None
    kv_heads: int | None = None
    left_out: Sequence[str] = ()
