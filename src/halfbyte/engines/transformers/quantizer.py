"""The quantizer that transformers calls while it loads and saves a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming, WeightTransform
from transformers.quantizers.base import HfQuantizer

from halfbyte.checkpoint.quantization_config import parse_config
from halfbyte.engines.transformers.config import StoredCompressedTensorsConfig, StoredConfig
from halfbyte.engines.transformers.conversions import spare
from halfbyte.engines.transformers.placement import target_device
from halfbyte.engines.transformers.replace import repack_modules, replace_modules
from halfbyte.engines.transformers.stored_modules import UnsupportedError, find_stored_modules, read_headers
from halfbyte.errors import HalfbyteError

logger = logging.getLogger(__name__)


def choose_quantizer(config: Any, **kwargs: Any) -> HfQuantizer:
    """The quantizer for a checkpoint's config: halfbyte's own, where it can.

    compressed-tensors checkpoints that halfbyte cannot read go to transformers' own quantizer, with one log
    line; so do those for which the caller asks for its options.
    """
    if not isinstance(config, StoredConfig):
        return _stock(config, **kwargs)
    if isinstance(config, StoredCompressedTensorsConfig) and config.wants_stock_path:
        return _stock(config.as_stock(), **kwargs)
    try:
        return HalfbyteQuantizer(config, **kwargs)
    except HalfbyteError as reason:
        return _stock(_stock_config(config, reason), **kwargs)


class HalfbyteQuantizer(HfQuantizer):
    """Builds halfbyte's layers for what is stored quantized, lets transformers load into them, then repacks them."""

    requires_calibration = True
    quantization_config: StoredConfig

    def __init__(self, quantization_config: StoredConfig, **kwargs: Any) -> None:
        """Errors: a quantization config that says something halfbyte does not know."""
        super().__init__(quantization_config, **kwargs)
        self._declared = parse_config(quantization_config.to_dict())
        self._spared: set[str] = set()
        self._moved: dict[str, str] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        try:
            if not checkpoint_files:
                raise UnsupportedError(
                    "quantized weights are read from checkpoint files, not from a state dict"
                )
            found = find_stored_modules(model, read_headers(checkpoint_files), self._declared)
            replace_modules(model, found)
        except UnsupportedError as reason:
            self._hand_over(model, reason, checkpoint_files=checkpoint_files, **kwargs)
            return
        self._spared = found.renamed
        self._moved = found.moved
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}

    def update_weight_conversions(
        self, weight_conversions: Sequence[WeightTransform], *args: Any
    ) -> list[WeightTransform]:
        return [*_renamings(self._moved), *spare(weight_conversions, self._spared)]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        _settle_dtypes(model, self._dtypes)
        if (device := target_device()) is not None:
            model.to(device)
        counts = ", ".join(f"{count} on {kernel}" for kernel, count in repack_modules(model).items())
        logger.info("%s: quantized layers run %s", model.config.name_or_path, counts)
        return model

    def _hand_over(self, model: PreTrainedModel, reason: HalfbyteError, **kwargs: Any) -> None:
        """Become transformers' own quantizer: it has chosen this object, and asks it for everything that follows."""
        stock = _stock(_stock_config(self.quantization_config, reason), pre_quantized=True)
        stock.validate_environment()
        self.__dict__, self.__class__ = stock.__dict__, type(stock)
        self._process_model_before_weight_loading(model, **kwargs)


def _renamings(moved: Mapping[str, str]) -> list[WeightTransform]:
    """From the names that tensors have in the files to those that they have here, by the last two parts of both."""
    ends = {tuple(".".join(name.split(".")[-2:]) for name in names) for names in moved.items()}
    return [WeightRenaming(stored, name) for stored, name in sorted(ends)]


def _settle_dtypes(model: PreTrainedModel, dtypes: dict[str, torch.dtype]) -> None:
    """Cast what transformers (before 5.20) loads in its stored dtype when it loads a quantized checkpoint.

    float32 stays: it is what parts that a model keeps in fp32 are in.
    """
    for name, parameter in model.named_parameters():
        wanted = dtypes.get(name)
        if wanted is not None and parameter.dtype not in (wanted, torch.float32):
            parameter.data = parameter.data.to(wanted)


def _stock_config(config: StoredConfig, reason: HalfbyteError) -> Any:
    """The config for transformers' own quantizer, if it has one and its library is there; else ``reason``."""
    if not isinstance(config, StoredCompressedTensorsConfig):
        raise reason
    try:
        stock = config.as_stock()
    except ImportError:
        raise reason from None
    logger.warning("Left to transformers' own compressed-tensors path, because halfbyte says: %s", reason)
    return stock


def _stock(config: Any, **kwargs: Any) -> HfQuantizer:
    from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

    return CompressedTensorsHfQuantizer(config, **kwargs)
