"""FP8 linear layers by ``torch._scaled_mm``: cuBLAS or CUTLASS, whichever torch has for the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.kernels.fused import QuantizesTokens
from halfbyte.kernels.problem import LinearProblem, Prepared, first_refusal
from halfbyte.kernels.quantized_inputs import QuantizedInputs
from halfbyte.kernels.triton.linear_conditions import (
    HALVES,
    gpu_conditions,
    is_blocks,
    is_coarse,
    is_hopper,
    is_simple,
    name_of,
)
from halfbyte.kernels.triton_linear import TritonFp8

# Without it sums are promoted to fp32 on their way through K, as Hopper's FP8 tensor cores need it: 1 to 15 % more time
# from 128 tokens on (H200), and an error of 1.7e-3 for any K instead of up to 3.3e-3.
_FAST_ACCUMULATION = False
# Up to so many tokens or results, torch's kernel for scales per token and channel takes up to twice the time on Hopper
# that the product alone takes; scaling that afterwards costs less.
_FEW_TOKENS = 64
_FEW_RESULTS = 2**20
# cuBLAS takes blocks for multiples of 4 tokens: a row of their scales must be a multiple of 16 bytes. Our own kernel is
# as fast for fewer than 64.
_FEWEST_BLOCK_TOKENS = 64
_BLOCK_TOKENS = 4


class ScaledMM(QuantizesTokens):
    """E4M3 weights with a scale per channel or tensor, E4M3 inputs with a scale per token or tensor."""

    name = "scaled-mm"

    def can_implement(self, problem: LinearProblem) -> tuple[bool, str]:
        return first_refusal(self._conditions(problem))

    def _conditions(self, problem: LinearProblem) -> Iterator[tuple[bool, str]]:
        weights, activations = problem.scheme.weights, problem.scheme.activations
        yield (
            weights.element == "e4m3" and is_coarse(weights),
            "weights must be E4M3 with a scale per channel or tensor",
        )
        yield is_simple(activations, "e4m3"), "inputs must be E4M3 with a scale per token or tensor"
        yield (
            problem.out_features % 16 == 0 and problem.in_features % 16 == 0,
            f"out_features {problem.out_features} and in_features {problem.in_features} must be multiples "
            "of 16",
        )
        accepted = (torch.bfloat16, torch.float16) if _is_single(problem) else (torch.bfloat16,)
        yield (
            problem.dtype in accepted,
            f"results must be {' or '.join(map(name_of, accepted))} for such scales, "
            f"not {name_of(problem.dtype)}",
        )
        yield from gpu_conditions(problem, (8, 9))

    def prepare(
        self, q: QuantizedTensor, problem: LinearProblem, input_scale: torch.Tensor | None = None
    ) -> Prepared:
        factors = q.scales.float()
        tensors = {"codes": q.codes.contiguous(), "scales": q.scales}
        if not _is_single(problem):
            factors = factors.expand(problem.out_features, 1).T
            tensors["one"] = factors.new_ones(1)
        tensors["factors"] = factors.contiguous()
        return Prepared(problem, tensors, input_scale)

    def restore(self, prepared: Prepared) -> QuantizedTensor:
        tensors = prepared.tensors
        return QuantizedTensor(prepared.problem.scheme.weights, tensors["codes"], tensors["scales"])

    def run(self, x: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None = None) -> torch.Tensor:
        from halfbyte.kernels.triton.linear_inputs import quantized_inputs

        activations = prepared.problem.scheme.activations
        assert activations is not None
        return self._multiply(*quantized_inputs(x, activations, prepared.input_scale), prepared, bias)

    def run_quantized(
        self, inputs: QuantizedInputs, prepared: Prepared, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._multiply(inputs.codes, inputs.scales, prepared, bias)

    def _multiply(
        self, codes: torch.Tensor, scale: torch.Tensor, prepared: Prepared, bias: torch.Tensor | None
    ) -> torch.Tensor:
        tensors, problem = prepared.tensors, prepared.problem
        rows = codes.shape[0]
        if rows == 0:
            return codes.new_empty(0, problem.out_features, dtype=problem.dtype)
        single = _is_single(problem)
        few = rows <= _FEW_TOKENS or rows * problem.out_features <= _FEW_RESULTS

        def multiply(fused: torch.Tensor | None) -> torch.Tensor:
            if codes.is_cuda and few and not single:
                from halfbyte.kernels.triton.scaled_product import scale_product

                one = tensors["one"]
                product = _product(codes, tensors["codes"], one, one, None, torch.float32)
                return scale_product(product, scale, tensors["factors"], fused, problem.dtype)
            scales = scale if single else scale.reshape(-1, 1).expand(rows, 1).contiguous()
            return _product(codes, tensors["codes"], scales, tensors["factors"], fused, problem.dtype)

        return _biased(multiply, bias, problem.dtype)


class ScaledMMBlocks(TritonFp8):
    """E4M3 weights with a scale for 128 x 128 of them, inputs with one for 128: by cuBLAS where it takes them."""

    name = "scaled-mm-blocks"

    def _conditions(self, problem: LinearProblem) -> Iterator[tuple[bool, str]]:
        weights = problem.scheme.weights
        yield weights.element == "e4m3" and is_blocks(weights), "weights must be E4M3 in blocks of 128 x 128"
        yield from super()._conditions(problem)
        # It reads weights' scales in rows of multiples of 16 bytes, whatever their strides say, and says nothing.
        yield (
            problem.in_features % 512 == 0,
            f"in_features must be a multiple of 512, not {problem.in_features}",
        )
        yield (
            problem.out_features % 16 == 0,
            f"out_features must be a multiple of 16, not {problem.out_features}",
        )
        yield problem.dtype in HALVES, f"results must be bfloat16 or float16, not {name_of(problem.dtype)}"
        yield is_hopper(problem), "cuBLAS has it for compute capability 9.0"
        yield (
            _numbers(torch.version.cuda) >= (12, 9) and _numbers(torch.__version__) >= (2, 9),
            f"torch has it from 2.9 and CUDA 12.9 on, not in {torch.__version__} with CUDA {torch.version.cuda}",
        )

    def prepare(
        self, q: QuantizedTensor, problem: LinearProblem, input_scale: torch.Tensor | None = None
    ) -> Prepared:
        tensors = super().prepare(q, problem, input_scale).tensors
        return Prepared(problem, {**tensors, "factors": q.scales.float().contiguous()}, input_scale)

    def _multiply(
        self, codes: torch.Tensor, scale: torch.Tensor | None, prepared: Prepared, bias: torch.Tensor | None
    ) -> torch.Tensor:
        assert scale is not None
        tokens, tensors = codes.shape[0], prepared.tensors
        if tokens < _FEWEST_BLOCK_TOKENS or tokens % _BLOCK_TOKENS:
            return super()._multiply(codes, scale, prepared, bias)
        dtype, of_tokens = prepared.problem.dtype, scale.T
        return _biased(
            lambda fused: _product(codes, tensors["codes"], of_tokens, tensors["factors"].T, fused, dtype),
            bias,
            dtype,
        )


def _numbers(version: str | None) -> tuple[int, int]:
    """The first two of a version; of none, zeros."""
    major, minor = (version or "0.0").split(".")[:2]
    return int(major), int(minor)


def _biased(
    multiply: Callable[[torch.Tensor | None], torch.Tensor], bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """A product in ``dtype`` with a bias, which ``multiply`` adds if it is in ``dtype`` too; else it is added after."""
    fused = bias if bias is not None and bias.dtype == dtype else None
    result = multiply(fused)
    return result if bias is None or bias is fused else result.add_(bias)


def _product(
    codes: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    factors: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Codes ``[M, K]`` times ``weight [N, K]``, scaled: ``[M, N]`` in ``dtype``."""
    return torch._scaled_mm(
        codes, weight.T, scale, factors, bias=bias, out_dtype=dtype, use_fast_accum=_FAST_ACCUMULATION
    )


def _is_single(problem: LinearProblem) -> bool:
    """Whether one scale holds for all inputs and one for all weights; torch takes these, or vectors for both."""
    activations = problem.scheme.activations
    return (
        problem.scheme.weights.granularity == "tensor"
        and activations is not None
        and activations.granularity == "tensor"
    )
