"""What a user says about calibration data. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from halfbyte.calibration.masks import MASKED_ROLES
from halfbyte.errors import HalfbyteError

DEFAULT_DATA = "default"
"""Stands for the texts that come with the package."""
DEFAULT_LENGTH = 2048


@dataclass(frozen=True)
class CalibrationData:
    """path: a file or directory, :data:`DEFAULT_DATA`, or none: that, but only for an algorithm that needs data.

    samples: how many sequences. length: tokens of each, or several such numbers that they have in turn; 2048, or the
    model's context if that is shorter, unless given. masked_roles: messages of these enter no statistic. activations:
    where hidden states wait between blocks, in ``memory`` or on ``disk``. See
    :func:`halfbyte.calibration.load.load_samples`.
    Errors: another place for activations.
    """

    path: Path | str | None = DEFAULT_DATA
    samples: int = 128
    length: int | Sequence[int] | None = None
    masked_roles: Sequence[str] = MASKED_ROLES
    activations: str = "memory"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.activations not in ("memory", "disk"):
            raise HalfbyteError(f"activations {self.activations!r}; accepted: memory, disk")
