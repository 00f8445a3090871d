"""Quantized linear layers on the CPU beside torch's own BF16: ratios of times taken in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from halfbyte.algorithms.rtn import rtn
from halfbyte.assignment import fit_group
from halfbyte.bench.record import Row
from halfbyte.errors import HalfbyteError
from halfbyte.kernels.problem import LinearProblem
from halfbyte.kernels.reference import reference_linear
from halfbyte.kernels.registry import select
from halfbyte.schemes import Scheme, resolve

# More weight than any CPU's cache holds, so that every call reads its weight from memory, as in a model.
_ROTATED_BYTES = 600_000_000
_MOST_COPIES = 64


def bench_linear(
    shapes: Sequence[tuple[int, int]], rows: Sequence[int], schemes: Sequence[str], seconds: float = 0.5
) -> list[Row]:
    """Least microseconds of ``y = x @ w.T`` per shape ``(N, K)``, number of rows M and scheme, BF16 in and out.

    Weights rotate through copies larger than the cache. ``rel_err``: Frobenius error against the scheme's
    arithmetic in float64. ``ratio``: time over BF16's at the same shape and M.
    """
    generator = torch.Generator().manual_seed(0)
    found: list[Row] = []
    for out_features, in_features in shapes:
        weight = torch.randn(out_features, in_features, generator=generator).mul_(0.02).bfloat16()
        copies = max(1, min(_MOST_COPIES, _ROTATED_BYTES // weight.nbytes))
        plain = [weight.clone() for _ in range(copies)]
        inputs = {m: torch.randn(m, in_features, generator=generator).bfloat16() for m in rows}
        base = {
            m: _time([_bound(torch.nn.functional.linear, x, w) for w in plain], seconds)
            for m, x in inputs.items()
        }
        for m, microseconds in base.items():
            exact = inputs[m].double() @ weight.double().T
            error = _error(torch.nn.functional.linear(inputs[m], weight), exact)
            found.append(_row("bf16", "torch", out_features, in_features, m, microseconds, error, 1.0))
        del plain
        for name in schemes:
            scheme = fit_group(resolve(name), in_features)
            if scheme is None:
                raise HalfbyteError(
                    f"scheme {name}: no group size divides K {in_features}; accepted: another shape"
                )
            found += _scheme_rows(scheme, weight, inputs, base, copies, seconds)
    return found


def _scheme_rows(
    scheme: Scheme,
    weight: torch.Tensor,
    inputs: dict[int, torch.Tensor],
    base: dict[int, float],
    copies: int,
    seconds: float,
) -> list[Row]:
    out_features, in_features = weight.shape
    quantized = rtn(weight, scheme.weights.with_scale("bf16"))
    settled = Scheme(scheme.name, quantized.format, scheme.activations)
    problem = LinearProblem(settled, out_features, in_features, weight.device, torch.bfloat16)
    kernel = select(problem)
    prepared = [kernel.prepare(quantized, problem) for _ in range(copies)]
    found = []
    for m, x in inputs.items():
        microseconds = _time([_bound(kernel.run, x, one) for one in prepared], seconds)
        exact = reference_linear(x, quantized, scheme.activations)
        error = _error(kernel.run(x, prepared[0]), exact)
        ratio = microseconds / base[m]
        found.append(_row(scheme.name, kernel.name, out_features, in_features, m, microseconds, error, ratio))
    return found


def _row(
    scheme: str,
    kernel: str,
    out_features: int,
    in_features: int,
    m: int,
    us: float,
    error: float,
    ratio: float,
) -> Row:
    return {
        "op": "linear",
        "scheme": scheme,
        "kernel": kernel,
        "N": out_features,
        "K": in_features,
        "M": m,
        "us": round(us, 1),
        "rel_err": float(f"{error:.3g}"),
        "ratio": round(ratio, 3),
    }


def _bound(function: Callable[..., torch.Tensor], *arguments: object) -> Callable[[], torch.Tensor]:
    return lambda: function(*arguments)


def _time(calls: Sequence[Callable[[], torch.Tensor]], seconds: float) -> float:
    """Least microseconds of one call, taken in turns over ``calls`` for about ``seconds``, after one warm turn."""
    for call in calls:
        call()
    times: list[float] = []
    finish = time.perf_counter() + seconds
    while time.perf_counter() < finish:
        for call in calls:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
    return min(times) * 1e6


def _error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())
