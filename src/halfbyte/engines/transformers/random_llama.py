"""A Llama of any size full of random numbers, made where it runs and in the form it runs in: for timing alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from halfbyte.assignment import fit_group
from halfbyte.engines.transformers.codec import ModuleCodec
from halfbyte.errors import HalfbyteError
from halfbyte.formats.quantized_tensor import QuantizedTensor
from halfbyte.formats.spec import TensorFormat
from halfbyte.layers.linear import QuantLinear
from halfbyte.schemes import Scheme

_DTYPE = torch.bfloat16
_WEIGHT_STD = 0.02
# Of codes in a float format: well inside their range, and fine enough that most codes occur.
_FLOAT_CODE_STD = 32.0
# Of two levels: whatever the code and the zero point, 15 times it is an INT8 number.
_MOST_LEVEL_SCALE = 8


@dataclass(frozen=True)
class LlamaShape:
    """As in config.json; those of Llama 3 8B unless given."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256


def random_llama(
    shape: LlamaShape, scheme: Scheme | None, positions: int, device: torch.device, seed: int = 0
) -> PreTrainedModel:
    """A bfloat16 Llama in evaluation mode on ``device`` with room for ``positions`` tokens.

    scheme: of all linear layers but the head; none leaves them in bfloat16. No weight exists in 16 bits first.
    Errors: a scheme whose numbers cannot be drawn at random, or whose groups divide no side of the shape.
    """
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
    )
    return filled(config, scheme, torch.Generator(device).manual_seed(seed), {})


Replacement = Callable[[str, nn.Module, Scheme, torch.Generator], nn.Module]


def filled(
    config: PretrainedConfig,
    scheme: Scheme | None,
    generator: torch.Generator,
    others: Mapping[type[nn.Module], Replacement],
) -> PreTrainedModel:
    """The model of a config, where the generator is. others: what modules beside linear layers become in a scheme."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=_DTYPE).eval()
    model.generation_config.eos_token_id = None
    for name, module in list(model.named_modules()):
        replacement = random_linear if isinstance(module, nn.Linear) else others.get(type(module))
        if scheme is not None and replacement is not None and not name.endswith("lm_head"):
            model.set_submodule(name, replacement(name, module, scheme, generator))
        else:
            _fill(module, generator)
    with torch.device(generator.device):
        # Its frequencies are computed when it is made, which on the meta device they were not.
        model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    return model


def _fill(module: nn.Module, generator: torch.Generator) -> None:
    """Weights drawn, norms one."""
    for name, parameter in module.named_parameters(recurse=False):
        values = torch.ones(parameter.shape, dtype=_DTYPE, device=generator.device)
        if parameter.dim() > 1:
            values.normal_(std=_WEIGHT_STD, generator=generator)
        setattr(module, name, nn.Parameter(values, requires_grad=False))


def random_linear(name: str, module: nn.Module, scheme: Scheme, generator: torch.Generator) -> QuantLinear:
    """In the place of a linear layer, which lends its sizes."""
    assert isinstance(module, nn.Linear)
    fitted = fit_group(scheme, module.in_features)
    if fitted is None:
        raise HalfbyteError(
            f"scheme {scheme.name}: no group size divides {module.in_features} inputs of {name}"
        )
    settled = replace(fitted, weights=drawn_format(fitted.weights))
    weight = random_weight(settled.weights, module.out_features, module.in_features, generator)
    codec = ModuleCodec(name, settled)
    layer = QuantLinear(
        settled,
        module.in_features,
        module.out_features,
        stored=codec.encode(weight),
        codec=codec,
        name=name,
    )
    layer.repack(_DTYPE)
    return layer


def drawn_format(fmt: TensorFormat) -> TensorFormat:
    """``fmt`` with bfloat16 scales where its scales are floats."""
    return fmt if fmt.scale == "int8" else fmt.with_scale("bf16")


def random_weight(
    fmt: TensorFormat, out_features: int, in_features: int, generator: torch.Generator
) -> QuantizedTensor:
    """Codes and scales of a weight of normal size, without a weight that they were quantized from.

    Errors: formats other than integers and E4M3, with scales that are neither bfloat16 nor integers of two levels.
    """
    two_levels = (fmt.element, fmt.scale, fmt.outer) == ("int4", "int8", "channel")
    one_level = fmt.scale == "bf16" and fmt.outer is None and fmt.element in ("int4", "int8", "e4m3")
    if not (one_level or two_levels):
        raise HalfbyteError(
            f"weights in {fmt.element} with {fmt.scale} scales cannot be drawn at random; "
            "accepted: int4, int8 and e4m3 with bf16 scales, int4 in two levels"
        )
    device, shape = generator.device, (out_features, in_features)

    def integers(low: int, high: int, of: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high + 1, of, dtype=torch.int8, device=device, generator=generator)

    if fmt.is_integer:
        codes = integers(fmt.qmin, fmt.qmax, shape)
        code_std = (fmt.qmax - fmt.qmin) / 12**0.5
    else:
        codes = torch.randn(shape, dtype=torch.float32, device=device, generator=generator)
        codes = codes.mul_(_FLOAT_CODE_STD).clamp_(-fmt.max_value, fmt.max_value).to(torch.float8_e4m3fn)
        code_std = _FLOAT_CODE_STD
    of_groups = tuple(fmt.scale_shape(shape))
    zeros = None if fmt.symmetric else integers(fmt.qmin, fmt.qmax, of_groups)
    of_channels = fmt.outer_shape(shape)
    if of_channels is not None:
        scales = integers(1, _MOST_LEVEL_SCALE, of_groups)
        code_std *= ((_MOST_LEVEL_SCALE + 1) * (2 * _MOST_LEVEL_SCALE + 1) / 6) ** 0.5
    floats = torch.rand(of_channels or of_groups, device=device, generator=generator)
    floats = floats.add_(0.5).mul_(_WEIGHT_STD / code_std)
    if of_channels is None:
        return QuantizedTensor(fmt, codes, floats.bfloat16(), zeros)
    return QuantizedTensor(fmt, codes, scales, zeros, floats)
