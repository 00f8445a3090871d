"""What a checkpoint's config.json says about its numbers, for our own and for foreign formats. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halfbyte.audit.declaration import Declared
from halfbyte.audit.declared_foreign import FOREIGN
from halfbyte.audit.declared_groups import read_config_groups
from halfbyte.errors import HalfbyteError

READERS = {"compressed-tensors": read_config_groups, "halfbyte": read_config_groups, **FOREIGN}


def declared(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None = None) -> Declared:
    """Reads ``quantization_config`` of a config.json (also inside ``text_config``).

    hf_quant_config: content of ModelOpt's ``hf_quant_config.json``, used when config.json says nothing.
    """
    found, where = _find(config, hf_quant_config)
    if found is None:
        return Declared()
    method = str(found.get("quant_method") or _method_by_fields(found)).lower()
    result = Declared(method=method, why=f"{where}: quant_method {method!r}")
    reader = READERS.get(method)
    if reader is None:
        result.problems.append(f"quant_method {method!r} is not known; described from tensor names alone")
        return result
    try:
        reader(found, result)
    except (HalfbyteError, KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        result.problems.append(f"{where} ({method}) is not understood: {what}")
    return result


def find_quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization config inside a config.json, or none."""
    return _find(config, None)[0]


def _method_by_fields(found: Mapping[str, Any]) -> str:
    if "quant_algo" in found:
        return "modelopt"
    return "compressed-tensors" if "config_groups" in found else "unknown"


def _find(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any] | None, str]:
    sections = [("", config), ("text_config.", config.get("text_config"))]
    for prefix, section in sections:
        for key in ("quantization_config", "compression_config"):
            found = section.get(key) if isinstance(section, Mapping) else None
            if isinstance(found, Mapping) and found:
                nested = found.get("quantization_config")
                return nested if isinstance(nested, Mapping) else found, f"config.json {prefix}{key}"
    if hf_quant_config and isinstance(hf_quant_config.get("quantization"), Mapping):
        return {**hf_quant_config["quantization"], "quant_method": "modelopt"}, "hf_quant_config.json"
    return None, ""
