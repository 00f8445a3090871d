"""A linear layer on a quantized weight: created with room for what is stored, loaded, repacked, run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.kernels.problem import Kernel, LinearProblem, Prepared
from halfbyte.kernels.quantized_inputs import QuantizedInputs, SharedInputsKernel, can_share_inputs
from halfbyte.kernels.registry import select
from halfbyte.schemes import Scheme

# Shapes and global scales stay as they were read: a divisor of 1 / x does not survive being inverted twice.
_SMALL = 16


class WeightCodec(Protocol):
    """Translates between the tensors that a file holds for one weight, by local name, and their meaning."""

    def decode(self, stored: Mapping[str, torch.Tensor]) -> QuantizedTensor: ...

    def encode(self, q: QuantizedTensor) -> Mapping[str, torch.Tensor]: ...

    def input_scale(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """fp32 ``[1]`` for static activations, or none."""
        ...


class QuantLinear(nn.Module):
    """``y = x @ weight.T + bias`` on a weight that stays packed. Inference only.

    Before :meth:`repack` the layer has one buffer per stored tensor, for a loader to fill. After it, the
    weight is in the form of the kernel that was chosen, and ``state_dict`` gives the stored tensors back, bit
    for bit. The layer follows its inputs: one of another dtype or on another device makes it repack for that.
    """

    bias: torch.Tensor | None

    def __init__(
        self,
        scheme: Scheme,
        in_features: int,
        out_features: int,
        *,
        stored: Mapping[str, torch.Tensor],
        codec: WeightCodec,
        bias: nn.Parameter | None = None,
        name: str = "a linear layer",
    ) -> None:
        """stored: tensors (or meta tensors) of the file's dtypes and shapes. name: for logs and messages."""
        super().__init__()
        self.scheme = scheme
        self.in_features = in_features
        self.out_features = out_features
        self.name = name
        self.register_parameter("bias", bias)
        self._codec = codec
        self._stored_names = tuple(stored)
        for local, tensor in stored.items():
            self.register_buffer(local, tensor)
        self._kept: dict[str, torch.Tensor] = {}
        self._kernel: Kernel | None = None
        self._prepared: Prepared | None = None
        self._borrower: tuple[QuantLinear, slice] | None = None

    @property
    def kernel(self) -> str | None:
        """Name of the kernel that runs this layer; none before :meth:`repack`."""
        if self._borrower is not None:
            return self._borrower[0].kernel
        return self._kernel.name if self._kernel else None

    @property
    def problem(self) -> LinearProblem:
        """What the layer's kernel was chosen for; its scheme has the scale dtype that is stored."""
        if self._borrower is not None:
            return replace(self._borrower[0].problem, out_features=self.out_features)
        return self._ready()[1].problem

    @property
    def static_input_scale(self) -> torch.Tensor | None:
        """fp32 ``[1]`` of static activations, or none."""
        if self._borrower is not None:
            return self._borrower[0].static_input_scale
        return self._ready()[1].input_scale

    def repack(self, dtype: torch.dtype) -> None:
        """Turn the loaded buffers into the form of the kernel that runs best for inputs of ``dtype``.

        Errors: stored tensors that do not make a weight of this layer's shape; no kernel that can run it.
        """
        stored = {local: self.get_buffer(local) for local in self._stored_names}
        q = self._codec.decode(stored)
        if q.shape != (self.out_features, self.in_features):
            raise HalfbyteError(
                f"{self.name}: the stored weight has shape {list(q.shape)}, but the model has "
                f"{[self.out_features, self.in_features]} here"
            )
        self._prepare(q, dtype, self._codec.input_scale(stored))
        self._kept = {local: tensor for local, tensor in stored.items() if tensor.numel() <= _SMALL}
        for local in self._stored_names:
            del self._buffers[local]

    def unpack(self) -> QuantizedTensor:
        """The weight as it was loaded, bit for bit."""
        if self._borrower is not None:
            other, rows = self._borrower
            return rows_of(other.unpack(), rows)
        kernel, prepared = self._ready()
        return kernel.restore(prepared)

    @property
    def prepared(self) -> Prepared:
        """The weight in the form of the layer's kernel, of layers that hold theirs themselves."""
        return self._ready()[1]

    def adopt(self, prepared: Prepared) -> None:
        """Run from tensors that somebody else holds: the same weight in the same form."""
        self._prepared = prepared

    def lend(self, other: QuantLinear, rows: slice) -> None:
        """Give the weight up for the same one at ``rows`` of ``other``, which has this layer's bias there too."""
        self._borrower = (other, rows)
        self._kernel = self._prepared = None

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Repack for inputs on ``device`` and of ``dtype``, unless that is what the layer is packed for."""
        if self._borrower is not None:
            self._borrower[0].place(device, dtype)
            return
        _, prepared = self._ready()
        if (dtype, device) != (prepared.problem.dtype, prepared.problem.device):
            self._prepare(_moved(self.unpack(), device), dtype, _on(prepared.input_scale, device))

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        """What the kernel reads, in its own form; nothing before :meth:`repack`."""
        return self._prepared.tensors.values() if self._prepared else ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]`` in the dtype of ``x``."""
        if torch.is_grad_enabled():
            return _ForwardOnly.apply(x, self)
        return self._run(x)

    def takes_quantized(self, x: torch.Tensor) -> bool:
        """Whether inputs that were like ``x``, in dtype and device, may come quantized instead."""
        if self._borrower is not None:
            return self._borrower[0].takes_quantized(x)
        self.place(x.device, x.dtype)
        return self._kernel is not None and can_share_inputs(self._kernel, self.scheme)

    def quantize(self, x: torch.Tensor) -> QuantizedInputs:
        """Inputs ``[M, in]`` as :meth:`forward_quantized` takes them, if it does."""
        if self._borrower is not None:
            return self._borrower[0].quantize(x)
        self.place(x.device, x.dtype)
        kernel, prepared = self._sharing()
        return kernel.quantize(x, prepared)

    def forward_quantized(self, inputs: QuantizedInputs, dtype: torch.dtype) -> torch.Tensor:
        """``[M, out]`` of ``dtype`` from inputs ``[M, in]`` that are quantized already.

        Their sums must be over groups of ``sum_group(self.scheme)``.
        """
        if self._borrower is not None:
            other, rows = self._borrower
            return other.forward_quantized(inputs, dtype)[..., rows]
        self.place(inputs.codes.device, dtype)
        kernel, prepared = self._sharing()
        return kernel.run_quantized(inputs, prepared, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scheme={self.scheme.name}, kernel={self.kernel}"
        )

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        if self._borrower is not None:
            other, rows = self._borrower
            return other._run(x)[..., rows]
        self.place(x.device, x.dtype)
        kernel, prepared = self._ready()
        outputs = kernel.run(x.reshape(-1, self.in_features), prepared, self.bias)
        return outputs.view(*x.shape[:-1], self.out_features)

    def _prepare(self, q: QuantizedTensor, dtype: torch.dtype, input_scale: torch.Tensor | None) -> None:
        scheme = replace(self.scheme, weights=q.format)
        problem = LinearProblem(scheme, self.out_features, self.in_features, q.codes.device, dtype)
        self._kernel = select(problem, module=self.name)
        # Whatever the mode in which inputs of another dtype first come, the weight outlives it.
        with torch.inference_mode(False), torch.no_grad():
            self._prepared = self._kernel.prepare(q, problem, input_scale)

    def _ready(self) -> tuple[Kernel, Prepared]:
        if self._kernel is None or self._prepared is None:
            raise HalfbyteError(f"{self.name}: its weight was not loaded and repacked yet")
        return self._kernel, self._prepared

    def _sharing(self) -> tuple[SharedInputsKernel, Prepared]:
        kernel, prepared = self._ready()
        if not isinstance(kernel, SharedInputsKernel):
            raise HalfbyteError(f"{self.name}: kernel {kernel.name} quantizes its inputs itself")
        return kernel, prepared

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._prepared is None and self._borrower is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            encoded = {**self._codec.encode(self.unpack()), **self._kept}
        if new := sorted(set(encoded) - set(self._stored_names)):
            raise HalfbyteError(
                f"{self.name}: cannot be saved, it was stored as {', '.join(self._stored_names)}, "
                f"not with {', '.join(new)}"
            )
        for local in self._stored_names:
            if (
                local in encoded
            ):  # what the codec does not give again had nothing to say (zero points of zero)
                destination[prefix + local] = encoded[local]


def rows_of(q: QuantizedTensor, rows: slice) -> QuantizedTensor:
    """Some output features of a weight ``[out, in]`` that has scales of its own for each, or for blocks of them.

    ``rows`` must begin and end with a block.
    """
    height = q.format.block_shape[0] if q.format.block_shape else 1
    scale_rows = slice(rows.start // height, -(-rows.stop // height))

    def part(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[scale_rows]

    return QuantizedTensor(
        q.format, q.codes[rows], q.scales[scale_rows], part(q.zero_points), part(q.outer_scales)
    )


def _on(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)


def _moved(q: QuantizedTensor, device: torch.device) -> QuantizedTensor:
    zero_points, outer_scales = _on(q.zero_points, device), _on(q.outer_scales, device)
    return QuantizedTensor(q.format, q.codes.to(device), q.scales.to(device), zero_points, outer_scales)


class _ForwardOnly(torch.autograd.Function):
    """Lets a model run with gradients on, and stops whoever asks for them instead of losing them silently."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: QuantLinear) -> torch.Tensor:
        # Autograd lets nobody change a view in place that a function returns, and model code does.
        return layer._run(x).clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        raise HalfbyteError("quantized layers run forward only; train the unquantized checkpoint")
