"""Whether the tensors of a quantized weight are what its layout calls for: partners, dtypes, shapes, exact values."""

from __future__ import annotations

from halfbyte.audit.modules import StoredModule, contradictions
from halfbyte.audit.raw import values
from halfbyte.audit.stored import QSERVE_LAYOUT
from halfbyte.audit.verification import Finding
from halfbyte.checkpoint.reader import Checkpoint

_INTEGER_LAYOUTS = ("pack-quantized", "two-level-pack-quantized")
_SCALE_DTYPES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


def structure_findings(checkpoint: Checkpoint, module: StoredModule) -> list[Finding]:
    """Errors of one quantized weight that its names, dtypes, shapes and ``weight_shape`` tell."""
    name, parts, stored, match = module
    found = [Finding("error", "partners", f"{name}.{fault.split()[0]}", fault) for fault in stored.faults]
    if match is None:
        text = f"stored as {stored.layout}, yet config.json says that it is not quantized"
        found.append(Finding("error", "config", name, text))
    else:
        found += [Finding("error", "config", name, text) for text in contradictions(stored, match)]
    if stored.layout in _INTEGER_LAYOUTS:
        found += _weight_shape(checkpoint, module)
    form = stored.format
    if form is None or found:
        return found
    rows, columns = stored.shape[-2:]
    groups = form.scale_shape((rows, columns))
    wanted: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}
    if stored.layout == QSERVE_LAYOUT:
        return found  # its zeros and scales were held against its codes when it was recognised
    if not form.symmetric:
        if stored.layout in _INTEGER_LAYOUTS:
            wanted["weight_zero_point"] = ("I32",), (-(-rows // (32 // form.bits)), groups[1])
        else:
            wanted["weight_zero_point"] = ("I8",), groups
    if form.outer == "tensor":
        wanted["weight_global_scale"] = ("F32",), (1,)
    if form.outer == "channel":
        wanted["weight_channel_scale"] = ("F32",), (rows, 1)
    for leaf, (dtypes, shape) in wanted.items():
        info = parts.get(leaf)
        if info is None:
            found.append(Finding("error", "partners", f"{name}.{leaf}", f"{leaf} is missing"))
        elif info.dtype not in dtypes or info.shape != shape:
            text = f"is {info.dtype} {list(info.shape)}; accepted: {dtypes[0]} {list(shape)}"
            found.append(Finding("error", "shape", info.name, text))
    found += _scale_dtype(checkpoint, module)
    acts = match.rule.activations if match else None
    if acts and not acts.dynamic and not {"input_scale", "input_global_scale"} & parts.keys():
        text = "input_scale is missing, yet config.json says static input activations"
        found.append(Finding("error", "partners", f"{name}.input_scale", text))
    return found


def _weight_shape(checkpoint: Checkpoint, module: StoredModule) -> list[Finding]:
    info = module.parts.get("weight_shape")
    if info is None:
        return []
    if info.dtype != "I64" or info.shape != (2,):
        text = f"is {info.dtype} {list(info.shape)}; accepted: I64 [2]"
        return [Finding("error", "shape", info.name, text)]
    said = [int(size) for size in values(checkpoint, info.name)]
    packed = module.parts[module.stored.codes]
    form = module.stored.format
    per_word = 32 // (form.bits if form else 4)
    fits = len(packed.shape) == 2 and packed.shape == (said[0], -(-said[1] // per_word))
    if not fits or (form and form.group_size and said[1] != module.stored.shape[1]):
        text = f"says {said}, yet {packed.name.rpartition('.')[2]} is {list(packed.shape)}"
        return [Finding("error", "shape", info.name, text)]
    return []


def _scale_dtype(checkpoint: Checkpoint, module: StoredModule) -> list[Finding]:
    """Engines allocate packed weights' scales in the model's dtype; another one loads, but is rounded."""
    info = module.parts.get("weight_scale")
    model = _SCALE_DTYPES.get(checkpoint.model_dtype)
    if module.stored.layout != "pack-quantized" or info is None or info.dtype == model:
        return []
    return [
        Finding("warning", "scale dtype", info.name, f"is {info.dtype} in a model that computes in {model}")
    ]
