"""``inspect``: what is in a checkpoint, told from headers, and from the scales where they are few. No torch.

Works on unquantized checkpoints, on ours and on foreign ones, also on those that cannot be run.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from halfbyte.audit.declaration import Declared, preset_name
from halfbyte.audit.declared import declared
from halfbyte.audit.inspection import Anomaly, Inspection, ScaleRange, WeightKind, WeightRow
from halfbyte.audit.modules import Gathered, StoredModule, contradictions, gather, group_in_words
from halfbyte.audit.partners import fused_anomalies, kv_findings
from halfbyte.audit.stored import KV_LEAVES, SCALE_LEAVES
from halfbyte.checkpoint.headers import TensorInfo
from halfbyte.checkpoint.reader import Checkpoint
from halfbyte.models.describe import describe
from halfbyte.models.layout import ModelLayout, Role

SCALE_BUDGET_BYTES = 256 << 20
SCALE_BUDGET_TENSORS = 10_000
# Scales that multiply all the others of a tensor say nothing about the range of its weights.
_OUTER_SCALES = ("weight_global_scale", "weight_scale_2", "weight_channel_scale")
_KIND_OF_ROLE = {
    Role.LINEAR: "linear weights",
    Role.EXPERT: "linear weights",
    Role.EMBEDDING: "embeddings",
    Role.LM_HEAD: "lm_head",
    Role.NORM: "norms",
}


def inspect(path: Path | str, *, scales: bool | None = None) -> Inspection:
    """Describes the checkpoint in directory ``path``.

    scales: read the values of scales; by default only where they are at most 256 MB in 10,000 tensors.
    Errors: what opening a checkpoint refuses (see :meth:`Checkpoint.open`).
    """
    with _without_garbage_collection():
        checkpoint = Checkpoint.open(path)
        said = declared(checkpoint.config, _hf_quant_config(checkpoint.path))
        gathered = gather(checkpoint.tensors, said)
        layout = describe(checkpoint.config, gathered.shapes())
        return _Inspector(checkpoint, said, gathered, layout, scales).run()


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Headers become a million objects and no cycles; looking for cycles among them costs a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _hf_quant_config(path: Path) -> dict[str, Any] | None:
    file = path / "hf_quant_config.json"
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


class _Judged(NamedTuple):
    """kind, the entry of ``bytes_by_kind`` that its codes count for, and what is wrong with all such modules."""

    kind: WeightKind
    bytes_kind: str
    faults: tuple[str, ...]


class _Inspector:
    """One pass over the modules of a checkpoint."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        said: Declared,
        gathered: Gathered,
        layout: ModelLayout,
        scales: bool | None,
    ) -> None:
        self._checkpoint, self._said, self._gathered, self._layout = checkpoint, said, gathered, layout
        self._roles: dict[str, Role] = {}
        self._fused: dict[str, str] = {}
        for module in layout.modules:
            self._roles[module.source.tensor] = module.role
            if module.fused_group:
                self._fused[module.name] = module.fused_group
        self._judged: dict[tuple[int, int, str], _Judged] = {}
        self._loose_kinds: dict[WeightKind, WeightKind] = {}
        self._read_scale = self._scale_reader(scales)
        self._result = Inspection(
            path=checkpoint.path,
            family=layout.family,
            known_family=layout.known,
            format=self._format(),
            why=self._why(),
            kv_cache=said.kv,
            target=said.target,
            tied=layout.tied,
            scales_read=self._read_scale is not None,
            notes=[*checkpoint.notes, *said.problems],
        )

    def run(self) -> Inspection:
        for module in self._gathered.modules:
            self._add_module(module)
        for info in self._gathered.loose:
            self._add_loose(info)
        for info in self._gathered.orphans:
            self._flag(info.name, "belongs to a weight that is not stored")
            self._result.bytes_by_kind["scales"] += info.nbytes
        self._result.anomalies += fused_anomalies(self._result.rows, self._fused)
        self._check_kv_cache()
        self._add_histograms()
        if self._said.rules and not self._result.quantized_parameters:
            self._flag("config.json", f"declares {self._said.method}, yet no weight is quantized")
        return self._result

    def _flag(self, where: str, what: str) -> None:
        self._result.anomalies.append(Anomaly(where, what))

    def _format(self) -> str:
        if self._said.method != "none":
            return f"{self._said.method} ({self._said.format})" if self._said.format else self._said.method
        layouts = self._count_layouts()
        return max(layouts, key=layouts.__getitem__) if layouts else "unquantized"

    def _why(self) -> str:
        layouts = self._count_layouts()
        stored = ", ".join(f"{count} weights stored as {name}" for name, count in layouts.items())
        return f"{self._said.why}; {stored or 'no quantized weights'}"

    def _count_layouts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for module in self._gathered.modules:
            if module.stored.quantized:
                counts[module.stored.layout] = counts.get(module.stored.layout, 0) + 1
        return counts

    def _scale_reader(self, wanted: bool | None) -> Callable[[str, TensorInfo], ScaleRange | None] | None:
        if wanted is None:
            infos = [
                info
                for module in self._gathered.modules
                if module.stored.quantized
                for leaf, info in module.parts.items()
                if leaf in SCALE_LEAVES
            ]
            wanted = (
                len(infos) <= SCALE_BUDGET_TENSORS
                and sum(info.nbytes for info in infos) <= SCALE_BUDGET_BYTES
            )
        if not wanted:
            return None
        from halfbyte.audit.scales import all_equal, read_scales, scale_faults, scale_range

        def read(module: str, info: TensorInfo) -> ScaleRange | None:
            values = read_scales(self._checkpoint, info)
            leaf = info.name.rpartition(".")[2]
            for fault in scale_faults(values):
                self._flag(module, f"{leaf}: {fault}")
            if all_equal(values, info.dtype):
                self._flag(module, f"{leaf}: all {values.size} scales are {float(values.flat[0]):.6g}")
            return scale_range(values)

        return read

    def _add_module(self, module: StoredModule) -> None:
        name, parts, stored, _ = module
        role = self._roles.get(module.weight_name)
        if role is None:
            role = Role.NORM if _is_norm(name, stored.shape) else Role.OTHER
        rule = module.match.rule if module.match else None
        key = id(stored), id(rule), role.value
        if key not in self._judged:
            self._judged[key] = self._judge(module, role)
        judged = self._judged[key]
        kind, result = judged.kind, self._result
        result.parameters += kind.parameters
        result.bytes_by_kind[judged.bytes_kind] += kind.code_nbytes
        result.bytes_by_kind["scales"] += kind.nbytes - kind.code_nbytes
        for fault in judged.faults:
            self._flag(name, fault)
        scales = None
        if kind.quantized:
            result.quantized_parameters += kind.parameters
            result.quantized_bytes += kind.nbytes
            if self._read_scale:
                for leaf, info in parts.items():
                    if leaf in SCALE_LEAVES:
                        found = self._read_scale(name, info)
                        scales = scales or (None if leaf in _OUTER_SCALES else found)
        if len(kind.shape) > 1:
            result.rows.append(WeightRow(name, kind, scales))

    def _judge(self, module: StoredModule, role: Role) -> _Judged:
        """What all modules of the same tensors, rule and role have in common."""
        _, parts, stored, match = module
        faults = list(stored.faults)
        if role is Role.LM_HEAD and self._layout.tied:
            faults.append("stored although config.json ties it to the embedding")
        if stored.quantized and match:
            faults += contradictions(stored, match)
        elif stored.quantized and self._said.rules:
            faults.append(f"stored as {stored.layout}, yet config.json says that it is not quantized")
        elif not stored.quantized and match and match.binds(role):
            faults.append(
                f"config.json says {match.rule.layout}, yet it is stored as {parts['weight'].dtype}"
            )
        bytes_kind = _KIND_OF_ROLE.get(role, "linear weights" if stored.quantized else "other")
        return _Judged(self._kind(module, role), bytes_kind, tuple(faults))

    def _kind(self, module: StoredModule, role: Role) -> WeightKind:
        parts, stored = module.parts, module.stored
        rule = module.match.rule if module.match and stored.quantized else None
        acts = rule.activations if rule else None
        scheme = stored.element.upper()
        if stored.quantized:
            scheme = f"W{stored.format.bits}" if stored.format else stored.element
            if rule:
                scheme += f"A{acts.bits if acts else 16}"
        return WeightKind(
            role=role.value,
            scheme=scheme,
            preset=preset_name(stored.format, acts) if stored.format and rule else None,
            layout=stored.layout,
            element=stored.element,
            group=group_in_words(stored.format),
            shape=stored.shape,
            parameters=math.prod(stored.shape),
            nbytes=sum(info.nbytes for info in parts.values()),
            code_nbytes=parts[stored.codes].nbytes,
        )

    def _add_loose(self, info: TensorInfo) -> None:
        if info.name.rpartition(".")[2] in KV_LEAVES:
            self._result.bytes_by_kind["scales"] += info.nbytes
            return
        role = self._roles.get(info.name, Role.NORM if _is_norm(info.name, info.shape) else Role.OTHER)
        parameters = math.prod(info.shape)
        self._result.parameters += parameters
        self._result.bytes_by_kind[_KIND_OF_ROLE.get(role, "other")] += info.nbytes
        if len(info.shape) < 2:
            return
        element = info.dtype.lower()
        sizes = parameters, info.nbytes, info.nbytes
        kind = WeightKind(role.value, info.dtype, None, "plain", element, "-", info.shape, *sizes)
        self._result.rows.append(WeightRow(info.name, self._loose_kinds.setdefault(kind, kind)))
        match = self._said.rule_for(info.name) if role is Role.EXPERT else None
        if match and match.binds(role):
            self._flag(info.name, f"config.json says {match.rule.layout}, yet it is stored as {info.dtype}")

    def _check_kv_cache(self) -> None:
        names = [info.name for info in self._gathered.loose if info.name.rpartition(".")[2] in KV_LEAVES]
        anomalies, notes = kv_findings(names, self._said.kv)
        self._result.anomalies += anomalies
        self._result.notes += notes

    def _add_histograms(self) -> None:
        tensors = self._checkpoint.tensors.values()
        self._result.dtypes = _histogram((info.dtype, info.nbytes) for info in tensors)
        sizes = _histogram((info.file.name, info.nbytes) for info in tensors)
        self._result.files = {name: size for name, (_, size) in sizes.items()}


def _is_norm(name: str, shape: tuple[int, ...]) -> bool:
    if len(shape) > 1:
        return False
    parts = name.removesuffix(".bias").removesuffix(".weight").rpartition(".")
    return "norm" in parts[2] or parts[2].startswith("ln")


def _histogram(pairs: Iterable[tuple[str, int]]) -> dict[str, tuple[int, int]]:
    counts: dict[str, tuple[int, int]] = {}
    for key, nbytes in pairs:
        number, total = counts.get(key, (0, 0))
        counts[key] = number + 1, total + nbytes
    return counts
