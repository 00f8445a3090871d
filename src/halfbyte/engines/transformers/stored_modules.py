"""Which modules of a model are stored quantized, by file headers and config.json, under the model's names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from halfbyte.checkpoint.headers import TensorInfo, read_header
from halfbyte.checkpoint.stored_quantization import StoredQuantization
from halfbyte.checkpoint.w4afp8_config import moved_input_scales
from halfbyte.errors import HalfbyteError
from halfbyte.models.layout import Role
from halfbyte.schemes import FormName, Scheme

_CODES = ("I8", "F8_E4M3", "F8_E5M2")
_EXPERT = re.compile(r"(?P<parent>.*experts)\.(?P<index>\d+)\.(?P<projection>[^.]+)$")


class UnsupportedError(HalfbyteError):
    """A checkpoint that may be fine but that halfbyte has no layers for."""


@dataclass(frozen=True)
class StoredModule:
    """One weight in the files.

    stored_name, name: of its module in the files and in the model. scheme: none if it is not quantized.
    tensors: by local name (``weight_packed``, ...), without the bias. form: how a quantized weight is stored.
    """

    stored_name: str
    name: str
    scheme: Scheme | None
    tensors: Mapping[str, TensorInfo]
    form: FormName = "compressed-tensors"


@dataclass(frozen=True)
class ExpertAddress:
    """``{parent}.{index}.{projection}``: a projection of one expert, where the model has fused experts."""

    parent: str
    index: int
    projection: str

    @classmethod
    def of(cls, name: str) -> ExpertAddress | None:
        match = _EXPERT.match(name)
        return cls(match["parent"], int(match["index"]), match["projection"]) if match else None


@dataclass
class StoredModules:
    """linears: modules that are quantized and exist in the model. experts: those of fused experts, all of each.

    renamed: tensor names of ``experts`` as transformers' loader sees them after its own renaming.
    moved: names in the files of input scales that belong to a module of another name, and what they are called here.
    """

    linears: list[StoredModule] = field(default_factory=list)
    experts: dict[ExpertAddress, StoredModule] = field(default_factory=dict)
    renamed: set[str] = field(default_factory=set)
    moved: dict[str, str] = field(default_factory=dict)

    def add_expert(self, address: ExpertAddress, stored: StoredModule, renamed: Sequence[str]) -> None:
        self.experts[address] = stored
        self.renamed.update(renamed)


def read_headers(files: Sequence[str]) -> dict[str, TensorInfo]:
    """All tensors of safetensors ``files``. Errors: files in another format."""
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise UnsupportedError(f"{file}: quantized weights are read from safetensors files only")
        tensors.update(read_header(Path(file))[0])
    return tensors


def find_stored_modules(
    model: PreTrainedModel, tensors: Mapping[str, TensorInfo], declared: StoredQuantization
) -> StoredModules:
    """What of ``tensors`` needs a layer of ours in ``model`` (not loaded yet, its modules still transformers' own).

    Errors: a stored weight without its scales. UnsupportedError: a module that is stored quantized but not
    declared, has no place in the model, or that transformers takes apart or joins with others while loading.
    """
    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    modules = dict(model.named_modules())
    found = StoredModules()
    if declared.form == "w4afp8":
        found.moved = moved_input_scales(tensors.keys())
        tensors = {found.moved.get(name, name): info for name, info in tensors.items()}
    plain_experts: list[tuple[ExpertAddress, StoredModule, list[str]]] = []
    for stored_name, parts in _by_module(tensors).items():
        renamed = [_rename(f"{stored_name}.{part}", renamings) for part in parts]
        name = _place(renamed[0].rpartition(".")[0], modules, model.base_model_prefix)
        address = ExpertAddress.of(name)
        scheme = _scheme(stored_name, name, parts, declared)
        stored = StoredModule(stored_name, name, scheme, parts, declared.form)
        if stored.scheme is None:
            if address and set(parts) == {"weight"}:
                plain_experts.append((address, stored, renamed))
            continue
        if {full.rpartition(".")[2] for full in renamed} != set(parts):
            raise UnsupportedError(f"{stored_name}: transformers renames its tensors to {', '.join(renamed)}")
        if name in modules:
            found.linears.append(stored)
        elif address and address.parent in modules:
            found.add_expert(address, stored, renamed)
        else:
            raise UnsupportedError(
                f"{stored_name} is stored quantized, but {type(model).__name__} has no such module"
            )
    if declared.form == "w4afp8":
        _refuse_plain(plain_experts)
    parents = {address.parent for address in found.experts}
    for address, stored, renamed in plain_experts:
        if address.parent in parents:
            found.add_expert(address, stored, renamed)
    return found


def _refuse_plain(experts: Sequence[tuple[ExpertAddress, StoredModule, list[str]]]) -> None:
    """Errors: an expert that is not quantized, in a form whose experts all are."""
    for _, stored, _ in experts:
        info = stored.tensors["weight"]
        rows, columns = info.shape if len(info.shape) == 2 else (info.shape[0], 0)
        raise HalfbyteError(
            f"{info.name}: is {info.dtype} {list(info.shape)}; accepted in experts of w4afp8: I8 "
            f"{[rows, columns // 2]} with weight_scale_inv and input_scale"
        )


def _by_module(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """Tensors by module and local name; biases are left out, as they are never quantized."""
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        module, _, part = name.rpartition(".")
        if part != "bias":
            modules.setdefault(module, {})[part] = info
    return modules


def _scheme(
    stored_name: str, name: str, parts: Mapping[str, TensorInfo], declared: StoredQuantization
) -> Scheme | None:
    """The scheme of a stored weight, none if it is not quantized."""
    scaled = declared.scale_leaf in parts
    packed = bool({"weight_packed", "qweight"} & parts.keys())
    # FP8 may be plain numbers, but not in a form that always has scales for them.
    packed |= declared.form == "w4afp8" and "weight" in parts and parts["weight"].dtype in _CODES
    if packed and not scaled:
        raise HalfbyteError(f"{stored_name}: {declared.scale_leaf} is missing beside {', '.join(parts)}")
    if not packed and not (scaled and "weight" in parts):
        return None
    role = (
        Role.EXPERT if ExpertAddress.of(name) else Role.LM_HEAD if name.endswith("lm_head") else Role.LINEAR
    )
    scheme = declared.scheme_for(stored_name, role)
    if scheme is None:
        raise UnsupportedError(f"{stored_name} is stored quantized, but config.json gives it no scheme")
    return scheme


def _rename(name: str, renamings: Sequence[WeightRenaming]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def _place(name: str, modules: Mapping[str, Any], prefix: str) -> str:
    """``name`` with the base model's prefix put on or taken off where only that leads to a module."""
    for candidate in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if candidate in modules:
            return candidate
        address = ExpertAddress.of(candidate)
        if address and address.parent in modules:
            return candidate
    return name
