"""``quantization_config`` of config.json as transformers passes it around: kept word for word."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from transformers.utils.quantization_config import CompressedTensorsConfig, QuantizationConfigMixin

COMPRESSED_TENSORS = "compressed-tensors"
HALFBYTE = "halfbyte"
QSERVE = "qoq"
W4AFP8 = "w4afp8"


class StoredConfig(QuantizationConfigMixin):
    """What the checkpoint says, unparsed: saving the model writes the same words again."""

    def __init__(self, **stored: Any) -> None:
        self.stored = stored
        self.quant_method = stored["quant_method"]

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.stored)

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()


class StoredCompressedTensorsConfig(StoredConfig, CompressedTensorsConfig):
    """The same for compressed-tensors, without needing its library.

    It still is transformers' own class by type and by name, since ``from_pretrained`` compares names: so a
    caller's ``CompressedTensorsConfig(dequantize=True)`` is accepted, and asks for transformers' own path.
    """

    def __init__(self, **stored: Any) -> None:
        super().__init__(**stored)
        self.quantization_config = None
        self.dequantize = False
        self.use_optimized_inference = False

    @property
    def wants_stock_path(self) -> bool:
        """Whether the caller asked for something that only transformers' own quantizer does."""
        return self.dequantize or self.use_optimized_inference

    def as_stock(self) -> CompressedTensorsConfig:
        """What transformers would have made of it. Errors: ImportError without the compressed-tensors library."""
        stock = CompressedTensorsConfig.from_dict(self.to_dict())
        for attribute in stock.get_loading_attributes():
            setattr(stock, attribute, getattr(self, attribute))
        return stock


StoredCompressedTensorsConfig.__name__ = CompressedTensorsConfig.__name__
