"""What kernels are launched with, recorded instead of run, so that just that can be compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.compile_triton import Compiled, compile_for


@dataclass
class Launch:
    """What a kernel was launched with, instead of running."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    def compiled(self, capability: int) -> Compiled:
        """For a GPU, on which kernels may overlap from 9.0 on, whatever the device was."""
        arguments, options = self.arguments, self.options
        if "PDL" in arguments:
            overlap = capability >= 90
            arguments, options = {**arguments, "PDL": overlap}, {**options, "launch_pdl": overlap}
        return compile_for(self.kernel, capability, arguments, **options)


@dataclass
class Recorder:
    """Stands in for a kernel."""

    kernel: Any
    launches: list[Launch]

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *arguments: Any, **named: Any) -> None:
        names = [parameter.name for parameter in self.kernel.params]
        given = {**dict(zip(names, arguments, strict=False)), **named}
        self.launches.append(
            Launch(
                self.kernel,
                {name: _described(given[name]) for name in names},
                {name: value for name, value in named.items() if name not in names},
            )
        )


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return "*i16" if value.dtype == torch.int16 else value.dtype
