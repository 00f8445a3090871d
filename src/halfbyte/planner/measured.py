"""Measured times of linear layers on one GPU, and what they say of layers that were not measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources

from halfbyte.errors import HalfbyteError
from halfbyte.formats.spec import TensorFormat
from halfbyte.kernels.roofline import Ceilings, ceilings_of, linear_work
from halfbyte.schemes import PRESETS

UNQUANTIZED = "bf16"
Shape = tuple[int, int]
"""out_features, in_features."""


@dataclass(frozen=True)
class MeasuredTable:
    """gpu: its name. times: scheme -> (out_features, in_features) -> tokens -> microseconds, inputs quantized before.

    A layer that was not measured takes ``a * floor + b``: its roofline time, stretched, and what any launch takes,
    fitted to the shapes that were measured with as many tokens; between two numbers of tokens the share of the
    roofline is interpolated along their logarithm.
    """

    gpu: str
    times: Mapping[str, Mapping[Shape, Mapping[int, float]]]

    def __hash__(self) -> int:
        return hash(self.gpu)

    @property
    def schemes(self) -> list[str]:
        """Those that were measured."""
        return list(self.times)

    def counts(self, scheme: str) -> list[int]:
        """Numbers of tokens that were measured with at least one shape."""
        return sorted({tokens for of_shape in self.times[scheme].values() for tokens in of_shape})

    def microseconds(self, scheme: str, shape: Shape, tokens: int) -> float:
        """Of one product ``[tokens, in] x [in, out]``. Errors: a scheme that was not measured."""
        if scheme not in self.times:
            raise HalfbyteError(
                f"scheme {scheme} was not measured on {self.gpu}; measured: {', '.join(self.times)}"
            )
        measured = self.times[scheme].get(shape, {})
        if tokens in measured:
            return measured[tokens]
        counts = self.counts(scheme)
        below = max((count for count in counts if count <= tokens), default=counts[0])
        above = min((count for count in counts if count >= tokens), default=counts[-1])
        share = 0.0 if below == above else math.log(tokens / below) / math.log(above / below)
        low, high = self._efficiency(scheme, shape, below), self._efficiency(scheme, shape, above)
        return self._floor(scheme, shape, tokens) / (low + share * (high - low))

    def _efficiency(self, scheme: str, shape: Shape, tokens: int) -> float:
        floor = self._floor(scheme, shape, tokens)
        measured = self.times[scheme].get(shape, {}).get(tokens)
        if measured is None:
            stretch, launch = self._fit(scheme, tokens)
            measured = stretch * floor + launch
        return floor / measured

    @lru_cache(maxsize=1024)  # noqa: B019  # tables live as long as the process
    def _fit(self, scheme: str, tokens: int) -> tuple[float, float]:
        """Stretch (at least 1) and launch (at least 0) of least squared relative error."""
        points = [
            (self._floor(scheme, shape, tokens), of_shape[tokens])
            for shape, of_shape in self.times[scheme].items()
            if tokens in of_shape
        ]
        # Relative: each equation a * floor + b = us is divided by us.
        xx = sum((floor / us) ** 2 for floor, us in points)
        x1 = sum(floor / us**2 for floor, us in points)
        ones = sum(1 / us**2 for _, us in points)
        x, one = sum(floor / us for floor, us in points), sum(1 / us for _, us in points)
        determinant = xx * ones - x1**2
        if determinant > 1e-9 * xx * ones:
            stretch, launch = (x * ones - one * x1) / determinant, (one * xx - x * x1) / determinant
            if stretch >= 1 and launch >= 0:
                return stretch, launch
            if stretch < 1:
                return 1.0, max(0.0, (one - x1) / ones)
        return max(1.0, x / xx), 0.0

    def _floor(self, scheme: str, shape: Shape, tokens: int) -> float:
        of = PRESETS.get(scheme)
        weights = None if of is None else _dividing(of.weights.with_scale("bf16"), shape[1])
        work = linear_work(*shape, tokens, weights, of.activations if of else None, quantized=True)
        return work.floor_us(self._ceilings)

    @property
    def _ceilings(self) -> Ceilings:
        ceilings = ceilings_of(self.gpu)
        assert ceilings is not None
        return ceilings


def _dividing(fmt: TensorFormat, in_features: int) -> TensorFormat:
    """With groups that divide the inputs, as ``quantize`` chooses them: 128, 64 or 32."""
    if fmt.group_size is None or in_features % fmt.group_size == 0:
        return fmt
    size = next((size for size in (64, 32) if in_features % size == 0), None)
    return fmt.with_group_size(size) if size else TensorFormat(fmt.element, "channel", scale="bf16")


@cache
def measured_table(gpu: str) -> MeasuredTable:
    """The table of a GPU. Errors: one that nobody has measured; the message lists those that were."""
    folder = resources.files("halfbyte") / "data"
    known = {
        file.name.removeprefix("measured-").removesuffix(".json"): file
        for file in folder.iterdir()
        if file.name.startswith("measured-")
    }
    if gpu.lower() not in known:
        names = ", ".join(name.upper() for name in sorted(known))
        raise HalfbyteError(f"no products were measured on the GPU {gpu}; measured: {names}")
    content = json.loads(known[gpu.lower()].read_text(encoding="utf-8"))
    times: dict[str, dict[Shape, dict[int, float]]] = {}
    for scheme, rows in content["schemes"].items():
        for out_features, in_features, tokens, us in rows:
            times.setdefault(scheme, {}).setdefault((out_features, in_features), {})[tokens] = us
    return MeasuredTable(content["gpu"], times)
