"""Whether vLLM loads a W4A8 checkpoint and finds a kernel for it: its rules as data.

A refusal is a fact about vLLM, not a fault of the file. Source: vLLM 0.33, compressed_tensors_w4a8_fp8.py,
compressed_tensors_moe_w4a8_fp8.py, kernels/linear/mixed_precision/cutlass.py and fused_moe/oracle/w4a8.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from halfbyte.audit.modules import StoredModule
from halfbyte.audit.stored import W4AFP8_LAYOUT
from halfbyte.audit.verification import Finding
from halfbyte.models.layout import ModuleInfo, Role

GROUP = 128
DENSE_MULTIPLE = 128
EXPERT_MULTIPLE = 256
_WEIGHT_PARTS = ("weight_packed", "weight_scale", "weight_shape")


@dataclass(frozen=True)
class Candidate:
    """A module declared as 4-bit integers with 8-bit float activations, and the model around it."""

    module: StoredModule
    info: ModuleInfo | None
    model_dtype: str

    @property
    def expert(self) -> bool:
        return self.info is not None and self.info.role is Role.EXPERT


Rule = tuple[str, Callable[[Candidate], str | None]]
"""Name, and what a candidate breaks of it in words (value found, value accepted)."""


def _format(candidate: Candidate) -> str | None:
    layout = candidate.module.stored.layout
    return None if layout == "pack-quantized" else f"stored as {layout}; accepted: pack-quantized"


def _group(candidate: Candidate) -> str | None:
    form = candidate.module.stored.format
    if form is None or form.granularity != "group":
        return f"scales per {form.granularity if form else 'nothing'}; accepted: per group of {GROUP}"
    return None if form.group_size == GROUP else f"group size {form.group_size}; accepted: {GROUP}"


def _symmetric(candidate: Candidate) -> str | None:
    form = candidate.module.stored.format
    return "asymmetric weights; accepted: symmetric" if form and not form.symmetric else None


def _activations(candidate: Candidate) -> str | None:
    match = candidate.module.match
    acts = match.rule.activations if match else None
    if acts and (acts.granularity, acts.dynamic) == ("token", True):
        return None
    found = f"{acts.granularity}, {'dynamic' if acts.dynamic else 'static'}" if acts else "none"
    return f"input activations {found}; accepted: token, dynamic"


def _model_dtype(candidate: Candidate) -> str | None:
    dtype = candidate.model_dtype
    return None if dtype == "bf16" else f"model computes in {dtype}; accepted: bf16"


def _parameters(candidate: Candidate) -> str | None:
    parts = candidate.module.parts
    rows, columns = candidate.module.stored.shape[-2:]
    wanted = {
        "weight_packed": (("I32",), (rows, columns // 8)),
        "weight_scale": (("BF16", "F16"), (rows, columns // GROUP)),
        "weight_shape": (("I64",), (2,)),
    }
    for leaf in _WEIGHT_PARTS:
        if leaf not in parts:
            return f"{leaf} is missing"
        dtypes, shape = wanted[leaf]
        if parts[leaf].dtype not in dtypes or parts[leaf].shape != shape:
            return f"{leaf} is {parts[leaf].dtype} {list(parts[leaf].shape)}; accepted: {dtypes[0]} {list(shape)}"
    return None


def _expert_sizes(candidate: Candidate) -> str | None:
    sizes = candidate.module.stored.shape[-2:]
    if not candidate.expert or all(size % EXPERT_MULTIPLE == 0 for size in sizes):
        return None
    return f"expert of {list(sizes)}; accepted: multiples of {EXPERT_MULTIPLE}"


def _in_features(candidate: Candidate) -> str | None:
    columns = candidate.module.stored.shape[-1]
    if candidate.expert or columns % DENSE_MULTIPLE == 0:
        return None
    return f"in_features {columns}; accepted: multiples of {DENSE_MULTIPLE}"


RULES: tuple[Rule, ...] = (
    ("format", _format),
    ("group size", _group),
    ("symmetric", _symmetric),
    ("activations", _activations),
    ("model dtype", _model_dtype),
    ("parameters", _parameters),
    ("in_features", _in_features),
    ("expert sizes", _expert_sizes),
)


def vllm_refusals(
    modules: Iterable[StoredModule], infos: Mapping[str, ModuleInfo], model_dtype: str
) -> list[Finding] | None:
    """Why vLLM refuses the W4A8 modules among ``modules``, in order; none if there are no such modules.

    infos: the layout's modules by name, for roles and fused groups.
    """
    modules = list(modules)
    candidates = [
        Candidate(module, infos.get(module.name), model_dtype) for module in modules if _is_w4a8(module)
    ]
    if not candidates:
        return None
    found = [
        Finding("warning", f"vLLM {rule}", candidate.module.name, broken)
        for candidate in candidates
        for rule, judge in RULES
        if (broken := judge(candidate))
    ]
    return [*found, *_fused(modules, infos)]


def _is_w4a8(module: StoredModule) -> bool:
    rule = module.match.rule if module.match else None
    return bool(
        module.stored.quantized
        and module.stored.layout != W4AFP8_LAYOUT  # which vLLM does not read at all
        and module.stored.element == "int4"
        and rule
        and rule.activations
        and rule.activations.element == "e4m3"
    )


def _fused(modules: Iterable[StoredModule], infos: Mapping[str, ModuleInfo]) -> list[Finding]:
    """What engines run as one product needs one scheme, and together a number of rows that tiles cover."""
    groups: dict[str, list[StoredModule]] = {}
    for module in modules:
        info = infos.get(module.name)
        if info and info.role.quantizable:
            expert = info.role is Role.EXPERT  # all three projections of an expert run in one kernel
            key = module.name.rpartition(".")[0] if expert else info.fused_group or module.name
            groups.setdefault(key, []).append(module)
    found = []
    for key, members in groups.items():
        kinds = {_is_w4a8(member) for member in members}
        if len(kinds) > 1:
            names = ", ".join(member.name.rpartition(".")[2] for member in members if not _is_w4a8(member))
            found.append(
                Finding("warning", "vLLM fused partners", key, f"{names} are not W4A8 as the others are")
            )
        elif kinds == {True}:
            rows = sum(member.stored.shape[-2] for member in members)
            if rows % DENSE_MULTIPLE and infos[members[0].name].role is not Role.EXPERT:
                text = f"out_features {rows}; accepted: multiples of {DENSE_MULTIPLE}"
                found.append(Finding("warning", "vLLM out_features", key, text))
    return found
