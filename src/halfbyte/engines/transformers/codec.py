"""The checkpoint formats as a layer sees them: by the names that its tensors have without the module's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from halfbyte.checkpoint.quantized_weight import decode, encode
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.schemes import FormName, Scheme

INPUT_SCALE = "input_scale"
_ANY_DTYPE = "bf16"


@dataclass(frozen=True)
class ModuleCodec:
    """Reads and writes the stored weight of one module (its name in the files), in the files' form."""

    module: str
    scheme: Scheme
    form: FormName = "compressed-tensors"

    def decode(self, stored: Mapping[str, torch.Tensor]) -> QuantizedTensor:
        named = {f"{self.module}.{name}": tensor for name, tensor in stored.items()}
        return decode(self.module, self.scheme, named, self.form)

    def encode(self, q: QuantizedTensor) -> Mapping[str, torch.Tensor]:
        # Scales keep the dtype that they were stored in, whatever the model computes in.
        scheme = replace(self.scheme, weights=q.format)
        encoded = encode(self.module, scheme, q, _ANY_DTYPE, self.form)
        return {name.removeprefix(f"{self.module}."): tensor for name, tensor in encoded.items()}

    def input_scale(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        scale = stored.get(INPUT_SCALE)
        return None if scale is None else scale.float().reshape(1)
