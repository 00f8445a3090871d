"""Mixtures of experts whose products are timed, and who gets which tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halfbyte.errors import HalfbyteError

BLOCK = "block"
"""In the place of a product: all of a mixture's experts, of halfbyte's kernels, beside their two products."""
GEMMS = ("gate-up", "down", BLOCK)
ROUTINGS = ("uniform", "zipf")
TOKENS = (1, 4, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True)
class Mixture:
    """As in config.json."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int

    def product(self, gemm: str) -> tuple[int, int]:
        """out_features and in_features of an expert's ``gemm``, gate and up as one."""
        return (2 * self.intermediate, self.hidden) if gemm == "gate-up" else (self.hidden, self.intermediate)


MIXTURES = {
    "qwen3-30b-a3b": Mixture(128, 8, 2048, 768),
    "mixtral-8x7b": Mixture(8, 2, 4096, 14336),
    "deepseek-v3": Mixture(256, 8, 7168, 2048),
}


def known(names: Sequence[str], among: Sequence[str], what: str) -> None:
    """Errors: a name that is not among them."""
    for name in names:
        if name not in among:
            raise HalfbyteError(f"{what} {name!r}; accepted: {', '.join(among)}")


def choices(mixture: Mixture, tokens: int, routing: str, generator: torch.Generator) -> torch.Tensor:
    """int32 ``[tokens, top_k]``, all of a token different, on the generator's device.

    routing: ``uniform``, or ``zipf`` where expert i is as likely as 1 / (i + 1).
    """
    order = torch.arange(1, mixture.experts + 1, device=generator.device, dtype=torch.float32)
    chances = 1 / order if routing == "zipf" else torch.ones_like(order)
    drawn = torch.multinomial(chances.expand(tokens, -1), mixture.top_k, generator=generator)
    return drawn.to(torch.int32)
