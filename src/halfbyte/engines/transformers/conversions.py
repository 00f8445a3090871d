"""transformers' own conversions while loading, kept away from tensors that already are where they belong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from transformers.core_model_loading import ConversionOps, WeightConverter, WeightTransform


class _Names(frozenset[str]):
    """Names that are shared, not copied: the loader copies a converter for every tensor that it makes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Names:
        return self


class SparingConverter(WeightConverter):
    """A converter (such as the one that merges experts into one tensor) that leaves the ``spared`` names alone."""

    __slots__ = ("spared",)

    def __init__(
        self,
        source_patterns: str | list[str],
        target_patterns: str | list[str],
        operations: list[ConversionOps],
        **extra: Any,
    ) -> None:
        super().__init__(source_patterns, target_patterns, operations, **extra)
        self.spared = _Names()

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if source_key in self.spared:
            return source_key, None
        return super().rename_source_key(source_key)


def spare(conversions: Sequence[WeightTransform], names: Iterable[str]) -> list[WeightTransform]:
    """``conversions`` of which none merges or splits the tensors called ``names``; renamings stay as they are."""
    spared = _Names(names)
    return [_sparing(entry, spared) if isinstance(entry, WeightConverter) else entry for entry in conversions]


def _sparing(converter: WeightConverter, spared: _Names) -> SparingConverter:
    extra = {"force_cpu": converter.force_cpu} if hasattr(converter, "force_cpu") else {}
    # The patterns as they were given: the converter's own have been processed once already.
    copy = SparingConverter(
        list(converter._original_source_patterns),
        list(converter._original_target_patterns),
        list(converter.operations),
        **extra,
    )
    copy.scope_prefix, copy.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
    copy.spared = spared
    return copy
