"""What a user says about calibration data. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from halfbyte.errors import HalfbyteError

DEFAULT_DATA = "default"
"""Stands for the texts that come with the package."""
DEFAULT_LENGTH = 2048
_OPTION_NAMES = {"masked_roles": "--mask-role"}


@dataclass(frozen=True)
class CalibrationData:
    """path: a file or directory, :data:`DEFAULT_DATA`, or none: that, but only for a method that needs data.

    What is none has its default. samples: how many sequences; 128. length: tokens of each, or several such numbers that
    they have in turn; 2048, or the model's context if that is shorter. masked_roles: messages of these enter no
    statistic; system, developer and tool. activations: where hidden states wait between blocks, in ``memory`` (the
    default) or on ``disk``. seed: decides which data is drawn; 0. See :func:`halfbyte.calibration.load.load_samples`.
    Errors: another place for activations.
    """

    path: Path | str | None = DEFAULT_DATA
    samples: int | None = None
    length: int | Sequence[int] | None = None
    masked_roles: Sequence[str] | None = None
    activations: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.activations not in (None, "memory", "disk"):
            raise HalfbyteError(f"activations {self.activations!r}; accepted: memory, disk")

    def settings(self) -> dict[str, Any]:
        """What was said besides ``path``, by field."""
        said = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "path"}
        return {name: value for name, value in said.items() if value is not None}

    def options(self) -> list[str]:
        """The same as names of options on the command line."""
        return [_OPTION_NAMES.get(name, f"--{name}") for name in self.settings()]
