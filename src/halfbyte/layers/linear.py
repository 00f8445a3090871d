"""A linear layer on a quantized weight: created with room for what is stored, loaded, repacked, run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.kernels.problem import Kernel, LinearProblem, Prepared
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

    bias: nn.Parameter | None

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

    @property
    def kernel(self) -> str | None:
        """Name of the kernel that runs this layer; none before :meth:`repack`."""
        return self._kernel.name if self._kernel else None

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
        kernel, prepared = self._ready()
        return kernel.restore(prepared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` to ``[..., out]`` in the dtype of ``x``."""
        if torch.is_grad_enabled():
            return _ForwardOnly.apply(x, self)
        return self._run(x)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scheme={self.scheme.name}, kernel={self.kernel}"
        )

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        kernel, prepared = self._ready()
        if (x.dtype, x.device) != (prepared.problem.dtype, prepared.problem.device):
            kernel, prepared = self._follow(x)
        rows = kernel.run(x.reshape(-1, self.in_features), prepared, self.bias)
        return rows.view(*x.shape[:-1], self.out_features)

    def _follow(self, x: torch.Tensor) -> tuple[Kernel, Prepared]:
        q, scale = self.unpack(), self._ready()[1].input_scale

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(x.device)

        q = QuantizedTensor(
            q.format,
            q.codes.to(x.device),
            q.scales.to(x.device),
            moved(q.zero_points),
            moved(q.outer_scales),
        )
        self._prepare(q, x.dtype, moved(scale))
        return self._ready()

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

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._prepared is None:
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


class _ForwardOnly(torch.autograd.Function):
    """Lets a model run with gradients on, and stops whoever asks for them instead of losing them silently."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: QuantLinear) -> torch.Tensor:
        # Autograd lets nobody change a view in place that a function returns, and model code does.
        return layer._run(x).clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        raise HalfbyteError("quantized layers run forward only; train the unquantized checkpoint")
