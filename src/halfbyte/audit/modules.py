"""The tensors of a checkpoint gathered into modules, each beside what its config declares. No torch, no values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from halfbyte.audit.declaration import Declared, Match
from halfbyte.audit.recognise import recognise
from halfbyte.audit.stored import Part, StoredWeight, split_name
from halfbyte.checkpoint.headers import TensorInfo
from halfbyte.formats.spec import TensorFormat

_W4AFP8_METHOD = "w4afp8"
_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


class StoredModule(NamedTuple):
    """One weight and its companions. parts: leaf -> tensor."""

    name: str
    parts: dict[str, TensorInfo]
    stored: StoredWeight
    match: Match | None

    @property
    def weight_name(self) -> str:
        """The name that the weight has, or would have, unquantized: what a layout is described from."""
        return self.name if self.stored.codes in ("_blocks", "") else f"{self.name}.weight"


@dataclass
class Gathered:
    """modules: in file order. loose: tensors that are no part of a module, and companions without codes."""

    modules: list[StoredModule] = field(default_factory=list)
    loose: list[TensorInfo] = field(default_factory=list)
    orphans: list[TensorInfo] = field(default_factory=list)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the model as it would be unquantized."""
        found = {}
        for module in self.modules:
            shape = module.stored.shape
            if module.stored.codes == "_blocks":  # such experts are [experts, in, out] when unquantized
                shape = (*shape[:-2], shape[-1], shape[-2])
            found[module.weight_name] = shape
        found.update({info.name: info.shape for info in self.loose})
        return found


def gather(tensors: Mapping[str, TensorInfo], declared: Declared) -> Gathered:
    """Modules of a checkpoint. Equal sets of tensors are recognised once, so 90,000 tensors take a moment."""
    by_module: dict[str, dict[str, TensorInfo]] = {}
    result = Gathered()
    for name, info in tensors.items():
        module, leaf = split_name(name)
        if not leaf:
            result.loose.append(info)
        elif module in by_module:
            by_module[module][leaf] = info
        else:
            by_module[module] = {leaf: info}
    if declared.method == _W4AFP8_METHOD:
        _bring_input_scales_home(by_module)
    seen: dict[tuple[object, ...], StoredWeight | None] = {}
    for name, parts in by_module.items():
        match = declared.rule_for(name) if declared.rules else None
        rule = match.rule if match else None
        key = (id(rule), *((leaf, info.dtype, info.shape) for leaf, info in parts.items()))
        if key not in seen:
            seen[key] = recognise({leaf: Part(info.dtype, info.shape) for leaf, info in parts.items()}, rule)
        stored = seen[key]
        if stored is None:
            result.orphans.extend(parts.values())
        else:
            result.modules.append(StoredModule(name, parts, stored, match))
    return result


def _bring_input_scales_home(by_module: dict[str, dict[str, TensorInfo]]) -> None:
    """In checkpoints of DeepSeek's models, ``w1.input_scale`` is of ``gate_proj.weight``, and so on."""
    for module in [name for name, parts in by_module.items() if parts.keys() == {"input_scale"}]:
        expert, _, shard = module.rpartition(".")
        home = by_module.get(f"{expert}.{_PROJECTIONS.get(shard, '')}")
        if home is not None and "input_scale" not in home:
            home |= by_module.pop(module)


def group_in_words(form: TensorFormat | None) -> str:
    """Which weights share a scale: ``128``, ``channel``, ``tensor``, ``128x128`` or ``-``."""
    if form is None:
        return "-"
    if form.granularity == "group":
        return str(form.group_size)
    if form.block_shape:
        return f"{form.block_shape[0]}x{form.block_shape[1]}"
    return form.granularity


def contradictions(stored: StoredWeight, match: Match) -> list[str]:
    """How the tensors of a quantized weight differ from what the config declares for them."""
    declared, form = match.rule.weights, stored.format
    if declared is None or form is None:
        return []
    found = []
    if match.rule.layout != stored.layout and not _same_layout(match.rule.layout, stored.layout):
        found.append(f"config says format {match.rule.layout}, tensors are {stored.layout}")
    if declared.element != form.element:
        found.append(f"config says {declared.element}, tensors are {form.element}")
    if declared.symmetric != form.symmetric:
        found.append(
            "config says symmetric, yet zero points are stored"
            if declared.symmetric
            else "config says asymmetric, yet no zero points are stored"
        )
    said, found_group = group_in_words(declared), group_in_words(form)
    if said != found_group:
        found.append(f"config says group {said}, scales are per {found_group}")
    if declared.scale in ("e8m0", "e4m3", "int8") and declared.scale != form.scale:
        found.append(f"config says scales in {declared.scale}, they are {form.scale}")
    return found


def _same_layout(declared: str, stored: str) -> bool:
    return {declared, stored} <= {"naive-quantized", "float-quantized", "int-quantized"}
