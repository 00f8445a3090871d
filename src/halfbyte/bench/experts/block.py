"""A whole block of experts beside its two products: what routing, rows, SwiGLU and sums add."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import lcm

import torch
from torch.nn import functional

from halfbyte.bench.experts.contender import Loaded
from halfbyte.bench.experts.mixtures import Mixture, choices
from halfbyte.bench.experts.operands import Stack
from halfbyte.bench.experts.ours import Grouped, hopper
from halfbyte.bench.kernels.accuracy import exact_inputs, exact_rows
from halfbyte.bench.kernels.timing import Call
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.layers.expert_gate import ExpertGate
from halfbyte.layers.grouped_experts import Products

_CHECKED_TOKENS = 8
_ROUTINGS_A_LOOP = 8


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


@dataclass(frozen=True)
class Block:
    """Both products of a mixture's experts in the form of one kernel, each with copies that take turns."""

    mixture: Mixture
    gate_up: Loaded
    down: Loaded
    grouped: tuple[Grouped, Grouped]

    @classmethod
    def load(cls, name: str, scheme: str, mixture: Mixture, device: torch.device) -> Block:
        """Errors: MissingError."""
        parts = [hopper(name, scheme, Stack(mixture, gemm, device)) for gemm in ("gate-up", "down")]
        return cls(mixture, parts[0][0], parts[1][0], (parts[0][1], parts[1][1]))

    def calls(self, tokens: int, routing: str, stack: Stack) -> tuple[list[Call], Callable[[], float]]:
        """Blocks to be timed, over several routings, and what tells the relative error of the first against float64."""
        generator = torch.Generator(stack.device).manual_seed(tokens)
        ids = [choices(self.mixture, tokens, routing, generator) for _ in range(_ROUTINGS_A_LOOP)]
        x = stack.normal(tokens, self.mixture.hidden)
        shares = torch.rand(tokens, self.mixture.top_k, device=stack.device, generator=generator)
        blocks = list(self._products())
        first = partial(blocks[0], x, ids[0], shares)
        made: list[Call] = [
            partial(blocks[i % len(blocks)], x, ids[i % len(ids)], shares)
            for i in range(lcm(len(blocks), len(ids)))
        ]
        return made, lambda: self._error(first(), x, ids[0], shares)

    def _products(self) -> Iterator[Products]:
        first, last = self.grouped
        gate = ExpertGate(swiglu, activation="silu")
        for i in range(max(len(self.gate_up.copies), len(self.down.copies))):
            of_copies = [
                replace(part.prepared, stacked=dict(zip(part.names, copies[i % len(copies)], strict=True)))
                for part, copies in ((first, self.gate_up.copies), (last, self.down.copies))
            ]
            yield Products(first.kernel, of_copies[0], last.kernel, of_copies[1], gate)

    def _error(self, result: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> float:
        """Of the first tokens: codes of inputs as the scheme makes them, what comes between in bf16 as in a model."""
        count = min(_CHECKED_TOKENS, len(x))
        exact = torch.zeros(count, x.shape[1], dtype=torch.float64, device=x.device)
        inputs = exact_inputs(x[:count], self.gate_up.activations)
        for token in range(count):
            for expert, share in zip(ids[token].tolist(), shares[token].double(), strict=True):
                inner = inputs[token : token + 1] @ _weight(self.gate_up.experts, expert).T
                between = swiglu(inner.to(torch.bfloat16))
                outer = exact_inputs(between, self.down.activations) @ _weight(self.down.experts, expert).T
                exact[token] += share * outer[0]
        return float((result[:count].double() - exact).norm() / exact.norm())


def _weight(experts: Sequence[QuantizedTensor | torch.Tensor], expert: int) -> torch.Tensor:
    return exact_rows(experts[expert], slice(0, experts[expert].shape[0]))
