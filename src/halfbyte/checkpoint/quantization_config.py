"""``quantization_config`` of config.json: written for a set of schemes, and read in all its legal variants.

The same words serve both quant_methods. ``compressed-tensors`` holds what that library (0.17 and later) accepts;
``halfbyte`` stands for a checkpoint in which at least one group is in halfbyte's own form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from halfbyte.checkpoint import qserve_config, w4afp8_config
from halfbyte.checkpoint.config_groups import (
    TWO_LEVEL_FORMAT,
    activation_args,
    group_format,
    read_scheme,
    weight_args,
)
from halfbyte.checkpoint.name_patterns import covering_patterns
from halfbyte.checkpoint.stored_quantization import StoredGroup, StoredQuantization
from halfbyte.errors import HalfbyteError
from halfbyte.models.layout import ModelLayout, Role
from halfbyte.schemes import Scheme, TargetName

COMPRESSED_TENSORS = "compressed-tensors"
QUANT_METHOD = "halfbyte"
TARGET_KEY = "halfbyte_target"
"""Whose kernel weights were rounded for. compressed-tensors reads over what it does not know at this level."""
CONFIG_KEYS = ("quantization_config", "compression_config")
_DEFAULT_TARGET = "halfbyte"
_MIXED = "mixed-precision"
_NOT_LINEAR = (Role.EMBEDDING, Role.NORM)
_UNCOMPRESSED = ("dense", "fakequant")
_READABLE = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized"),
    *("mxfp4-pack-quantized", "nvfp4-pack-quantized", TWO_LEVEL_FORMAT),
)


def quantization_config(schemes: Mapping[str, Scheme | None], layout: ModelLayout) -> dict[str, Any]:
    """The entry for modules quantized as ``schemes`` say (none: left alone).

    One scheme for all targets ``Linear``; several name their modules. What is left alone is ignored by name, the
    head of a tied model included, which no tensor tells of. Patterns end in ``$``.
    Errors: nothing is quantized.
    """
    groups: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        if scheme is not None:
            groups.setdefault(scheme, []).append(name)
    if not groups:
        raise HalfbyteError("no module is quantized, so there is no quantization to describe")
    forms = {scheme: group_format(scheme) for scheme in groups}
    left_alone = [name for name in _linear_modules(layout) if schemes.get(name) is None]
    quantized = [name for names in groups.values() for name in names]
    config_groups = {}
    for number, (scheme, names) in enumerate(groups.items()):
        chosen = set(names)
        others = [*(name for name in quantized if name not in chosen), *left_alone]
        config_groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(groups) == 1 else covering_patterns(names, others),
            "format": forms[scheme],
            "weights": weight_args(scheme.weights),
            "input_activations": activation_args(scheme.activations),
            "output_activations": None,
        }
    config = {
        "quant_method": QUANT_METHOD if TWO_LEVEL_FORMAT in forms.values() else COMPRESSED_TENSORS,
        "format": next(iter(forms.values())) if len(set(forms.values())) == 1 else _MIXED,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": covering_patterns(left_alone, quantized),
        "config_groups": config_groups,
        "kv_cache_scheme": None,
    }
    target = next((scheme.target for scheme in groups if scheme.target != _DEFAULT_TARGET), None)
    return config if target is None else {**config, TARGET_KEY: target}


def find_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization entry of a config.json: the model's, or its text part's; under its old name too."""
    for section in (config, config.get("text_config")):
        for key in CONFIG_KEYS:
            found = section.get(key) if isinstance(section, Mapping) else None
            if isinstance(found, Mapping) and found:
                nested = found.get("quantization_config")
                return nested if isinstance(nested, Mapping) else found
    return None


def parse_config(quantization: Mapping[str, Any]) -> StoredQuantization:
    """What a ``quantization_config`` of compressed-tensors, halfbyte, QServe (``qoq``) or SGLang's ``w4afp8`` says.

    Errors: sparse weights, values that no supported format has, entries of the wrong type, an unknown target.
    """
    method = str(quantization.get("quant_method", COMPRESSED_TENSORS))
    if method == qserve_config.QUANT_METHOD:
        return qserve_config.parse_config(quantization)
    if method == w4afp8_config.QUANT_METHOD:
        return w4afp8_config.parse_config(quantization)
    if method not in (COMPRESSED_TENSORS, QUANT_METHOD):
        raise HalfbyteError(
            f"quant_method {method!r} is not read as config groups; accepted: {COMPRESSED_TENSORS}, {QUANT_METHOD}, "
            f"{qserve_config.QUANT_METHOD}, {w4afp8_config.QUANT_METHOD}"
        )
    _refuse_sparse(quantization)
    target = quantization.get(TARGET_KEY, _DEFAULT_TARGET)
    if target not in get_args(TargetName):
        raise HalfbyteError(
            f"quantization_config: {TARGET_KEY} {target!r}; accepted: {', '.join(get_args(TargetName))}"
        )
    summary = str(quantization.get("format", _MIXED))
    config_groups = quantization.get("config_groups")
    if not isinstance(config_groups, Mapping):
        raise HalfbyteError("quantization_config: config_groups must map names to groups")
    groups: list[StoredGroup] = []
    notes: list[str] = []
    for name, group in config_groups.items():
        _read_group(f"quantization_config, {name}", group, summary, groups, notes)
    groups = [replace(group, scheme=group.scheme.aimed_at(target)) for group in groups]
    kv_cache = quantization.get("kv_cache_scheme")
    return StoredQuantization(
        method,
        tuple(groups),
        _strings("quantization_config: ignore", quantization.get("ignore") or []),
        kv_cache if isinstance(kv_cache, Mapping) else None,
        tuple(notes),
    )


def _read_group(where: str, group: Any, summary: str, groups: list[StoredGroup], notes: list[str]) -> None:
    if not isinstance(group, Mapping):
        raise HalfbyteError(f"{where}: a group must say targets and weights, found {group!r}")
    targets = _strings(f"{where}: targets", group.get("targets"))
    weights, inputs = group.get("weights"), group.get("input_activations")
    form = group.get("format") or (None if summary == _MIXED else summary)
    if not isinstance(weights, Mapping):
        notes.append(
            f"{where} quantizes no weights, only what goes into or comes out of {', '.join(targets)}"
        )
        return
    if form in _UNCOMPRESSED:
        notes.append(f"{where} is stored {form}: its weights are not quantized")
        return
    if form is not None and form not in _READABLE:
        raise HalfbyteError(f"{where}: format {form!r} is not readable; accepted: {', '.join(_READABLE)}")
    if group.get("output_activations"):
        notes.append(f"{where}: output_activations are not applied")
    scheme = read_scheme(where, weights, inputs if isinstance(inputs, Mapping) else None, form)
    groups.append(StoredGroup(targets, scheme, form or group_format(scheme)))


def _refuse_sparse(quantization: Mapping[str, Any]) -> None:
    sparsity = quantization.get("sparsity_config")
    form = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else "dense"
    if form != "dense":
        raise HalfbyteError(
            f"sparsity_config: weights stored as {form!r} are not readable; accepted: dense weights"
        )


def _strings(what: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        raise HalfbyteError(
            f"{what} must be a list of module names, patterns or class names, found {values!r}"
        )
    return tuple(values)


def _linear_modules(layout: ModelLayout) -> list[str]:
    """Modules that an engine may build as Linear."""
    names = [module.name for module in layout.modules if module.role not in _NOT_LINEAR]
    has_head = any(module.role is Role.LM_HEAD for module in layout.modules)
    return names if has_head else [*names, "lm_head"]
