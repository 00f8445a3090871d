"""A yes or no from an evaluation: which limits it breaks."""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.errors import HalfbyteError
from halfbyte.evaluation.result import Evaluation


@dataclass(frozen=True)
class Gate:
    """Limits against the baseline; None is no limit.

    max_ppl_increase: percent. max_kl: mean KL, nats per token. min_top1: share of agreeing tokens, 0 to 1.
    """

    max_ppl_increase: float | None = None
    max_kl: float | None = None
    min_top1: float | None = None

    @property
    def is_set(self) -> bool:
        return (self.max_ppl_increase, self.max_kl, self.min_top1) != (None, None, None)

    def failures(self, evaluation: Evaluation) -> list[str]:
        """One line for each limit that the evaluation breaks. Errors: a limit, but no baseline."""
        if not self.is_set:
            return []
        against = evaluation.baseline
        if against is None:
            raise HalfbyteError("a limit needs a baseline to compare with")
        increase = 100 * against.perplexity_increase
        broken: list[str] = []
        if self.max_ppl_increase is not None and increase > self.max_ppl_increase:
            broken.append(f"perplexity rose by {increase:.2f} %, allowed {self.max_ppl_increase:g} %")
        if self.max_kl is not None and against.kl_mean > self.max_kl:
            broken.append(f"mean KL is {against.kl_mean:.4f}, allowed {self.max_kl:g}")
        if self.min_top1 is not None and against.top1_agreement < self.min_top1:
            broken.append(f"top-1 agreement is {against.top1_agreement:.4f}, wanted {self.min_top1:g}")
        return broken
