"""Applying a fold: what a producer puts out becomes smaller by a scale per channel, what reads it larger."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from halfbyte.algorithms.shared_columns import SharedColumns
from halfbyte.calibration.statistics import InputStatistics
from halfbyte.errors import HalfbyteError
from halfbyte.models.folding import Fold
from halfbyte.models.layout import WeightSource
from halfbyte.models.producers import NormProducer, RowsProducer


def fold_scales_(
    tensors: Mapping[str, torch.Tensor], sources: Mapping[str, WeightSource], fold: Fold, scales: torch.Tensor
) -> torch.Tensor:
    """Divides the fold's producer by ``scales`` and multiplies the columns of all its consumers, in place.

    tensors: stored tensors by name, any float dtype; those to be quantized should be fp32, as others are rounded
        to their dtype once more. sources: where modules lie in them, by module name. scales: fp32 ``[channels]``,
        finite and positive.
    Returns: the scales that took effect, fp32 ``[channels]``. A norm's gain is rounded to its dtype first, and the
        consumers are multiplied with what it really lost, so that a rounded gain changes nothing.
    Errors: scales of another shape, or not finite and positive.
    """
    if scales.shape != (fold.channels,) or not bool((scales.isfinite() & (scales > 0)).all()):
        raise HalfbyteError(
            f"scales {list(scales.shape)} cannot be folded into {_name(fold)}; "
            f"accepted: {fold.channels} finite positive numbers"
        )
    if isinstance(fold.producer, NormProducer):
        scales = _divide_norm_(tensors, fold.producer, scales)
    else:
        _divide_rows_(tensors, sources, fold.producer, scales)
    columns = SharedColumns(fold.width, fold.repeats).to_columns(scales)
    for consumer in fold.consumers:
        weight = weight_view(tensors, sources[consumer])
        weight.copy_(weight.float() * columns.to(weight.device))
    return scales


def folded_statistics(statistics: InputStatistics, columns: torch.Tensor) -> InputStatistics:
    """Statistics of a consumer's inputs once they were divided by ``columns``, scales per column fp32 ``[in]``."""
    return InputStatistics(
        tokens=statistics.tokens,
        moment=(statistics.moment / columns).div_(columns[:, None]),
        absmean=statistics.absmean / columns,
        absmax=statistics.absmax / columns,
    )


def weight_view(tensors: Mapping[str, torch.Tensor], source: WeightSource) -> torch.Tensor:
    """The weight ``[out, in]`` that ``source`` says, as a view of its stored tensor."""
    weight = tensors[source.tensor]
    if source.expert is not None:
        weight = weight[source.expert]
    if source.transposed:
        weight = weight.t()
    return weight if source.rows is None else weight[slice(*source.rows)]


def _divide_norm_(
    tensors: Mapping[str, torch.Tensor], norm: NormProducer, scales: torch.Tensor
) -> torch.Tensor:
    stored = tensors[norm.weight]
    scales = scales.to(stored.device)
    gain = stored.float() + norm.offset
    smaller = (gain / scales - norm.offset).to(stored.dtype)
    lost = gain / (smaller.float() + norm.offset)
    # A gain that rounds to zero cannot be made good by its readers: such a channel stays as it is.
    keeps = ~(lost.isfinite() & (lost > 0))
    stored.copy_(torch.where(keeps, stored, smaller))
    scales = lost.masked_fill(keeps, 1.0)
    if norm.bias is not None:
        bias = tensors[norm.bias]
        bias.copy_(bias.float() / scales.to(bias.device))
    return scales


def _divide_rows_(
    tensors: Mapping[str, torch.Tensor],
    sources: Mapping[str, WeightSource],
    rows: RowsProducer,
    scales: torch.Tensor,
) -> None:
    heads, within = torch.arange(rows.heads), torch.arange(rows.width)
    index = (rows.start + heads[:, None] * rows.stride + within).flatten()
    weight = weight_view(tensors, sources[rows.module])
    weight[index] = (weight[index].float() / scales.to(weight.device)[:, None]).to(weight.dtype)
    if rows.bias is not None:
        bias = tensors[rows.bias]
        bias[index] = (bias[index].float() / scales.to(bias.device)).to(bias.dtype)


def _name(fold: Fold) -> str:
    producer = fold.producer
    return producer.weight if isinstance(producer, NormProducer) else producer.module
