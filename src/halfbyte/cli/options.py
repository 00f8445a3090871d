"""Options that several commands share."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer


class Dtype(str, Enum):
    """What everything that is not quantized computes in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Kernel = Annotated[str | None, typer.Option(help="Run all quantized layers on this kernel, or say why not.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:N, or auto: a GPU if there is one.")]
