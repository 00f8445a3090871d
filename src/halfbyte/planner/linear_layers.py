"""What the linear layers of a model take for a number of tokens, scheme by scheme, and which scheme to choose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.errors import HalfbyteError
from halfbyte.models.describe import describe
from halfbyte.models.layout import ModelLayout, Role
from halfbyte.planner.measured import UNQUANTIZED, MeasuredTable, Shape

# Closer than what one case differs from pass to pass on the GPU.
_LEVEL = 0.03
# A weight so many times smaller than the smallest one measured waits for launches, of which the table says little.
_FAR = 4


@dataclass(frozen=True)
class LinearTimes:
    """gpu, model: names. times: scheme -> milliseconds of all linear layers, one for each of ``tokens``.

    products: shape -> how often one step multiplies by such a weight; layers that engines run as one are one. notes:
    what is left out, and what was estimated.
    """

    gpu: str
    model: str
    tokens: tuple[int, ...]
    products: dict[Shape, int]
    times: dict[str, tuple[float, ...]]
    notes: tuple[str, ...] = field(default=())

    def fastest(self, index: int) -> str:
        """The scheme with the least time for ``tokens[index]``."""
        return min(self.times, key=lambda scheme: self.times[scheme][index])

    def comparison(self, scheme: str, other: str) -> list[str]:
        """Where ``scheme`` is faster than ``other``, slower or level, in words: one line for each stretch of tokens."""
        ratios = [one / two for one, two in zip(self.times[scheme], self.times[other], strict=True)]
        lines = []
        for first, last in _stretches([_verdict(ratio) for ratio in ratios]):
            span = str(self.tokens[first])
            if last > first:
                span += f" to {self.tokens[last]}"
            low, high = min(ratios[first : last + 1]), max(ratios[first : last + 1])
            factor = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
            lines.append(f"{span} tokens: {scheme} {_verdict(ratios[first])} {other} ({factor} of its time)")
        return lines


def _verdict(ratio: float) -> str:
    if ratio < 1 - _LEVEL:
        return "beats"
    return "loses to" if ratio > 1 + _LEVEL else "is level with"


def _stretches(verdicts: Sequence[str]) -> list[tuple[int, int]]:
    """First and last index of each run of equal verdicts."""
    ends = [i for i in range(len(verdicts)) if i + 1 == len(verdicts) or verdicts[i + 1] != verdicts[i]]
    return list(zip([0, *(end + 1 for end in ends[:-1])], ends, strict=True))


def linear_times(checkpoint: Checkpoint, table: MeasuredTable, tokens: Sequence[int]) -> LinearTimes:
    """Of a checkpoint that is not quantized, told from its headers.

    Errors: a model without linear layers outside of experts.
    """
    layout = describe(checkpoint.config, checkpoint.shapes)
    products, notes = _products(layout)
    if not products:
        raise HalfbyteError(
            f"{checkpoint.path}: no linear layers outside of experts, which have no times yet"
        )
    times = {
        scheme: tuple(
            sum(count * table.microseconds(scheme, shape, m) for shape, count in products.items()) / 1e3
            for m in tokens
        )
        for scheme in table.schemes
    }
    estimated = [f"{n}x{k}" for n, k in products if (n, k) not in table.times[UNQUANTIZED]]
    if estimated:
        notes.append(f"estimated from other shapes: {', '.join(estimated)}")
    smallest = min(table.times[UNQUANTIZED], key=_weights)
    if tiny := [f"{n}x{k}" for n, k in products if _weights((n, k)) < _weights(smallest) / _FAR]:
        notes.append(
            f"{', '.join(tiny)}: far smaller than all that was measured ({smallest[0]}x{smallest[1]} and up), "
            "so these times are rough and no reason to choose by"
        )
    for scheme in table.schemes:
        if unknown := [str(m) for m in tokens if m not in table.counts(scheme)]:
            notes.append(f"{scheme}: estimated from other numbers of tokens at {', '.join(unknown)}")
    return LinearTimes(table.gpu, checkpoint.path.name, tuple(tokens), products, times, tuple(notes))


def _weights(shape: Shape) -> int:
    return shape[0] * shape[1]


def _products(layout: ModelLayout) -> tuple[dict[Shape, int], list[str]]:
    """The products of one step, fused as engines fuse them, and what is left out."""
    groups: dict[str, Shape] = {}
    experts = 0
    for module in layout.modules:
        if module.role is Role.EXPERT:
            experts += 1
        elif module.role is Role.LINEAR:
            key = module.fused_group or module.name
            rows, _ = groups.get(key, (0, 0))
            groups[key] = (rows + module.out_features, module.in_features)
    notes = []
    if experts:
        notes.append(f"{experts} weights of experts are left out: grouped products were not measured yet")
    return dict(Counter(groups.values())), notes
