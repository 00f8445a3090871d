"""Which models halfbyte decodes itself; all others are transformers' own ``generate``'s."""

from __future__ import annotations

import inspect

from transformers import PreTrainedModel
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

from halfbyte.engines.transformers.decoding import cache_argument
from halfbyte.engines.transformers.visibility import KINDS, attention_kinds

_ATTENTION = ("sdpa", "eager")
# Fields of a generation config that change which token is chosen, with what leaves the choice alone.
_STEERING: dict[str, tuple[object, ...]] = {
    "bad_words_ids": (None,),
    "begin_suppress_tokens": (None,),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "exponential_decay_length_penalty": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1.0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "min_p": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "sequence_bias": (None,),
    "stop_strings": (None,),
    "suppress_tokens": (None,),
    "top_h": (None, 1.0),
    "typical_p": (None, 1.0),
    "watermarking_config": (None,),
}


def cannot_decode(model: PreTrainedModel) -> str:
    """Why ``model`` is left to transformers; empty if it is not.

    Its layers must keep keys and values and nothing else, see all tokens or a window of them, and take a mask.
    """
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        return "it has an encoder"
    if others := attention_kinds(config) - KINDS:
        return f"it has layers of {', '.join(sorted(others))}"
    layers = StaticCache(config=config, max_cache_len=1).layers
    if len(layers) != config.num_hidden_layers:
        return "some of its layers share keys and values"
    if unknown := {type(layer) for layer in layers} - {StaticLayer, StaticSlidingWindowLayer}:
        return f"its cache has {', '.join(sorted(kind.__name__ for kind in unknown))}"
    if config._attn_implementation not in _ATTENTION:
        return f"its attention runs on {config._attn_implementation}"
    parameters, cache = inspect.signature(model.forward).parameters, cache_argument(model)
    if missing := {"position_ids", "logits_to_keep", cache} - parameters.keys():
        return f"its forward takes no {', '.join(sorted(missing))}"
    annotation = parameters[cache].annotation
    if annotation is not inspect.Parameter.empty and "Cache" not in str(annotation):
        return f"its forward takes another kind of {cache}"
    if len({parameter.device for parameter in model.parameters()}) != 1:
        return "it lies on several devices"
    for field, neutral in _STEERING.items():
        value = getattr(model.generation_config, field, None)
        if value not in neutral:
            return f"its generation config has {field} {value}"
    return ""
