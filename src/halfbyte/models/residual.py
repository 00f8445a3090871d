"""Who writes a model's residual stream and who reads it: what has to turn together when the stream is rotated.

A rotation passes through a norm only if that norm divides by the root mean square, which no rotation changes, and if
its gain can move into the linears behind it. So only families whose norms were checked are accepted.
Source: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024, section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfbyte.errors import HalfbyteError
from halfbyte.models.config_fields import read_config
from halfbyte.models.folding import Fold, find_folds
from halfbyte.models.layout import ModelLayout, ModuleInfo, Role
from halfbyte.models.names import WEIGHT, split
from halfbyte.models.producers import NormProducer, RowsProducer
from halfbyte.models.readers import Input, input_of
from halfbyte.models.wiring import wiring_of

_STREAM = (Input.ATTENTION_NORM, Input.MLP_NORM)
_WRITES = (Input.VALUES, Input.INNER)
_AROUND_BLOCKS = (Role.EMBEDDING, Role.LM_HEAD, Role.NORM)
_HEAD = f"lm_head{WEIGHT}"
# All other known families have LayerNorms. Those with norms behind attention or the MLP are told by their tensors.
_RMS_NORMS = frozenset(
    {
        *("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone4", "gemma", "gemma2", "gemma3"),
        *("gemma3_text", "glm4", "glm4_moe", "gpt_oss", "granite", "granitemoe", "hunyuan_v1_moe", "llama"),
        *("llama4", "llama4_text", "minimax_m2", "mistral", "mixtral", "olmo2", "olmoe", "phi3", "qwen2"),
        *("qwen2_moe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss"),
        "smollm3",
    }
)
# Each channel of a head is multiplied with a gate of its own before o_proj, so that heads cannot turn.
_GATED_VALUES = frozenset({"qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"})


@dataclass(frozen=True)
class StreamNorm:
    """A norm of the residual stream and the modules that read what it puts out, by name."""

    norm: NormProducer
    readers: tuple[str, ...]


@dataclass(frozen=True)
class TurnableHeads:
    """rows: those that put out attention's values. reader: the module that reads their weighted sums, head by head."""

    rows: RowsProducer
    reader: str


@dataclass(frozen=True)
class Residual:
    """The residual stream of a model: ``hidden`` channels.

    embedding: stored tensor ``[vocab, hidden]`` whose rows begin the stream.
    head, head_origin: the output head's tensor ``[vocab, hidden]``, and the stored one that holds its values: the
        embedding where both are tied.
    norms, final_norm: all norms of the stream; the head reads the final one.
    writers: modules whose outputs are added to it. biases: their stored biases, ``[hidden]`` or ``[experts, hidden]``.
    heads: attention heads whose values can be rotated one by one.
    """

    hidden: int
    embedding: str
    head: str
    head_origin: str
    norms: tuple[StreamNorm, ...]
    final_norm: NormProducer
    writers: tuple[str, ...]
    biases: tuple[str, ...]
    heads: tuple[TurnableHeads, ...]


def find_residual(
    layout: ModelLayout, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> Residual:
    """The residual stream of the model that ``shapes`` (stored tensor -> shape) and ``config`` (config.json) describe.

    Errors: why the model cannot be rotated: a family that is not known or has LayerNorms, norms behind attention or
    the MLP, positions added to the embedding, tensors of which it is not known whether they touch the stream.
    """
    try:
        return _find(layout, shapes, config)
    except HalfbyteError as error:
        raise HalfbyteError(
            f"{layout.family or 'this model'} cannot be rotated: {error}; accepted: known families with RMSNorms "
            "before attention and MLP and none behind them"
        ) from None


def _find(layout: ModelLayout, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> Residual:
    fields, wiring = read_config(config), wiring_of(config)
    families = {fields.family, fields.text_family}
    if wiring is None:
        raise HalfbyteError("how its blocks are wired is not known")
    if not families & _RMS_NORMS:
        raise HalfbyteError("its norms subtract the mean of all channels, which a rotation changes")
    if wiring.attention_norm is None or wiring.mlp_norm is None:
        raise HalfbyteError("its norms lie behind attention and the MLP, not before them")
    modules = {module.name: module for module in layout.modules}
    embedding = _embedding(layout.modules)
    hidden = embedding.in_features
    folds = find_folds(layout, shapes, config)
    norms = _stream_norms(folds.folds, modules)
    blocks = tuple({f"{_block(norm)}." for norm in norms})
    read = {reader for norm in norms for reader in norm.readers}
    outside = [name for name in shapes if not name.startswith(blocks)]
    _require_known(layout, blocks, read, folds.left_out, hidden)
    _require_no_more_gains(norms, shapes, hidden)
    final_norm = _final_norm([name for name in outside if shapes[name] == (hidden,)], wiring.norm_offset)
    writers = [module for module in layout.modules if _inside(module, blocks) and input_of(module) in _WRITES]
    head = _stored_head(layout)
    return Residual(
        hidden=hidden,
        embedding=embedding.source.tensor,
        head=head or _HEAD,
        head_origin=head or embedding.source.tensor,
        norms=norms,
        final_norm=final_norm,
        writers=tuple(module.name for module in writers),
        biases=_biases(writers, shapes),
        heads=() if families & _GATED_VALUES else _heads(folds.folds, modules),
    )


def _embedding(modules: Sequence[ModuleInfo]) -> ModuleInfo:
    found = [module for module in modules if module.role is Role.EMBEDDING]
    if len(found) != 1:
        names = ", ".join(module.name for module in found) or "none"
        raise HalfbyteError(f"one embedding has to begin the residual stream, found: {names}")
    return found[0]


def _stored_head(layout: ModelLayout) -> str | None:
    """The output head's tensor, none where it is the embedding."""
    heads = [module.source.tensor for module in layout.modules if module.role is Role.LM_HEAD]
    if len(heads) > 1 or not (heads or layout.tied):
        raise HalfbyteError(f"one output head has to read it, found: {', '.join(heads) or 'none'}")
    return heads[0] if heads else None


def _stream_norms(folds: Iterable[Fold], modules: Mapping[str, ModuleInfo]) -> tuple[StreamNorm, ...]:
    norms = tuple(
        StreamNorm(fold.producer, fold.consumers)
        for fold in folds
        if isinstance(fold.producer, NormProducer) and input_of(modules[fold.consumers[0]]) in _STREAM
    )
    for norm in norms:
        if norm.norm.bias is not None:
            raise HalfbyteError(f"{norm.norm.bias} is added behind a norm")
    return norms


def _block(norm: StreamNorm) -> str:
    return split(norm.norm.weight.removesuffix(WEIGHT))[0]


def _inside(module: ModuleInfo, blocks: tuple[str, ...]) -> bool:
    return module.role not in _AROUND_BLOCKS and module.name.startswith(blocks)


def _require_known(
    layout: ModelLayout,
    blocks: tuple[str, ...],
    read: set[str],
    why_not: Mapping[str, str],
    hidden: int,
) -> None:
    """Every matrix reads the stream through a known norm, writes it, or does not touch it."""
    for module in layout.modules:
        if input_of(module) in _STREAM and module.name in why_not:
            raise HalfbyteError(f"{module.name}: {why_not[module.name]}")
    for module in layout.modules:
        if module.role in _AROUND_BLOCKS:
            continue
        source = input_of(module)
        if (
            not _inside(module, blocks)
            or source is Input.UNKNOWN
            or (source in _STREAM) != (module.name in read)
        ):
            raise HalfbyteError(
                f"{module.name} may read or write the residual stream in a way that is not known"
            )
        width = module.in_features if source in _STREAM else module.out_features
        if source in (*_STREAM, *_WRITES) and width != hidden:
            raise HalfbyteError(f"{module.name} has {width} channels where the residual stream has {hidden}")
    for tensor in layout.left_out:
        if not tensor.startswith(blocks):
            raise HalfbyteError(f"{tensor} may read or write the residual stream in a way that is not known")


def _require_no_more_gains(
    norms: Sequence[StreamNorm], shapes: Mapping[str, tuple[int, ...]], hidden: int
) -> None:
    """A block's own vectors of the stream's width are the norms that linears read."""
    known = {norm.norm.weight for norm in norms}
    blocks = {_block(norm) for norm in norms}
    for tensor, shape in shapes.items():
        if shape == (hidden,) and tensor not in known and split(tensor.removesuffix(WEIGHT))[0] in blocks:
            raise HalfbyteError(
                f"{tensor} scales channels behind attention or the MLP, before they are added"
            )


def _final_norm(vectors: Sequence[str], offset: float) -> NormProducer:
    """The one vector ``[hidden]`` outside the blocks."""
    if len(vectors) != 1 or not vectors[0].endswith(WEIGHT):
        names = ", ".join(vectors) or "none"
        raise HalfbyteError(f"one norm without a bias has to lie before the output head, found: {names}")
    return NormProducer(vectors[0], None, offset)


def _biases(writers: Iterable[ModuleInfo], shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    stems = dict.fromkeys(module.source.tensor.removesuffix(WEIGHT) for module in writers)
    names = (name for stem in stems for name in (f"{stem}.bias", f"{stem}_bias"))
    return tuple(name for name in names if name in shapes)


def _heads(folds: Iterable[Fold], modules: Mapping[str, ModuleInfo]) -> tuple[TurnableHeads, ...]:
    return tuple(
        TurnableHeads(fold.producer, reader)
        for fold in folds
        if isinstance(fold.producer, RowsProducer)
        for reader in fold.consumers
        if input_of(modules[reader]) is Input.VALUES
    )
