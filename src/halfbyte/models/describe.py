"""From config.json and tensor shapes to the layout of a model. Reads no weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from halfbyte.models.config_fields import ConfigFields, read_config
from halfbyte.models.experts import count_experts, find_fused_experts, stored_transposed, unfold
from halfbyte.models.families import FAMILIES, Family
from halfbyte.models.fusion import fused_group
from halfbyte.models.layout import ModelLayout, ModuleInfo, Role, WeightSource
from halfbyte.models.names import WEIGHT, layer_index, split, template
from halfbyte.models.roles import role_of

_STATE_SPACE_MARK = ".A_log"
_CONV1D_EXPANDING = frozenset({"c_attn", "c_fc"})
_CONV1D = _CONV1D_EXPANDING | {"c_proj"}
_BIAS = "bias"


def describe(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> ModelLayout:
    """The layout of the model that ``config`` (config.json) and ``shapes`` (stored tensor -> shape) describe.

    Every ``[a, b]`` tensor called ``*.weight`` becomes a module, experts fused into ``[experts, a, b]`` one
    module per expert and projection. What stays as it is for lack of a meaning is in ``left_out``.
    """
    fields = read_config(config)
    if fields.experts is None:
        fields = replace(fields, experts=count_experts(shapes))
    known = FAMILIES.get(fields.family) or FAMILIES.get(fields.text_family)
    modules, left_out = _Describer(fields, known or Family(), shapes).run()
    has_head = any(module.role is Role.LM_HEAD for module in modules)
    says = fields.tied if fields.tied is not None else (known is not None and known.tied)
    return ModelLayout(
        family=fields.family,
        modules=modules,
        tied=says or not (has_head or fields.tied is False),
        known=known is not None,
        heads=fields.heads,
        kv_heads=fields.kv_heads,
        left_out=left_out,
    )


class _Describer:
    """One pass over the tensors. Roles depend on a name's template only, so each is judged once per model."""

    def __init__(self, fields: ConfigFields, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._fields = fields
        self._family = family
        self._shapes = shapes
        self._fused = find_fused_experts(shapes)
        self._experts_transposed = stored_transposed(self._fused.values(), fields, family)
        self._conv1d = self._stores_conv1d()
        marks = (tensor for tensor in shapes if tensor.endswith(_STATE_SPACE_MARK))
        self._state_space = frozenset(template(mark.removesuffix(_STATE_SPACE_MARK)) for mark in marks)
        self._roles: dict[tuple[str, tuple[int, ...]], Role] = {}

    def run(self) -> tuple[tuple[ModuleInfo, ...], tuple[str, ...]]:
        modules: list[ModuleInfo] = []
        left_out: list[str] = []
        for tensor, shape in self._shapes.items():
            found = list(self._modules(tensor, shape))
            modules += found
            if not found and len(shape) > 1 and not tensor.endswith(_BIAS):
                left_out.append(tensor)
        return tuple(modules), tuple(left_out)

    def _modules(self, tensor: str, shape: tuple[int, ...]) -> Iterator[ModuleInfo]:
        fused = self._fused.get(tensor)
        if fused:
            if self._experts_transposed is not None and not self._beyond_last_block(tensor):
                yield from unfold(fused, self._experts_transposed, self._family.interleaved_experts)
        elif len(shape) == 2 and tensor.endswith(WEIGHT):
            name = tensor.removesuffix(WEIGHT)
            transposed = self._conv1d and split(name)[1] in _CONV1D
            out_features, in_features = reversed(shape) if transposed else shape
            role = self._role(name, (out_features, in_features))
            yield ModuleInfo(
                name=name,
                role=role,
                out_features=out_features,
                in_features=in_features,
                source=WeightSource(tensor, transposed=transposed),
                fused_group=fused_group(name) if role.quantizable else None,
            )

    def _role(self, name: str, shape: tuple[int, int]) -> Role:
        if self._beyond_last_block(name):
            return Role.OTHER
        key = template(name), shape
        if key not in self._roles:
            self._roles[key] = self._judge(*key)
        return self._roles[key]

    def _judge(self, pattern: str, shape: tuple[int, int]) -> Role:
        if any(pattern.startswith(f"{prefix}.") for prefix in self._state_space):
            return Role.OTHER
        return role_of(pattern, shape, self._fields)

    def _beyond_last_block(self, name: str) -> bool:
        """Blocks past the last one are heads for multi-token prediction (DeepSeek-V3 keeps them there)."""
        if self._fields.layers is None:
            return False
        index = layer_index(name)
        return index is not None and index >= self._fields.layers

    def _stores_conv1d(self) -> bool:
        """GPT-2's Conv1D keeps ``[in, out]``: its expanding layers then have the hidden size in front."""
        for tensor, shape in self._shapes.items():
            if len(shape) == 2 and tensor.endswith(WEIGHT):
                leaf = split(tensor.removesuffix(WEIGHT))[1]
                if leaf in _CONV1D_EXPANDING and shape[0] != shape[1]:
                    return shape[0] == self._fields.hidden
        return False
