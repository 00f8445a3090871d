"""How the numbers of a weight are chosen: named steps that always run in one order. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.errors import HalfbyteError

ROTATION = "rotation"
RTN = "rtn"
STEPS = (ROTATION, "smoothquant", "awq", RTN, "gptq")
"""All steps, in the order in which they run, whatever the order in which they are named."""
BEST = "awq+gptq"
"""What a run with calibration data does unless told otherwise."""
_SCALINGS = frozenset({"smoothquant", "awq"})
_ROUNDINGS = frozenset({RTN, "gptq"})


@dataclass(frozen=True)
class Method:
    """steps: some of :data:`STEPS`, in that order, the last of them a rounding.

    clip: ``none`` covers the largest weight of a group; ``mse`` narrows (or widens) ranges to the least squared
    error of the weights, ``output`` to that of the layer's outputs on calibration data.
    """

    steps: tuple[str, ...] = (RTN,)
    clip: str = "none"

    @classmethod
    def parse(cls, algorithm: str, clip: str | None = None) -> Method:
        """``awq+gptq`` and the like. Without ``clip``, methods with data take ``output``, others ``none``.

        A rounding that is not named is round to nearest.
        Errors: an unknown step, one that stands there twice, two of a kind.
        """
        names = [part.strip() for part in algorithm.lower().split("+")]
        for name in names:
            if name not in STEPS:
                raise HalfbyteError(
                    f"algorithm {algorithm!r}: step {name!r} is not known; accepted: {', '.join(STEPS)}, joined by +"
                )
        if len(set(names)) != len(names):
            raise HalfbyteError(f"algorithm {algorithm!r} names a step twice; accepted: each step once")
        for kind in (_SCALINGS, _ROUNDINGS):
            if len(kind & set(names)) > 1:
                raise HalfbyteError(
                    f"algorithm {algorithm!r} has {' and '.join(sorted(kind & set(names)))}; accepted: one of them"
                )
        if not _ROUNDINGS & set(names):
            names.append(RTN)
        steps = tuple(step for step in STEPS if step in names)
        by_data = any(step in steps for step in ("awq", "gptq", "smoothquant"))
        return cls(steps, clip if clip is not None else "output" if by_data else "none")

    @property
    def needs_data(self) -> bool:
        """Whether statistics of the layer's inputs are needed."""
        return self.clip == "output" or bool({"smoothquant", "awq", "gptq"} & set(self.steps))

    @property
    def without_data(self) -> Method:
        """What is left of it for a weight whose layer's inputs were not seen."""
        if not self.needs_data:
            return self
        steps = tuple(step for step in self.steps if step == ROTATION)
        return Method((*steps, RTN), "none" if self.clip == "output" else self.clip)

    @property
    def scaling(self) -> str | None:
        """``awq``, ``smoothquant`` or none."""
        return next((step for step in self.steps if step in _SCALINGS), None)

    @property
    def rounding(self) -> str:
        """``rtn`` or ``gptq``."""
        return self.steps[-1]

    def __str__(self) -> str:
        return "+".join(self.steps) + f" clip {self.clip}" * (self.clip != "none")
