"""Which tensors can absorb a scale per channel on the inputs of linears, without a change in what the model computes.

A fold divides what a producer puts out and multiplies the columns of everything that reads it. So every reader is
listed, quantized or not: a router that is left out would route differently.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.models.layout import ModelLayout, ModuleInfo, Role
from halfbyte.models.names import WEIGHT, split
from halfbyte.models.producers import NormProducer, RowsProducer, inner_rows, value_rows
from halfbyte.models.readers import Input, input_of
from halfbyte.models.wiring import Wiring, wiring_of

_BLOCK = re.compile(r"^(?P<block>.*?\.\d+)\.(?P<rest>.+)$")
_NORM_INPUTS = (Input.ATTENTION_NORM, Input.MLP_NORM, Input.QUERY_NORM, Input.KEY_VALUE_NORM)


@dataclass(frozen=True)
class Fold:
    """One producer and all that reads it.

    consumers: module names. channels: how many scales there are, one per channel of the producer.
    width, repeats: a consumer's columns are ``[channels / width, repeats, width]``: each run of ``width`` channels (a
        key/value head) is read ``repeats`` times (by the query heads that share it).
    """

    producer: NormProducer | RowsProducer
    consumers: tuple[str, ...]
    channels: int
    width: int
    repeats: int = 1


@dataclass(frozen=True)
class Folds:
    """All folds of a model, and why the other quantizable modules have none, by module name."""

    folds: tuple[Fold, ...]
    left_out: Mapping[str, str]


def find_folds(
    layout: ModelLayout, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> Folds:
    """The folds of the model that ``shapes`` (stored tensor -> shape) and ``config`` (config.json) describe.

    Only families whose wiring is known have any; a module is in ``left_out`` unless a fold scales its inputs.
    """
    wiring = wiring_of(config)
    folds: list[Fold] = []
    reasons: dict[str, str] = {}
    if wiring is not None:
        for name, modules in _blocks(layout).items():
            block = _Block(name, modules, layout, shapes, wiring)
            folds += block.folds()
            reasons |= block.reasons
    folded = {consumer for fold in folds for consumer in fold.consumers}
    unknown = f"what its inputs come from is not known in family {layout.family!r}"
    left_out = {
        module.name: reasons.get(module.name, unknown)
        for module in layout.modules
        if module.role.quantizable and module.name not in folded
    }
    return Folds(tuple(folds), left_out)


def _blocks(layout: ModelLayout) -> dict[str, list[ModuleInfo]]:
    """The blocks that hold quantizable modules, each with all its matrices."""
    blocks: dict[str, list[ModuleInfo]] = {}
    for module in layout.modules:
        found = _BLOCK.match(module.name)
        if found and module.role is not Role.NORM:
            blocks.setdefault(found["block"], []).append(module)
    return {name: modules for name, modules in blocks.items() if any(m.role.quantizable for m in modules)}


class _Block:
    """One block, its modules sorted by what they read."""

    def __init__(
        self,
        name: str,
        modules: Sequence[ModuleInfo],
        layout: ModelLayout,
        shapes: Mapping[str, tuple[int, ...]],
        wiring: Wiring,
    ) -> None:
        self._name = name
        self._layout = layout
        self._shapes = shapes
        self._wiring = wiring
        self._modules = {module.name: module for module in modules}
        self._readers: dict[Input, list[ModuleInfo]] = {}
        for module in modules:
            self._readers.setdefault(input_of(module), []).append(module)
        strangers = [module.name for module in self._readers.get(Input.UNKNOWN, [])]
        strangers += [
            tensor
            for tensor in layout.left_out
            if tensor.startswith(f"{name}.") and split(tensor.removesuffix(WEIGHT))[1] != "conv1d"
        ]
        self._stranger = next(iter(strangers), None)
        self.reasons: dict[str, str] = {}

    def folds(self) -> Iterator[Fold]:
        for source in _NORM_INPUTS:
            yield from self._norm_fold(source)
        for module in self._readers.get(Input.VALUES, []):
            yield from self._values_fold(module)
        for module in self._readers.get(Input.INNER, []):
            yield from self._inner_fold(module)

    def _norm_fold(self, source: Input) -> Iterator[Fold]:
        wiring = self._wiring
        readers = list(self._readers.get(source, []))
        if wiring.attention_norm == wiring.mlp_norm:
            # A parallel block: one norm feeds both halves, so that there is one fold with all readers.
            if source is Input.ATTENTION_NORM:
                readers += self._readers.get(Input.MLP_NORM, [])
            elif source is Input.MLP_NORM:
                readers = []
        if not readers:
            return
        norm = self._norm_name(source, readers[0])
        if norm is None:
            self._leave_out(readers, "it reads the residual stream, not a norm")
        elif self._shapes.get(norm + WEIGHT) != (readers[0].in_features,):
            self._leave_out(readers, f"no {norm}{WEIGHT} of its {readers[0].in_features} inputs is stored")
        elif self._stranger is not None:
            self._leave_out(readers, f"{self._stranger} may read the same norm")
        else:
            bias = f"{norm}.bias"
            producer = NormProducer(
                norm + WEIGHT,
                bias if bias in self._shapes else None,
                wiring.norm_offset if source in (Input.ATTENTION_NORM, Input.MLP_NORM) else 0.0,
            )
            channels = readers[0].in_features
            yield Fold(producer, tuple(reader.name for reader in readers), channels, channels)

    def _norm_name(self, source: Input, reader: ModuleInfo) -> str | None:
        if source is Input.QUERY_NORM:
            return f"{split(reader.name)[0]}.q_a_layernorm"
        if source is Input.KEY_VALUE_NORM:
            return f"{split(reader.name)[0]}.kv_a_layernorm"
        leaf = self._wiring.attention_norm if source is Input.ATTENTION_NORM else self._wiring.mlp_norm
        return leaf and f"{self._name}.{leaf}"

    def _values_fold(self, reader: ModuleInfo) -> Iterator[Fold]:
        if not self._wiring.linear_values:
            self._leave_out([reader], "the values that it reads are clamped")
            return
        producer = value_rows(reader, self._modules, self._shapes, self._layout)
        if producer is None:
            self._leave_out([reader], "which rows put out the values that it reads is not known")
            return
        repeats = reader.in_features // producer.channels
        yield Fold(producer, (reader.name,), producer.channels, producer.width, repeats)

    def _inner_fold(self, reader: ModuleInfo) -> Iterator[Fold]:
        inner = inner_rows(reader, self._modules, self._shapes)
        if not self._wiring.linear_up or (inner and not inner.gated and not self._wiring.homogeneous):
            self._leave_out([reader], "the activation before it does not pass a factor on")
        elif inner is None:
            self._leave_out([reader], "which rows put out what it reads is not known")
        else:
            yield Fold(inner.rows, (reader.name,), inner.rows.channels, inner.rows.width)

    def _leave_out(self, modules: Sequence[ModuleInfo], why: str) -> None:
        self.reasons |= dict.fromkeys((module.name for module in modules), why)
