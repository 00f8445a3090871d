"""What a checkpoint's config.json says about its numbers, for our own and for foreign formats. No torch.

Read apart from ``checkpoint/`` on purpose: an audit that shared its parser would share its mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from halfbyte.errors import HalfbyteError
from halfbyte.formats.spec import INTEGER_BITS, ActivationFormat, TensorFormat
from halfbyte.matching import matches, specificity
from halfbyte.models.layout import Role
from halfbyte.schemes import PRESETS

LINEAR_CLASSES = ("Linear", "LinearBase")
_CLASS_RANK = 3


@dataclass(frozen=True)
class Rule:
    """The numbers that a config declares for a set of modules.

    layout: how they are stored (``pack-quantized``, ``awq``, ``gptq``, ...), as :mod:`halfbyte.audit.stored` names it.
    weights: none when the config names a scheme without saying what its numbers are.
    """

    layout: str
    weights: TensorFormat | None
    activations: ActivationFormat | None = None


class Match(NamedTuple):
    """The rule of a module, and whether a name or pattern chose it; else the class of linear layers did."""

    rule: Rule
    named: bool

    def binds(self, role: Role) -> bool:
        """Whether a module of this role must be stored so. A class means linear layers and experts."""
        return self.named or role.quantizable


@dataclass
class Declared:
    """The whole declaration.

    method: ``quant_method`` (``none`` without a quantization config). why: where it was found.
    rules: target patterns and what they get; a pattern of :data:`LINEAR_CLASSES` means every linear layer.
    ignored: says whether a module is left alone. kv: the KV cache's numbers in words, or none.
    problems: what could not be understood, one line each.
    """

    method: str = "none"
    format: str | None = None
    why: str = "config.json has no quantization_config"
    rules: list[tuple[Sequence[str], Rule]] = field(default_factory=list)
    ignored: Callable[[str], bool] = lambda name: False
    kv: str | None = None
    problems: list[str] = field(default_factory=list)

    @cached_property
    def _classes_only(self) -> Match | None:
        """What every module gets when the one rule there is names nothing but classes."""
        targets, rule = self.rules[0]
        return Match(rule, named=False) if targets and set(targets) <= set(LINEAR_CLASSES) else None

    def rule_for(self, name: str) -> Match | None:
        """What the config says about the module ``name``; none: nothing, or that it is left alone.

        An exact name decides before a pattern, a pattern before a class.
        """
        if not self.rules or self.ignored(name):
            return None
        if len(self.rules) == 1 and self._classes_only is not None:
            return self._classes_only
        best: tuple[int, Rule] | None = None
        for targets, rule in self.rules:
            for target in targets:
                if target in LINEAR_CLASSES:
                    rank = _CLASS_RANK
                elif matches(name, target):
                    rank = specificity(target)
                else:
                    continue
                if best is None or rank < best[0]:
                    best = rank, rule
        return Match(best[1], named=best[0] < _CLASS_RANK) if best else None


def preset_name(weights: TensorFormat, activations: ActivationFormat | None) -> str | None:
    """Our preset with these numbers, whatever the group size and the 16-bit or fp32 scale dtype; or none."""

    def shape_of(w: TensorFormat, a: ActivationFormat | None) -> tuple[Any, ...]:
        scale = "any" if w.scale in ("model", "bf16", "f16", "f32") else w.scale
        group = w.group_size if scale != "any" and w.outer != "channel" else None
        acts = (a.element, a.granularity) if a else None
        return w.element, w.granularity, w.symmetric, scale, group, w.outer, acts

    wanted = shape_of(weights, activations)
    for name, scheme in PRESETS.items():
        if shape_of(scheme.weights, scheme.activations) == wanted:
            return name
    return None


def declared(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None = None) -> Declared:
    """Reads ``quantization_config`` of a config.json (also inside ``text_config``).

    hf_quant_config: content of ModelOpt's ``hf_quant_config.json``, used when config.json says nothing.
    """
    found, where = _find(config, hf_quant_config)
    if found is None:
        return Declared()
    method = str(found.get("quant_method") or ("modelopt" if "quant_algo" in found else "unknown")).lower()
    result = Declared(method=method, why=f"{where}: quant_method {method!r}")
    reader = _READERS.get(method)
    if reader is None:
        result.problems.append(f"quant_method {method!r} is not known; described from tensor names alone")
        return result
    try:
        reader(found, result)
    except (HalfbyteError, KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        result.problems.append(f"{where} ({method}) is not understood: {what}")
    return result


def _find(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any] | None, str]:
    sections = [("", config), ("text_config.", config.get("text_config"))]
    for prefix, section in sections:
        for key in ("quantization_config", "compression_config"):
            if isinstance(section, Mapping) and isinstance(section.get(key), Mapping):
                return section[key], f"config.json {prefix}{key}"
    if hf_quant_config and isinstance(hf_quant_config.get("quantization"), Mapping):
        return {**hf_quant_config["quantization"], "quant_method": "modelopt"}, "hf_quant_config.json"
    return None, ""


def ignore_by_pattern(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Exact names, ``re:`` and wildcards; exact names are looked up, so that long lists stay quick."""
    exact = frozenset(p for p in patterns if specificity(p) == 0)
    rest = [p for p in patterns if specificity(p)]
    if not rest:
        return exact.__contains__
    return lambda name: name in exact or any(matches(name, p) for p in rest)


def _ignore_by_part(parts: Sequence[str]) -> Callable[[str], bool]:
    if not parts:
        return frozenset[str]().__contains__
    return lambda name: any(part in name for part in parts)


# compressed-tensors ---------------------------------------------------------------------------------------------

_CT_SCALES = {"torch.uint8": "e8m0", "uint8": "e8m0", "torch.float8_e4m3fn": "e4m3", "float8_e4m3fn": "e4m3"}


def weight_format(args: Mapping[str, Any]) -> TensorFormat:
    """The weights of a compressed-tensors config group, from its QuantizationArgs.

    Errors: numbers that no TensorFormat can say.
    """
    bits, kind = int(args.get("num_bits", 8)), args.get("type", "int")
    if kind == "int":
        element = f"int{bits}"
        if element not in INTEGER_BITS:
            raise HalfbyteError(f"num_bits {bits} of type int; accepted: 2..8")
    else:
        element = {8: "e4m3", 4: "e2m1"}.get(bits, f"float{bits}")
    group = args.get("group_size")
    strategy = args.get("strategy") or (
        "tensor" if group is None else "channel" if group == -1 else "group"
    )
    scale = _CT_SCALES.get(str(args.get("scale_dtype")), "model")
    outer = None
    if strategy == "tensor_group":
        strategy, scale, outer = "group", "e4m3", "tensor"
    elif element == "e2m1":
        scale = "e8m0"
    return TensorFormat(
        element,
        strategy,
        group_size=group if strategy == "group" else None,
        block_shape=tuple(args["block_structure"]) if strategy == "block" else None,
        symmetric=bool(args.get("symmetric", True)),
        scale=scale,
        outer=outer,
    )


def activation_format(args: Mapping[str, Any]) -> ActivationFormat:
    """The input activations of a compressed-tensors config group, from its QuantizationArgs."""
    bits, kind = int(args.get("num_bits", 8)), args.get("type", "int")
    element = f"int{bits}" if kind == "int" else {8: "e4m3", 4: "e2m1"}.get(bits, f"float{bits}")
    strategy = args.get("strategy") or "tensor"
    scale = _CT_SCALES.get(str(args.get("scale_dtype")), "f32")
    if strategy == "tensor_group":
        strategy, scale = "group", "e4m3"
    return ActivationFormat(
        element,
        strategy,
        group_size=args.get("group_size") if strategy == "group" else None,
        dynamic=bool(args.get("dynamic", False)),
        scale=scale,
    )


def infer_layout(weights: TensorFormat) -> str:
    """The compressed-tensors format of a group that names none, or only ``mixed-precision``."""
    if weights.element == "e2m1":
        return "nvfp4-pack-quantized" if weights.outer else "mxfp4-pack-quantized"
    if weights.element == "e4m3":
        return "mxfp8-quantized" if weights.scale == "e8m0" else "float-quantized"
    return "pack-quantized" if weights.bits < 8 else "int-quantized"


def _compressed_tensors(found: Mapping[str, Any], result: Declared) -> None:
    result.format = found.get("format")
    result.ignored = ignore_by_pattern(found.get("ignore") or [])
    result.kv = _kv_in_words(found.get("kv_cache_scheme"))
    for name, group in found.get("config_groups", {}).items():
        if not isinstance(group, Mapping) or not group.get("weights"):
            result.problems.append(f"config group {name!r} says nothing about weights")
            continue
        weights = weight_format(group["weights"])
        acts = group.get("input_activations")
        layout = group.get("format") or found.get("format")
        if layout in (None, "mixed-precision", "dense", "fakequant"):
            layout = infer_layout(weights)
        rule = Rule(layout, weights, activation_format(acts) if acts else None)
        result.rules.append((tuple(group.get("targets") or ()), rule))


def _kv_in_words(scheme: Mapping[str, Any] | None) -> str | None:
    if not scheme:
        return None
    kind = "fp" if scheme.get("type") == "float" else "int"
    timing = "dynamic" if scheme.get("dynamic") else "static"
    return f"{kind}{scheme.get('num_bits', 8)} per {scheme.get('strategy') or 'tensor'}, {timing}"


# foreign formats ------------------------------------------------------------------------------------------------


def _group_format(element: str, group: int, symmetric: bool, scale: str) -> TensorFormat:
    if group <= 0:
        return TensorFormat(element, "channel", symmetric=symmetric, scale=scale)
    return TensorFormat(element, "group", group, symmetric=symmetric, scale=scale)


def _awq(found: Mapping[str, Any], result: Declared) -> None:
    bits = found.get("bits", found.get("w_bit", 4))
    group = found.get("group_size", found.get("q_group_size", 128))
    result.format = found.get("version", "gemm")
    rule = Rule("awq", _group_format(f"int{bits}", group, not found.get("zero_point", True), "f16"))
    result.rules.append((LINEAR_CLASSES, rule))
    result.ignored = _ignore_by_part(found.get("modules_to_not_convert") or ())


def _gptq(found: Mapping[str, Any], result: Declared) -> None:
    result.format = found.get("checkpoint_format", "gptq")
    group, symmetric = found.get("group_size", 128), bool(found.get("sym", True))
    rule = Rule("gptq", _group_format(f"int{found['bits']}", group, symmetric, "f16"))
    result.rules.append((LINEAR_CLASSES, rule))
    dynamic = found.get("dynamic") or {}
    result.ignored = ignore_by_pattern(["re:" + key[2:] for key in dynamic if key.startswith("-:")])
    for key, overrides in dynamic.items():
        if not key.startswith("-:"):
            own = {**found, **overrides}
            weights = _group_format(f"int{own['bits']}", own.get("group_size", group), own.get("sym", symmetric), "f16")
            result.rules.append((["re:" + key.removeprefix("+:")], Rule("gptq", weights)))


def _fp8(found: Mapping[str, Any], result: Declared) -> None:
    block = found.get("weight_block_size")
    static = found.get("activation_scheme") == "static"
    if block:
        weights = TensorFormat("e4m3", "block", block_shape=(block[0], block[1]), scale="f32")
        rule = Rule("fp8-block", weights, ActivationFormat("e4m3", "group", block[1]))
    else:
        weights = TensorFormat("e4m3", "tensor", scale="f32")
        rule = Rule("fp8", weights, ActivationFormat("e4m3", "tensor", dynamic=not static))
    result.format = "block" if block else "tensor"
    result.rules.append((LINEAR_CLASSES, rule))
    result.ignored = _ignore_by_part(found.get("modules_to_not_convert") or found.get("ignored_layers") or ())


_MODELOPT: dict[str, Rule] = {
    "FP8": Rule(
        "modelopt-fp8", TensorFormat("e4m3", "tensor", scale="f32"), ActivationFormat("e4m3", "tensor", dynamic=False)
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": Rule(
        "modelopt-fp8", TensorFormat("e4m3", "channel", scale="f32"), ActivationFormat("e4m3", "token")
    ),
    "FP8_PB_WO": Rule("modelopt-fp8", TensorFormat("e4m3", "block", block_shape=(128, 128), scale="f32")),
    "NVFP4": Rule(
        "modelopt-nvfp4",
        TensorFormat("e2m1", "group", 16, scale="e4m3", outer="tensor"),
        ActivationFormat("e2m1", "group", 16, dynamic=False, scale="e4m3"),
    ),
    "W4A16_NVFP4": Rule("modelopt-nvfp4", TensorFormat("e2m1", "group", 16, scale="e4m3", outer="tensor")),
    "MXFP8": Rule(
        "mxfp8-quantized",
        TensorFormat("e4m3", "group", 32, scale="e8m0"),
        ActivationFormat("e4m3", "group", 32, scale="e8m0"),
    ),
    "W4A16_AWQ": Rule("modelopt-int4", TensorFormat("int4", "group", 128)),
    "W4A8_AWQ": Rule("modelopt-int4", TensorFormat("int4", "group", 128), ActivationFormat("e4m3", "tensor", dynamic=False)),
}


def _modelopt(found: Mapping[str, Any], result: Declared) -> None:
    algorithm = str(found.get("quant_algo") or found.get("quantization", {}).get("quant_algo") or "")
    result.format = algorithm or None
    excluded = list(found.get("exclude_modules") or found.get("ignore") or ())
    result.ignored = ignore_by_pattern(excluded)
    kv = found.get("kv_cache_quant_algo") or found.get("kv_cache_scheme")
    result.kv = _kv_in_words(kv) if isinstance(kv, Mapping) else (str(kv).lower() if kv else None)
    if rule := _MODELOPT.get(algorithm.upper()):
        result.rules.append((LINEAR_CLASSES, rule))
    for name, own in (found.get("quantized_layers") or {}).items():
        if rule := _MODELOPT.get(str(own.get("quant_algo")).upper()):
            result.rules.append(([name], rule))
    if not result.rules:
        result.problems.append(f"ModelOpt quant_algo {algorithm!r} is not known; accepted: {', '.join(_MODELOPT)}")


def _mxfp4(found: Mapping[str, Any], result: Declared) -> None:
    result.format = "blocks and scales"
    # gpt-oss stores its experts so, whatever linear layers the ignore list leaves; tensors tell which.
    result.ignored = _ignore_by_part(found.get("modules_to_not_convert") or ())


def _names_only(layout: str) -> Callable[[Mapping[str, Any], Declared], None]:
    """A format that is described from its tensors; its config only says which one it is."""

    def read(found: Mapping[str, Any], result: Declared) -> None:
        result.format = str(found.get("version") or found.get("format") or layout)

    return read


_READERS: dict[str, Callable[[Mapping[str, Any], Declared], None]] = {
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _mxfp4,
    "w4afp8": _names_only("w4afp8"),
    "bitsandbytes": _names_only("bitsandbytes"),
    "exl3": _names_only("exl3"),
    "qoq": _names_only("qserve"),
    "torchao": _names_only("torchao"),
    "quark": _names_only("quark"),
    "auto-round": _names_only("auto-round"),
}
